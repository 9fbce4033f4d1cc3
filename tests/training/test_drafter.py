"""Drafters draft in training as at inference, from the files that training writes."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.kinds import KINDS, TRAINABLE
from specsim.core.pair import Pair
from specsim.models.load import load
from specsim.reference.oracle_block import draft_block
from specsim.reference.oracle_draft import DraftNode
from specsim.reference.oracle_forward import in_dtype
from specsim.reference.oracle_p_eagle import draft_p_eagle
from specsim.reference.oracle_request import Draws, OracleRequest
from specsim.training import DrafterModule, Drafts, Roots, TrainingOptions
from specsim.training.estimate import agreement, greedy_drafts
from specsim.training.train import build_drafter

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=0, initializer_range=0.2,
)  # fmt: skip
DEPTH = 4
STEPS = 3
ROOTS = (1, 2, 7, 12)
OPTIONS = TrainingOptions(num_drafts=DEPTH, num_roots=4, intermediate_size=40, feature_layers=(1, 2, 3), markov_rank=8)
BLOCK_DRAFT = partial(draft_block, depth=DEPTH)
ORACLES = {"p-eagle": partial(draft_p_eagle, depth=DEPTH), "dflash": BLOCK_DRAFT, "dspark": BLOCK_DRAFT}
NO_DRAWS = Draws(lambda *_: 0.0, lambda _: torch.zeros(0))


@pytest.fixture
def target() -> LlamaForCausalLM:
    torch.manual_seed(5)
    model = LlamaForCausalLM(CONFIG).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


@pytest.fixture
def tokens(target) -> torch.Tensor:
    return torch.randint(CONFIG.vocab_size, (17,))


def built(name: str, target: LlamaForCausalLM, num_drafts: int = DEPTH) -> DrafterModule:
    options = replace(OPTIONS, drafter=name, num_drafts=num_drafts)
    return build_drafter(target, torch.arange(CONFIG.vocab_size), options).eval()


# Drafts one by one.


def _mtp_logits(drafter, target: LlamaForCausalLM, tokens_C: torch.Tensor, root: int) -> list[torch.Tensor]:
    """Run each module over the rows before the root, in transformers' own decoder layers."""
    rope = LlamaRotaryEmbedding(drafter.config)(torch.zeros(1), torch.arange(root)[None])
    mask = torch.full((root, root), float("-inf")).triu(1)[None, None]
    hidden = target.model(tokens_C[None, :root]).last_hidden_state
    logits = []
    for depth, module in enumerate(drafter.chain):
        layer = LlamaDecoderLayer(drafter.config, 0)
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


def _frozen_logits(drafter, target: LlamaForCausalLM, tokens_C: torch.Tensor, root: int) -> list[torch.Tensor]:
    """Draft one row at a time, against the cache of a target that has seen no later token."""
    output = target.model(tokens_C[None, :root], use_cache=True)
    last = output.past_key_values.layers[-1]
    groups = target.config.num_attention_heads // target.config.num_key_value_heads
    keys, values = (repeat_kv(kv, groups) for kv in (last.keys, last.values))
    rope = drafter.rotary(keys, torch.tensor([[root - 1]]))
    hidden = output.last_hidden_state[0, -1]
    logits = []
    for step in range(STEPS):
        x = drafter.pre_projection(torch.cat([target.model.embed_tokens(tokens_C[root + step]), hidden]))
        for layer in drafter.layers:
            query = layer.self_attn.q_proj(layer.input_layernorm(x)).view(1, -1, 1, target.config.head_dim)
            query, _ = apply_rotary_pos_emb(query, query, *rope)
            seen = F.scaled_dot_product_attention(query, keys, values)
            x = x + layer.self_attn.o_proj(seen.flatten())
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        x = drafter.norm(x)
        logits.append(drafter.lm_head(x))
        hidden = drafter.post_projection(x)
    return logits


def _standalone_logits(drafter, target: LlamaForCausalLM, tokens_C: torch.Tensor, root: int) -> list[torch.Tensor]:
    return [drafter.language_model(tokens_C[None, : root + 1 + step]).logits[0, -1] for step in range(STEPS)]


@pytest.mark.parametrize(
    ("name", "by_hand"), [("mtp", _mtp_logits), ("frozen-kv", _frozen_logits), ("standalone", _standalone_logits)]
)
@torch.no_grad()
def test_unrolled_drafts_equal_drafting_from_each_root(name, by_hand, target, tokens):
    drafter = built(name, target, STEPS)
    windows = tokens[None]
    drafts = drafter.drafts(drafter.read(target, windows), windows, Roots(windows, windows), STEPS)
    for root in ROOTS:
        rows = torch.stack([draft.logits_BAV[0, root - 1] for draft in drafts])
        torch.testing.assert_close(rows, torch.stack(by_hand(drafter, target, tokens, root)), atol=2e-5, rtol=1e-4)
        assert [int(draft.columns_BA[0, root - 1]) for draft in drafts] == [root + depth for depth in range(STEPS)]


