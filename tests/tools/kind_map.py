"""Files of the package that name each verifier and each drafter: `python tests/tools/kind_map.py [-v]`.

A new one needs a change in as many. All other files read the records of core.verifiers and core.kinds.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from specsim.core.display import print_table, stdout_console
from specsim.core.kinds import KINDS
from specsim.core.verifiers import KIND_OF, VERIFIERS

ROOT = Path(__file__).resolve().parents[2]
ABOUT = r"[Vv]erif|rule|CONFIGS|of_kind|kind\.name|acceptance\b"  # words of lines about verifiers
FOLDERS = ("specsim", "reference", "fast")
WORDS = ("eagle", "standalone", "suffix")  # drafters whose names are words, or parts of others' names


@cache
def modules_of(name: str) -> tuple[str, ...]:
    """List the modules in which a verifier's record places its code."""
    return tuple(dict.fromkeys(code.partition(":")[0] for code in KIND_OF[name].places))


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


def drafter_pattern(name: str) -> re.Pattern[str]:
    """Make the pattern of a drafter's name in code, comments and docstrings, however its parts are joined.

    A name that is a word is found in quotes, and where a class begins with it.
    """
    if name in WORDS:
        return re.compile(rf"[\"'`]{name}[\"'`]|\b{name.capitalize()}[A-Z]")
    forms = {"[-_ ]?".join(re.findall(r"[a-z]+|\d+", form.lower())) for form in (name, KINDS[name].title)}
    return re.compile(rf"(?<![a-z])(?:{'|'.join(sorted(forms))})", re.IGNORECASE)


def files_naming_drafter(name: str) -> list[str]:
    """List the files that have a drafter's name in their text."""
    form = drafter_pattern(name)
    return [path for path, text in _texts().items() if form.search(text)]


def files_naming(name: str) -> list[str]:
    """List the files that have a verifier's name in their text, or hold its code."""
    form = pattern(name, modules_of(name))
    return [path for path, text in _texts().items() if module_of(path) in modules_of(name) or form.search(text)]


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
    files = [path for path in paths if not any(link in path.parents for link in links)]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}


def main() -> int:
    """Print a row for each verifier and each drafter."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-v", "--verbose", action="store_true", help="list the files")
    is_verbose = parser.parse_args().verbose
    drafters = {name: files_naming_drafter(name) for name in KINDS}
    for heading, files_by_name in (("verifier", kind_map()), ("drafter", drafters)):
        rows = [
            (name, str(len(files)), *([" ".join(files)] if is_verbose else [])) for name, files in files_by_name.items()
        ]
        print_table(stdout_console(), (heading, "files", *(["names"] if is_verbose else [])), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
