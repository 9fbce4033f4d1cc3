"""Families beyond dense attention: checkpoints of transformers, read and run, against transformers and the oracle."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import DeepseekV3Config, GptOssConfig, Qwen2Config, Qwen3MoeConfig

from specsim import SamplingParams, ServingConfig, SpecConfig, generate, load, load_engine
from specsim.cli.main import main
from specsim.core.engine_options import EngineOptions
from specsim.core.pair import Pair, TargetCheckpoint
from specsim.core.pool import KVBuffer, KVPool
from specsim.correctness.differential.cell import Cell
from specsim.correctness.differential.oracle import compare_with_oracle
from specsim.models.checkpoint import load_target
from specsim.models.shipped import TINY
from specsim.models.synthetic_pair import random_target, synthetic_pair
from specsim.models.tiny_config import tiny_config
from specsim.reference.attention import causal_metadata
from specsim.reference.oracle_forward import routed_experts, target_forward
from specsim.reference.targets import FAMILIES
from specsim.serving.requests import make_requests
from specsim.serving.scheduler import Scheduler

EXACT = EngineOptions("reference", torch.float64)
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0,
}  # fmt: skip
SIZES = {
    "vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
HEADS = {"num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 40}
LATENT = {
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 2,
    "moe_intermediate_size": 24, "intermediate_size": 40, "num_nextn_predict_layers": 0,
}  # fmt: skip
GPT_OSS = HEADS | {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 5, "intermediate_size": 24}
CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen2": (Qwen2Config, {"num_key_value_heads": 2, "intermediate_size": 40}),
    "qwen2, yarn, sliding": (
        Qwen2Config,
        {
            "num_key_value_heads": 2, "intermediate_size": 40, "rope_parameters": YARN, "use_sliding_window": True,
            "sliding_window": 5, "max_window_layers": 1,
        },
    ),
    "gpt_oss": (GptOssConfig, GPT_OSS | {"rope_parameters": YARN | {"truncate": False}}),
    "qwen3_moe": (Qwen3MoeConfig, HEADS | EXPERTS | {"norm_topk_prob": True}),
    "qwen3_moe, some dense": (Qwen3MoeConfig, HEADS | EXPERTS | {"mlp_only_layers": [0], "decoder_sparse_step": 3}),
    "deepseek_v3": (
        DeepseekV3Config,
        LATENT | {"q_lora_rank": 24, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "deepseek_v3, queries in one projection": (
        DeepseekV3Config,
        LATENT | {"q_lora_rank": None, "norm_topk_prob": False, "attention_bias": True, "rope_interleave": False},
    ),
}  # fmt: skip
every_case = pytest.mark.parametrize("name", CASES)
one_of_each = pytest.mark.parametrize("name", ["qwen2", "gpt_oss", "qwen3_moe", "deepseek_v3"])


def random_model(name: str, **changes: Any) -> Any:
    """Make transformers' model in float32, with weights in which no part is negligible."""
    make_config, fields = CASES[name]
    config = make_config(**SIZES | fields | changes)
    config._attn_implementation = "eager" if name == "gpt_oss" else "sdpa"
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" not in key:
                values = torch.randn(tensor.shape, generator=generator)
                scale = 1.0 if "embed" in key or "sinks" in key else 0.25
                tensor.copy_(1 + 0.2 * values if "norm" in key and key.endswith("weight") else scale * values)
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Save transformers' model of a case and load it: (model in float64, our target)."""
    made = {}

    def make(name: str) -> tuple[Any, TargetCheckpoint]:
        if name not in made:
            model = random_model(name)
            model.save_pretrained(folder := tmp_path_factory.mktemp("family"))
            made[name] = model.double(), load_target(folder)
        return made[name]

    return make


