"""Twins: files of one name in both implementations have the same operations with the same signatures."""

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import specsim.fast
import specsim.reference


def operations(module: ModuleType) -> dict[str, inspect.Signature]:
    """List the signatures of the public functions of a file or folder and of its public classes' methods, by name."""
    return {name: inspect.signature(function) for name, function in _functions(module)}


def _functions(module: ModuleType) -> Iterator[tuple[str, object]]:
    for name, value in vars(module).items():
        if name.startswith("_") or not f"{getattr(value, '__module__', None)}.".startswith(f"{module.__name__}."):
            continue
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value):
            methods = inspect.getmembers(value, inspect.isfunction)
            yield from ((f"{name}.{method}", function) for method, function in methods if not method.startswith("_"))


def names_of(package: ModuleType) -> set[str]:
    """List the package's files below its folder, with dots; a folder counts as one file, too."""
    folder = Path(str(package.__file__)).parent
    files = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py"))
    names = {".".join(path.parts).removesuffix(".__init__") for path in files}
    return names - {"__init__", "drafters", "targets"}


def differences(reference: inspect.Signature, fast: inspect.Signature) -> list[str]:
    """List parameters in which a fast function is more than its twin with keyword-only buffers and options."""
    shared = list(reference.parameters.values())
    own = list(fast.parameters.values())
    differing = [
        each.name
        for each, other in zip(shared, own, strict=False)
        if (each.name, each.kind, each.default) != (other.name, other.kind, other.default)
    ]
    missing = [each.name for each in shared[len(own) :]]
    behind = own[len(shared) :]
    extra = [each.name for each in behind if each.kind != each.KEYWORD_ONLY or each.default not in (None, False)]
    return differing + missing + extra


@pytest.mark.parametrize("name", sorted(names_of(specsim.reference) & names_of(specsim.fast)))
def test_twins_have_equal_signatures(name):
    reference, fast = (
        operations(import_module(f"{package.__name__}.{name}")) for package in (specsim.reference, specsim.fast)
    )
    shared = reference.keys() & fast.keys()
    found = {each: differences(reference[each], fast[each]) for each in sorted(shared)}
    assert {each: names for each, names in found.items() if names} == {}
