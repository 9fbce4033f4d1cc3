"""GPU results kept in fast/measurements: complete, passed runs of the fast implementation, and which are stale."""

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specsim.bench.suites import SUITES, Options
from specsim.core.errors import InputError, require
from specsim.core.files import read_json
from specsim.core.provenance import PRINTING, code_digests

Result = Mapping[str, Any]  # as a command wrote it with --json
PROOFS = ("sampling-test", "certify", "faults", "conformance", "soak")  # commands, besides diff
CHECKS = ("cells", "faults", "tests", "certificates", "programs", "outcomes")  # numbers or lists of what a run checked
KEPT_OF_A_RUN = ("command", "date", "versions", "measured_peaks", "seconds", "finished")


def read(path: Path, *names: str) -> dict[str, Any]:
    """Read a command's JSON result; InputError for any other file, and where a field of `names` is missing."""
    allowed = "a result that a command of specsim wrote with --json"
    value = read_json(path, "file", allowed)
    for name in names:
        require(isinstance(value, dict) and name in value, "file", str(path), f"{allowed} (it has no {name})")
    return value


def runs_of(result: Result) -> Sequence[Result]:
    """List the runs of a kept suite; any other result is one run."""
    return result.get("runs", [result])


def changed_modules(run: Result) -> set[str]:
    """Find the modules whose code has changed since a run, all where it has no digests.

    A module that is new to it is imported by a changed one.
    """
    now, then = code_digests(), run["versions"].get("code")
    return set(now) if then is None else {name for name in {*then} - PRINTING if now.get(name) != then[name]}


def stale(folder: Path) -> dict[str, list[str]]:
    """List kept results whose code has changed, by file name, with the changed modules."""
    changed = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text("utf-8"))
        changed[path.name] = sorted({name for run in runs_of(result) for name in changed_modules(run)})
    return {name: modules for name, modules in changed.items() if modules}


def missing_groups(result: Result) -> list[str]:
    """List the groups of a kept suite that none of its runs has finished."""
    finished = {group for run in result["runs"] for group in run["finished"]}
    return [group for group in SUITES[result["suite"]].groups if group not in finished]


def suite_command(result: Result) -> str:
    """Write the command that runs a kept suite."""
    option = "" if result["shape"] == Options(result["suite"]).shape else f" --shape {result['shape']}"
    return f"specsim bench --suite {result['suite']}{option}"


def keep(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Write results to `folder`; runs of one benchmark suite, each of some of its groups, become one file.

    Groups of a suite that no run has finished stay as they are in the folder, with the provenance of their own run;
    pages name those that were never finished. Rows of these are kept as far as these runs have them.

    Raises InputError for a part of a grid, a suite without a finished group, a quick run, a run without a GPU or of the
    reference, and one that failed. A result of injected faults is kept whatever it detected: its table row counts the
    detected ones.
    """
    results: dict[str, Result] = {}
    suites: dict[str, list[Result]] = defaultdict(list)
    for path in paths:
        result = read(path, "command", "date", "versions")
        if "suite" in result:
            suites[_suite_file(path)].append(result)
        else:
            results |= _proof(path, result)
    results |= {name: _joined(runs, folder / name) for name, runs in suites.items()}
    for name, result in results.items():
        (folder / name).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return [folder / name for name in results]


def _refuse(path: Path, expected: str, faults: Mapping[str, bool]) -> None:
    for fault, is_found in faults.items():
        require(not is_found, "file", str(path), f"{expected}, and not {fault}")


def _suite_file(path: Path) -> str:
    result = read(path, "suite", "shape", "finished", "is_quick", "passed", "versions", "measured_peaks", "rows")
    faults = {
        "a quick run": result["is_quick"],
        "rows that are not equal": not result["passed"],
        "an unknown suite": result["suite"] not in SUITES,
        "one of the CPU": result["measured_peaks"] is None,
        "one of a shape without a name": not re.fullmatch(r"[\w.-]+", result["shape"]),
    }
    _refuse(path, "the result of a suite that passed", faults)
    suffix = "" if result["shape"] == Options(result["suite"]).shape else f"-{result['shape']}"
    return f"bench-{result['suite']}{suffix}.json"


def _joined(runs: Sequence[Result], before: Path) -> Result:
    """Join runs of a suite's groups, with those groups of the file `before` that they do not have.

    Rows of a group that a time limit cut off are dropped if another run finished the group.
    """
    suite = runs[0]["suite"]
    groups = SUITES[suite].groups
    new = [group for run in runs for group in run["finished"]]
    old = read(before) if before.exists() else {"runs": (), "rows": ()}
    earlier = [run | {"finished": [group for group in run["finished"] if group not in new]} for run in old["runs"]]
    joined = [run for run in (*earlier, *runs) if run["finished"]]
    if not new or len(new) != len({*new} & {*groups}):
        raise InputError(
            suite, ", ".join(new) or "without a finished group", f"its groups, each once: {', '.join(groups)}"
        )
    if any(_machine(run) != _machine(joined[0]) for run in joined):
        raise InputError(suite, "runs of different GPUs or versions", "runs of one")
    done = {group for run in joined for group in run["finished"]}
    rows = [row for row in old["rows"] if row["group"] in done.difference(new)]
    rows += [row for run in runs for row in run["rows"] if row["group"] in run["finished"] or row["group"] not in done]
    return {
        "suite": suite,
        "shape": runs[0]["shape"],
        "runs": [{name: run[name] for name in KEPT_OF_A_RUN} for run in joined],
        "rows": sorted(rows, key=lambda row: [*groups].index(row["group"])),
    }


def _machine(run: Result) -> dict[str, Any]:
    """Return the GPU and the versions of a run, without those of its own code, which may differ between groups."""
    return {name: value for name, value in run["versions"].items() if name not in ("code", "specsim")}


def _proof(path: Path, result: Result) -> dict[str, Result]:
    """Choose file name and kept part of a proof's result: no cells of a grid, no programs of a soak."""
    command = result["command"].removeprefix("specsim ").split(" ")[0]
    if command not in ("diff", *PROOFS) or "gpu" not in result["versions"]:
        *others, last = "diff", *PROOFS
        raise InputError("file", str(path), f"a result that specsim {', '.join(others)} or {last} wrote on a GPU")
    rows = [
        entry for name in ("tests", "certificates") for entry in result.get(name, ()) if not entry.get("is_control")
    ]
    says_so = result.get("is_ok", command in ("diff", "conformance", "faults"))  # these three have no such field
    passed = says_so and all(entry["passed"] for entry in result.get("outcomes", ()))
    faults = {
        "a run of the reference": "reference" in (result.get("impl"), *(entry["impl"] for entry in rows)),
        "a run that failed": not passed or bool(result.get("failures")),
        "a run without checks": not any(map(result.get, CHECKS)),
    }
    _refuse(path, "a proof of the fast implementation", faults)
    if command != "diff":
        return {
            f"{command}-cuda.json": {
                name: entry for name, entry in result.items() if name not in ("schema", "programs")
            }
        }
    read(path, "grid", "dtype", "device", "cells", "num_cells", "incomplete_cells")
    part = f"{result['cells']} of {result['num_cells']} cells"
    _refuse(path, "a whole grid", {part: result["cells"] != result["num_cells"]})
    grid = {name: entry for name, entry in result.items() if name not in ("schema", "results")}
    grid["incomplete_cells"] = len(result["incomplete_cells"])
    return {f"diff-{result['grid']}-{result['dtype']}-{result['device']}.json": grid}
