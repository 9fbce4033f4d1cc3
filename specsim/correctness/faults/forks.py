"""Forks of a process that has imported torch, Triton and more, which takes longer than a small examination.

python forks.py MODULE JOBS FOLDER … calls MODULE.main(folder) in a fork for every folder, JOBS of them at a time. Each
folder holds a copy of the package, from which its fork imports MODULE. So this file runs as a script, and imports
nothing of specsim.
"""

import gc
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

PRELOADED = ("torch", "triton.experimental.gluon", "safetensors.torch", "rich.console", "rich.table")


def start(module: str, folder: str) -> None:
    """Fork, import the module from the folder and call its main; the fork ends with status 1 on an error."""
    if os.fork():
        return
    status = 1
    gc.disable()  # a fork lives for seconds, and ends with all its memory
    try:
        sys.path.insert(0, folder)
        import_module(module).main(Path(folder))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def main(arguments: Sequence[str]) -> int:
    """Run a module's main for all folders; returns exit status 1 if one of the forks failed."""
    module, jobs, *folders = arguments
    for name in PRELOADED:
        import_module(name)
    num_running = 0
    has_failed = False
    while folders or num_running:
        if folders and num_running < int(jobs):
            start(module, folders.pop(0))
            num_running += 1
            continue
        _, status = os.wait()
        num_running -= 1
        has_failed |= status != 0
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
