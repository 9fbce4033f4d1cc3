"""Scripts of failed cases, which need torch and the user's module only: arguments, expected results, the checks."""

import base64
import re
import zlib
from collections.abc import Mapping, Sequence
from inspect import getsource
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from specsim import __version__
from specsim.core.errors import InputError, require
from specsim.core.files import read_text, write_whole
from specsim.correctness.conformance import checked_call, comparison
from specsim.correctness.conformance.comparison import bits
from specsim.correctness.conformance.contract import (
    BY_NAME,
    DEVICE,
    Call,
    KernelCase,
    Operation,
    SampleDistribution,
    Value,
)
from specsim.correctness.conformance.runner import adapted_call, name_of

_MARK = '"""Case of specsim conformance: '
_MOST_INLINE = 256  # entries of a tensor that is written as numbers
_SCRIPT = '''
Run it with python, and with another FILE.py or module as an argument. It calls {function} once and exits with
status 1 if a result is wrong, or after {seconds:g} seconds. It needs torch; the checks are those of specsim {version}.
"""

import base64, faulthandler, importlib, math, os, sys, zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import module_from_spec, spec_from_file_location
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

MODULE = {module!r}
DEVICE = torch.device({device!r})


def make_call():
    """Make arguments and expected results."""
    return {call}


def make_operation():
    """Describe arguments and results."""
    return {operation}


def unpacked(text, dtype, shape):
    """Read a tensor from compressed bytes."""
    return torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(text))), dtype=dtype).reshape(shape)


def with_strides(tensor, strides):
    """Copy a tensor to a memory layout with gaps."""
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)


def load(name):
    """Load a module by its file or its dotted name."""
    sys.path.append({folder!r})
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = spec_from_file_location(Path(name).stem, name)
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    """Call the function; an error that the contract allows is no wrong result."""
    os._exit = sys.exit
    function = getattr(load(*sys.argv[1:] or [MODULE]), {function!r})
    faulthandler.dump_traceback_later({seconds}, exit=True)
    try:
        wrong = wrong_result(function, make_operation(), make_call(), DEVICE)
    except SystemExit as error:
        sys.exit("the function calls exit()")
    except Exception as error:
        if not {may_refuse} or isinstance(error, torch.AcceleratorError):
            raise
        sys.exit(print(f"refused: {{error}}"))
    sys.exit(print("equal") if wrong is None else "\\n".join(filter(None, (str(wrong), wrong.excerpt))))


# The checks, copied from specsim.

{checks}

if __name__ == "__main__":
    main()
'''


def script_path(folder: Path, case: KernelCase) -> Path:
    """Name the script of a case."""
    return folder / (re.sub(r"\W+", "_", case.id.lower()).strip("_") + ".py")


def check_folder(folder: Path, cases: Sequence[KernelCase]) -> None:
    """Make the folder; InputError where that fails, or where a script would replace a file that is none of ours."""
    allowed = "a folder that can be made and written"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("dump", str(folder), f"{allowed} ({error.strerror})") from error
    for path in (script_path(folder, case) for case in cases):
        is_own = not path.exists() or read_text(path, "dump", "a script").startswith(_MARK)
        require(is_own, "dump", str(folder), f"a folder without another file named {path.name}")


def script(name: str, module: ModuleType, case: KernelCase, device: str, seconds: float) -> str:
    """Write the source of a script; name: that of the module, or its file."""
    operation = BY_NAME[case.operation]
    function = name_of(module, operation, device) or ""
    case_call = adapted_call(getattr(module, function), case)
    is_file = name.endswith(".py")
    return f"{_MARK}{case.id}.\n" + _SCRIPT.format(
        module=str(Path(name).resolve()) if is_file else name,
        folder=str(Path.cwd()),
        function=function,
        device=device,
        seconds=seconds,
        version=__version__,
        may_refuse=case.may_refuse,
        call=_literal(case_call),
        operation=repr(operation),
        checks="\n\n".join(
            [
                *map(getsource, (Value, Operation, SampleDistribution, Call)),
                *(_without_imports(getsource(part)) for part in (comparison, checked_call)),
            ]
        ),
    )


def write_script(folder: Path, case: KernelCase, source: str) -> None:
    """Write the script of a case; InputError where it cannot be written."""
    write_whole(script_path(folder, case), source.encode(), "dump")


def _without_imports(source: str) -> str:
    """Leave out a module's docstring and imports, which end before its first constant, class or function."""
    start = re.search(r"^(?:[A-Z_]+ = |@|def |class )", source, re.MULTILINE)
    return source[start.start() :] if start else source


def _literal(value: Any) -> str:
    """Write a value as an expression."""
    if value is DEVICE:
        return "DEVICE"
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, Call):
        parts = (value.arguments, value.expected, value.rows, value.tolerance, value.alternatives)
        return f"Call({', '.join(map(_literal, parts))})"
    if isinstance(value, SampleDistribution):
        return f"SampleDistribution({_literal(value.outcomes)}, {value.rows})"
    if isinstance(value, SimpleNamespace):
        return f"SimpleNamespace({', '.join(f'{name}={_literal(item)}' for name, item in vars(value).items())})"
    if isinstance(value, Mapping):
        return "{" + "".join(f"\n        {name!r}: {_literal(item)}," for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}([{', '.join(map(_literal, value))}])"
    return repr(value)


def _tensor(tensor: torch.Tensor) -> str:
    shape = list(tensor.shape)
    if tensor.numel() <= _MOST_INLINE:
        text = f"torch.tensor({tensor.tolist()}, dtype={tensor.dtype}).reshape({shape})"
    else:
        packed = base64.b64encode(zlib.compress(bits(tensor).numpy().tobytes())).decode()
        text = f"unpacked({packed!r}, {tensor.dtype}, {shape})"
    return text if tensor.is_contiguous() else f"with_strides({text}, {tensor.stride()})"
