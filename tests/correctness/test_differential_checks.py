"""Every check of the differential reports a difference that is injected for it."""

import ast
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specsim.correctness import differential
from specsim.correctness.differential import grid_run
from specsim.correctness.differential.cell import cell_of
from specsim.correctness.differential.comparison import Mismatch

from .test_differential_kv import lose_a_page, swap_slots, touch
from .test_differential_states import SEMANTIC, WARM, spoiler

FOLDER = Path(differential.__file__).parent
CHAIN = dict(topk=1, num_steps=2, page_size=4, batch=2)
TREE = CHAIN | dict(topk=2, num_steps=3, num_draft_tokens=8)
GREEDY, BLOCK, MTP, SUFFIX = (cell_of(TREE | {"kind": kind}) for kind in ("eagle", "dspark", "mtp", "suffix"))
OWN_COLUMN = cell_of(CHAIN | {"kind": "standalone"})
LANES = cell_of(
    TREE
    | dict(
        num_steps=2, num_draft_tokens=5, batch=1, sampling="warm", kind="eagle3", verifier="multi_round", graph="phase"
    )
)
EXPERTS = cell_of(CHAIN | {"family": "qwen3_moe"})


def near_the_limit(cell, **changes):
    """Make a cell whose first round, of 7 columns, has depths at and beyond the limit."""
    return replace(cell, config=replace(cell.config, num_steps=5, max_len=10, **changes))


NEAR = near_the_limit(cell_of(TREE | dict(batch=1)))
NEAR_LANES = near_the_limit(LANES, num_draft_tokens=11)
NEAR_MASKS = near_the_limit(cell_of(CHAIN | dict(batch=1, kind="p-eagle")), num_draft_tokens=6)


def entry(path: str, *place: int, value: float):
    """Write a value to one entry of a state's field."""

    def spoil(state, batch, pools):
        name, _, rest = path.partition(".")
        part = getattr(state, name)
        if rest:
            return replace(state, **{name: entry(rest, *place, value=value)(part, batch, pools)})
        changed = part.clone()
        changed[place] = value
        return replace(state, **{name: changed})

    return spoil


def of_pools(change):
    """Change the pools of the implementation under test."""

    def spoil(output, batch, pools):
        change(pools, int(batch.req_pool_indices[0]))

    return spoil


def change_ring(name: str):
    return of_pools(lambda pools, row: getattr(pools.recent, name)[row].add_(1))


def draw_outside(output, batch, pools):
    """Give request 0 a bonus token outside the vocabulary."""
    node = int(output.verdict.accept_index[0, output.verdict.num_accepted_drafts[0]])
    return entry("verdict.predict", node, value=99)(output, batch, pools)


