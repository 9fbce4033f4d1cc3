"""P-EAGLE drafters: a forward by hand, the oracle, plain decoding, mask rows at pages and at the length limit."""

from dataclasses import replace

import pytest
import torch

from specsim import SamplingParams, SpecConfig
from specsim.core.config import ServingConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.pair import Pair
from specsim.core.phases import Batch, PrefillInput
from specsim.correctness.differential import check
from specsim.correctness.differential.cell import cell_of
from specsim.correctness.differential.grids import P_EAGLE
from specsim.correctness.differential.oracle import draws
from specsim.models.synthetic_pair import synthetic_pair
from specsim.reference import oracle
from specsim.reference.drafters.product import product
from specsim.reference.oracle_draft import DraftNode
from specsim.reference.oracle_forward import in_dtype
from specsim.reference.oracle_p_eagle import draft_p_eagle
from specsim.reference.oracle_request import OracleRequest
from specsim.serving.generation import generate, load_engine
from specsim.serving.requests import Request, make_request
from specsim.serving.scheduler import Scheduler

PROMPTS = [[5, 17, 3, 40, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [30] * 3]
CONFIGS = {
    "chain": SpecConfig(1, 3, page_size=4),
    "product": SpecConfig(3, 3, 10, page_size=4),
    "ragged": SpecConfig(1, 5, page_size=1, extend="ragged", release="round"),
    "one step": SpecConfig(4, 1, page_size=16),
    "short": SpecConfig(2, 4, 8, page_size=2, max_len=19, score="logprob", release="round"),
}
REFERENCE = EngineOptions("reference", torch.float64)


def pair_of(family: str = "llama", noise: float = 0.02) -> Pair:
    return synthetic_pair("p-eagle", family, noise=noise, window={"mistral": 7}.get(family))


def outputs(pair: Pair, config: SpecConfig, engine: EngineOptions, sampling: SamplingParams) -> list:
    return list(generate(pair, PROMPTS, config, sampling, engine=engine).outputs)


@pytest.mark.by_default("fast-product", "fast-ragged", "reference-chain", "reference-short")
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("impl", ["reference", "fast"])
def test_greedy_tokens_equal_plain_decoding(impl, config):
    """The fast implementation accepts the same numbers of drafts as the reference, too."""
    setting = CONFIGS[config]
    pair = pair_of()
    sampling = SamplingParams(max_new_tokens=12)
    plain = outputs(replace(pair, drafter=None), SpecConfig.plain(4, setting.max_len), REFERENCE, sampling)
    options = REFERENCE if impl == "reference" else EngineOptions("fast", torch.float32)
    found = outputs(pair, setting, options, sampling)
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    counts = [each.num_accepted_tokens_per_round for each in found]
    assert max(map(max, counts)) > 1
    if impl == "fast":
        expected = outputs(pair, setting, REFERENCE, sampling)
        assert counts == [each.num_accepted_tokens_per_round for each in expected]


# The oracle and the differential.

ORACLE = {
    "chain": (SpecConfig(1, 3, page_size=4), SamplingParams()),
    "product": (SpecConfig(3, 3, 10, page_size=4), SamplingParams(temperature=1.0, seed=5)),
    "multi_round": (SpecConfig(2, 3, verifier="multi_round"), SamplingParams(temperature=1.0)),
    "block": (SpecConfig(1, 3, verifier="block", max_len=21), SamplingParams(temperature=0.8)),
    "gumbel": (SpecConfig(1, 3, verifier="gumbel", score="logprob"), SamplingParams(temperature=1.0, seed=2)),
    "short": (CONFIGS["short"], SamplingParams()),
}


@pytest.mark.every_value
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("setting", ORACLE)
def test_rounds_equal_the_oracle(setting, family):
    config, sampling = ORACLE[setting]
    sampling = replace(sampling, max_new_tokens=16)
    pair = pair_of(family)
    found = outputs(pair, config, REFERENCE, sampling)
    for index, (prompt, output) in enumerate(zip(PROMPTS, found, strict=True)):
        truth = oracle.generate(pair, prompt, config, sampling, draws(sampling.seed, index, 48))
        assert output.token_ids == truth.token_ids
        assert output.num_accepted_tokens_per_round == tuple(len(each.accepted) for each in truth.rounds)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_drafts_of_every_depth_equal_the_oracle(prompt):
    """The oracle runs a forward for each depth, without the mask rows after it."""
    pair = pair_of("mistral", noise=0.15)
    engine = load_engine(pair, CONFIGS["product"], REFERENCE)
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
    pair = pair_of(family)
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
@pytest.mark.parametrize("impl", ["reference", "fast"])
@pytest.mark.parametrize("config", ["chain", "product"])
def test_the_targets_lm_head_drafts_as_a_copy_of_it(config, impl):
    pair = with_targets_head()
    options = REFERENCE if impl == "reference" else EngineOptions("fast", torch.float32)
    sampling = SamplingParams(max_new_tokens=12)
    found, expected = (outputs(each, CONFIGS[config], options, sampling) for each in (pair, with_a_copy(pair)))
    counts = [each.num_accepted_tokens_per_round for each in found]
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert counts == [each.num_accepted_tokens_per_round for each in expected]
    assert max(map(max, counts)) > 1


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("setting", ["chain", "product"])
def test_rounds_with_the_targets_lm_head_equal_the_oracle(setting, family):
    config, sampling = ORACLE[setting]
    sampling = replace(sampling, max_new_tokens=12)
    pair = with_targets_head(family)
    found = outputs(pair, config, REFERENCE, sampling)
    for index, (prompt, output) in enumerate(zip(PROMPTS, found, strict=True)):
        truth = oracle.generate(pair, prompt, config, sampling, draws(sampling.seed, index, 48))
        assert output.token_ids == truth.token_ids
        assert output.num_accepted_tokens_per_round == tuple(len(each.accepted) for each in truth.rounds)


CELLS = [cell_of(P_EAGLE[index]) for index in (1, 6, 11)]


def test_cells_equal_the_reference_and_drafts_are_accepted():
    """The cells have 0 mismatches, and together 200 decisions, 10 accepted drafts and a path of 3 at least."""
    results = [check(cell) for cell in CELLS]
    assert [each.first_divergence for each in results if each.mismatches] == []
    assert sum(each.decisions for each in results) >= 200
    accepted = [(name, count) for each in results for name, count in each.coverage.items() if name[:8] == "accepted"]
    assert sum(int(name.split()[1]) * count for name, count in accepted) >= 10
    assert max(int(name.split()[1]) for name, count in accepted if count) >= 3


# KV of mask rows.


def scheduler_of(
    pair: Pair, requests: list[Request], impl: str = "reference", config: SpecConfig = CONFIGS["chain"], **serving
) -> Scheduler:
    dtype = torch.float64 if impl == "reference" else torch.float32
    engine = load_engine(pair, config, EngineOptions(impl, dtype))
    scheduler = Scheduler(engine, ServingConfig(num_slots=400, **serving), audits=True)
    for request in requests:
        scheduler.submit(request)
    return scheduler


def ask(pair: Pair, request_id: int, prompt: list[int], arrival: int = 0, new_tokens: int = 12) -> Request:
    sampling = SamplingParams(max_new_tokens=new_tokens)
    return make_request(pair.target.config, None, request_id, prompt, sampling, arrival=arrival)


def kv_after(scheduler: Scheduler, request: Request, rounds: int) -> tuple[int, torch.Tensor]:
    """Step until a request has had some rounds: its committed columns and their draft KV."""
    while len(request.accepted) < rounds:
        assert request.finish_reason is None
        scheduler.step()
    columns = scheduler.reservations.committed(request)
    slots = scheduler.pools.slots(request.row, torch.arange(columns))
    draft = scheduler.pools.draft
    return columns, torch.stack([draft.keys[:, slots], draft.values[:, slots]]).double()


@pytest.mark.parametrize("impl", ["reference", "fast"])
@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_committed_kv_depends_on_no_mask_row(impl, schedule):
    """A chain of 4 drafts leaves the KV of a chain of 1, which has no mask rows."""
    pair = pair_of(noise=0.15)
    kept = []
    for num_steps in (1, 4):
        own = ask(pair, 0, PROMPTS[1], new_tokens=16)
        scheduler = scheduler_of(pair, [own], impl, SpecConfig(1, num_steps, page_size=4), schedule=schedule)
        kept.append(kv_after(scheduler, own, 6))
    columns = min(each[0] for each in kept)
    assert columns > len(PROMPTS[1])
    budget = 1e-9 if impl == "reference" else 1e-4
    torch.testing.assert_close(kept[0][1][:, :, :columns], kept[1][1][:, :, :columns], rtol=budget, atol=budget)


@pytest.mark.parametrize("impl", ["reference", "fast"])
@pytest.mark.parametrize("serving", [{"chunk_tokens": 2}, {"prefix_cache": True, "chunk_tokens": 5}], ids=str)
def test_chunks_leave_the_draft_kv_of_a_whole_prefill(impl, serving):
    """Mask rows after a chunk stand where the next chunk's rows come."""
    pair = pair_of(noise=0.15)
    found, expected = (
        kv_after(scheduler_of(pair, [own], impl, **each), own, 1)
        for own, each in ((ask(pair, 0, PROMPTS[1]), serving), (ask(pair, 0, PROMPTS[1]), {}))
    )
    budget = 1e-9 if impl == "reference" else 1e-4
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1], rtol=budget, atol=budget)


