"""In bfloat16 most of every cell is compared, and small errors of scale are found."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from specsim import SamplingParams, SpecConfig, generate
from specsim.core.engine_options import EngineOptions
from specsim.core.kinds import TESTED
from specsim.correctness.differential import check, grid
from specsim.correctness.differential.cell import cell_of
from specsim.correctness.differential.implementation import load_implementation
from specsim.correctness.differential.pairs import KINDS, make_pair, wide_pair

WIDE = [cell for cell in grid("pairwise", "bfloat16") if "-wide" in cell.pair]
CELLS = [replace(cell, rounds=2) for cell in WIDE[::56]]
SMALL = [cell for cell in WIDE if len(cell.prompts) == 1]
FAULT_CELLS = [replace(cell, graph="eager", mode="lockstep", rounds=6) for cell in SMALL[::4]]
# An error of a scale in attention and in the sums of a residual stream, as one of the weights.
FAULTS = {
    "attention's scale": ({"llama": "q_proj", "qwen2": "q_proj", "mistral": "q_proj", "qwen3": "q_norm"}, 1.1),
    "attention in the residual": (dict.fromkeys(("llama", "qwen2", "mistral", "qwen3"), "o_proj"), 0.95),
    "MLP in the residual": (dict.fromkeys(("llama", "qwen2", "mistral", "qwen3"), "down_proj"), 0.95),
}
FAMILIES = ("wide", "wide_qwen2", "wide_qwen3", "wide_mistral")


def scaled(pair, names: dict[str, str], factor: float):
    """A pair with one kind of the target's weights scaled."""
    part = f"{names[pair.target.config.family]}.weight"
    weights = pair.target.tensors.items()
    tensors = {name: (tensor * factor).to(tensor.dtype) if part in name else tensor for name, tensor in weights}
    return replace(pair, target=replace(pair.target, tensors=tensors))


def test_the_cells_have_every_wide_pair():
    assert {cell.pair for cell in WIDE} == {
        *(f"{kind}-{family}" for kind in ("eagle", "eagle3") for family in FAMILIES),
    }
    assert len(CELLS) == 2
    assert 10 <= len(FAULT_CELLS) <= 12


def test_nine_of_ten_phases_are_compared_in_bfloat16():
    compared, not_compared = Counter(), Counter()
    for cell in CELLS:
        result = check(cell, dtype="bfloat16")
        assert (result.mismatches, result.first_divergence) == (0, None)
        compared.update(result.compared)
        not_compared.update(result.not_compared)
    assert compared.total() >= 0.9 * (compared.total() + not_compared.total())


NEW = sorted({each.pair.partition("-wide")[0] for each in grid("drafters", "bfloat16") if "-wide" in each.pair})
CHAIN = dict(topk=1, num_steps=2, page_size=4, batch=1, sampling="warm")


def test_the_grid_of_drafters_has_every_kind_in_bfloat16():
    assert {*NEW, "eagle", "eagle3"} == set(KINDS)
    families = {cell.pair.rpartition("-")[2] for cell in grid("drafters", "bfloat16")}
    assert families == {*FAMILIES, "twins"}


@pytest.mark.by_default("mtp.one-wide", "dflash-wide", "frozen-kv-wide_qwen2", "p-eagle-wide_mistral")
@pytest.mark.parametrize(("kind", "family"), [*zip(NEW, FAMILIES * 3, strict=False)])
def test_each_kind_of_drafter_is_compared_in_bfloat16(kind, family):
    """Some drafts are accepted and no request diverges; the cell is small, as a run needs seconds."""
    cell = replace(cell_of(CHAIN | {"kind": kind, "family": family}), rounds=3)
    result = check(cell, dtype="bfloat16")
    assert (result.mismatches, result.first_divergence) == (0, None)
    assert sum(result.compared.values()) >= 0.9 * (sum(result.compared.values()) + sum(result.not_compared.values()))


# DSpark's Markov head knows the token before a draft, so attention decides little.
@pytest.mark.parametrize(
    "kind", [each for each in NEW if TESTED[each].has_weights and TESTED[each].name != "dspark" and ".cut" not in each]
)
def test_a_wide_drafter_agrees_by_its_attention(kind):
    """Drafts are accepted more often than those of the same drafter without values in attention."""
    pair = make_pair(f"{kind}-wide")
    tensors = {
        name: tensor * ("v_proj" not in name and "layers.0.self_attn.o_proj" not in name)
        for name, tensor in pair.checkpoint.tensors.items()
    }
    blind = pair.with_drafter(replace(pair.checkpoint, tensors=tensors))
    params = SamplingParams(max_new_tokens=40)
    lengths = [
        generate(each, [[3, 14, 15, 92, 65, 35]], SpecConfig(1, 3), params).metrics["accept_length"]
        for each in (pair, blind)
    ]
    assert lengths[0] > lengths[1] + 0.2


@pytest.mark.by_default("attention's scale", "MLP in the residual")
@pytest.mark.parametrize(("names", "factor"), FAULTS.values(), ids=FAULTS)
def test_a_wrong_scale_is_found_in_most_cells(names, factor, budgets_once):
    found = []
    for cell in FAULT_CELLS:
        pair = scaled(make_pair(cell.pair, torch.bfloat16), names, factor)
        wrong = load_implementation(cell, pair, EngineOptions(dtype=torch.bfloat16))
        found.append(check(cell, "reference", "bfloat16", wrap=lambda _, each=wrong: each).mismatches > 0)
    assert sum(found) >= 0.7 * len(found)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_attention_decides_the_next_token(kind):
    """Without the two heads that find earlier tokens, other tokens have the largest probability."""
    pair = wide_pair(kind)
    blind = scaled(pair, {"llama": "v_proj"}, 0.0)
    params = SamplingParams(max_new_tokens=24)
    tokens = [
        generate(each, [[3, 14, 15, 92, 65, 35]], SpecConfig(4, 3, 8), params).outputs[0].token_ids
        for each in (pair, blind)
    ]
    assert tokens[0] != tokens[1]
