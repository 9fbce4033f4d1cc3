"""Every target family in float64 against transformers: prefill, chunks over shuffled pages, trees, generate."""

import math
from collections.abc import Iterator
from importlib import import_module

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from specsim import SamplingParams, SpecConfig, generate
from specsim.core.engine_options import EngineOptions
from specsim.core.pair import Pair, TargetCheckpoint
from specsim.core.phases import Batch, PrefillInput
from specsim.core.pool import KVBuffer, KVPool
from specsim.core.target import ModelConfig
from specsim.models.synthetic_pair import LLAMA3, random_target, synthetic_pair
from specsim.models.tiny_config import tiny_config
from specsim.reference.attention import causal_metadata, tree_metadata
from specsim.reference.targets import FAMILIES

from .transformers_models import norm_in_its_type, sizes_of
from .trees import tree_batch

CASES = {
    "llama": tiny_config("llama"),
    "llama with llama3 scaling": tiny_config("llama", rope_theta=5e5, rope_scaling=LLAMA3),
    "llama with a tied head": tiny_config("llama", tie_word_embeddings=True),
    "llama with biases": tiny_config("llama", attention_bias=True, mlp_bias=True),
    "llama, head_dim 10, one key head": tiny_config("llama", num_heads=2, num_kv_heads=1, head_dim=10),
    "llama of five layers": tiny_config("llama", num_layers=5),
    "mistral": tiny_config("mistral"),
    "mistral with a window": tiny_config("mistral", window=5),
    "qwen3": tiny_config("qwen3"),
    "qwen3 with biases": tiny_config("qwen3", attention_bias=True),
    "qwen3 with a window on some layers": tiny_config("qwen3", num_layers=3, sliding_windows=(None, 4, 4)),
}
every_case = pytest.mark.parametrize("config", CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def norms_in_float64(monkeypatch) -> None:
    """In float64 the budget can be 1e-10."""
    for norm in (LlamaRMSNorm, MistralRMSNorm, Qwen3RMSNorm):
        monkeypatch.setattr(norm, "forward", norm_in_its_type)


def random_checkpoint(config: ModelConfig) -> TargetCheckpoint:
    """Make random weights in which no part is negligible."""
    checkpoint = random_target(config, context=0.3)
    tied = {"lm_head.weight": checkpoint.tensors["model.embed_tokens.weight"]} if config.tie_word_embeddings else {}
    return TargetCheckpoint(config, {**checkpoint.tensors, **tied})


def transformers_model(checkpoint: TargetCheckpoint) -> torch.nn.Module:
    """Load the same weights in transformers' model, in float64."""
    config = checkpoint.config
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    shape = sizes_of(config) | special | {"tie_word_embeddings": config.tie_word_embeddings}
    window = next((window for window in config.sliding_windows if window), None)
    if config.family == "mistral":
        model = MistralForCausalLM(MistralConfig(sliding_window=window, **shape))
    elif config.family == "qwen3":
        kinds = ["full_attention" if w is None else "sliding_attention" for w in config.sliding_windows]
        windows = dict(use_sliding_window=window is not None, sliding_window=window, layer_types=kinds)
        model = Qwen3ForCausalLM(Qwen3Config(attention_bias=config.heads.bias, **windows, **shape))
    else:
        biases = dict(attention_bias=config.heads.bias, mlp_bias=config.mlp.bias)
        model = LlamaForCausalLM(LlamaConfig(**biases, **shape))
    model = model.double().eval()
    model.load_state_dict(checkpoint.tensors)
    return model


def transformers_rows(model: torch.nn.Module, token_ids: list[int]) -> tuple[torch.Tensor, ...]:
    """Run one sequence: (logits [R, V], input of the head [R, H], input of every layer [R, layers·H])."""
    read = []
    hook = model.lm_head.register_forward_pre_hook(lambda _, args: read.append(args[0][0]))
    with torch.no_grad():
        output = model(torch.tensor([token_ids]), output_hidden_states=True, use_cache=False)
    hook.remove()
    entering = torch.cat([hidden[0] for hidden in output.hidden_states[:-1]], dim=-1)
    return output.logits[0], read[0], entering


class Served:
    """A target over a pool with pages in random order that hold NaN until they are written."""

    def __init__(self, checkpoint: TargetCheckpoint, page_size: int, num_requests: int):
        self.target = FAMILIES[checkpoint.config.family](checkpoint.config, checkpoint.tensors, torch.float64)
        num_pages = num_requests * (48 // page_size)
        buffer = KVBuffer(checkpoint.config.kv_layout, num_pages * page_size, torch.float64)
        buffer.keys.fill_(math.nan)
        buffer.values.fill_(math.nan)
        self.pools = KVPool(buffer, None, page_size, num_pages, 48)
        taken = [self.pools.open() for _ in range(num_pages)]
        for row in taken:
            self.pools.reserve(row, page_size)
        for index in torch.randperm(num_pages).tolist():
            self.pools.close(taken[index])
        self.rows = [self.pools.open() for _ in range(num_requests)]
        for row in self.rows:
            self.pools.reserve(row, 48)

    def prefill(self, chunks: list[list[int]], starts: list[int]) -> Iterator[tuple[torch.Tensor, ...]]:
        """Prefill a chunk of each request: (logits, hidden, features entering every layer)."""
        counts = torch.tensor([len(chunk) for chunk in chunks])
        row_starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        places = zip(self.rows, starts, counts.tolist(), strict=True)
        slots = torch.cat([self.pools.req_to_token[row, start : start + count] for row, start, count in places])
        ids = torch.tensor([token for chunk in chunks for token in chunk])
        metadata = causal_metadata(torch.tensor(self.rows), torch.tensor(starts), row_starts, slots, self.pools)
        return zip(*(part.split(counts.tolist()) for part in self.forward(ids, metadata)), strict=True)

    def forward(self, ids: torch.Tensor, metadata) -> tuple[torch.Tensor, ...]:
        layers = tuple(range(self.target.config.num_layers))
        output = self.target.forward(ids, metadata, self.pools.target, layers)
        return self.target.logits(output.hidden), output.hidden, output.features


def assert_rows(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...], config: ModelConfig) -> None:
    """Compare in float64, except that llama3 frequencies are float32 and may differ in the last place."""
    budget = 1e-5 if config.rope.scaling else 1e-10
    for name, mine, yours in zip(("logits", "hidden", "features"), ours, theirs, strict=True):
        torch.testing.assert_close(mine, yours, rtol=budget, atol=budget, msg=lambda text, name=name: f"{name}: {text}")


def random_prompts(*lengths: int) -> list[list[int]]:
    return [torch.randint(48, (length,)).tolist() for length in lengths]


@every_case
def test_a_prefill_of_unequal_prompts_equals_transformers(config):
    """Logits, the head's input, and the hidden states entering every layer agree."""
    checkpoint = random_checkpoint(config)
    model, prompts = transformers_model(checkpoint), random_prompts(13, 1, 20)
    ours = Served(checkpoint, 4, 3).prefill(prompts, [0, 0, 0])
    for rows, prompt in zip(ours, prompts, strict=True):
        assert_rows(rows, transformers_rows(model, prompt), config)


@every_case
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_prefill_in_chunks_equals_transformers(config, page_size):
    checkpoint = random_checkpoint(config)
    model, prompts, served = transformers_model(checkpoint), random_prompts(19, 11), Served(checkpoint, page_size, 2)
    ends, parts = [0, 0], [[], []]
    for sizes in ((3, 5), (1, 1), (8, 0), (7, 5)):
        chunks = [prompt[end : end + size] for prompt, end, size in zip(prompts, ends, sizes, strict=True)]
        for own, part in zip(parts, served.prefill(chunks, ends), strict=True):
            own.append(part)
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    for own, prompt in zip(parts, prompts, strict=True):
        assert_rows([torch.cat(part) for part in zip(*own, strict=True)], transformers_rows(model, prompt), config)


# The last is deeper than the windows, and its nodes are not numbered by depth.
PARENTS = [[-1, 0, 0, 1, 1, 3, 2, 5], [-1, 0, 0, 0, 0, 0, 0, 0], [-1, 0, 0, 2, 3, 4, 5, 6]]


def path(parents: list[int], node: int) -> list[int]:
    """List the nodes from the root to `node`."""
    return [*path(parents, parents[node]), node] if node >= 0 else []


def make_batch(rows: list[int], lengths: list[int]) -> Batch:
    return Batch.of(rows, rows, lengths, [SamplingParams()] * len(rows), vocab_size=48)


@every_case
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_every_node_of_a_tree_equals_transformers_on_its_path(config, page_size):
    checkpoint, lengths = random_checkpoint(config), [7, 12, 1]
    model, prompts, trees = transformers_model(checkpoint), random_prompts(*lengths), random_prompts(8, 8, 8)
    served = Served(checkpoint, page_size, 3)
    served.prefill(prompts, [0, 0, 0])
    tables = zip(served.pools.req_to_token[served.rows], lengths, strict=True)
    columns = torch.cat([table[length : length + 8] for table, length in tables])
    tree_input = tree_batch(PARENTS, lengths, torch.tensor(trees), columns)
    metadata = tree_metadata(make_batch(served.rows, lengths), tree_input, served.pools)
    ours = [part.view(3, 8, -1) for part in served.forward(torch.tensor(trees).flatten(), metadata)]
    for request, (prompt, tree, parents) in enumerate(zip(prompts, trees, PARENTS, strict=True)):
        for node in range(8):
            tokens = prompt + [tree[ancestor] for ancestor in path(parents, node)]
            theirs = [part[-1] for part in transformers_rows(model, tokens)]
            assert_rows([part[request, node] for part in ours], theirs, config)


def test_features_are_the_named_layers_or_the_heads_input():
    """hidden_states[i] of transformers enters layer i."""
    checkpoint = random_checkpoint(CASES["llama of five layers"])
    model, prompt, served = transformers_model(checkpoint), random_prompts(9)[0], Served(checkpoint, 4, 1)
    _, head_input, entering = transformers_rows(model, prompt)
    slots = served.pools.req_to_token[served.rows[0], :9]
    metadata = causal_metadata(torch.tensor(served.rows), torch.tensor([0]), torch.tensor([0, 9]), slots, served.pools)
    for layers, expected in (((), head_input), ((1, 2, 4), entering.view(9, 5, 32)[:, [1, 2, 4]].flatten(1))):
        output = served.target.forward(torch.tensor(prompt), metadata, served.pools.target, layers)
        torch.testing.assert_close(output.features, expected, rtol=1e-10, atol=1e-10)


# The whole engine. Greedy output equals transformers' with any drafter.

PROMPT_LENGTHS = (1, 4, 11, 17)
NEW_TOKENS = 14
SETTINGS = {
    "chain": SpecConfig(topk=1, num_steps=3, num_draft_tokens=4, page_size=4),
    "tree": SpecConfig(topk=3, num_steps=3, num_draft_tokens=8, page_size=1),
    "paged tree": SpecConfig(topk=2, num_steps=4, num_draft_tokens=7, page_size=4, draft_kv="ancestor"),
    "tree, slots of a round": SpecConfig(
        topk=2, num_steps=3, num_draft_tokens=6, page_size=16, extend="ragged", release="round"
    ),
}


def transformers_greedy(target: TargetCheckpoint, prompts: list[list[int]]) -> list[list[int]]:
    model = transformers_model(target)
    outputs = [
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
        )
        for prompt in prompts
    ]
    return [output[0, len(prompt) :].tolist() for output, prompt in zip(outputs, prompts, strict=True)]