@pytest.mark.parametrize("serving", [{"schedule": "overlap"}, {"prefix_cache": True}, {"chunk_tokens": 3}], ids=str)
@pytest.mark.parametrize("page_size", [1, 4])
def test_served_requests_equal_solo_ones(serving, page_size):
    """Rounds in flight have the columns of their mask rows, so as many drafts are accepted."""
    pair = pair_of()
    config = SpecConfig(1, 4, page_size=page_size)
    requests = [ask(pair, index, prompt, arrival=index) for index, prompt in enumerate(PROMPTS)]
    scheduler = scheduler_of(pair, requests, config=config, **serving)
    scheduler.run()
    alone = generate(pair, PROMPTS, config, SamplingParams(max_new_tokens=12), engine=REFERENCE).outputs
    assert [tuple(each.token_ids) for each in requests] == [each.token_ids for each in alone]
    assert [tuple(each.accepted) for each in requests] == [each.num_accepted_tokens_per_round for each in alone]
    scheduler.close()
    assert scheduler.pools.audit()["free"] == scheduler.pools.num_slots


# Bad input.


@pytest.mark.parametrize("impl", ["reference", "fast"])
def test_more_lanes_than_draft_tokens_are_refused(impl):
    with pytest.raises(InputError) as refused:
        load_engine(pair_of(), SpecConfig(43, 1, 44), EngineOptions(impl, torch.float32))
    assert refused.value.name == "topk"


@pytest.mark.parametrize("token", [-1, 48])
def test_a_mask_token_outside_the_vocabulary_is_refused(token):
    with pytest.raises(InputError) as refused:
        replace(pair_of().drafter.config, mask_token_id=token)
    assert refused.value.name == "mask_token_id"
