"""A process of its own for trials of a copy of the package.

python -m specsim.correctness.faults.trial, JSON in and out.

In: {"root": folder of the copy, "device": …, "trials": [{"judge": …, "setting": …}]}. Out: a list of findings a trial.
"""

import json
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specsim.correctness.faults.checks import judge
from specsim.correctness.faults.fault import Finding, Trial
from specsim.correctness.faults.injection import require_copy


def findings(trial: Trial, device: str) -> list[dict[str, Any]]:
    """What a judge finds, as values that JSON has; an error that it does not expect is a finding too."""
    try:
        found = judge(trial.judge, trial.setting, device)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}, line {where.lineno}"
        found = [Finding("error", place, None, f"{type(error).__name__}: {error}")]
    return [{name: _plain(value) for name, value in asdict(each).items()} for each in found]


def _plain(value: Any) -> Any:
    """Numbers and texts stay, all else is told; JSON has no number that is none."""
    if isinstance(value, float) and value != value:
        return "nan"
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def main() -> None:
    """Read, judge, write."""
    import torch

    torch.set_num_threads(1)
    asked = json.load(sys.stdin)
    found = [findings(Trial(**each), asked["device"]) for each in asked["trials"]]
    require_copy(Path(asked["root"]))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
