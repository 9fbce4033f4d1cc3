"""Outputs of prefill and draft-extend: the first drafts of the next round, and after prefill the first token."""

from collections.abc import Sequence

import torch

from specsim.core.grammar import allowed_first
from specsim.core.phases import DraftInput, PrefillInput, PrefillOutput
from specsim.correctness.differential.budget import budget
from specsim.correctness.differential.comparison import Comparison, Trio, present
from specsim.correctness.differential.distribution import RowDistribution, rounding
from specsim.correctness.differential.ranking import compare_drafts, compare_ranking, log_scores
from specsim.correctness.differential.sampled import Names, compare_draws, log_noise
from specsim.correctness.differential.scene import Scene


def compare_draft_input(
    scene: Scene,
    request: int,
    states: Trio[DraftInput],
    bonus: int,
    root_len: int,
    check: Comparison,
    prefix: str = "",
) -> None:
    """bonus: the root that the column has to hand on; root_len: its L. The first drafts are ranked by the logits of
    exact's hidden, or drawn from their distribution.
    """
    state = states.fast
    one = slice(request, request + 1)
    check.same(f"{prefix}bonus_tokens", torch.tensor(bonus, dtype=torch.int32), state.bonus_tokens[request])
    if state.topk_index.shape[1] == 0:
        return
    check.close(f"{prefix}hidden", states.map(lambda state: present("hidden", state.hidden)[request]))
    logits = first_draft_logits(scene, request, states)
    if scene.config.is_sampled:
        tokens = states.map(lambda state: state.topk_index[request])
        distributions = states.map(lambda state: None if state.draft_prob is None else state.draft_prob[request])
        names = Names(root_len, 0, range(scene.config.topk))
        compare_draws(scene, request, names, f"{prefix}topk_index", tokens, distributions, logits, check)
    else:
        tokens = states.map(lambda state: state.topk_index[one])
        compare_drafts(check, f"{prefix}topk_index", tokens, *logits, scene.draft_ids)
    prob = states.map(lambda state: log_scores(state.topk_p[request]))
    check.within(f"{prefix}topk_p", prob.exact, prob.fast, log_noise(scene, request, logits, check))


def first_draft_logits(scene: Scene, request: int, states: Trio[DraftInput]) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits [1, draft V] of a request's first drafts, the reference's and exact's."""
    pairs = zip(scene.columns[:2], states[:2], strict=True)
    reference, exact = (
        column.engine.drafter.logits(present("hidden", state.hidden)[request, None]) for column, state in pairs
    )
    return reference, exact


def prefill_logits(scene: Scene, prefill: PrefillInput) -> tuple[torch.Tensor, torch.Tensor]:
    """The adjusted logits f64 [B, V] after each chunk, the reference's and exact's; their KV is written once more,
    with the same values.
    """
    from specsim.reference.attention import prefill_metadata
    from specsim.reference.sampling import adjust_logits

    adjusted = []
    for column in scene.columns[:2]:
        metadata = prefill_metadata(scene.batch, prefill, column.pools)
        hidden_RH, _ = column.engine.target.forward(prefill.input_ids, metadata, column.pools.target, ())
        logits_BV = column.engine.target.logits(hidden_RH[prefill.last_rows])
        contexts = [column.pools.token_ids[row, :length] for row, length in scene.batch.rows_and_lens]
        prompt_lens = scene.batch.prompt_lens.tolist()
        sampling = scene.batch.sampling
        allowed = allowed_first(scene.batch, column.pools, column.engine.grammars)
        free_1V = (None,)
        rows = zip(logits_BV, contexts, prompt_lens, range(scene.batch.size), strict=True)
        adjusted.append(
            torch.stack([adjust_logits(*row[:3], sampling, row[3], allowed.get(row[3], free_1V)[0]) for row in rows])
        )
    return adjusted[0], adjusted[1]


def compare_first_token(
    scene: Scene,
    request: int,
    known: int,
    adjusted_BV: Sequence[torch.Tensor],
    outputs: Trio[PrefillOutput],
    check: Comparison,
) -> None:
    """The token after the chunk, from exact's logits: prefill does not show the column's own. known: -1 if sampled."""
    from specsim.core.uniforms import first_uniforms

    reference_V, exact_V = (adjusted[request] for adjusted in adjusted_BV)
    noise = max(budget(reference_V, exact_V, check.eps), rounding(exact_V))
    distribution = RowDistribution(exact_V, scene.batch.sampling, request, noise)
    tokens = outputs.map(lambda output: int(output.next_tokens[request]))
    expected = tokens.reference if known < 0 else known
    is_token = tokens.fast == known if known >= 0 else 0 <= tokens.fast < len(exact_V)
    check.require("next_tokens", is_token, expected, tokens.fast)
    if known < 0 and distribution.temperature == 0:
        compare_ranking(check, "next_tokens", tokens.map(lambda token: [token]), reference_V, exact_V, noise)
    elif known < 0:
        names = (getattr(scene.batch, name)[request, None] for name in ("seeds", "request_ids", "seq_lens"))
        distribution.compare_draw(
            "next_tokens", distribution.prob(), float(first_uniforms(*names)[0]), tokens.fast, None
        )
        check.decided(tokens.fast == tokens.exact == tokens.reference)
    expected = torch.tensor(distribution.logprob(tokens.fast), dtype=torch.float64)
    found = outputs.fast.logprobs[request]
    check.within("logprobs", expected, found, distribution.logprob_slack(noise))
    error = abs(float(found.double() - expected))
    check.tally.max_logprob_error = max(check.tally.max_logprob_error, error)
