"""Files of the package that name each verifier: `python -m specsim.maintain.kind_map [-v]`.

A new verifier needs a change in as many. Rooms without a name of their own read the records of core.verifiers.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from specsim.core.display import print_table, stdout_console
from specsim.core.verifiers import KIND_OF, VERIFIERS

ROOT = Path(__file__).resolve().parents[2]
ABOUT = r"[Vv]erif|rule|CONFIGS|of_kind|kind\.name|acceptance\b"  # words of lines about verifiers
FOLDERS = ("specsim", "reference", "fast")


@cache
def modules_of(name: str) -> tuple[str, ...]:
    """List the modules in which a verifier's record places its code."""
    return tuple(dict.fromkeys(place.partition(":")[0] for place in KIND_OF[name].places))


def pattern(name: str, modules: Iterable[str]) -> re.Pattern[str]:
    """Make the pattern of a name in code, comments and docstrings.

    It finds the name in quotes, imports of its modules, and of functions or constants of that name from them. A name
    with an underscore is no word of English, and is found anywhere. Another one also names other things, such as drafts
    of a block: in quotes it is found on lines that speak of verifiers or have two of them.
    """
    others = "|".join(other for other in VERIFIERS if other != name)
    quoted = rf"[\"'`:]{name}[\"'`]"
    forms = [rf"^(?=.*(?:{ABOUT}|[\"'`](?:{others})[\"'`])).*{quoted}"]
    for module in map(re.escape, modules):
        forms.append(rf"\bfrom {module} import (?:\([^)]*|.*)(?i:\b{name}\b)")
        parent, _, last = module.rpartition(r"\.")
        forms += [rf"\bfrom {parent} import .*\b{name}\b", rf"\bfrom {module} import"] if last == name else []
    forms += [rf"\b{name}\b"] if "_" in name else []
    return re.compile("|".join(forms), re.MULTILINE)


def files_naming(name: str) -> list[str]:
    """List the files that have a verifier's name in their text, or hold its code."""
    own = pattern(name, modules_of(name))
    return [path for path, text in _texts().items() if module_of(path) in modules_of(name) or own.search(text)]


def module_of(path: str) -> str:
    """Name the module of a file."""
    package = "" if path.startswith("specsim/") else "specsim."
    return package + path.removesuffix(".py").replace("/", ".")


def kind_map(names: Iterable[str] = VERIFIERS) -> Mapping[str, list[str]]:
    """List the files that name each of some verifiers."""
    return {name: files_naming(name) for name in names}


@cache
def _texts() -> Mapping[str, str]:
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    links = [ROOT / "specsim" / folder for folder in FOLDERS[1:]]
    own = [path for path in paths if not any(link in path.parents for link in links)]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in own}


def main() -> int:
    """Print a row for each verifier."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-v", "--verbose", action="store_true", help="list the files")
    is_verbose = parser.parse_args().verbose
    found = kind_map()
    rows = [(name, str(len(files)), *([" ".join(files)] if is_verbose else [])) for name, files in found.items()]
    print_table(stdout_console(), ("verifier", "files", *(["names"] if is_verbose else [])), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
