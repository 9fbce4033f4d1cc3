"""MTP drafters: transformers' own candidate generator, plain decoding, and rows that are written again."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specsim import SamplingParams, SpecConfig
from specsim.core.config import ServingConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.kv_buffer import FeatureRing
from specsim.core.pair import Pair
from specsim.correctness.differential import check
from specsim.correctness.differential.cell import cell_of
from specsim.correctness.differential.grids import MTP
from specsim.models.synthetic_pair import synthetic_pair
from specsim.reference import oracle
from specsim.serving.generation import generate, load_engine
from specsim.serving.requests import Request, make_request
from specsim.serving.scheduler import Scheduler

PROMPTS = [[5, 17, 3, 40, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [30] * 3]
FIELDS = {
    "chain": {},
    "parallel": {"hidden_chain": False},
    "stale": {"boundary": "stale"},
    "one module": {"num_modules": 1},
}
CONFIGS = {
    "chain": SpecConfig(1, 3, page_size=4),
    "product": SpecConfig(3, 3, 10, page_size=4),
    "ragged": SpecConfig(1, 2, page_size=1, extend="ragged", release="round"),
    "one step": SpecConfig(4, 1, page_size=16),
    "short": SpecConfig(2, 3, 8, page_size=2, max_len=19, score="logprob"),
}


def pair_of(fields: str = "chain", noise: float = 0.02, family: str = "llama") -> Pair:
    return synthetic_pair("mtp", family, noise=noise, fields=FIELDS[fields])


def outputs(pair: Pair, config: SpecConfig, engine: EngineOptions, sampling: SamplingParams | None = None) -> list:
    sampling = SamplingParams(max_new_tokens=16) if sampling is None else sampling
    return list(generate(pair, PROMPTS, config, sampling, engine=engine).outputs)


REFERENCE = EngineOptions("reference", torch.float64)


@pytest.mark.by_default(
    "fast-chain-product", "fast-one module-ragged", "reference-parallel-short", "reference-stale-one step"
)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("impl", ["reference", "fast"])
def test_greedy_tokens_equal_plain_decoding(impl, fields, config):
    """The fast implementation accepts the same numbers of drafts as the reference, too."""
    setting = CONFIGS[config]
    pair = pair_of(fields)
    sampling = SamplingParams(max_new_tokens=16 if impl == "reference" else 10)
    plain = outputs(replace(pair, drafter=None), SpecConfig.plain(4, setting.max_len), REFERENCE, sampling)
    options = REFERENCE if impl == "reference" else EngineOptions("fast", torch.float32)
    found = outputs(pair, setting, options, sampling)
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    counts = [each.num_accepted_tokens_per_round for each in found]
    assert max(map(max, counts)) > 1
    if impl == "fast":
        expected = outputs(pair, setting, REFERENCE, sampling)
        assert counts == [each.num_accepted_tokens_per_round for each in expected]


@pytest.mark.by_default("round")
@pytest.mark.parametrize("graph", ["eager", "round"])
def test_bfloat16_runs_and_accepts_drafts(graph):
    found = outputs(pair_of(), CONFIGS["chain"], EngineOptions("fast", torch.bfloat16, graph=graph))
    assert max(max(each.num_accepted_tokens_per_round) for each in found) > 1


# transformers.


def transformers_model(pair: Pair, num_modules: int, monkeypatch, llama_of) -> LlamaForCausalLM:
    """Make the target as a Llama of transformers whose MTP layers have the drafter's weights, in float64."""
    monkeypatch.setattr(
        LlamaRMSNorm,
        "forward",
        lambda self, x: self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon),
    )
    fields = {"attn_implementation": "sdpa", "num_mtp_layers": num_modules, "bos_token_id": None, "eos_token_id": None}
    main = llama_of(pair.target.config, pair.target.tensors, **fields)
    modules = MtpModel(main, num_modules).double().eval()
    names = {"layers": "modules", "post_norm": "norm"}
    state = {}
    for name in modules.state_dict():
        parts = [names.get(part, part) for part in name.split(".") if part != "mtp_block"]
        if parts[0] == "modules":
            state[name] = pair.drafter.tensors[".".join(parts)]
    missing, unexpected = modules.load_state_dict(state, strict=False)
    assert not unexpected
    assert all("layers" not in name for name in missing)
    monkeypatch.setattr(MtpModel, "from_pretrained", lambda *args, **kwargs: modules)
    return main


