"""Provenance: a result names the code of its process, whose digests change with the code and nothing else."""

import sys

import pytest
import torch

import specsim.core.provenance as module
from specsim.core.provenance import code_digests, versions

KERNEL = "specsim.fast.persistent.kernel"  # which only a persistent forward imports


def test_digests_are_those_of_imported_modules_where_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.delitem(sys.modules, KERNEL, raising=False)
    monkeypatch.setitem(sys.modules, "specsim.fast.tree", sys)
    every, imported = versions("cuda")["code"], versions("cuda", only_imported=True)["code"]
    assert every == code_digests()
    assert imported == {name: each for name, each in every.items() if name in sys.modules}
    assert KERNEL in every
    assert KERNEL not in imported
    assert imported["specsim.fast.tree"] == every["specsim.fast.tree"]
    assert "code" not in versions("cpu")


SOURCE = '''"""Words about a module."""

from specsim.other import value


def double(x):
    """Double it."""
    return 2 * x
'''


@pytest.fixture
def digest(tmp_path, monkeypatch):
    """Compute the digests of specsim.engine in a package of two modules, one of them with this source."""
    package = tmp_path / "specsim"
    package.mkdir()
    (package / "other.py").write_text("value = 1\n")
    monkeypatch.setattr(module, "PACKAGE", package)

    def of(source: str) -> dict[str, str]:
        (package / "engine.py").write_text(source)
        return code_digests.__wrapped__("specsim.engine")

    return of


@pytest.mark.parametrize(
    ("old", "new"),
    [("Words about", "Other words about"), ("Double it.", "Twice\n\n    as much."), ("\n\n\n", "\n\n# why\n\n")],
    ids=["module docstring", "docstring", "comment"],
)
def test_prose_does_not_change_a_digest(digest, old, new):
    changed = SOURCE.replace(old, new)
    assert changed != SOURCE
    assert digest(changed) == digest(SOURCE)


@pytest.mark.parametrize(("old", "new"), [("2 * x", "3 * x"), ("    return", "    if x:\n        return")])
def test_code_changes_the_digest_of_its_module(digest, old, new):
    before = digest(SOURCE)
    after = digest(SOURCE.replace(old, new))
    assert {name for name in before if before[name] != after[name]} == {"specsim.engine"}


def test_imported_modules_are_followed(digest):
    assert set(digest(SOURCE)) == {"specsim.engine", "specsim.other"}
    assert set(digest("def late():\n    import specsim.other\n")) == {"specsim.engine", "specsim.other"}
    assert set(digest("import os\n")) == {"specsim.engine"}


def test_modules_that_print_are_left_out(digest, monkeypatch):
    monkeypatch.setattr(module, "PRINTING", {"specsim.other"})
    assert set(digest(SOURCE)) == {"specsim.engine"}


def test_modules_that_records_name_are_followed(digest, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "RECORDS", {"specsim.other"})
    (tmp_path / "specsim" / "kernel.py").write_text("")
    (tmp_path / "specsim" / "other.py").write_text('PLACES = ("specsim.kernel:make", "specsim.missing:make", "a: b")')
    assert set(digest(SOURCE)) == {"specsim.engine", "specsim.kernel"}


def test_the_fast_engine_has_all_its_kernels():
    code = set(code_digests())
    files = (module.PACKAGE / "fast").rglob("*.py")
    paths = [file.relative_to(module.PACKAGE).with_suffix("") for file in files]
    modules = {".".join(("specsim", *path.parts)) for path in paths if path.name != "__init__"}
    assert modules <= code
    assert not [name for name in code if name.startswith(("specsim.cli", "specsim.plots", "specsim.bench"))]
