"""Forks of a process that has imported torch, Triton and more, which takes longer than a small examination.

python forks.py JOBS FOLDER … examines the copy of the package in every folder by a fork, JOBS of them at a time. A fork
imports the package from its folder. So this file runs as a script, and imports nothing of specsim before it forks.
"""

import gc
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path


def preload() -> None:
    """Import what every fork needs, except the package."""
    import rich.table  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch  # noqa: F401
    import triton.language  # noqa: F401


def start(folder: str) -> None:
    """Fork, and examine the copy in a folder there; the fork ends with status 1 on an error."""
    if os.fork():
        return
    status = 1
    gc.disable()  # a fork lives for seconds, and ends with all its memory
    try:
        sys.path.insert(0, folder)
        from specsim.course.examination import main as examine

        examine(Path(folder))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def main(arguments: Sequence[str]) -> int:
    """Examine the copies in all folders; returns exit status 1 if one of the forks failed."""
    jobs, *folders = arguments
    preload()
    num_running = 0
    has_failed = False
    parent = os.getppid()
    while (folders and os.getppid() == parent) or num_running:
        if folders and num_running < int(jobs):
            start(folders.pop(0))
            num_running += 1
            continue
        _, status = os.wait()
        num_running -= 1
        has_failed |= status != 0
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