# By check: its module and function, and its field or, where that is computed, the expression of it.
SEEN = {
    "block.compare_slots SCORES": (BLOCK, "draft", spoiler("candidates.scores", (0, 0))),
    "block._compare_lanes PARENTS": (BLOCK, "draft", spoiler("candidates.parents", (0, 0))),
    "block._compare_lanes PARENTS 2": (BLOCK, "draft", spoiler("candidates.parents", (0, -1))),
    "block._compare_confidence 'candidates.confidence'": (BLOCK, "draft", spoiler("candidates.confidence", (0, 0))),
    "block._compare_children SCORES": (BLOCK, "draft", entry("candidates.scores", 0, -1, value=9.0)),
    "block._compare_alive 'candidates.num_alive'": (BLOCK, "draft", spoiler("candidates.num_alive", (0,))),
    "distribution.reported_walk 'accept_index'": (GREEDY, "verify", spoiler("verdict.accept_index", (0, 0))),
    "distribution.compare_argmax name": (EXPERTS, "verify", spoiler("verdict.predict", (0,))),
    "distribution.deny name": (WARM, "prefill", spoiler("next_tokens", (0,))),
    "distribution.compare_draw name": (WARM, "prefill", spoiler("next_tokens", (0,))),
    "draft.compare_draft 'draft'": (GREEDY, "draft", touch("draft", "keys", lambda length: length + 4)),
    "draft._compare_candidates PARENTS": (GREEDY, "draft", spoiler("candidates.parent_list", (0, 0))),
    "draft._compare_candidates TOKENS": (GREEDY, "draft", spoiler("candidates.tokens", (0, 0))),
    "draft._compare_explicit f'{state}.num_alive'": (SUFFIX, "draft", spoiler("candidates.num_alive", (0,))),
    "draft._compare_explicit f'{state}.{name}'": (SUFFIX, "draft", spoiler("candidates.parents", (0, 0))),
    "draft._compare_lanes PARENTS": (GREEDY, "draft", spoiler("candidates.parent_list", (0, -1))),
    "draft._compare_children TOKENS": (NEAR, "draft", spoiler("candidates.tokens", (0, -1))),
    "draft._compare_scores SCORES": (GREEDY, "draft", entry("candidates.scores", 0, -1, value=9.0)),
    "draft._compare_scores SCORES 2": (GREEDY, "draft", spoiler("candidates.scores", (0, 0))),
    "draft._compare_tree name": (GREEDY, "draft", spoiler("draft_tokens", (0, 0))),
    "draft_input.compare_all_drafts f'{prefix}{name}'": (
        NEAR_MASKS,
        "prefill",
        spoiler("draft_input.topk_index", (0, -1, 0)),
    ),
    "draft_input._compare_depth f'{prefix}hidden'": (GREEDY, "prefill", spoiler("draft_input.hidden", (0, 0))),
    "draft_input._compare_depth f'{prefix}topk_scores'": (GREEDY, "draft_extend", spoiler("topk_scores", (0, 0))),
    "draft_input._compare_features 'kept positions'": (MTP, "prefill", change_ring("positions")),
    "draft_input._compare_features 'kept features'": (MTP, "prefill", change_ring("features")),
    "draft_input.compare_product f'candidates.{name}'": (MTP, "draft", spoiler("candidates.tokens", (0, -1))),
    "draft_input.compare_product 'candidates.scores'": (MTP, "draft", spoiler("candidates.scores", (0, -1))),
    "draft_input.compare_product 'draft_prob'": (
        cell_of(CHAIN | dict(kind="mtp", verifier="rejection", sampling="warm")),
        "draft",
        spoiler("draft_prob", (0, 0, 0)),
    ),
    "draft_input.compare_prefill request": (GREEDY, "prefill", touch("target", "keys", lambda length: 0)),
    "draft_input._compare_draft_state request": (GREEDY, "prefill", touch("draft", "keys", lambda length: 0)),
    "draft_input._compare_draft_state request 2": (MTP, "prefill", touch("draft", "keys", lambda length: 0)),
    "draft_input._compare_draft_input f'{prefix}bonus_tokens'": (GREEDY, "draft_extend", spoiler("bonus_tokens", (0,))),
    "draft_input._compare_first_token 'next_tokens'": (GREEDY, "prefill", entry("next_tokens", 0, value=99)),
    "draft_input._compare_first_token 'next_tokens' 2": (WARM, "prefill", spoiler("next_tokens", (0,))),
    "draft_input._compare_first_token 'logprobs'": (GREEDY, "prefill", spoiler("logprobs", (0,))),
    "kv.compare_kv part": (GREEDY, "prefill", touch("target", "values", lambda length: 0)),
    "kv.compare_kv part 2": (GREEDY, "prefill", touch("target", "values", lambda length: 0)),
    "kv.compare_committed buffer": (OWN_COLUMN, "prefill", touch("draft", "keys", lambda length: length)),
    "kv._compare_side f'side output {name}'": (
        EXPERTS,
        "prefill",
        of_pools(lambda pools, row: [rows.add_(1) for rows in pools.side.rows.values()]),
    ),
    "kv.compare_tables name": (
        GREEDY,
        "draft",
        lambda output, batch, pools: swap_slots(output, batch.filter(torch.tensor([0, 0, 0])), pools),
    ),
    "kv.compare_tables 'page books'": (GREEDY, "draft", lose_a_page),
    "lockstep._advance 'error'": (GREEDY, *SEMANTIC["an error"][:2]),
    "lockstep._close 'page books'": (
        replace(GREEDY, rounds=1),
        "prefill",
        lambda output, batch, pools: setattr(pools, "close", lambda row: None),
    ),
    "phase.compare_untouched f'stray write, {writes.buffer} pool'": (
        GREEDY,
        "verify",
        touch("draft", "keys", lambda length: 0),
    ),
    "ranking.compare name": (GREEDY, "prefill", spoiler("next_tokens", (0,))),
    "ranking.compare_drafts name": (GREEDY, "prefill", entry("draft_input.topk_index", 0, 0, value=99)),
    "ranking.require_falling name": (GREEDY, "draft", entry("candidates.scores", 0, -1, value=9.0)),
    "ranking.compare_draws row.prob_name": (LANES, "draft_extend", spoiler("draft_prob", (0, 0))),
    "ranking.compare_draws row.name": (LANES, "draft_extend", spoiler("topk_index", (0, 0))),
    "ranking.compare_lanes 'candidates.parent_list'": (LANES, "draft", spoiler("candidates.parent_list", (0, 0))),
    "ranking.compare_lanes 'candidates.tokens'": (LANES, "draft", spoiler("candidates.tokens", (0, 0))),
    "ranking.compare_lanes 'draft_prob'": (LANES, "draft", spoiler("draft_prob", (0, 0, 0))),
    "ranking.compare_lanes 'candidates.scores'": (LANES, "draft", spoiler("candidates.scores", (0, 0))),
    "ranking._compare_child row.name": (NEAR_LANES, "draft", spoiler("candidates.tokens", (0, -1))),
    "ranking._compare_child row.prob_name": (NEAR_LANES, "draft", spoiler("draft_prob", (0, -1, 0))),
    "verify.compare_verify request": (GREEDY, "verify", touch("target", "keys", lambda length: length)),
    "verify._compare_logits 'target_logits'": (GREEDY, "verify", spoiler("target_logits", (0, 0))),
    "verify._compare_walk 'predict'": (GREEDY, "verify", draw_outside),
    "verify._compare_walk 'predict' 2": (GREEDY, "verify", entry("verdict.predict", 4, value=3)),
    "verify._compare_walk name": (GREEDY, "verify", spoiler("verdict.num_accepted_drafts", (0,))),
    "verify._compare_greedy name": (EXPERTS, "verify", spoiler("verdict.predict", (0,))),
    "verify._compare_greedy 'accept_index'": (GREEDY, *SEMANTIC["a path cut short"][:2]),
    "verify._compare_sampled 'predict'": (WARM, "verify", spoiler("verdict.predict", (0,))),
    "verify._compare_sampled 'accept_index'": (WARM, *SEMANTIC["a path cut short"][:2]),
    "verify._compare_logprobs 'logprobs'": (GREEDY, "verify", spoiler("verdict.logprobs", (0, 0))),
    "verify._compare_extend_input f'{prefix}row_starts'": (
        GREEDY,
        "verify",
        spoiler("draft_extend_input.row_starts", (1,)),
    ),
    "verify._compare_extend_input prefix + name": (GREEDY, "verify", spoiler("draft_extend_input.seq_lens", (0,))),
    "verify._compare_extend_input prefix + name 2": (GREEDY, "verify", spoiler("draft_extend_input.hidden", (0, 0))),
    "verify._compare_extend_input prefix + name 3": (GREEDY, "verify", spoiler("draft_extend_input.positions", (0,))),
}
# Checks that other tests see.
ELSEWHERE = {
    "distribution._deny 'predict'": "test_differential_rounding.py: a uniform that is a little off",
    "distribution._deny 'accept_index'": "test_differential_rounding.py: a uniform that is a little off",
    "draft._compare_tree PARENTS": "a guard: candidates are compared before, so that they are a tree",
    "lockstep._advance 'rank digests'": "test_rank_group.py, where ranks differ",
    "lockstep.note_writes kind": "test_differential_kv.py: writes to states",
    "ranking.candidates 'candidates (type)'": "test_differential_states.py: a narrower type, which ends the comparison",
}
METHODS = ("same", "close", "within", "require", "deny", "compare_argmax", "compare_draw")
FUNCTIONS = ("Mismatch", "compare_kv", "compare_committed", "require_falling")


