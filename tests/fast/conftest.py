"""Small cases of attention metadata: pools of two requests, and batches of rows and lengths."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from specsim.core.config import SamplingParams
from specsim.core.phases import Batch

TABLE = [[10, 11, 12, 13, 14, 15, 16, 17], [20, 21, 22, 23, 24, 25, 26, 27]]


@pytest.fixture
def pools(device) -> SimpleNamespace:
    table = torch.tensor(TABLE, device=device)
    return SimpleNamespace(req_to_token=table, slots=lambda rows, columns: table[rows, columns])


@pytest.fixture
def make_batch(device) -> Callable[[list[int], list[int]], Batch]:
    def make(rows: list[int], lengths: list[int]) -> Batch:
        params = [SamplingParams()] * len(rows)
        return Batch.of(range(len(rows)), rows, lengths, params, vocab_size=3).to(device)

    return make