def generated(pair: Pair, prompts: list[list[int]], config: SpecConfig):
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS)
    return generate(pair, prompts, config, sampling, engine=EngineOptions("reference", torch.float64))


@every_case
def test_plain_decoding_equals_transformers_generate(config):
    checkpoint, prompts = random_checkpoint(config), random_prompts(*PROMPT_LENGTHS)
    ours = generated(Pair(checkpoint, None, None, "plain"), prompts, SpecConfig.plain(page_size=4))
    assert [list(output.token_ids) for output in ours.outputs] == transformers_greedy(checkpoint, prompts)


FAMILY_CASES = {
    "llama": {"family": "llama"},
    "llama with llama3 scaling": {"family": "llama", "rope_theta": 5e5, "rope_scaling": LLAMA3},
    "mistral with a window": {"family": "mistral", "window": 5},
    "qwen3": {"family": "qwen3"},
}


@pytest.mark.parametrize("changes", FAMILY_CASES.values(), ids=FAMILY_CASES)
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("config", SETTINGS.values(), ids=SETTINGS)
def test_speculative_greedy_equals_transformers_generate(config, kind, changes):
    """Rounds accept different numbers of drafts, otherwise the test would show nothing."""
    pair, prompts = synthetic_pair(kind, **changes), random_prompts(*PROMPT_LENGTHS)
    ours = generated(pair, prompts, config)
    counts = {count for output in ours.outputs for count in output.num_accepted_tokens_per_round}
    assert [list(output.token_ids) for output in ours.outputs] == transformers_greedy(pair.target, prompts)
    assert len(counts) > 1


