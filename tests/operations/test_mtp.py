"""MTP drafters: transformers' own candidate generator, the oracle, and rows that are written again."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specsim import SamplingParams, SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.kv_buffer import FeatureRing
from specsim.core.pair import Pair
from specsim.reference import oracle
from specsim.serving.generation import generate, load_engine

from . import rounds
from .rounds import CHAIN, EXACT, LONG, both, pair_of, request_of, scheduler_of
from .transformers_models import norm_in_its_type

SETTINGS = {
    "chain": CHAIN,
    "product": SpecConfig(3, 3, 10, page_size=4),
    "ragged": SpecConfig(1, 2, page_size=1, extend="ragged", release="round"),
    "one step": SpecConfig(4, 1, page_size=16),
    "short": SpecConfig(2, 3, 8, page_size=2, max_len=15, score="logprob"),
}
SAMPLED = rounds.SAMPLED | {
    "product": SETTINGS["product"],
    "short block": SpecConfig(1, 3, verifier="block", max_len=13),
    "gumbel, sums": SpecConfig(1, 3, verifier="gumbel", score="logprob"),
}


def stale_pair(noise: float = 0.02) -> Pair:
    """Make a pair whose rows are not written again."""
    return pair_of("mtp", noise=noise, fields={"boundary": "stale"})


# transformers.


def transformers_model(pair: Pair, num_modules: int, monkeypatch, llama_of) -> LlamaForCausalLM:
    """Make the target as a Llama of transformers whose MTP layers have the drafter's weights, in float64."""
    monkeypatch.setattr(LlamaRMSNorm, "forward", norm_in_its_type)
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
    pair = pair_of("mtp", noise=noise)
    main = transformers_model(pair, 3, monkeypatch, llama_of)
    proposed: list[list[int]] = []
    make = MTPCandidateGenerator.get_candidates

    def get_candidates(self, input_ids, *args, **kwargs):
        ids, logits = make(self, input_ids, *args, **kwargs)
        if logits is not None:
            proposed.append(ids[0, input_ids.shape[1] :].tolist())
        return ids, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", get_candidates)
    prompt = torch.tensor([LONG])
    with torch.no_grad():
        ids = main.generate(
            prompt, attention_mask=torch.ones_like(prompt), use_mtp=True, max_new_tokens=40, do_sample=False
        )
    sampling = SamplingParams(max_new_tokens=40)
    truth = oracle.generate(pair, LONG, CHAIN, sampling, None)  # greedy: nothing is drawn
    assert list(truth.token_ids) == ids[0, len(LONG) :].tolist()
    drafts = [list(each.paths[-1]) for each in truth.rounds]
    whole = min(len(drafts), len(proposed)) - 2  # the last round may have fewer drafts there
    assert whole >= 8
    assert drafts[:whole] == proposed[:whole]
    engine = generate(pair, [LONG], CHAIN, sampling, engine=EXACT).outputs[0]
    assert engine.num_accepted_tokens_per_round == tuple(len(each.accepted) for each in truth.rounds)


# The oracle.


@pytest.mark.every_value
@pytest.mark.parametrize("kind", ["mtp", "mtp.parallel", "mtp.one"])
@rounds.settings_and_families(SETTINGS, SAMPLED)
def test_rounds_are_the_oracles(name, family, kind):
    rounds.assert_equal_to_the_oracle(pair_of(kind, family), (SETTINGS | SAMPLED)[name], float(name in SAMPLED))


def test_the_oracle_refuses_stale_rows():
    with pytest.raises(InputError, check=lambda error: error.name == "boundary"):
        oracle.generate(stale_pair(), LONG, CHAIN, SamplingParams(), None)


# Rows that are written again.

START = [5, 17, 3, 40, 8, 1, 2, 9]


@pytest.mark.every_value
@both
@pytest.mark.parametrize("chunk_tokens", [1, 2])
def test_chunks_leave_the_draft_kv_of_a_whole_prefill(chunk_tokens, options):
    rounds.assert_chunks_leave_the_draft_kv(pair_of("mtp", noise=0.15), options, chunk_tokens=chunk_tokens)


@pytest.mark.every_value
@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
@both
def test_a_turn_after_a_cut_path_drafts_as_a_solo_run(options, stop, schedule):
    """The features of a conversation's last kept positions are there although later ones were written."""
    pair = pair_of("mtp")
    first = request_of(pair, 0, START, 6 + stop)
    turn = request_of(pair, 1, [7, 8], 16, continues=0)
    columns, kv = rounds.kv_after(scheduler_of(pair, [first, turn], options, schedule=schedule), turn, 2)
    solo = request_of(pair, 1, turn.prompt_ids, 16)
    solo_columns, expected = rounds.kv_after(scheduler_of(pair, [solo], options, schedule=schedule), solo, 2)
    assert turn.accepted == solo.accepted
    columns = min(columns, solo_columns)
    assert columns > len(turn.prompt_ids)
    rounds.assert_kv_close(kv[:, :, :columns], expected[:, :, :columns], options)


def test_a_rewrite_matters():
    """Otherwise the tests above would compare equal modes."""
    kv = []
    for pair in (pair_of("mtp", noise=0.15), stale_pair(0.15)):
        request = request_of(pair, 0, START)
        kv.append(rounds.kv_after(scheduler_of(pair, [request]), request, 4))
    columns = min(count for count, _ in kv)
    rewritten, stale = (tensor[:, :, :columns] for _, tensor in kv)
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
    with pytest.raises(InputError, check=lambda error: error.name == name):
        load_engine(pair_of("mtp"), config, EngineOptions(impl, torch.float32))


def test_an_unknown_boundary_is_refused():
    with pytest.raises(InputError, check=lambda error: error.name == "boundary"):
        replace(pair_of("mtp").drafter.config, boundary="kept")
