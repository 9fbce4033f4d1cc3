"""Commands of pages, run in the tests' process."""

import contextlib
import io
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from specsim.cli.main import main


@pytest.fixture(scope="session")
def printed() -> Callable[..., str]:
    """Run a command in a folder, and give what `outputs.run` returns in another process."""

    def run(command: str, folder: Path, allowed: tuple[int, ...] = (0, 1)) -> str:
        out = io.StringIO()
        with (
            contextlib.chdir(folder),
            contextlib.redirect_stdout(out),
            patch.dict(os.environ, {"COLUMNS": "100"}),
            pytest.raises(SystemExit, check=lambda end: (end.code or 0) in allowed),
        ):
            main(shlex.split(command)[1:])
        return "\n".join(line.rstrip() for line in out.getvalue().strip("\n").splitlines())

    return run
