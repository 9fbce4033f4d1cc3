"""What every test runs under: one thread, no network, deterministic operations, and NaN in unwritten memory."""

import os

# Read when the libraries load, so before torch is imported.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import hypothesis
import pytest
import torch

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