@pytest.mark.parametrize("noise", [0.02, 0.15])
def test_drafts_equal_those_of_transformers(monkeypatch, llama_of, noise):
    """Independent oracle: transformers' MTPCandidateGenerator at batch 1, with Llama layers as modules.

    Its cache of the last S rows is cropped and filled again after every round with a rejection.
    """
    pair = pair_of(noise=noise)
    main = transformers_model(pair, 3, monkeypatch, llama_of)
    proposed: list[list[int]] = []
    make = MTPCandidateGenerator.get_candidates

    def get_candidates(self, input_ids, *args, **kwargs):
        ids, logits = make(self, input_ids, *args, **kwargs)
        if logits is not None:
            proposed.append(ids[0, input_ids.shape[1] :].tolist())
        return ids, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", get_candidates)
    prompt = torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        ids = main.generate(
            prompt, attention_mask=torch.ones_like(prompt), use_mtp=True, max_new_tokens=40, do_sample=False
        )
    sampling = SamplingParams(max_new_tokens=40)
    truth = oracle.generate(pair, PROMPTS[1], SpecConfig(1, 3, page_size=4), sampling, None)  # greedy: nothing is drawn
    assert list(truth.token_ids) == ids[0, len(PROMPTS[1]) :].tolist()
    drafts = [list(each.paths[-1]) for each in truth.rounds]
    whole = min(len(drafts), len(proposed)) - 2  # the last round may have fewer drafts there
    assert whole >= 8
    assert drafts[:whole] == proposed[:whole]
    engine = generate(pair, PROMPTS[1:2], SpecConfig(1, 3, page_size=4), sampling, engine=REFERENCE).outputs[0]
    assert engine.num_accepted_tokens_per_round == tuple(len(each.accepted) for each in truth.rounds)


# The oracle and the differential.

ORACLE = {
    "chain": (SpecConfig(1, 3, page_size=4), SamplingParams(max_new_tokens=16)),
    "product": (SpecConfig(3, 3, 10, page_size=4), SamplingParams(temperature=1.0, max_new_tokens=16, seed=5)),
    "multi_round": (SpecConfig(2, 3, verifier="multi_round"), SamplingParams(temperature=1.0, max_new_tokens=16)),
    "block": (SpecConfig(1, 3, verifier="block", max_len=21), SamplingParams(temperature=0.8, max_new_tokens=16)),
    "gumbel": (SpecConfig(1, 3, verifier="gumbel", score="logprob"), SamplingParams(temperature=1.0, seed=2)),
}


