"""States of padded requests, which own nothing and write nothing."""

import pytest
import torch

from specsim.core.config import SpecConfig
from specsim.fast.runtime import padding

TREE = SpecConfig(topk=2, num_steps=3, num_draft_tokens=5, max_len=64)


@pytest.mark.parametrize("config", [TREE, SpecConfig.plain(max_len=64)])
def test_padded_requests_own_nothing(config):
    shape = padding.RoundShape(3, config, vocab_size=7, num_features=12, dtype=torch.float32)
    batch = padding.padded_batch(shape)
    assert batch.req_pool_indices.tolist() == [-1] * 3
    assert batch.seq_lens.tolist() == [0] * 3
    assert (padding.padded_verify_input(shape).cache_locations == -1).all()
    assert (padding.padded_extend_input(shape).cache_locations == -1).all()
    assert padding.padded_verdict(shape).num_accepted_tokens.tolist() == [1] * 3
