"""P-EAGLE drafters: a forward by hand, the oracle, mask rows at pages and at the length limit."""

from dataclasses import replace

import pytest
import torch

from specsim import SamplingParams, SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.pair import Pair
from specsim.core.phases import Batch, PrefillInput
from specsim.reference.drafters.product import product
from specsim.reference.oracle_draft import DraftNode
from specsim.reference.oracle_forward import in_dtype
from specsim.reference.oracle_p_eagle import draft_p_eagle
from specsim.reference.oracle_request import OracleRequest
from specsim.serving.generation import generate, load_engine

from . import rounds
from .rounds import CHAIN, EXACT, LONG, PROMPTS, both, pair_of, request_of, scheduler_of

PRODUCT = SpecConfig(3, 3, 10, page_size=4)
SETTINGS = {
    "chain": CHAIN,
    "product": PRODUCT,
    "ragged": SpecConfig(1, 5, page_size=1, extend="ragged", release="round"),
    "one step": SpecConfig(4, 1, page_size=16),
    "short": SpecConfig(2, 4, 8, page_size=2, max_len=15, score="logprob", release="round"),
}
SAMPLED = rounds.SAMPLED | {
    "sampled product": PRODUCT,
    "short block": SpecConfig(1, 3, verifier="block", max_len=13),
    "gumbel, sums": SpecConfig(1, 3, verifier="gumbel", score="logprob"),
}


@rounds.settings_and_families(SETTINGS, SAMPLED)
def test_rounds_are_the_oracles(name, family):
    rounds.assert_equal_to_the_oracle(pair_of("p-eagle", family), (SETTINGS | SAMPLED)[name], float(name in SAMPLED))


@pytest.mark.parametrize("prompt", [LONG, *PROMPTS[1:]])
def test_drafts_of_every_depth_equal_the_oracle(prompt):
    """The oracle runs a forward for each depth, without the mask rows after it."""
    pair = pair_of("p-eagle", "mistral", noise=0.15)
    engine = load_engine(pair, PRODUCT, EXACT)
    config = engine.config
    pools = engine.make_pools(1, 200)
    row = pools.open()
    pools.reserve(row, len(prompt) + config.num_steps)
    batch = Batch.of([0], [row], [len(prompt)], [SamplingParams()], 48)
    output = engine.prefill(batch, PrefillInput.of_prompts([prompt]), pools)
    tokens = [*prompt, int(output.next_tokens)]
    draft_input = output.draft_input
    models = (in_dtype(each, torch.float64) for each in (pair.target, pair.drafter))
    request = OracleRequest(*models, config, SamplingParams(), None, len(prompt), config.length_limit, None)
    for _ in range(4):
        expected = draft_p_eagle(request, tokens, DraftNode((), None, 0, 1.0, None, None, ()), request.config.num_steps)
        made = product(draft_input, config)
        assert made.tokens[0].tolist() == [node.token for node in expected]
        torch.testing.assert_close(made.scores[0], torch.tensor([node.score for node in expected]))
        advance = engine.advance(batch, draft_input, pools)
        tokens += advance.verdict.accepted_tokens()[0]
        draft_input, batch = advance.draft_input, advance.batch


# A head that reads out by its target's lm_head.


def with_targets_head(family: str = "llama") -> Pair:
    """A head for the whole vocabulary, which has no lm_head of its own."""
    pair = pair_of("p-eagle", family)
    own = {
        name: tensor for name, tensor in pair.drafter.tensors.items() if name not in ("lm_head.weight", "d2t", "t2d")
    }
    config = replace(pair.drafter.config, draft_vocab_size=pair.target.config.vocab_size)
    return pair.with_drafter(replace(pair.drafter, config=config, tensors=own))


def with_a_copy(pair: Pair) -> Pair:
    """The same head with the target's lm_head in its own file."""
    tensors = {**pair.drafter.tensors, "lm_head.weight": pair.target.tensors["lm_head.weight"]}
    return pair.with_drafter(replace(pair.drafter, tensors=tensors))


@pytest.mark.every_value
@both
@pytest.mark.parametrize("name", ["chain", "product"])
def test_the_targets_lm_head_drafts_as_a_copy_of_it(name, options):
    pair = with_targets_head()
    sampling = SamplingParams(max_new_tokens=6)
    runs = [generate(each, PROMPTS, SETTINGS[name], sampling, engine=options) for each in (pair, with_a_copy(pair))]
    tokens, expected = ([output.token_ids for output in run.outputs] for run in runs)
    assert tokens == expected
    counts, expected = ([output.num_accepted_tokens_per_round for output in run.outputs] for run in runs)
    assert counts == expected
    assert max(map(max, counts)) > 1


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", ["chain", "sampled product"])
def test_rounds_with_the_targets_lm_head_equal_the_oracle(name, family):
    rounds.assert_equal_to_the_oracle(with_targets_head(family), (SETTINGS | SAMPLED)[name], float(name in SAMPLED))


# KV of mask rows.


@both
@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_committed_kv_depends_on_no_mask_row(schedule, options):
    """A chain of 4 drafts leaves the KV of a chain of 1, which has no mask rows."""
    pair = pair_of("p-eagle", noise=0.15)
    kv = []
    for num_steps in (1, 4):
        request = request_of(pair, 0, LONG, 16)
        scheduler = scheduler_of(pair, [request], options, SpecConfig(1, num_steps, page_size=4), schedule=schedule)
        kv.append(rounds.kv_after(scheduler, request, 6))
    columns = min(count for count, _ in kv)
    assert columns > len(LONG)
    one, four = (tensor[:, :, :columns] for _, tensor in kv)
    rounds.assert_kv_close(four, one, options)


@rounds.every_serving
@pytest.mark.parametrize("page_size", [1, 4])
def test_served_rounds_are_those_of_a_solo_run(page_size, serving, release):
    """Rounds in flight have the columns of their mask rows, so as many drafts are accepted."""
    config = SpecConfig(1, 4, page_size=page_size, release=release)
    rounds.assert_served_rounds_are_solo(pair_of("p-eagle"), config, **rounds.SERVED[serving])


# Bad input.


@pytest.mark.parametrize("impl", ["reference", "fast"])
def test_more_lanes_than_draft_tokens_are_refused(impl):
    with pytest.raises(InputError, check=lambda error: error.name == "topk"):
        load_engine(pair_of("p-eagle"), SpecConfig(43, 1, 44), EngineOptions(impl, torch.float32))


@pytest.mark.parametrize("token", [-1, 48])
def test_a_mask_token_outside_the_vocabulary_is_refused(token):
    with pytest.raises(InputError, check=lambda error: error.name == "mask_token_id"):
        replace(pair_of("p-eagle").drafter.config, mask_token_id=token)