@pytest.mark.every_value
@pytest.mark.parametrize("fields", ["chain", "parallel", "one module"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("setting", ORACLE)
def test_rounds_equal_the_oracle(setting, family, fields):
    from specsim.correctness.differential.oracle import draws

    config, sampling = ORACLE[setting]
    sampling = replace(sampling, max_new_tokens=16)
    window = {"mistral": 7}.get(family)
    pair = synthetic_pair("mtp", family, window=window, fields=FIELDS[fields])
    found = outputs(pair, config, REFERENCE, sampling)
    for index, (prompt, output) in enumerate(zip(PROMPTS, found, strict=True)):
        truth = oracle.generate(pair, prompt, config, sampling, draws(sampling.seed, index, 48))
        assert output.token_ids == truth.token_ids
        assert output.num_accepted_tokens_per_round == tuple(len(each.accepted) for each in truth.rounds)


def test_the_oracle_refuses_stale_rows():
    with pytest.raises(InputError) as refused:
        oracle.generate(pair_of("stale"), PROMPTS[0], CONFIGS["chain"], SamplingParams(), None)
    assert refused.value.name == "boundary"


CELLS = [cell_of(each) for each in (MTP[0], MTP[5], MTP[11])]


def test_cells_equal_the_reference_and_drafts_are_accepted():
    """The cells have 0 mismatches, and together 200 decisions and 10 accepted drafts at least."""
    results = [check(cell) for cell in CELLS]
    assert [each.first_divergence for each in results if each.mismatches] == []
    assert sum(each.decisions for each in results) >= 200
    accepted = [(name, count) for each in results for name, count in each.coverage.items() if name[:8] == "accepted"]
    assert sum(int(name.split()[1]) * count for name, count in accepted) >= 10


# Rows that are written again.


def scheduler_of(
    pair: Pair, requests: list[Request], impl: str = "reference", config: SpecConfig = CONFIGS["chain"], **serving
) -> Scheduler:
    dtype = torch.float64 if impl == "reference" else torch.float32
    engine = load_engine(pair, config, EngineOptions(impl, dtype))
    scheduler = Scheduler(engine, ServingConfig(num_slots=400, **serving), audits=True)
    for request in requests:
        scheduler.submit(request)
    return scheduler


def ask(pair: Pair, request_id: int, prompt: list[int], arrival: int = 0, new_tokens: int = 12, **params) -> Request:
    sampling = SamplingParams(max_new_tokens=new_tokens, **params)
    return make_request(pair.target.config, None, request_id, prompt, sampling, arrival=arrival)


def draft_kv(scheduler: Scheduler, request: Request, columns: int) -> torch.Tensor:
    slots = scheduler.pools.slots(request.row, torch.arange(columns))
    draft = scheduler.pools.draft
    return torch.stack([draft.keys[:, slots], draft.values[:, slots]]).double()


def kv_after(scheduler: Scheduler, request: Request, rounds: int) -> tuple[int, torch.Tensor]:
    """Step until a request has had some rounds: its committed columns and their draft KV."""
    while len(request.accepted) < rounds:
        assert request.finish_reason is None
        scheduler.step()
    columns = scheduler.reservations.committed(request)
    return columns, draft_kv(scheduler, request, columns)


START = [5, 17, 3, 40, 8, 1, 2, 9]


@pytest.mark.every_value
@pytest.mark.parametrize("impl", ["reference", "fast"])
@pytest.mark.parametrize("shared", [8, 9, 10, 11, 12])
@pytest.mark.parametrize("serving", [{}, {"chunk_tokens": 3}, {"schedule": "overlap"}], ids=str)
def test_draft_kv_of_a_shared_prefix_equals_a_solo_run(impl, shared, serving):
    """Two requests differ from a few columns after a page on, where module k's row depends on token p+1+k."""
    pair = pair_of(noise=0.15)
    prefix = [*START, 11, 12, 13, 14][:shared]
    first = ask(pair, 0, [*prefix, 21, 22, 23, 24])
    second = ask(pair, 1, [*prefix, 31, 32, 33, 34], arrival=5)
    both = scheduler_of(pair, [first, second], impl, prefix_cache=True, **serving)
    columns, found = kv_after(both, second, 2)
    assert second.num_reused == (shared - 2 - 1) // 4 * 4
    own = ask(pair, 1, second.prompt_ids)
    alone = scheduler_of(pair, [own], impl)
    expected_columns, expected = kv_after(alone, own, len(second.accepted))
    assert min(columns, expected_columns) >= len(second.prompt_ids)
    known = min(columns, expected_columns) - 2  # the last rows may have been drafted in different rounds
    budget = 1e-9 if impl == "reference" else 1e-4
    torch.testing.assert_close(found[:, :, :known], expected[:, :, :known], rtol=budget, atol=budget)


@pytest.mark.every_value
@pytest.mark.parametrize("impl", ["reference", "fast"])
@pytest.mark.parametrize("chunk_tokens", [1, 2, 5])
def test_chunks_leave_the_draft_kv_of_a_whole_prefill(impl, chunk_tokens):
    pair = pair_of(noise=0.15)
    prompt = [*START, 11, 12, 13]
    found, expected = (
        kv_after(scheduler_of(pair, [own], impl, **serving), own, 1)
        for own, serving in ((ask(pair, 0, prompt), {"chunk_tokens": chunk_tokens}), (ask(pair, 0, prompt), {}))
    )
    budget = 1e-9 if impl == "reference" else 1e-4
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1], rtol=budget, atol=budget)