def ours(target: TargetCheckpoint, dtype: torch.dtype, token_ids: list[int]):
    """Run one sequence in two chunks over shuffled pages: (logits, features entering every layer, side outputs)."""
    config = target.config
    model = FAMILIES[config.family](config, target.tensors, dtype)
    pools = KVPool(KVBuffer(config.kv_layout, 64, dtype), None, 4, 4, 64)
    pools.target.keys.fill_(torch.nan)
    rows = [pools.open() for _ in range(3)]
    for columns in (4, 12, 24):
        for row in rows:
            pools.reserve(row, columns if row < 2 else 4)
    parts = []
    layers = tuple(range(config.num_layers))
    for start, stop in ((0, 9), (9, len(token_ids))):
        slots = pools.req_to_token[rows[0], start:stop]
        starts, ends = torch.tensor([start]), torch.tensor([0, stop - start])
        metadata = causal_metadata(torch.tensor(rows[:1]), starts, ends, slots, pools)
        parts.append(model.forward(torch.tensor(token_ids[start:stop]), metadata, pools.target, layers))
    hidden, features = (torch.cat([getattr(part, field) for part in parts]) for field in ("hidden", "features"))
    side = {key: torch.cat([part.side[key] for part in parts]) for key in parts[0].side}
    return model.logits(hidden), features, side


def random_tokens(length: int) -> list[int]:
    return torch.randint(48, (length,)).tolist()


@every_case
def test_forwards_equal_transformers_and_the_oracle(name, checkpoint):
    """transformers keeps norms, rotary angles and routers in float32; the oracle keeps nothing there but angles."""
    model, target = checkpoint(name)
    tokens = random_tokens(21)
    logits, features, side = ours(target, torch.float64, tokens)
    with torch.no_grad():
        theirs = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    entering = torch.cat([hidden[0] for hidden in theirs.hidden_states[:-1]], dim=-1)
    for mine, yours in ((logits, theirs.logits[0]), (features, entering)):
        assert (mine - yours).abs().max() <= 1e-6 * yours.abs().max()
    exact = {key: tensor.double() for key, tensor in target.tensors.items()}
    layers = tuple(range(target.config.num_layers))
    for mine, yours in zip((logits, features), target_forward(target.config, exact, tokens, layers), strict=True):
        assert (mine - yours).abs().max() <= 1e-10
    assert (set(side) == {"experts"}) == bool(target.config.expert_layers)
    if side:
        assert torch.equal(side["experts"], routed_experts(target.config, exact, tokens))
        assert side["experts"].dtype == torch.int16
        assert len(side["experts"].unique()) > 3


@one_of_each
def test_forwards_in_float32_are_as_close_as_rounding(name, checkpoint):
    _, target = checkpoint(name)
    tokens = random_tokens(21)
    narrow, _, _ = ours(target, torch.float32, tokens)
    exact, _, _ = ours(target, torch.float64, tokens)
    assert (narrow - exact).abs().max() <= 1e-4 * exact.abs().max()


# Whole engines

PROMPT_LENGTHS = (1, 6, 11)
SETTINGS = {
    "plain": SpecConfig.plain(page_size=4),
    "chain": SpecConfig(topk=1, num_steps=3, num_draft_tokens=4, page_size=1),
    "tree": SpecConfig(topk=3, num_steps=3, num_draft_tokens=8, page_size=4),
    "tree of ancestors": SpecConfig(topk=2, num_steps=3, num_draft_tokens=6, page_size=16, draft_kv="ancestor"),
}
# As tiny_config has them.
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rms_norm_eps": 1e-5}
TINY_LIKE = {
    "qwen2": HEADS | {"intermediate_size": 48},
    "gpt_oss": GPT_OSS,
    "qwen3_moe": HEADS | EXPERTS | {"norm_topk_prob": True},
    "deepseek_v3": LATENT | {"q_lora_rank": 24, "n_shared_experts": 1, "intermediate_size": 48},
}


