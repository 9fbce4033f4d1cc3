"""python -m specsim: the command line."""

import os
import sys

import specsim

if not sys.flags.safe_path and os.path.dirname(os.path.dirname(specsim.__file__)) != os.getcwd():  # noqa: PTH109, PTH120 - a pathlib.py there would be loaded
    sys.path.append(sys.path.pop(0))  # the current folder last, where a file of a user may be called like a library

from specsim.cli.main import main

main()
