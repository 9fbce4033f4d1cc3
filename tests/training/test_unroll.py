"""The unrolled head drafts as at inference, and its features are those that transformers names."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from specsim.training.building import HeadSizes, build_head
from specsim.training.heads import UnrolledEagleHead, rope_at
from specsim.training.unroll import read_features, unroll

SIZES = HeadSizes(draft_vocab_size=48, intermediate_size=40, feature_layers=(1, 2, 3))
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def _draft_by_hand(head: nn.Module, features, tokens_C: torch.Tensor, root: int, steps: int) -> list[torch.Tensor]:
    """Compute the hidden state of each draft of a chain from `root`, one row at a time."""
    hidden = list(head.first_hidden(features)[0, :root])
    fed = []
    outputs = []
    for step in range(steps):
        token = tokens_C[1 : root + step + 1]
        previous = torch.stack([*hidden[:root], *outputs][: len(token)])
        if isinstance(head, UnrolledEagleHead):
            residual = x = head.fc(torch.cat([head.embed_tokens(token), previous], -1))
            layer = head.layers[0]
        else:
            layer = head.midlayer
            residual = previous
            embedding = head.borrowed["embed_tokens"](token)
            x = torch.cat([layer.input_layernorm(embedding), layer.hidden_norm(previous)], -1)
        fed.append(x)
        attention = layer.self_attn
        query, key, value = (
            projection(x[None]).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rope_at(head.rotary, x[None], 0))
        key, value = (repeat_kv(tensor, attention.groups) for tensor in (key, value))
        seen = F.scaled_dot_product_attention(query[:, :, -1:], key, value)
        mixed = residual[-1] + attention.o_proj(seen.transpose(1, 2).flatten(2))[0, 0]
        outputs.append(mixed + layer.mlp(layer.post_attention_layernorm(mixed)))
    return outputs


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_unrolled_head_equals_drafting_one_row_at_a_time(name):
    steps = 4
    target = LlamaForCausalLM(CONFIG).eval().requires_grad_(False)
    tokens_BC = torch.randint(CONFIG.vocab_size, (1, 17))
    head = build_head(name, target, tokens_BC[0], SIZES)
    features = read_features(target, tokens_BC, SIZES.feature_layers)
    with torch.no_grad():
        hidden_SRH = torch.cat([hidden_BRH for hidden_BRH, _ in unroll(head, features, tokens_BC, steps)])
        for root in (1, 2, 7, 13):
            by_hand = torch.stack(_draft_by_hand(head, features, tokens_BC[0], root, steps))
            torch.testing.assert_close(hidden_SRH[:, root - 1], by_hand)


def test_features_are_those_that_transformers_names():
    target = LlamaForCausalLM(CONFIG).eval()
    tokens_BC = torch.randint(CONFIG.vocab_size, (2, 9))
    features = read_features(target, tokens_BC, (1, 2, 3))
    output = target(tokens_BC, output_hidden_states=True)
    assert torch.equal(features.logits_BCV, output.logits)
    assert torch.equal(features.last_BCH, output.hidden_states[-1])
    assert torch.equal(features.aux_BCF, torch.cat(output.hidden_states[1:4], -1))
