"""Drafters on the target's frozen KV, against transformers' candidate generator and the oracle."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from specsim.core.config import SamplingParams
from specsim.core.errors import InputError
from specsim.core.frozen_kv import source_layers
from specsim.core.pair import Pair
from specsim.core.phases import Batch, PrefillInput
from specsim.models.synthetic_pair import synthetic_pair
from specsim.serving.generation import generate, load_engine

from . import rounds
from .rounds import CHAIN, EXACT, FAST, PROMPTS, SAMPLED, SETTINGS, TREE, both, draft_phases, pair_of

MODES = {"last": "frozen-kv", "next": "frozen-kv.next"}  # by the position of all drafts
every_mode = pytest.mark.parametrize("kind", MODES.values())


# The candidate generator of transformers, over a model that is made of its Llama's parts.


class Gemma4AssistantOfLlama(torch.nn.Module):
    """A drafter on shared KV, as that generator calls it: both layers read the target's last layer."""

    def __init__(self, pair: Pair, config: LlamaConfig, num_steps: int) -> None:
        super().__init__()
        own = pair.checkpoint
        model = own.config.model
        self.tensors = {name: tensor.double() for name, tensor in own.tensors.items()}
        self.model = model
        self.rotary = LlamaRotaryEmbedding(config)
        sizes = {"hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size}
        shape = LlamaConfig(num_attention_heads=model.num_heads, **sizes)
        self.mlp = LlamaMLP(shape).double()
        self.norm = LlamaRMSNorm(model.hidden_size, model.rms_norm_eps).double()
        self.config = shape
        self.generation_config = GenerationConfig(num_assistant_tokens=num_steps)
        self.device = torch.device("cpu")

    def normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        self.norm.weight.data = self.tensors[f"{name}.weight"]
        return self.norm(x)

    def forward(self, inputs_embeds, attention_mask, position_ids, shared_kv_states, use_cache):
        assert attention_mask is not None
        assert not use_cache
        keys, values = shared_kv_states["full_attention"]
        x = inputs_embeds @ self.tensors["pre_projection.weight"].T
        for layer in range(self.model.num_layers):
            name = f"layers.{layer}"
            normed = self.normed(x, f"{name}.input_layernorm")
            query = normed @ self.tensors[f"{name}.self_attn.q_proj.weight"].T
            query = query.unflatten(-1, (-1, self.model.head_dim)).transpose(1, 2)
            cos, sin = self.rotary(query, position_ids)
            query, _ = apply_rotary_pos_emb(query, query, cos, sin)
            attended = torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
            x = x + attended.transpose(1, 2).flatten(2) @ self.tensors[f"{name}.self_attn.o_proj.weight"].T
            parts = [f"{part}_proj.weight" for part in ("gate", "up", "down")]
            self.mlp.load_state_dict({part: self.tensors[f"{name}.mlp.{part}"] for part in parts})
            x = x + self.mlp(self.normed(x, f"{name}.post_attention_layernorm"))
        x = self.normed(x, "norm")
        logits = x @ self.tensors["lm_head.weight"].T
        return SimpleNamespace(logits=logits, last_hidden_state=x @ self.tensors["post_projection.weight"].T)


def drafts_of_transformers(pair: Pair, theirs: LlamaForCausalLM, tokens: list[int], num_steps: int) -> list[int]:
    """List the drafts after these tokens; the last one is the root, which the target has not read."""
    assistant = Gemma4AssistantOfLlama(pair, theirs.config, num_steps)
    ids = torch.tensor([tokens])
    generator = SinglePositionMultiTokenCandidateGenerator(
        input_ids=ids,  # of 5.17 only, as are the model's arguments
        assistant_model=assistant,
        target_model_input_embeddings=theirs.model.embed_tokens,
        generation_config=GenerationConfig(max_length=500),
        model_kwargs={},
    )
    with torch.no_grad():
        out = theirs(torch.tensor([tokens[:-1]]), use_cache=True, output_hidden_states=True)
        last = out.past_key_values.layers[-1]
        outputs = SimpleNamespace(
            hidden_states=out.hidden_states, shared_kv_states={"full_attention": (last.keys, last.values)}
        )
        mask = torch.ones(1, len(tokens), dtype=torch.long)
        candidates, _ = generator.get_candidates(
            ids, {"attention_mask": mask}, outputs, is_first_iteration=False, n_last_matches=len(tokens) - 2
        )
    return candidates[0, len(tokens) :].tolist()


@pytest.mark.every_value
@both
@pytest.mark.parametrize("chunks", [(7,), (3, 7)], ids=str)
@pytest.mark.parametrize("name", ["chain", "chain, round"])
def test_drafts_are_those_of_transformers_generator(name, chunks, options, llama_of):
    """Chains of SinglePositionMultiTokenCandidateGenerator, whose position is that of the root."""
    pair = pair_of("frozen-kv.next", noise=0.1)
    theirs = llama_of(pair.target.config, pair.target.tensors)
    for tokens, tree, *_ in draft_phases(pair, SETTINGS[name], options, chunks):
        assert tree.draft_tokens[0, 1:].tolist() == drafts_of_transformers(pair, theirs, tokens, 3)


@both
@pytest.mark.parametrize("name", ["tree", "tree, round"])
def test_it_keeps_no_kv_and_writes_none_of_the_targets(name, options):
    """`draft_phases` checks the target's KV after draft-extend."""
    pair = pair_of("frozen-kv")
    assert load_engine(pair, TREE, options).drafter.kv_layout is None
    assert [pools.draft for _, _, pools, _ in draft_phases(pair, SETTINGS[name], options)] == [None] * 5


# Layers and positions.


def test_a_layer_reads_the_last_target_layer_of_its_kind():
    pair = synthetic_pair("frozen-kv", num_layers=4)
    target = pair.target.config.with_windows((5, None, 5, None))
    own = replace(target, layers=target.layers[:3]).with_windows((5, None, 9))
    assert source_layers(replace(pair.checkpoint.config, model=own), target) == (2, 3, 2)


def test_a_kind_of_attention_that_the_target_lacks_is_refused():
    pair = synthetic_pair("frozen-kv")
    own = pair.checkpoint.config.model.with_windows((5, None))
    with pytest.raises(InputError, check=lambda error: error.name == "attention of the drafter's layer 0"):
        source_layers(replace(pair.checkpoint.config, model=own), pair.target.config)


def test_mixed_windows_are_the_oracles():
    """Sliding and full layers alternate, in target and drafter, so that they read two layers."""
    pair = pair_of("frozen-kv", num_layers=4, noise=0.15)
    target = replace(pair.target, config=pair.target.config.with_windows((3, None, 3, None)))
    config = pair.checkpoint.config
    own = replace(config, model=config.model.with_windows((3, None)))
    pair = replace(pair, target=target, drafter=replace(pair.checkpoint, config=own))
    rounds.assert_equal_to_the_oracle(pair, TREE)
    sampling = SamplingParams(max_new_tokens=6)
    exact = generate(pair, PROMPTS, TREE, sampling, engine=EXACT).outputs
    found = generate(pair, PROMPTS, TREE, sampling, engine=FAST).outputs
    for name in ("token_ids", "num_accepted_tokens_per_round"):
        assert [getattr(output, name) for output in found] == [getattr(output, name) for output in exact]


@both
def test_the_position_is_that_of_its_name(options):
    last, following = (next(draft_phases(pair_of(kind, noise=0.3), TREE, options)).tree for kind in MODES.values())
    assert not torch.equal(last.scores, following.scores)
    positions = {}
    for position, kind in MODES.items():
        engine = load_engine(pair_of(kind), TREE, options)
        seen = positions[position] = []
        head = engine.drafter._head
        forward = head.forward
        head.forward = lambda ids, hidden, metadata, kv, run=forward, to=seen: (
            to.append(metadata.positions.tolist()) or run(ids, hidden, metadata, kv)
        )
        pools = engine.make_pools(1, 160)
        pools.reserve(pools.open(), 7)
        batch = Batch.of([0], [0], [7], [SamplingParams()], 48).to(engine.device)
        draft_input = engine.prefill(batch, PrefillInput.of_prompts(PROMPTS[:1]).to(engine.device), pools).draft_input
        engine.drafter.propose(batch, draft_input, pools)
    assert positions == {"last": [[6], [6] * 4, [6] * 4], "next": [[7], [7] * 4, [7] * 4]}


def test_an_unknown_position_is_refused():
    with pytest.raises(InputError, check=lambda error: error.name == "position"):
        replace(pair_of("frozen-kv").checkpoint.config, position="first")


# Serving and the oracle.


@rounds.every_serving
def test_served_rounds_are_those_of_a_solo_run(serving, release):
    config = replace(CHAIN, release=release)
    rounds.assert_served_rounds_are_solo(pair_of("frozen-kv", "mistral", noise=0.1), config, **rounds.SERVED[serving])


@every_mode
@rounds.settings_and_families()
def test_rounds_are_the_oracles(name, family, kind):
    pair = pair_of(kind, family, noise=0.1)
    rounds.assert_equal_to_the_oracle(pair, (SETTINGS | SAMPLED)[name], 0.9 if name in SAMPLED else 0.0)
