"""NaN and infinity in a model end a run with an error that names request, round and place."""

import pickle
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from specsim import SamplingParams, SpecConfig, generate, trace
from specsim.acceptance.measured_pair import measure_pair
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import NotFinite
from specsim.core.pair import Pair
from specsim.core.rule import AcceptanceRule
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.core.text_forward import first_nonfinite_part
from specsim.correctness.differential import check
from specsim.correctness.differential.cell import one_cell
from specsim.models.synthetic_pair import synthetic_pair
from specsim.reference.acceptance import target_only
from specsim.serving.generation import load_engine

# Triton's interpreter computes with numpy, which warns of NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
PROMPT = [8, 9, 10]
FEW = SamplingParams(max_new_tokens=4, ignore_eos=True)
RULE = AcceptanceRule("own", "best", lambda *walk: target_only(*walk[:2], *walk[3:], 1.0, 1.0))
EMBEDDING = "model.embed_tokens.weight"


def poisoned(pair: Pair, name: str, place: tuple[int, ...], value: float = torch.nan, part: str = "target") -> Pair:
    """Replace one weight, or one row of weights, of a part of a pair."""
    checkpoint = getattr(pair, part)
    changed = checkpoint.tensors[name].clone()
    changed[place] = value
    return replace(pair, **{part: replace(checkpoint, tensors={**checkpoint.tensors, name: changed})})


class Thirds:
    """A grammar that forbids every third token."""

    vocab_size = 48
    has_ended = False

    def matcher(self):
        return self

    def allowed(self):
        return torch.arange(self.vocab_size) % 3 != 1

    def advance(self, token):
        return token % 3 != 1

    def roll_back(self, count):
        pass


SETTINGS = {
    "plain": (SpecConfig.plain(), {}),
    "tree": (SpecConfig(topk=2, num_draft_tokens=5), {}),
    "grammar": (SpecConfig(topk=2, num_draft_tokens=5), {"grammars": Thirds()}),
    "rejection": (SpecConfig(topk=1, num_steps=2, verifier="rejection"), {}),
    "block": (SpecConfig(topk=1, num_steps=2, verifier="block"), {}),
    "gumbel": (SpecConfig(topk=1, num_steps=2, verifier="gumbel"), {}),
    "multi_round": (SpecConfig(topk=2, num_steps=2, verifier="multi_round"), {}),
    "traversal": (SpecConfig(topk=2, num_steps=2, verifier="traversal"), {}),
    "recursive": (SpecConfig(topk=2, num_steps=2, verifier="recursive"), {}),
    "typical": (SpecConfig(topk=2, num_draft_tokens=5, verifier="typical"), {}),
    "synthetic": (SpecConfig(topk=2, num_steps=2), {"acceptance": SyntheticAcceptance((0.8, 0.5))}),
    "rule": (SpecConfig(topk=2, num_draft_tokens=5), {"verifier": RULE}),
}
FILTERED = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
SAMPLINGS = [{}, {**FILTERED, "repetition_penalty": 1.2, "presence_penalty": 0.5, "logit_bias": {3: 2.0, 5: -90.0}}]


@pytest.mark.every_value
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("impl", ["reference", "fast"])
def test_nan_at_the_root_ends_the_run(impl, setting, sampling, value):
    """The token that the prefill samples gets an embedding that is not finite in the target alone."""
    config, others = SETTINGS[setting]
    params = replace(FEW, **sampling)
    pair = synthetic_pair("eagle")  # whose drafter has an embedding of its own
    token = generate(pair, [PROMPT], config, replace(params, max_new_tokens=1), **others).outputs[0].token_ids[0]
    bad = poisoned(pair, EMBEDDING, (token,), value)
    with pytest.raises(NotFinite) as found:
        generate(bad, [PROMPT], config, params, engine=EngineOptions(impl), **others)
    error = found.value
    assert (error.model, error.request_id, error.round_number) == ("target", 0, 1)
    assert (error.dtype, error.part) == ("float32", "the embedding")


@pytest.mark.parametrize("setting", SETTINGS)
def test_nan_inside_a_path_ends_the_run(setting):
    """A later token gets an embedding of NaN; the tokens up to it are right."""
    config, others = SETTINGS[setting]
    params = replace(FEW, max_new_tokens=8, temperature=1.0)
    pair = synthetic_pair("eagle")
    sound = generate(pair, [PROMPT], config, params, **others).outputs[0]
    tokens = sound.token_ids
    index = next(i for i in range(1, 7) if tokens[i] not in (*PROMPT, *tokens[:i]))
    ends = accumulate(sound.num_accepted_tokens_per_round, initial=1)
    after = next(number for number, end in enumerate(ends) if end > index + 1)
    with pytest.raises(NotFinite) as found:
        generate(poisoned(pair, EMBEDDING, (tokens[index],)), [PROMPT], config, params, **others)
    assert found.value.round_number <= after  # earlier where a refused draft of the tree is the token


