"""Drafters that learn by distillation draft in training as at inference, and training continues where it stopped."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

from specsim.maintain.training.corpus import Document, first_bytes
from specsim.maintain.training.distil import BUILDERS, num_steps
from specsim.maintain.training.estimate import agreement, student_drafts
from specsim.maintain.training.minimise import Budget, Spent, minimise
from specsim.maintain.training.recipe import SMOKE
from specsim.maintain.training.student import Student, distillation_loss, read_target
from specsim.maintain.training.target import target_config

STEPS = 3
ROOTS = (1, 2, 7, 13)


@pytest.fixture
def target() -> LlamaForCausalLM:
    torch.manual_seed(5)
    return LlamaForCausalLM(target_config(SMOKE)).eval().requires_grad_(False)


@pytest.fixture
def tokens(target) -> torch.Tensor:
    return torch.randint(SMOKE.vocab_size, (17,))


def _unrolled(student: Student, target: LlamaForCausalLM, tokens_C: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat(student.unroll(read_target(target, tokens_C[None]), tokens_C[None], STEPS))


def _mtp_logits(student: Student, target: LlamaForCausalLM, tokens_C: torch.Tensor, root: int) -> list[torch.Tensor]:
    """Run each module over the rows before the root, in transformers' own decoder layers."""
    rope = LlamaRotaryEmbedding(student.config)(torch.zeros(1), torch.arange(root)[None])
    mask = torch.full((root, root), float("-inf")).triu(1)[None, None]
    hidden = target.model(tokens_C[None, :root]).last_hidden_state
    logits = []
    for depth, module in enumerate(student.chain):
        layer = LlamaDecoderLayer(student.config, 0)
        layer.load_state_dict(
            {
                name: value
                for name, value in module.state_dict().items()
                if not name.startswith(("eh_proj", "enorm", "hnorm", "norm"))
            }
        )
        embedding = target.model.embed_tokens(tokens_C[None, depth + 1 : depth + 1 + root])
        x = module.eh_proj(torch.cat([module.enorm(embedding), module.hnorm(hidden)], -1))
        x = layer(x, attention_mask=mask, position_embeddings=rope)
        hidden = module.norm(x)
        logits.append(target.lm_head(hidden)[0, -1])
    return logits


def _frozen_logits(student: Student, target: LlamaForCausalLM, tokens_C: torch.Tensor, root: int) -> list[torch.Tensor]:
    """Draft one row at a time, against the cache of a target that has seen no later token."""
    output = target.model(tokens_C[None, :root], use_cache=True)
    last = output.past_key_values.layers[-1]
    groups = target.config.num_attention_heads // target.config.num_key_value_heads
    keys, values = (repeat_kv(kept, groups) for kept in (last.keys, last.values))
    rope = student.rotary(keys, torch.tensor([[root - 1]]))
    hidden = output.last_hidden_state[0, -1]
    logits = []
    for step in range(STEPS):
        x = student.pre_projection(torch.cat([target.model.embed_tokens(tokens_C[root + step]), hidden]))
        for layer in student.layers:
            query = layer.self_attn.q_proj(layer.input_layernorm(x)).view(1, -1, 1, target.config.head_dim)
            query, _ = apply_rotary_pos_emb(query, query, *rope)
            seen = F.scaled_dot_product_attention(query, keys, values)
            x = x + layer.self_attn.o_proj(seen.flatten())
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        x = student.norm(x)
        logits.append(student.lm_head(x))
        hidden = student.post_projection(x)
    return logits


def _standalone_logits(
    student: Student, target: LlamaForCausalLM, tokens_C: torch.Tensor, root: int
) -> list[torch.Tensor]:
    return [student.language_model(tokens_C[None, : root + 1 + step]).logits[0, -1] for step in range(STEPS)]