def checks() -> dict[str, tuple[str, range]]:
    """Find the module and the lines of every check, by its name; several in a function are numbered."""
    lines_of = {}
    for path in sorted(FOLDER.glob("*.py")):
        if path.stem == "comparison":  # its functions are those checks
            continue
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        calls = {node: function.name for function in functions for node in ast.walk(function) if _is_check(node)}
        for call in sorted(calls, key=lambda call: call.lineno):
            name = f"{path.stem}.{calls[call]} {ast.unparse(call.args[getattr(call.func, 'id', '') == 'compare_kv'])}"
            number = 1 + sum(name == other.rstrip(" 23") for other in lines_of)
            lines = range(call.lineno, call.end_lineno + 1)
            lines_of[name if number == 1 else f"{name} {number}"] = (path.stem, lines)
    return lines_of


def _is_check(node: ast.AST) -> bool:
    """Check whether a node is a method of FieldChecks or of a distribution, or a function that compares."""
    if not isinstance(node, ast.Call):
        return False
    is_method = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value).endswith(
        ("check", "self", "]", "distribution")
    )
    return node.func.attr in METHODS if is_method else getattr(node.func, "id", "") in FUNCTIONS


def test_every_check_has_a_difference():
    assert checks().keys() == SEEN.keys() | ELSEWHERE.keys()


@pytest.mark.parametrize("name", SEEN)
def test_a_check_reports_the_difference_injected_for_it(name, check_spoiled, monkeypatch):
    monkeypatch.setattr(grid_run, "perturbation_budgets", lambda *_: {})  # differences are much larger
    monkeypatch.setattr(grid_run, "compare_with_oracle", lambda *_: [])
    lines = set()
    init = Mismatch.__init__

    def traced(self, *values):
        frame = sys._getframe(1)
        while frame is not None:
            lines.add((Path(frame.f_code.co_filename).stem, frame.f_lineno))
            frame = frame.f_back
        init(self, *values)

    monkeypatch.setattr(Mismatch, "__init__", traced)
    cell, phase, spoil = SEEN[name]
    assert check_spoiled(cell, phase, spoil).first_divergence is not None
    module, at = checks()[name]
    assert any((module, line) in lines for line in at), lines
