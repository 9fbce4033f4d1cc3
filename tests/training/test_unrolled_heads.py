"""The unrolled head drafts as at inference; conventions name its columns, hidden states and hiddens."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from specsim.core.errors import InputError
from specsim.training import Roots, TrainingOptions, feature_states, label_column, read_out, read_target
from specsim.training.attention import rope_at
from specsim.training.eagle import Eagle
from specsim.training.train import build_drafter

OPTIONS = TrainingOptions(draft_vocab_size=48, intermediate_size=40, feature_layers=(1, 2, 3), from_target=False)
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip


def _draft_by_hand(head: nn.Module, reading, tokens_C: torch.Tensor, root: int, steps: int) -> list[torch.Tensor]:
    """Compute the hidden state of each draft of a chain from `root`, one row at a time."""
    hidden = list(head.first_hidden(reading)[0, :root])
    fed = []
    outputs = []
    for step in range(steps):
        token = tokens_C[1 : root + step + 1]
        previous = torch.stack([*hidden[:root], *outputs][: len(token)])
        if isinstance(head, Eagle):
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
@torch.no_grad()
def test_unrolled_head_equals_drafting_one_row_at_a_time(name):
    steps = 4
    target = LlamaForCausalLM(CONFIG).eval().requires_grad_(False)
    tokens_BC = torch.randint(CONFIG.vocab_size, (1, 17))
    head = build_drafter(target, tokens_BC[0], replace(OPTIONS, drafter=name))
    reading = head.read(target, tokens_BC)
    drafts = head.drafts(reading, tokens_BC, Roots(tokens_BC, tokens_BC), steps)
    hidden_SRH = torch.cat([draft.hidden_BAH for draft in drafts])
    for root in (1, 2, 7, 13):
        by_hand = torch.stack(_draft_by_hand(head, reading, tokens_BC[0], root, steps))
        torch.testing.assert_close(hidden_SRH[:, root - 1], by_hand)


def test_features_are_those_that_transformers_names():
    target = LlamaForCausalLM(CONFIG).eval()
    tokens_BC = torch.randint(CONFIG.vocab_size, (2, 9))
    reading = read_target(target, tokens_BC, (1, 2, 3))
    output = target(tokens_BC, output_hidden_states=True)
    assert torch.equal(reading.logits_BCV, output.logits)
    assert torch.equal(reading.hidden_BCH, output.hidden_states[-1])
    assert torch.equal(reading.features_BCF, torch.cat(output.hidden_states[1:4], -1))


def test_label_of_a_row_is_the_token_after_those_it_read():
    tokens = "The quick brown fox jumps".split()
    row, step = 1, 1
    read = tokens[: row + step + 2]  # the row's own token, and those before it
    predicted_from = label_column(row, step)  # the target's column c predicts token c + 1
    assert tokens[predicted_from + 1] == tokens[len(read)]
    assert torch.equal(label_column(torch.arange(3), 2), torch.tensor([3, 4, 5]))


def test_both_conventions_of_layer_ids_name_the_same_states():
    states = ["embedding", "output of 0", "output of 1", "output of 2"]
    assert feature_states(states, [1, 2], "entering") == ["output of 0", "output of 1"]
    assert feature_states(states, [0, 1], "output") == ["output of 0", "output of 1"]
    with pytest.raises(InputError, check=lambda error: error.name == "convention"):
        feature_states(states, [0], "outputs")


def test_next_step_reads_the_hidden_before_its_norm():
    logits, hidden = read_out(torch.full((1, 1, 1), 2.0), lambda x: x / 2, lambda x: 10 * x)
    assert (logits.item(), hidden.item()) == (10.0, 2.0)
