"""One rank of a command: python -m specsim.cli.rank_process FOLDER RANK SIZE TIMEOUT DEVICE ARGUMENTS."""

import sys
import traceback
from pathlib import Path

from specsim.cli.main import main
from specsim.cli.rank_processes import BROKEN, LOST
from specsim.core.rank_group import RankLost, join, leave


def run() -> None:
    """Join the ranks that meet in the folder, and run the command line."""
    folder, rank, size, timeout, device, *arguments = sys.argv[1:]
    try:
        join(int(size), float(timeout), device, Path(folder), int(rank))
        sys.argv = ["specsim", *arguments]
        main(arguments)
    except RankLost:
        sys.exit(LOST)
    except Exception:
        traceback.print_exc()
        sys.exit(BROKEN)
    finally:
        leave()


if __name__ == "__main__":
    run()
