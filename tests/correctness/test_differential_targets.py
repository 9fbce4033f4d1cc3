"""The differential over target families and fp8 KV: cells of the grids, injected errors, and numbers rounding moves."""

from dataclasses import replace

import pytest
import torch

from specsim.core import target
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.kv_buffer import FP8
from specsim.correctness.differential import check, grid
from specsim.correctness.differential.cell import KV_FORMATS, LATER_FAMILIES, ROUTED, cell_of
from specsim.correctness.differential.drafter_grid import LATENT
from specsim.correctness.differential.pairs import make_pair
from specsim.serving.generation import load_engine

SMALL = dict(topk=2, num_steps=2, num_draft_tokens=4, page_size=4, batch=3)
FP8_CELL = replace(cell_of(SMALL | dict(kv="fp8")), rounds=1)


def family_of(cell):
    return cell.pair.rpartition("-")[2]


# Grids.


@pytest.mark.parametrize("name", ["pairwise", "drafters"])
def test_a_grid_has_every_family_with_every_number_format(name):
    met = {(family_of(cell), cell.kv) for cell in grid(name)}
    assert met >= {(family, kv) for family in target.FAMILIES for kv in KV_FORMATS.values()}


def test_every_drafter_meets_every_family_and_number_format():
    cells = grid("drafters")
    kinds = {cell.pair.rpartition("-")[0] for cell in cells}
    met = {(cell.pair.rpartition("-")[0], family_of(cell)) for cell in cells}
    assert ("frozen-kv", "deepseek_v3") not in met
    for kind in ("eagle3.1", "mtp", "standalone", "standalone.tli", "frozen-kv", "ngram", "suffix"):
        drafted_for = {family for each, family in met if each == kind}
        assert drafted_for >= set(target.FAMILIES) - set(LATENT if kind == "frozen-kv" else ())
    formats = {kind: {cell.kv for cell in cells if cell.pair.rpartition("-")[0] == kind} for kind in kinds}
    without_kv = ("frozen-kv", "ngram", "suffix")
    assert all(formats[kind] == {KV_FORMATS["model"], KV_FORMATS["fp8_target"]} for kind in without_kv)
    assert formats["mtp"] == formats["standalone"] == set(KV_FORMATS.values())
    # The case of vllm#41162: metadata of more than two drafts of MTP
    chains = {(cell.pair, cell.graph) for cell in cells if cell.config.num_steps > 2 and cell.config.topk == 1}
    pairs = ("mtp-mistral", "mtp-gpt_oss", "mtp-deepseek_v3", "mtp.one-mistral", "mtp.one-deepseek_v3")
    assert chains >= {(pair, graph) for pair in pairs for graph in ("step", "round")}


@pytest.mark.parametrize("name", ["pairwise", "drafters"])
def test_bfloat16_has_no_choice_that_rounding_changes(name):
    cells = grid(name, "bfloat16")
    assert {family_of(cell) for cell in cells} >= {"wide", "wide_qwen2", "wide_qwen3", "wide_mistral"}
    assert not {family_of(cell) for cell in cells} & {*ROUTED, *LATER_FAMILIES}
    assert {cell.kv for cell in cells} == {KV_FORMATS["model"]}


def test_no_two_scales_are_alike_or_powers_of_two():
    scales = [scale for each in KV_FORMATS["fp8"] for scale in (each.key_scale, each.value_scale)]
    assert len(set(scales)) == 4
    assert all(torch.tensor(scale).frexp().mantissa != 0.5 for scale in scales)


@pytest.mark.parametrize("impl", ["reference", "fast"])
def test_drafters_on_frozen_kv_refuse_fp8_and_latent_kv(impl):
    with pytest.raises(InputError, check=lambda error: error.name == "draft_kv_dtype"):
        cell_of(SMALL | dict(kind="frozen-kv", kv="fp8"))
    pytest.importorskip("triton")
    pair = make_pair("frozen-kv-deepseek_v3", torch.float32)
    with pytest.raises(InputError, check=lambda error: error.name == "drafter"):
        load_engine(pair, cell_of(SMALL).config, EngineOptions(impl, torch.float32))


# Injected errors.

