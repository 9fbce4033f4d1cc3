"""Comparing what one step left, phase by phase and request by request."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from specsim.correctness.differential.comparison import Comparison, Trio
from specsim.correctness.differential.coverage import note_round
from specsim.correctness.differential.divergence import Mismatch, Undecidable
from specsim.correctness.differential.draft import compare_candidates, compare_selection, compare_tree
from specsim.correctness.differential.draft_input import compare_draft_input, compare_first_token, prefill_logits
from specsim.correctness.differential.scene import Scene
from specsim.correctness.differential.slots import (
    column_slots,
    compare_committed,
    compare_kv,
    compare_tables,
    compare_untouched,
    extend_slots,
    lane_slots,
    tree_slots,
)
from specsim.correctness.differential.verify import (
    compare_extend_input,
    compare_logits,
    compare_verdict,
    compare_walk,
    own_distributions,
)

BY_ROW = frozenset(f"draft_extend_input.{name}" for name in ("input_ids", "positions", "cache_locations", "hidden"))
Outputs = dict[str, Trio[Any]]  # by phase
Found = tuple[str, int | None, Mismatch]


def compare_step(scene: Scene, entered: Trio[Any], outputs: Outputs, left_out: set[int]) -> Iterator[Found]:
    """Every request's first difference, (phase, place in the batch or None, what).

    entered: the states that the step started from. outputs: what each of its phases left, on the host. left_out: whom
    rounding has parted from the reference; those are not compared, and those that join them are added.
    """
    was_apart = set(left_out)
    wrong = set()
    check = Comparison(scene.tally, scene.eps)
    for phase, states in outputs.items():
        compare = _COMPARED[phase](scene, entered, outputs, check)
        if found := _failed(check.layout, "", states.reference, states.fast, BY_ROW):
            yield phase, None, found
            return
        for request in range(scene.batch.size):
            if request in left_out or request in wrong:
                scene.tally.left_out[phase] += 1
                continue
            try:
                compare(request)
                scene.tally.compared[phase] += 1
            except Undecidable:
                scene.tally.undecidable += 1
                scene.tally.left_out[phase] += 1
                left_out.add(request)
            except Mismatch as found:
                wrong.add(request)
                yield phase, request, found
    last = [*outputs][-1]
    if found := _failed(compare_tables, scene, left_out | wrong, check):
        yield last, None, found
    if not was_apart and (
        found := _failed(compare_untouched, scene, _written(scene, entered, outputs, left_out), check)
    ):
        yield last, None, found


def _failed(compare: Callable[..., None], *arguments: Any) -> Mismatch | None:
    try:
        compare(*arguments)
    except Mismatch as found:
        return found
    return None


def _prefill(scene: Scene, entered: Trio[Any], outputs: Outputs, check: Comparison) -> Callable[[int], None]:
    prefill = entered.reference
    states = outputs["prefill"]
    adjusted = prefill_logits(scene, prefill)
    known = prefill.next_tokens.tolist()

    def compare(request: int) -> None:
        length = scene.place(request)[1]
        compare_committed(scene, "target", request, length, check)
        compare_first_token(scene, request, known[request], adjusted, states, check)
        compare_committed(scene, "draft", request, length, check)
        bonus = int(states.fast.next_tokens[request])
        compare_draft_input(scene, request, states.map(lambda s: s.draft_input), bonus, length, check, "draft_input.")

    return compare


def _draft(scene: Scene, entered: Trio[Any], outputs: Outputs, check: Comparison) -> Callable[[int], None]:
    """The lanes' KV can be seen only where the step ends here: draft-extend writes over it."""
    trees = outputs["draft"]
    is_last = len(outputs) == 1
    slots = lane_slots(scene) if is_last and scene.pools.reference.draft is not None else None

    def compare(request: int) -> None:
        try:
            compare_candidates(scene, request, entered, trees, check)
        except Undecidable:
            compare_tree(scene, request, trees, check)
            raise
        compare_tree(scene, request, trees, check)
        if slots is not None:
            compare_kv(scene, "draft", slots[request], check)
        compare_selection(scene, request, trees, check)

    return compare


def _verify(scene: Scene, entered: Trio[Any], outputs: Outputs, check: Comparison) -> Callable[[int], None]:
    states = outputs["verify"]
    seen = outputs.get("draft", entered)
    tree = seen.reference
    own_prob = seen.fast.draft_prob
    grown, distributions = own_distributions(scene, tree, states.fast.target_logits)

    def compare(request: int) -> None:
        compare_logits(scene, request, tree, states, check)
        draft_prob = None if own_prob is None else own_prob[request].cpu()
        compare_walk(scene, request, grown[request], distributions[request], states, check, draft_prob)
        compare_verdict(scene, request, states, check)
        compare_extend_input(request, states, check)
        length = scene.place(request)[1] + int(states.reference.verdict.num_accepted_tokens[request])
        compare_committed(scene, "target", request, length, check)
        note_round(scene, request, tree, states)

    return compare


def _draft_extend(scene: Scene, entered: Trio[Any], outputs: Outputs, check: Comparison) -> Callable[[int], None]:
    states = outputs["draft_extend"]
    rows = outputs["verify"].reference.draft_extend_input if "verify" in outputs else entered.reference

    def compare(request: int) -> None:
        length = scene.place(request)[1] + int(rows.num_accepted_tokens[request])
        compare_committed(scene, "draft", request, length, check)
        compare_draft_input(scene, request, states, int(rows.bonus_tokens[request]), length, check)

    return compare


_COMPARED = {"prefill": _prefill, "draft": _draft, "verify": _verify, "draft_extend": _draft_extend}


def _written(scene: Scene, entered: Trio[Any], outputs: Outputs, left_out: set[int]) -> dict[str, list[torch.Tensor]]:
    """By buffer the slots that the step may write; of a request that was left out, all that its phase ever may."""
    target = []
    draft = []
    config = scene.config
    requests = range(scene.batch.size)
    if "prefill" in outputs:
        for request, start in zip(requests, entered.reference.start_lens.tolist(), strict=True):
            slots = column_slots(scene, request, start, scene.place(request)[1])
            target.append(slots)
            draft.append(slots)
    if "draft" in outputs and scene.pools.reference.draft is not None:
        draft += lane_slots(scene)
    for request in requests:
        (_, length) = scene.place(request)
        is_out = request in left_out
        if "verify" in outputs:
            tree = outputs["draft"].reference if "draft" in outputs else entered.reference
            count = int(outputs["verify"].reference.verdict.num_accepted_tokens[request])
            whole = column_slots(scene, request, length, length + config.num_draft_tokens)
            target.append(whole if is_out else tree_slots(scene, request, tree, count))
        if "draft_extend" in outputs:
            rows = outputs["verify"].reference.draft_extend_input if "verify" in outputs else entered.reference
            whole = column_slots(scene, request, length, length + config.num_steps + 1)
            draft.append(whole if is_out else extend_slots(request, rows))
    return {"target": target, "draft": draft}
