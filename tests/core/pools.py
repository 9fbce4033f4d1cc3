"""Small pools of KV."""

import torch

from specsim.core.kv_buffer import FeatureRing, SideOutputs
from specsim.core.pool import KVBuffer, KVLayout, KVPool

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=3)


def make_pool(num_slots: int = 40, page_size: int = 4, num_requests: int = 3, width: int = 32) -> KVPool:
    """Make a pool with every optional part."""
    target, draft = (KVBuffer(LAYOUT, num_slots, torch.float32) for _ in range(2))
    recent = FeatureRing(num_requests, 3, 2, torch.float32)
    side = SideOutputs({"experts": (2,)}, num_slots)
    return KVPool(target, draft, page_size, num_requests, width, recent, side)


def busy_pool() -> KVPool:
    """Make a pool with pages 0 to 2 in row 0 and 3 and 4 in row 1.

    Row 0 has 6 committed columns.
    """
    pool = make_pool()
    for columns in (9, 5):
        pool.reserve(pool.open(), columns)
    pool.mark_committed(0, 6)
    pool.audit()
    return pool