TENSORS = {
    "qwen2": "model.layers.0.self_attn.k_proj.bias",
    "gpt_oss": "model.layers.0.self_attn.sinks",
    "qwen3_moe": "model.layers.1.mlp.experts.down_proj.weight",
    "deepseek_v3": "model.layers.0.self_attn.kv_a_layernorm.weight",
}


@pytest.mark.usefixtures("budgets_once")
@pytest.mark.parametrize(("family", "name"), TENSORS.items())
def test_a_wrong_weight_of_a_family_is_found(family, name):
    cell = replace(cell_of(SMALL | dict(family=family)), rounds=1)
    pair = make_pair(cell.pair, torch.float32)
    tensors = pair.target.tensors | {name: pair.target.tensors[name] * 1.001 + 1e-3}
    engine = load_engine(replace(pair, target=replace(pair.target, tensors=tensors)), cell.config)
    assert check(cell, "reference").mismatches == 0
    assert check(cell, "reference", wrap=lambda each: replace(each, engine=engine)).mismatches > 0


@pytest.mark.parametrize(("channel", "field"), [(0, "target latent channels"), (-1, "target rotated channels")])
def test_a_wrong_channel_of_latent_kv_is_named(check_spoiled, channel, field):
    cell = replace(cell_of(SMALL | dict(family="deepseek_v3")), rounds=1)
    slots = []

    def spoil(output, batch, pools):
        slots.append(int(pools.req_to_token[batch.req_pool_indices[1], 2]))
        pools.target.keys[-1, slots[0], 0, channel] += 1e-2

    first = check_spoiled(cell, "prefill", spoil).first_divergence
    assert (first.phase, first.field, first.request, first.node) == ("prefill", field, 1, slots[0])
    assert f" in layer 1 of slot {slots[0]} (request row 1, column 2, token " in first.reference


def test_wrong_experts_of_an_accepted_token_are_named(check_spoiled):
    def spoil(output, batch, pools):
        slot = pools.req_to_token[batch.req_pool_indices[1], batch.seq_lens[1]]
        pools.side.rows["experts"][slot] += 1

    cell = replace(cell_of(SMALL | dict(family="qwen3_moe")), rounds=1)
    first = check_spoiled(cell, "verify", spoil).first_divergence
    assert (first.phase, first.field, first.request) == ("verify", "side output experts", 1)


# Numbers of fp8 that rounding moves to the next one.


def shifted(places, by):
    """Move stored numbers of one prompt, in the first `places` channels of every layer and head, by `by` codes."""

    def spoil(output, batch, pools):
        rows = pools.req_to_token[batch.req_pool_indices[1], : places[0]]
        codes = pools.target.keys.view(torch.uint8)
        for layer in range(len(codes) if places[1] > 1 else 1):
            part = codes[layer, rows, :1, : places[1]]
            codes[layer, rows, :1, : places[1]] = torch.where(part & 127 > 100, part - by, part + by)

    return spoil


@pytest.mark.parametrize(
    ("places", "by", "field"),
    [((1, 1), 1, None), *((*moved, "target keys") for moved in (((1, 1), 2), ((5, 1), 1), ((1, 8), 1), ((5, 16), 1)))],
    ids=["next code", "two codes", "column", "row", "all"],
)
def test_only_a_single_next_code_is_within_rounding_error(check_spoiled, places, by, field):
    assert FP8_CELL.kv == KV_FORMATS["fp8"]
    result = check_spoiled(FP8_CELL, "prefill", shifted(places, by))
    assert (result.mismatches, result.within_rounding_error) == ((1, 0) if field else (0, 1))
    assert (result.first_divergence and result.first_divergence.field) == field


@pytest.mark.usefixtures("budgets_once")
@pytest.mark.parametrize("scales", [dict(kv_scales=(0.31, 0.7)), dict(draft_kv_scales=(0.6, 0.21))], ids=str)
def test_another_scale_is_found(scales):
    def wrap(implementation):
        engine = implementation.engine
        options = replace(engine.options, **scales)
        other = load_engine(make_pair(FP8_CELL.pair, torch.float32), FP8_CELL.config, options)
        pools = other.make_pools(len(FP8_CELL.prompts), implementation.pools.num_slots)
        assert pools.target.keys.dtype == FP8
        return replace(implementation, engine=other, pools=pools)

    assert check(FP8_CELL, "reference", wrap=wrap).mismatches > 0
