"""One rank of a command: python -m specsim.cli.rank_process FOLDER RANK SIZE TIMEOUT DEVICE ARGUMENTS."""

import gc
import sys
import tempfile
import traceback
from os import _exit  # code of a user has another one (core.user_module)
from pathlib import Path
from threading import Thread
from typing import NoReturn

from specsim.cli.main import main
from specsim.cli.ranks import BROKEN, GRACE, LOST
from specsim.core.rank_group import RankLost, join, leave


def run() -> None:
    """Join the ranks that meet in the folder, run the command line, and end with its status."""
    folder, rank, size, timeout, device, *arguments = sys.argv[1:]
    tempfile.tempdir = folder  # which is removed when the ranks end, however they do
    status: object = None
    try:
        join(int(size), float(timeout), device, Path(folder), int(rank))
        sys.argv = ["specsim", *arguments]
        main(arguments)
    except SystemExit as ended:
        status = ended.code
    except RankLost:
        status = LOST
    except Exception:
        traceback.print_exc()
        status = BROKEN
    end(status)


def end(status: object) -> NoReturn:
    """Leave the ranks and end, also where the others no longer answer.

    NCCL waits for graphs that have captured its kernels, so what the command leaves is freed before.
    """
    if status not in (LOST, BROKEN):
        gc.collect()
        leaving = Thread(target=leave, daemon=True)
        leaving.start()
        leaving.join(GRACE / 2)
        if not leaving.is_alive():
            sys.exit(status)  # pyright: ignore[reportArgumentType] - a code or None
    sys.stdout.flush()
    sys.stderr.flush()
    _exit(status if isinstance(status, int) else 0 if status is None else 1)


if __name__ == "__main__":
    run()
