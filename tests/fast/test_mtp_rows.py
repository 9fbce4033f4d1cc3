"""Rows of MTP modules: rows that no request has, and columns beyond max_len, get no slot."""

from types import SimpleNamespace

import torch

from specsim.fast.drafters.mtp_rows import NewFeatures, SpanShape, gather_rows, spans_of


def test_rows_past_a_request_or_max_len_have_no_slot():
    """Batch of three requests: two new tokens, a padded one, and three tokens with one column below max_len."""
    rows = torch.tensor([1, -1, 0], dtype=torch.int32)
    table = torch.arange(100, 132, dtype=torch.int32).view(4, 8)[1:3]  # what lies before it are slots too
    pools = SimpleNamespace(req_to_token=table)
    batch = SimpleNamespace(size=3, req_pool_indices=rows, seq_lens=torch.tensor([2, 0, 5]))
    spans = spans_of(batch, batch.seq_lens, torch.tensor([2, 0, 3]), 0, 3, pools)
    new = NewFeatures(torch.arange(1.0, 10.0)[:, None], torch.tensor([0, 3, 6, 9]))
    features, slots = gather_rows(batch, spans, new, SpanShape(9, 3, 0, True), 6, pools)
    assert slots.tolist() == [118, 119, -1, -1, -1, -1, 113, -1, -1]
    assert features[:, 0].tolist() == [1, 2, 0, 0, 0, 0, 7, 8, 9]
