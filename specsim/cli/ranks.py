"""Commands that run on several ranks, one process each: options, start, and outputs of rank 0 alone."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specsim.cli.options import option
from specsim.core.errors import InputError, require_choice, require_int, require_number

if TYPE_CHECKING:
    from specsim.core.engine_options import EngineOptions

_OUTPUTS = ("json_file", "html_file", "trace")
MOST_RANKS = 64

TensorParallel = Annotated[
    int,
    option("Ranks", "Ranks that share the model, one process each; needs --impl fast. [1 to 64]"),
]
DraftParallel = Annotated[
    str,
    option("Ranks", "Drafter's weights: a slice on each rank, or all on each.", metavar="sharded|replicated"),
]
RankTimeout = Annotated[
    float, option("Ranks", "Seconds after which ranks that wait for another are ended. [at least 1]")
]


@dataclass(frozen=True, slots=True)
class RankOptions:
    """Ranks that share the model, and the drafter's part of each."""

    tensor_parallel: TensorParallel = 1
    draft_parallel: DraftParallel = "sharded"
    rank_timeout: RankTimeout = 300.0

    def of(self, options: "EngineOptions") -> "EngineOptions":
        """Add the ranks to an engine's options."""
        draft_parallel: Any = self.draft_parallel  # which EngineOptions checks
        return replace(options, tensor_parallel=self.tensor_parallel, draft_parallel=draft_parallel)


def in_ranks(command: Callable[..., None]) -> Callable[..., None]:
    """Run a command in as many processes as --tensor-parallel says; torchrun's own take part as they are."""

    @wraps(command)
    def started(**given: Any) -> None:
        size = require_int("tensor_parallel", given["tensor_parallel"], 1, MOST_RANKS)
        if size == 1:
            command(**given)
            return
        require_choice("impl", given["impl"], ("fast",))
        start_ranks(command, given, size, given["rank_timeout"], given["device"])

    return started


def start_ranks(
    command: Callable[..., None], given: dict[str, Any], size: int, timeout: float, device: str | None
) -> None:
    """Run a command in processes of its own for each rank, or as the rank that this process is."""
    require_number("rank_timeout", timeout, 1, 86400, "a number of seconds from 1 to 86400")
    chosen = _device(device, size)
    from specsim.core.rank_group import is_joined, join

    if not is_joined() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        join(size, timeout, chosen)
    if is_joined():
        _run_own(command, given, size)
        return
    from specsim.cli.rank_processes import run_ranks

    raise typer.Exit(run_ranks(lambda folder, rank: _words(folder, rank, size, timeout, chosen), size, timeout))


def _device(device: str | None, size: int) -> str:
    """Choose the ranks' device, as engines do, and see that there is a GPU for each rank."""
    import torch

    from specsim.core.engine_options import check_device

    chosen = check_device(device)
    if chosen == "cuda" and torch.cuda.device_count() < size:
        raise InputError("tensor_parallel", size, f"at most {torch.cuda.device_count()}, the GPUs of this machine")
    return chosen


def _words(folder: Path, rank: int, size: int, timeout: float, device: str) -> list[str]:
    own = [str(folder), str(rank), str(size), str(timeout), device]
    return [sys.executable, "-m", "specsim.cli.rank_process", *own, *sys.argv[1:]]


def _run_own(command: Callable[..., None], given: dict[str, Any], size: int) -> None:
    """Run this rank's command; ranks other than 0 print nothing and write their files where nobody reads them."""
    from specsim.core.rank_group import RankGroup

    group = RankGroup.joined(size)
    if group is None or group.rank == 0:
        command(**given)
        return
    with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        aside = {name: _aside(given[name], Path(folder)) for name in _OUTPUTS if given.get(name) is not None}
        command(**given | aside)


def _aside(file: Path, folder: Path) -> Path:
    """Copy an output, from which a run may resume, to a folder, and name its place there."""
    other = folder / file.name
    if file.is_file():
        shutil.copy(file, other)
    return other