@pytest.mark.parametrize("impl", ["reference", "fast"])
@pytest.mark.parametrize(
    ("name", "place", "part"),
    [
        (EMBEDDING, (8, 0), "the embedding"),
        ("model.layers.0.mlp.up_proj.weight", (0, 0), "layer 0"),
        ("model.layers.1.self_attn.v_proj.weight", (0, 0), "layer 1"),
        ("lm_head.weight", (20, 0), "the output head"),
    ],
)
@pytest.mark.parametrize("new_tokens", [1, 4])
def test_the_first_nonfinite_part_is_named(impl, name, place, part, new_tokens):
    pair = poisoned(synthetic_pair("eagle3"), name, place)
    with pytest.raises(NotFinite) as found:
        generate(pair, [PROMPT], None, replace(FEW, max_new_tokens=new_tokens), engine=EngineOptions(impl))
    assert (found.value.part, found.value.round_number) == (part, 0)
    assert str(pickle.loads(pickle.dumps(found.value))) == str(found.value)


def test_a_place_in_a_long_text_is_located_by_chunks():
    pair = poisoned(synthetic_pair("eagle3", max_position_embeddings=1024), EMBEDDING, (8,))
    engine = load_engine(pair, SpecConfig.plain())
    assert first_nonfinite_part(engine, [1] * 700) is None
    assert first_nonfinite_part(engine, [1] * 699 + [8]) == "the embedding"


def test_an_overflow_of_float16_names_other_formats():
    pair = synthetic_pair("eagle3")
    up = "model.layers.1.mlp.up_proj.weight"
    pair = poisoned(pair, up, (slice(None),), 3e4)
    with pytest.raises(NotFinite) as found:
        generate(pair, [PROMPT], SpecConfig.plain(), FEW, engine=EngineOptions(dtype=torch.float16))
    assert (found.value.name, found.value.value, found.value.part) == ("dtype", "float16", "layer 1")


def test_nan_in_one_request_is_not_one_in_others():
    pair = poisoned(synthetic_pair("eagle3"), EMBEDDING, (8,))
    sound = [1, 2, 3]
    with pytest.raises(NotFinite, check=lambda error: error.request_id == 7):
        generate(pair, [sound, PROMPT], None, FEW, request_ids=[3, 7])
    assert generate(pair, [sound], None, replace(FEW, max_new_tokens=1)).outputs[0].finish_reason == "length"


def test_a_forbidden_token_is_no_infinity():
    never = dict.fromkeys(range(3, 48), -torch.finfo(torch.float32).max)
    output = generate(synthetic_pair("eagle3"), [PROMPT], None, replace(FEW, logit_bias=never)).outputs[0]
    assert set(output.token_ids) <= {0, 1, 2}


def with_bad_drafter(kind: str, value: float = torch.nan) -> Pair:
    pair = synthetic_pair(kind)
    name = next(name for name in pair.drafter.tensors if name.endswith("mlp.down_proj.weight"))
    return poisoned(pair, name, (0, 0), value, part="drafter")


def is_drafters(error: NotFinite) -> bool:
    return (error.model, error.request_id, error.round_number, error.name) == ("drafter", 0, 1, "drafter")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["eagle3", "mtp", "dflash", "dspark", "p-eagle", "frozen-kv", "standalone"])
@pytest.mark.parametrize("setting", ["tree", "rejection", "multi_round", "recursive"])
def test_the_reference_checks_the_drafter(kind, setting, value):
    with pytest.raises(NotFinite, check=is_drafters):
        generate(with_bad_drafter(kind, value), [PROMPT], SETTINGS[setting][0], replace(FEW, temperature=1.0))


@pytest.mark.parametrize(
    "run",
    [
        lambda pair, config, engine: trace(pair, [PROMPT], config, FEW, engine=engine),
        lambda pair, config, engine: measure_pair(pair, [PROMPT], config, FEW, engine),
    ],
    ids=["trace", "accept"],
)
@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_what_reads_states_checks_the_fast_drafter(kind, run):
    with pytest.raises(NotFinite, check=is_drafters):
        run(with_bad_drafter(kind), SpecConfig(topk=1, num_steps=2), EngineOptions("fast"))


@pytest.mark.parametrize("setting", ["rejection", "block", "multi_round", "traversal", "recursive"])
def test_drafts_of_nan_are_refused_in_kernels(setting):
    """Without a draft that passes, a round is a step of plain decoding with the same uniform."""
    params = replace(FEW, max_new_tokens=3, temperature=1.0)
    pair = with_bad_drafter("eagle3")
    found = generate(pair, [PROMPT], SETTINGS[setting][0], params, engine=EngineOptions("fast")).outputs[0]
    plain = generate(pair, [PROMPT], SpecConfig.plain(), params).outputs[0]
    assert found.token_ids == plain.token_ids
    assert set(found.num_accepted_tokens_per_round) == {1}


@pytest.mark.parametrize(("part", "name"), [("target", "lm_head.weight"), ("drafter", "midlayer.mlp.down_proj.weight")])
def test_the_differential_names_the_model(part, name):
    pair = poisoned(synthetic_pair("eagle3"), name, (0, 0), part=part)
    with pytest.raises(NotFinite, check=lambda error: error.model == part):
        check(one_cell(SpecConfig(topk=1, num_steps=2), 0.0, "eagle3-llama", 1, "lockstep", "eager"), pair=pair)
