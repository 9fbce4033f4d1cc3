"""KV, side outputs, tables and page accounts after a step."""

from collections.abc import Callable
from typing import Any

import torch

from specsim.core.pool import KVBuffer, KVPool
from specsim.correctness.differential.comparison import FieldChecks, Mismatch, Trio
from specsim.correctness.differential.step import ComparedRequest, ComparedStep

MOST_TIES = 1e-3  # share of a request's fp8 numbers that may lie where rounding decides


def compare_kv(check: FieldChecks, buffer: str, buffers: Trio[KVBuffer], slots: torch.Tensor, owner: KVPool) -> None:
    """Compare the content of these slots in order; keys and values of every layer have a budget each.

    owner: the pool whose tables tell a slot's request and column. The parts of latent keys are compared by themselves.
    """
    buffers = buffers.map(lambda kv: kv.with_heads_of(buffers.fast))
    for part, content_of in _parts(buffers.reference, buffer):
        for layer in range(buffers.exact.keys.shape[0]):
            content = buffers.map(lambda kv, of=content_of, at=layer: of(kv)[at][slots.to(kv.keys.device)].cpu())
            try:
                check.close(part, content)
            except Mismatch as mismatch:
                if mismatch.node is None or part.endswith("(rms)"):
                    raise
                slot = int(slots[mismatch.node])
                raise Mismatch(
                    part, f"{mismatch.reference} in layer {layer} of {owner_of(owner, slot)}", mismatch.fast, slot
                ) from None


def _parts(kv: KVBuffer, buffer: str) -> list[tuple[str, Callable[[KVBuffer], torch.Tensor]]]:
    """Name the parts of a slot's content."""
    if not kv.values_in_keys:
        return [(f"{buffer} keys", lambda kv: kv.keys), (f"{buffer} values", lambda kv: kv.values)]
    rank = kv.values.shape[-1]
    return [
        (f"{buffer} latent channels", lambda kv: kv.values),
        (f"{buffer} rotated channels", lambda kv: kv.keys[..., rank:]),
    ]


def has_other_choices(request: ComparedRequest[Any]) -> bool:
    """Check whether rounding chose other experts for a row, or other fp8 numbers for a few of its KV.

    Later layers differ by more than rounding then. A number between two of fp8 may fall to either side, so its codes
    may differ by one. Experts are compared between the reference and its float64 run only.
    """
    pools = request.step.pools
    columns = pools.reference.req_to_token[request.row]
    slots = columns[columns >= 0]
    reference, exact = (pool.side.read(slots) for pool in pools[:2])
    if any(not torch.equal(rows, exact[name]) for name, rows in reference.items()):
        return True
    drafted = (pools.map(lambda pool: pool.draft), request.step.drafted)
    buffers = [pools.map(lambda pool: pool.target), *(trio for trio in drafted if None not in trio)]
    fp8 = (trio for trio in buffers if trio.reference is not None and trio.reference.is_fp8)
    return any(_has_ties(trio, slots) for trio in fp8)


def _has_ties(buffers: Trio[Any], slots: torch.Tensor) -> bool:
    buffers = buffers.map(lambda kv: kv.with_heads_of(buffers.fast))
    names = ("keys",) if buffers.reference.values_in_keys else ("keys", "values")
    for name in names:
        codes = buffers.map(lambda kv, n=name: _ordered(getattr(kv, n)[:, slots.to(kv.keys.device)].cpu()))
        distance = torch.maximum(*((codes.reference - other).abs() for other in codes[1:]))
        if distance.any() and int(distance.max()) == 1 and int(distance.sum()) <= max(2, MOST_TIES * distance.numel()):
            return True
    return False


def _ordered(stored: torch.Tensor) -> torch.Tensor:
    """Number fp8 values in their order, with both zeros alike, i32."""
    bits = stored.view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


def compare_committed(request: ComparedRequest[Any], buffer: str) -> None:
    """Compare the columns that the request has committed after the step, and the drafter's bonus_columns."""
    buffers = request.step.pools.map(lambda pools: getattr(pools, buffer))
    end = request.end
    if buffer == "draft":
        end = min(end + request.step.drafter.bonus_columns, request.config.length_limit)
    if buffer == "target":
        _compare_side(request, request.slots(torch.arange(end)))
    if buffers.reference is not None:
        compare_kv(request.check, buffer, buffers, request.slots(torch.arange(end)), request.step.pools.reference)


def _compare_side(request: ComparedRequest[Any], slots: torch.Tensor) -> None:
    """Compare the side outputs of committed columns."""
    reference, _, fast = request.step.pools.map(lambda pools: pools.side.read(slots.to(pools.req_to_token.device)))
    for name, rows in reference.items():
        request.check.same(f"side output {name}", rows, fast[name])


def owner_of(pools: KVPool, slot: int) -> str:
    """Name the request and column of a slot."""
    places = (pools.req_to_token == slot).nonzero()
    if not len(places):
        return f"slot {slot} (free)"
    row, column = places[0].tolist()
    token = int(pools.token_ids[row, column]) if column < pools.token_ids.shape[1] else -1
    return f"slot {slot} (request row {row}, column {column}, token {token})"


def compare_tables(step: ComparedStep, not_compared: set[int]) -> None:
    """Compare req_to_token and token_ids of the rows of all compared requests, and the page accounts."""
    reference, _, fast = step.pools
    skipped = {int(step.batch.req_pool_indices[index]) for index in not_compared}
    rows = [row for row in range(len(reference.req_to_token)) if row not in skipped]
    for name in ("req_to_token", "token_ids"):
        step.check.same(name, getattr(reference, name)[rows], getattr(fast, name).cpu()[rows])
    if not not_compared:
        step.check.require("page books", *compare_books(reference, fast))


def compare_books(reference: KVPool, fast: KVPool) -> tuple[bool, dict[str, int], dict[str, int] | str]:
    """Compare page accounts: (whether they are equal, the reference's audit, fast's audit or its error)."""
    expected = reference.audit()
    try:
        actual = fast.audit()
    except AssertionError as error:
        return False, expected, str(error)
    return actual == expected, expected, actual