# The fast implementation.


def fast_and_exact(config: ModelConfig, prompts: list[list[int]], dtype: torch.dtype, device: str) -> list[tuple]:
    """Prefill fast in dtype and the reference in dtype and float64: (logits, hidden, features of every layer)."""
    checkpoint, layers = random_checkpoint(config), tuple(range(config.num_layers))
    checkpoint = TargetCheckpoint(config, {name: each.to(dtype) for name, each in checkpoint.tensors.items()})
    lengths = [len(prompt) for prompt in prompts]
    results = []
    for column, kind, place in (
        ("fast", dtype, device),
        ("reference", dtype, "cpu"),
        ("reference", torch.float64, "cpu"),
    ):
        built_in = import_module(f"specsim.{column}.{'model.metadata' if column == 'fast' else 'attention'}")
        families = import_module(f"specsim.{column}.targets").FAMILIES
        more = (torch.device(place),) if column == "fast" else ()
        target = families[config.family](config, checkpoint.tensors, kind, *more)
        pools = KVPool(KVBuffer(config.kv_layout, 192, kind, place), None, 4, len(prompts), 64)
        rows = [pools.open() for _ in prompts]
        for row, length in zip(rows, lengths, strict=True):
            pools.reserve(row, length)
        batch = Batch.of(rows, rows, lengths, [SamplingParams()] * len(rows), config.vocab_size).to(place)
        prefill = PrefillInput.of_prompts(prompts).to(place)
        metadata = built_in.prefill_metadata(batch, prefill, pools)
        output = target.forward(prefill.input_ids, metadata, pools.target, layers)
        parts = (target.logits(output.hidden), output.hidden, output.features)
        results.append(tuple(each.double().cpu() for each in parts))
    return results


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fast_target_is_as_exact_as_the_reference(config, dtype, device):
    """Its error from float64 may be three times the reference's in the same type, and a few units of rounding."""
    with torch.inference_mode():
        fast, reference, exact = fast_and_exact(config, random_prompts(9, 1, 14), dtype, device)
    for name, mine, plain, truth in zip(("logits", "hidden", "features"), fast, reference, exact, strict=True):
        budget = 3 * (plain - truth).abs().max() + 4 * torch.finfo(dtype).eps * truth.abs().max()
        assert (mine - truth).abs().max() <= budget, name
