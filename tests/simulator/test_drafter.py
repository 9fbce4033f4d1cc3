"""Heads of drafters: their weights, and the bytes that a round reads of them."""

from dataclasses import replace

import numpy as np
import pytest

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError
from specsim.core.kinds import KINDS, SERVED
from specsim.simulator import CostModel, Efficiency, drafter, hardware, model

# Qwen/Qwen3-235B-A22B's config.json
QWEN = {
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
}
H, WIDTH, VOCAB = 4096, 12288, 32000
ENTERING = (64 + 2 * 4) * 128 * H  # q, k and v from H numbers
OUT = 64 * 128 * H


def test_eagle_heads_of_expert_models_are_one_dense_layer():
    target = model(QWEN)
    eagle3, eagle = drafter("eagle3", target, VOCAB).model, drafter("eagle", target).model
    assert eagle3.parameters == 3 * H**2 + 2 * ENTERING + OUT + 3 * H * WIDTH + VOCAB * H
    assert eagle.parameters == 2 * H**2 + ENTERING + OUT + 3 * H * WIDTH + target.vocab_size * H
    assert [each.layers[0].experts for each in (eagle3, eagle)] == [0, 0]
    assert eagle3.layers[0].kernels == model("llama-3-8b").layers[0].kernels


def test_a_head_may_be_wider_than_the_config():
    """SpecForge's configs/qwen3-235B-A22B-eagle3.json has 24576."""
    target = model(QWEN)
    usual, wide = (drafter("eagle3", target, VOCAB, width).model for width in (None, 24576))
    assert wide.parameters - usual.parameters == 3 * H * 12288
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("intermediate_size", 0)):
        drafter("eagle3", target, VOCAB, 0)


def test_an_mtp_layer_keeps_the_experts_of_its_target():
    target = model(QWEN)
    last = replace(target.layers[-1], count=1)
    assert drafter("mtp", target).model.parameters == last.weights + 2 * H**2 + target.head_weights


LLAMA = model("llama-3-8b")
LAYER = LLAMA.layers[0].weights
KV = LLAMA.layers[0].kv_width  # numbers of a token in one layer
WIDE = LLAMA.layers[0].input_weights  # q, k and v of the second half of a first layer's input
HEAD = LLAMA.hidden_size * LLAMA.vocab_size
PERFECT = Efficiency(1, 1, 1, mxfp4_experts=1, gap=0, launch=0, host=0, host_request=0, collective=0, draft_step=0)
CHAIN = SpecConfig(1, 3, 4)


def read_bytes(kind: str, config: SpecConfig = CHAIN, draft_vocab: int | None = None) -> tuple[float, float]:
    """Bytes of the draft phase and of draft-extend of one request of 1000 tokens, at full bandwidth."""
    gpu = hardware("H100-SXM")
    cost = CostModel(gpu, LLAMA, drafter(kind, LLAMA, draft_vocab), PERFECT)
    phases = cost.phases(np.array([1000]), config)
    return phases.draft * gpu.bandwidth, phases.extend * gpu.bandwidth


def test_a_p_eagle_head_drafts_in_draft_extend_alone():
    draft, extend = read_bytes("p-eagle", draft_vocab=VOCAB)
    assert draft == 0
    weights = 4 * LAYER + WIDE + 3 * LLAMA.hidden_size**2 + VOCAB * LLAMA.hidden_size
    # Six rows, four of tokens and two of masks, see five halves of a column of each other; three of them have logits.
    assert extend == pytest.approx(2 * weights + 4 * 2 * KV * (1000 + 2.5) + 3 * 12 * VOCAB, rel=1e-12)


@pytest.mark.parametrize(("kind", "rows"), [("dflash", 4), ("dspark", 3)])
def test_a_block_drafter_reads_its_layers_once(kind, rows):
    draft, extend = read_bytes(kind)
    logits = 12 * LLAMA.vocab_size
    block = 2 * (5 * LAYER + HEAD) + 5 * 2 * KV * (1000 + rows) + 3 * logits
    markov = 3 * (2 * 256 * LLAMA.vocab_size + logits) if kind == "dspark" else 0
    assert draft == pytest.approx(block + markov, rel=1e-12)
    # Context only: fc of five features, and the keys and values of every layer.
    assert extend == pytest.approx(2 * (5 * LLAMA.hidden_size**2 + 5 * LLAMA.hidden_size * KV), rel=1e-12)


@pytest.mark.parametrize("kind", SERVED)
def test_a_cut_head_reads_fewer_rows(kind):
    whole, cut = (drafter(kind, LLAMA, size).model for size in (None, VOCAB))
    assert (whole.vocab_size, cut.vocab_size) == (LLAMA.vocab_size, VOCAB)
    assert whole.head_weights - cut.head_weights == (LLAMA.vocab_size - VOCAB) * LLAMA.hidden_size
    assert sum(read_bytes(kind, draft_vocab=VOCAB)) < sum(read_bytes(kind))


@pytest.mark.parametrize("kind", ["p-eagle", "dflash"])
def test_a_tree_over_parallel_drafts_costs_no_more_to_draft(kind):
    assert read_bytes(kind, SpecConfig(4, 3, 8)) == read_bytes(kind)


def test_a_markov_head_reads_its_table_for_every_depth_of_a_tree():
    tree, chain = (read_bytes("dspark", config)[0] for config in (SpecConfig(2, 3, 6), CHAIN))
    assert tree - chain == pytest.approx(12 * LLAMA.vocab_size * (1 + 2 + 4 - 3))  # logits of more parents


@pytest.mark.parametrize("kind", SERVED)
def test_every_served_kind_has_a_cost(kind):
    head = drafter(kind, LLAMA)
    assert head.model.name == f"{kind} of {LLAMA.name}"
    assert head.is_block is (KINDS[kind].drafts == "block")
    assert head.is_parallel is (KINDS[kind].drafts == "masks")


def test_another_kind_is_refused():
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("drafter", "medusa")):
        drafter("medusa", LLAMA)