@pytest.mark.parametrize(
    ("name", "by_hand"), [("mtp", _mtp_logits), ("frozen-kv", _frozen_logits), ("standalone", _standalone_logits)]
)
def test_unrolled_student_equals_drafting_from_each_root(name, by_hand, target, tokens):
    student = BUILDERS[name](target, SMOKE).eval()
    logits_SRV = _unrolled(student, target, tokens)
    with torch.no_grad():
        for root in ROOTS:
            expected = torch.stack(by_hand(student, target, tokens, root))
            torch.testing.assert_close(logits_SRV[:, root - 1], expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", BUILDERS)
def test_loss_is_least_for_the_targets_distribution(name, target, tokens):
    reading = read_target(target, tokens[None])
    steps = num_steps(name, SMOKE)
    rows = len(tokens) - steps

    class Perfect(Student):
        def unroll(self, reading, tokens_BC, steps):
            return [reading.logits_BCV[:, step + 1 : step + 1 + rows] for step in range(steps)]

    perfect = distillation_loss(Perfect(), reading, tokens[None], steps)
    assert perfect < distillation_loss(BUILDERS[name](target, SMOKE), reading, tokens[None], steps)


def test_standalone_starts_with_the_targets_layers_and_loads(target, tokens, tmp_path):
    student = BUILDERS["standalone"](target, SMOKE).eval()
    inner = student.language_model.model
    for own, source in ((inner.layers[0], target.model.layers[0]), (inner.layers[1], target.model.layers[-1])):
        assert torch.equal(own.mlp.up_proj.weight, source.mlp.up_proj.weight)
    student.write(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for parameter in student.parameters():
        parameter.data = parameter.data.bfloat16().float()
    with torch.no_grad():
        expected = student.language_model(tokens[None]).logits
        assert torch.equal(loaded(tokens[None]).logits, expected)


def test_perfect_drafts_agree_everywhere(target):
    tokens_C = torch.randint(SMOKE.vocab_size, (3,))
    for _ in range(12):
        following = target(tokens_C[None]).logits[0, -1].argmax()
        tokens_C = torch.cat([tokens_C, following[None]])
    student = BUILDERS["standalone"](target, SMOKE)
    student.language_model = target
    agrees = agreement(student_drafts(student, target, 3, tokens_C), tokens_C)
    assert agrees.shape == (len(tokens_C) - 5, 3)
    assert agrees[2:].all()


def _fit(module: nn.Linear, budget: Budget) -> Spent:
    inputs = torch.eye(4)
    return minimise(lambda: (module(inputs) - 1).square().mean(), module, 1e-3, budget, "line")


def test_a_slice_continues_the_one_before(tmp_path):
    checkpoint = tmp_path / "line.pt"
    first = nn.Linear(4, 4)
    one = _fit(first, Budget(0.4, 0.2, checkpoint))
    assert 0.2 <= one.seconds < 0.4
    second = nn.Linear(4, 4)
    assert _fit(second, Budget(0.4, 0.0, checkpoint)) == one
    assert torch.equal(second.weight, first.weight)
    rest = _fit(second, Budget(0.4, None, checkpoint))
    assert rest.steps > one.steps
    assert rest.seconds >= 0.4
    assert not torch.equal(second.weight, first.weight)


def test_a_spent_budget_trains_no_further(tmp_path):
    checkpoint = tmp_path / "line.pt"
    first = nn.Linear(4, 4)
    spent = _fit(first, Budget(0.1, None, checkpoint))
    again = nn.Linear(4, 4)
    assert _fit(again, Budget(0.1, None, checkpoint)) == spent
    assert torch.equal(again.weight, first.weight)


def test_another_models_checkpoint_is_not_continued(tmp_path):
    checkpoint = tmp_path / "line.pt"
    spent = _fit(nn.Linear(4, 4), Budget(0.1, None, checkpoint))
    assert _fit(nn.Linear(4, 5), Budget(0.05, None, checkpoint)).seconds < spent.seconds


def test_first_bytes_are_whole_files():
    documents = [Document("library", "1", "MIT", f"{index}.py", "0", "é" * 5) for index in range(4)]
    assert list(first_bytes(documents, 25)) == documents[:2]
    assert list(first_bytes(documents, None)) == documents
