"""What every test runs under: one thread, no network, deterministic operations, and NaN in unwritten memory."""

import os
from collections.abc import Iterator

# Read when the libraries load, so before torch is imported.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import hypothesis
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # before anything imports triton
    os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
# With deterministic algorithms torch.empty holds NaN (the largest integer for integer types): an unwritten entry shows.
torch.utils.deterministic.fill_uninitialized_memory = True

# The same examples in every run. To look for new ones: make test ARGS="--hypothesis-profile=default"
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Make a test that builds random weights independent of the tests before it."""
    torch.manual_seed(0)


@pytest.fixture
def device() -> str:
    """Where the fast column's tests run."""
    return DEVICE


# A GPU runs the programs of a launch in no order; the interpreter in one, so a race shows as a difference in another.
@pytest.fixture(params=["in order", "reversed"] if DEVICE == "cpu" else ["in no order"])
def program_order(request, monkeypatch) -> Iterator[str]:
    """The order in which the interpreter runs the programs of every launch; in one, none may leave its tensors."""
    if request.param != "reversed":
        yield request.param
        return
    from specsim.faults.judges.memory import guarded

    with guarded() as guard:
        from triton.runtime.interpreter import InterpreterBuilder

        in_order = InterpreterBuilder.set_grid_idx

        def reversed_order(builder, *index: int) -> None:
            in_order(builder, *(size - 1 - place for size, place in zip(builder.grid_dim, index, strict=True)))

        monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", reversed_order)
        yield request.param
    assert guard.first is None, guard.first
