from typing import NamedTuple

import pytest

from specsim.cli.main import main


class Ended(NamedTuple):
    status: int
    out: str
    err: str

    def refuses(self, name: str, value: object) -> bool:
        """Whether one sentence names this field and this value."""
        return (
            self.status == 2 and self.out == "" and self.err.count("\n") == 1 and f": {name} is {value!r}" in self.err
        )


@pytest.fixture
def command(capsys):
    """The command line of specsim, run in this process."""

    def run(*words: str) -> Ended:
        with pytest.raises(SystemExit) as end:
            main(words)
        return Ended(end.value.code or 0, *capsys.readouterr())

    return run
