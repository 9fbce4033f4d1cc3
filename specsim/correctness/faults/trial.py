"""Trials of a copy of the package in their own process: python -m specsim.correctness.faults.trial.

JSON in: {"root": folder of the copy, "device": …, "trials": [{"check": …, "setting": …}]}. JSON out: a list of findings
for each trial.
"""

import json
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specsim.correctness.faults.checks import run_check
from specsim.correctness.faults.fault import FaultFinding, Trial, require_copy


def findings(trial: Trial, device: str) -> list[dict[str, Any]]:
    """Run a check; findings as JSON values, an unexpected error being one of them."""
    try:
        results = run_check(trial.check, trial.setting, device)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        location = f"{Path(where.filename).name}, line {where.lineno}"
        results = [FaultFinding("error", location, None, f"{type(error).__name__}: {error}")]
    return [{name: _plain(value) for name, value in asdict(finding).items()} for finding in results]


def _plain(value: Any) -> Any:
    """Keep numbers and texts, turn everything else into text; JSON has no NaN."""
    if isinstance(value, float) and value != value:
        return "nan"
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def main() -> None:
    """Read trials, run their checks, write the findings."""
    import torch

    torch.set_num_threads(1)
    request = json.load(sys.stdin)
    results = [findings(Trial(**trial), request["device"]) for trial in request["trials"]]
    require_copy(Path(request["root"]))
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
