"""Cases of the drafter's next input: ids one place ahead of their features, and the bonus token."""

from functools import partial

import torch

from specsim.core.phases import PrefillInput, Verdict
from specsim.correctness.conformance.case import Call, KernelCase, arguments, integers
from specsim.correctness.conformance.slots import batch_of


def shift_call(lens: list[int], next_tokens: list[int]) -> Call:
    """Make chunks of these lengths; the token after a chunk is sampled or, before the last, known."""
    from specsim.reference.extend import shift_left

    input_ids = torch.arange(100, 100 + sum(lens))
    starts = torch.nn.functional.pad(integers(lens).cumsum(0), (1, 0))
    prefill = PrefillInput(input_ids, starts, torch.zeros(len(lens), dtype=torch.int64), integers(next_tokens))
    expected = {"input_ids": shift_left(prefill, prefill.next_tokens)}
    values = input_ids, starts[:-1].contiguous(), integers(lens), integers(next_tokens)
    return Call(arguments("shift_ids", *values), expected)


_SHIFT = (
    KernelCase("shift_ids", "chunks of 1, 2 and 8 tokens", partial(shift_call, [1, 2, 8], [7, 8, 9])),
    KernelCase("shift_ids", "chunks of 9, 17 and 100 tokens", partial(shift_call, [9, 17, 100], [0, 2**31 - 1, 5])),
    KernelCase("shift_ids", "a chunk of 5000 tokens", partial(shift_call, [5000, 1], [3, 4])),
    KernelCase("shift_ids", "no requests", partial(shift_call, [], [])),
)


def bonus_call(paths: list[int], width: int, num_nodes: int) -> Call:
    """Make one call on trees of num_nodes.

    paths: number of accepted nodes per request, with the root. width: of a row.
    """
    from specsim.reference.extend import draft_extend_input

    batch = len(paths)
    accept_lens = integers(paths, torch.int32)
    predict = (1000 + torch.arange(batch * num_nodes)).int()
    step = torch.arange(width)
    nodes = torch.arange(batch)[:, None] * num_nodes + (step * 2).clamp(max=num_nodes - 1)
    accept_index = torch.where(step < accept_lens[:, None], nodes, -1).int()
    verdict = Verdict(predict, accept_index, accept_lens - 1, accept_lens, torch.zeros(batch, width))
    rows = torch.arange(batch * 64).view(batch, 64)
    features = torch.zeros(batch * num_nodes, 1)
    extend_input = draft_extend_input(batch_of([4] * batch, list(range(batch))), verdict, features, rows, 60, "fixed")
    tokens = torch.where(accept_index < 0, -1, predict[accept_index.long()]).int().flatten()
    values = tokens, accept_lens, torch.full_like(accept_lens, -7), width
    return Call(arguments("bonus_tokens", *values), {"bonus_tokens": extend_input.bonus_tokens})


_BONUS = (
    KernelCase("bonus_tokens", "rows of 4, of trees of 8", partial(bonus_call, [1, 4, 2, 3, 4], 4, 8)),
    KernelCase("bonus_tokens", "rows of 6, of trees of 11", partial(bonus_call, [6, 1, 5], 6, 11)),
    KernelCase("bonus_tokens", "rows of 1", partial(bonus_call, [1, 1], 1, 1)),
    KernelCase("bonus_tokens", "no requests", partial(bonus_call, [], 4, 8)),
)

CASES = (*_SHIFT, *_BONUS)