def test_standalone_starts_with_the_targets_layers_and_loads(target, tokens, tmp_path):
    drafter = built("standalone", target)
    inner = drafter.language_model.model
    for layer, source in ((inner.layers[0], target.model.layers[0]), (inner.layers[1], target.model.layers[-1])):
        assert torch.equal(layer.mlp.up_proj.weight, source.mlp.up_proj.weight)
    drafter.write(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = drafter.language_model(tokens[None]).logits
        assert torch.equal(loaded(tokens[None]).logits, expected)


# Drafts of all depths at once.


class Written(NamedTuple):
    """A drafter in training, and the pair that is loaded from what it wrote."""

    drafter: DrafterModule
    pair: Pair

    def request(self, num_drafts: int, **changes: float) -> OracleRequest:
        """A request of the oracle, in float64, with other fields of the block."""
        models = [in_dtype(model, torch.float64) for model in (self.pair.target, self.pair.drafter)]
        if changes:
            config = models[1].config
            models[1].config = replace(config, block=replace(config.block, **changes))
        config = SpecConfig(1, num_drafts, page_size=4)
        return OracleRequest(*models, config, SamplingParams(), NO_DRAWS, 1, 100, None)


def written(name: str, target: LlamaForCausalLM, folder: Path) -> Written:
    """Write an untrained drafter whose every tensor is random, and its target."""
    drafter = built(name, target)
    for parameter in drafter.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    drafter.write(folder / name)
    target.save_pretrained(folder / "target")
    return Written(drafter, load(folder / "target", folder / name, drafter=name))


def oracle_drafts(name: str, request: OracleRequest, tokens: list[int]) -> tuple[list[int], torch.Tensor]:
    """Drafts of a chain after the tokens, with the probability of each."""
    nodes = ORACLES[name](request, tokens, DraftNode((), None, 0, 1.0, None, None, ()))
    scores = torch.tensor([1.0, *(node.score for node in nodes)])
    return [node.token for node in nodes], scores[1:] / scores[:-1]


@torch.no_grad()
def drafts_after(
    drafter: DrafterModule, target: LlamaForCausalLM, tokens: list[int], root: int, num_drafts: int
) -> list[Drafts]:
    """Draft after one root, with the given number of drafts."""
    windows = torch.tensor([tokens])
    roots = Roots(torch.tensor([[root]]), torch.tensor([[num_drafts]]))
    return drafter.drafts(drafter.read(target, windows), windows, roots, DEPTH)


@pytest.mark.parametrize("num_drafts", [1, DEPTH - 1, DEPTH])
@pytest.mark.parametrize("name", ORACLES)
def test_parallel_drafts_are_those_of_the_written_files(name, num_drafts, target, tokens, tmp_path):
    """The oracle drafts from the files, after each root; in training the same drafts are read as true tokens."""
    drafter, pair = written(name, target, tmp_path)
    for root in ROOTS:
        before = tokens[: root + 1].tolist()
        expected, probs = oracle_drafts(name, Written(drafter, pair).request(num_drafts), before)
        assert len(expected) == num_drafts
        after = [*before, *expected, *[3] * (DEPTH + 1 - num_drafts)]
        drafts = drafts_after(drafter, target, after, root, num_drafts)
        for depth, (token, prob) in enumerate(zip(expected, probs, strict=True)):
            draft = drafts[depth]
            row = root - 1 if name == "p-eagle" and depth == 0 else 0  # its first depth has a draft for every row
            assert draft.columns_BA[0, row] == root + depth
            assert draft.weights_BA[0, row] == 1
            prob_V = draft.logits_BAV[0, row].softmax(-1)
            assert prob_V.argmax() == token
            torch.testing.assert_close(prob_V[token], prob, atol=1e-5, rtol=1e-3)
        assert not any(draft.weights_BA[0, 0] for draft in drafts[max(num_drafts, 1) :])


def test_confidence_is_that_of_the_written_files(target, tokens, tmp_path):
    """A threshold just below a draft's confidence keeps the draft, one just above ends the block there."""
    files = written("dspark", target, tmp_path)
    root = 7
    before = tokens[: root + 1].tolist()
    tokens_of_drafts, _ = oracle_drafts("dspark", files.request(DEPTH), before)
    drafts = drafts_after(files.drafter, target, [*before, *tokens_of_drafts, 3], root, DEPTH)
    confidence = torch.stack([draft.confidence_BA[0, 0] for draft in drafts]).sigmoid()
    least = int(confidence.argmin())
    for change, count in ((-1e-4, DEPTH), (1e-4, least)):
        request = files.request(DEPTH, threshold=float(confidence[least]) + change)
        assert len(oracle_drafts("dspark", request, before)[0]) == count


# All kinds.


def test_every_kind_with_weights_can_be_trained():
    assert set(TRAINABLE) == {name for name, kind in KINDS.items() if kind.has_weights}


@pytest.mark.parametrize("name", TRAINABLE)
def test_a_written_drafter_holds_the_values_of_its_file(name, target, tokens, tmp_path):
    """The loader reads it, and the rows of all depths begin with those of the roots."""
    drafter = built(name, target)
    drafter.write(tmp_path / "drafter")
    target.save_pretrained(tmp_path / "target")
    pair = load(tmp_path / "target", tmp_path / "drafter", drafter=name)
    assert pair.drafter is not None
    stored = {key: value.float() for key, value in pair.checkpoint.tensors.items() if value.is_floating_point()}
    assert {float(value.sum()) for value in stored.values()} >= {
        float(value.sum()) for value in drafter.tensors().values() if value.is_floating_point() and value.ndim == 1
    }
    assert greedy_drafts(drafter, target, tokens, STEPS).shape == (len(tokens) - STEPS, STEPS)


def test_perfect_drafts_agree_everywhere(target):
    tokens_C = torch.randint(CONFIG.vocab_size, (3,))
    for _ in range(12):
        following = target(tokens_C[None]).logits[0, -1].argmax()
        tokens_C = torch.cat([tokens_C, following[None]])
    drafter = built("standalone", target)
    drafter.language_model = target
    agrees = agreement(greedy_drafts(drafter, target, tokens_C, 3), tokens_C)
    assert agrees.shape == (len(tokens_C) - 5, 3)
    assert agrees[2:].all()
