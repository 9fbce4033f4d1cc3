"""Settings and prompts of the tests of the scheduler."""

import pytest

from specsim.core.config import SpecConfig

TREE = SpecConfig(topk=2, num_steps=3, num_draft_tokens=6, page_size=4, max_len=64)
CHAIN = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4, page_size=1, max_len=64)
BRANCHY = SpecConfig(topk=3, num_steps=2, num_draft_tokens=8, page_size=16, max_len=64)
LONG = [7 * i % 47 for i in range(20)]
SHORT = [5, 17, 3, 40]
OTHER = [9, 8, 7, 6, 5, 4, 3, 2, 1, 30, 31, 32]
SCHEDULES = pytest.mark.parametrize("schedule", ["sync", "overlap"])