@pytest.mark.every_value
@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
@pytest.mark.parametrize("impl", ["reference", "fast"])
def test_a_turn_after_a_cut_path_drafts_as_a_solo_run(impl, schedule, stop):
    """The features of a conversation's last kept positions are there although later ones were written."""
    pair = pair_of()
    first = ask(pair, 0, START, new_tokens=6 + stop)
    turn = make_request(pair.target.config, None, 1, [7, 8], SamplingParams(max_new_tokens=16), continues=0)
    found = kv_after(scheduler_of(pair, [first, turn], impl, schedule=schedule), turn, 2)
    own = ask(pair, 1, turn.prompt_ids, new_tokens=16)
    expected = kv_after(scheduler_of(pair, [own], impl, schedule=schedule), own, 2)
    assert turn.accepted == own.accepted
    columns = min(found[0], expected[0])
    assert columns > len(turn.prompt_ids)
    budget = 1e-9 if impl == "reference" else 1e-4
    torch.testing.assert_close(found[1][:, :, :columns], expected[1][:, :, :columns], rtol=budget, atol=budget)


def test_a_rewrite_matters():
    """Otherwise the tests above would compare equal modes."""
    pairs = [pair_of(fields, noise=0.15) for fields in ("chain", "stale")]
    kept = []
    for pair in pairs:
        own = ask(pair, 0, START)
        kept.append(kv_after(scheduler_of(pair, [own]), own, 4))
    columns = min(each[0] for each in kept)
    rewritten, stale = (each[1][:, :, :columns] for each in kept)
    torch.testing.assert_close(rewritten[:, 0], stale[:, 0], rtol=1e-9, atol=1e-9)  # module 0 reads no drafts
    assert (rewritten[:, 1:] - stale[:, 1:]).abs().max() > 1e-3


def test_a_ring_returns_the_last_positions_that_it_holds():
    ring = FeatureRing(2, 4, 1, torch.float64)
    ring.write(1, 3, torch.arange(3, 6).double()[:, None])
    assert ring.before(1, 6, 2).flatten().tolist() == [4, 5]
    assert ring.before(1, 6, 4).flatten().tolist() == [3, 4, 5]
    assert ring.before(1, 7, 2).numel() == ring.before(0, 6, 2).numel() == 0
    ring.write(1, 6, torch.arange(6, 16).double()[:, None])
    assert ring.before(1, 16, 9).flatten().tolist() == [12, 13, 14, 15]
    ring.clear(1)
    assert ring.before(1, 16, 2).numel() == 0


# Bad input.


@pytest.mark.parametrize("impl", ["reference", "fast"])
@pytest.mark.parametrize(
    ("config", "name"), [(SpecConfig(1, 4), "num_steps"), (SpecConfig(49, 1, 50), "topk")], ids=["steps", "topk"]
)
def test_more_steps_than_modules_are_refused(impl, config, name):
    with pytest.raises(InputError) as refused:
        load_engine(pair_of(), config, EngineOptions(impl, torch.float32))
    assert refused.value.name == name


def test_an_unknown_boundary_is_refused():
    with pytest.raises(InputError) as refused:
        replace(pair_of().drafter.config, boundary="kept")
    assert refused.value.name == "boundary"