def published(family: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give a target's tensors the names and shapes that transformers 5 has in memory."""
    renamed = {}
    for name, tensor in tensors.items():
        if ".experts." in name:
            name = name.removesuffix(".weight").replace(".bias", "_bias")
            if family == "gpt_oss" and "gate_up" in name:
                tensor = torch.stack(tensor.chunk(2, dim=1), dim=2).flatten(1, 2)
            if family == "gpt_oss" and tensor.dim() == 3:
                tensor = tensor.mT
        elif family != "gpt_oss":
            name = name.replace("router.weight", "gate.weight")
            name = name.replace("router.correction_bias", "gate.e_score_correction_bias")
        renamed[name] = tensor.contiguous()
    return renamed


def transformers_twin(target: TargetCheckpoint) -> Any:
    """Load a synthetic target's weights in transformers' model, in float64."""
    family = target.config.family
    model = random_model(family, **TINY_LIKE[family], **ROPE).double()
    model.load_state_dict(published(family, dict(target.tensors)))
    return model


@pytest.mark.every_value
@pytest.mark.parametrize("name", TINY_LIKE)
@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_tokens_equal_transformers_generate(name, setting):
    """Rounds accept different numbers of drafts, otherwise the test would show nothing."""
    pair = synthetic_pair("eagle3", name, num_layers=3)
    model = transformers_twin(pair.target)
    prompts = [random_tokens(length) for length in PROMPT_LENGTHS]
    expected = []
    for prompt in prompts:
        mask = torch.ones(1, len(prompt))
        output = model.generate(torch.tensor([prompt]), attention_mask=mask, do_sample=False, max_new_tokens=14)
        expected.append(output[0, len(prompt) :].tolist())
    pair = Pair(pair.target, None, None, name) if setting == "plain" else pair
    found = generate(pair, prompts, SETTINGS[setting], SamplingParams(max_new_tokens=14), engine=EXACT)
    assert [list(output.token_ids) for output in found.outputs] == expected
    counts = {count for output in found.outputs for count in output.num_accepted_tokens_per_round}
    assert setting == "plain" or len(counts) > 1


ROUNDS = {
    "sampled chain": ("eagle3", SpecConfig(topk=1, num_steps=3, num_draft_tokens=4, page_size=4, verifier="rejection")),
    "sampled tree": ("eagle", SpecConfig(topk=2, num_steps=3, num_draft_tokens=6, page_size=4)),
    "modules": ("mtp", SpecConfig(topk=1, num_steps=3, num_draft_tokens=4, page_size=1)),
    "tree of modules": ("mtp", SpecConfig(topk=2, num_steps=3, num_draft_tokens=6, page_size=4)),
}


@pytest.mark.every_value
@pytest.mark.parametrize("name", TINY_LIKE)
@pytest.mark.parametrize("setting", ROUNDS)
def test_sampled_rounds_are_the_oracles(name, setting):
    """Modules of multi-token prediction have the target's kind of layer: DeepSeek's latent attention and experts."""
    kind, config = ROUNDS[setting]
    prompts = tuple(tuple(random_tokens(length)) for length in PROMPT_LENGTHS)
    sampling = tuple(SamplingParams(temperature=0.8, seed=seed, max_new_tokens=8) for seed in range(len(prompts)))
    cell = Cell("one", f"{kind}-{name}", prompts, sampling, config)
    assert compare_with_oracle(cell, synthetic_pair(kind, name, num_layers=3)) == []


def oracles_experts(target: TargetCheckpoint, tokens: list[int]) -> torch.Tensor:
    exact = {key: tensor.double() for key, tensor in target.tensors.items()}
    return routed_experts(target.config, exact, tokens)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_experts_of_accepted_tokens_come_in_their_order(name, setting):
    """Outputs that end inside a path have those of their own tokens only."""
    pair = synthetic_pair("eagle3", name, num_layers=3)
    pair = Pair(pair.target, None, None, name) if setting == "plain" else pair
    prompts = [random_tokens(length) for length in PROMPT_LENGTHS]
    sampling = [SamplingParams(temperature=temperature, max_new_tokens=11) for temperature in (0.0, 0.9, 0.0)]
    for output in generate(pair, prompts, SETTINGS[setting], sampling, engine=EXACT).outputs:
        tokens = [*output.prompt_token_ids, *output.token_ids]
        assert torch.equal(output.side_outputs["experts"], oracles_experts(pair.target, tokens[:-1]))


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_experts_survive_preemption_and_reused_prefixes(schedule):
    """Tokens on pages that another request filled have the experts that it found."""
    pair = synthetic_pair("eagle3", "qwen3_moe", num_layers=3)
    config = SpecConfig(topk=2, num_steps=2, num_draft_tokens=4, page_size=4, max_len=40)
    engine = load_engine(pair, config, EXACT)
    common = random_tokens(9)
    prompts = [[*common, *random_tokens(length)] for length in (2, 3, 5)] + [common]
    requests = make_requests(pair, prompts, SamplingParams(max_new_tokens=12), None, 40)
    for number, request in enumerate(requests):
        request.arrival = 2 * number
    serving = ServingConfig(max_running=3, num_slots=84, schedule=schedule, prefix_cache=True, chunk_tokens=4)
    scheduler = Scheduler(engine, serving)
    for request in requests:
        scheduler.submit(request)
    with torch.inference_mode():
        scheduler.run()
    assert sum(request.num_preemptions for request in requests) > 0
    assert sum(request.num_reused for request in requests) > 0
    for request in requests:
        experts = oracles_experts(pair.target, request.known_ids[:-1])
        assert torch.equal(request.side_outputs["experts"], experts)


def test_modules_in_deepseeks_folder_are_read(tmp_path: Path):
    """Modules are the layers after the target's, and repeat its embedding and head."""
    pair = synthetic_pair("mtp", "deepseek_v3", num_layers=3)
    config = random_model("deepseek_v3", **TINY_LIKE["deepseek_v3"] | {"num_nextn_predict_layers": 3}, **ROPE).config
    config.save_pretrained(tmp_path)
    tensors = dict(pair.target.tensors)
    for name, tensor in pair.drafter.tensors.items():
        module, part = name.removeprefix("modules.").split(".", 1)
        part = f"shared_head.{part}" if part == "norm.weight" else part
        tensors[f"model.layers.{3 + int(module)}.{part}"] = tensor
    tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    stored = {name: each.float() for name, each in published("deepseek_v3", tensors).items()}
    save_file(stored, tmp_path / "model.safetensors")
    loaded = load(tmp_path, drafter="mtp")
    assert loaded.target.config.num_layers == 3
    assert loaded.drafter.config.num_modules == 3
    assert loaded.drafter.config.model.layers == pair.drafter.config.model.layers
    found, expected = loaded.drafter.tensors, pair.drafter.tensors
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name].float()) for name in expected)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe", "deepseek_v3"])
def test_experts_stacked_in_a_file_are_read(name, tmp_path: Path):
    """transformers 5 may save the stacked tensors of its memory, which for GPT-OSS are transposed."""
    target = random_target(tiny_config(name, 3))
    random_model(name, **TINY_LIKE[name], **ROPE).config.save_pretrained(tmp_path)
    tensors = {key: tensor.float() for key, tensor in target.tensors.items()}
    save_file(published(name, tensors), tmp_path / "model.safetensors")
    loaded = load_target(tmp_path)
    assert replace(loaded.config, max_position_embeddings=512) == target.config
    assert loaded.tensors.keys() == target.tensors.keys()
    assert all(torch.equal(loaded.tensors[key], tensors[key]) for key in tensors)


@one_of_each
def test_the_command_line_loads_each_layout(name, tmp_path: Path, capsys):
    folder = tmp_path / "target"
    random_model(name, vocab_size=4096).save_pretrained(folder)
    for file in (TINY / "target").glob("tokenizer*"):
        shutil.copy(file, folder)
    arguments = ("--target", str(folder), "--drafter", "none", "--prompt", "def f", "--impl", "reference")
    with pytest.raises(SystemExit) as exit_info:
        main(("generate", *arguments, "--max-new-tokens", "3"))
    shown = capsys.readouterr()
    assert exit_info.value.code == 0, shown.err
    assert "tokens           3" in shown.out
