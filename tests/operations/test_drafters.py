"""EAGLE heads, and every lane of the draft phase, against dense forwards over the sequences that they should see."""

import math
from dataclasses import replace
from itertools import cycle, pairwise
from unittest.mock import patch

import pytest
import torch
from torch.nn.functional import linear, pad, scaled_dot_product_attention, silu, softmax
from transformers import LlamaModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from specsim.core.columns import reserve_lanes
from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.eagle import Eagle3Config, EagleConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.pair import DrafterCheckpoint, Pair
from specsim.core.phases import Batch, Candidates, DraftInput, PrefillInput
from specsim.core.pool import KVPool
from specsim.core.verifiers import KIND_OF
from specsim.models.checkpoint.drafter_format import drafter_layout
from specsim.models.synthetic_pair import LLAMA3, random_target, synthetic_pair
from specsim.models.tiny_config import tiny_config
from specsim.reference.attention import causal_metadata
from specsim.reference.drafters.eagle import EagleHead
from specsim.reference.drafters.eagle3 import Eagle3Head
from specsim.reference.drafters.none import NoDrafter
from specsim.reference.engine import Engine
from specsim.serving.generation import load_engine

from .transformers_models import llama_config, norm_in_its_type, rms_norm


@pytest.fixture(autouse=True)
def norms_in_float64(monkeypatch) -> None:
    """In float64 the budget can be 1e-10."""
    monkeypatch.setattr(LlamaRMSNorm, "forward", norm_in_its_type)


# Pairs. The heads' drafts are random, so their lanes change parents.

HEAD_CASES = {
    "eagle": {"kind": "eagle"},
    "eagle without fc.bias": {"kind": "eagle", "without": "fc.bias"},
    "eagle of two layers": {"kind": "eagle", "model": {"num_layers": 2}},
    "eagle with llama3 scaling": {"kind": "eagle", "model": {"rope_theta": 5e5, "rope_scaling": LLAMA3}},
    "eagle, head_dim 10, one key head": {"kind": "eagle", "model": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 10}},
    "eagle3": {"kind": "eagle3"},
    "eagle3, narrow, norm before residual": {
        "kind": "eagle3",
        "model": {"hidden_size": 24},
        "norm_before_residual": True,
    },
    "eagle3 with its own embedding": {"kind": "eagle3", "own": "embed_tokens.weight"},
    "eagle3 with its target's head": {"kind": "eagle3", "draft_vocab_size": 48},
    "eagle3 with a head for every token": {"kind": "eagle3", "draft_vocab_size": 48, "own": "lm_head.weight"},
    "eagle3 with what leaves the last layer": {"kind": "eagle3", "feature_layers": (1, 3, 5)},
    "eagle3 with a window": {"kind": "eagle3", "model": {"window": 5}},
    "eagle3 with one feature": {"kind": "eagle3", "feature_layers": (3,)},
    "eagle3.1, one norm before fc": {"kind": "eagle3", "feature_layers": (0, 1, 3, 4), "norm_before_fc": True},
    "eagle3.1, a norm for every feature": {"kind": "eagle3", "fc_norm": True, "model": {"hidden_size": 24}},
    "eagle3.1, normed output": {"kind": "eagle3", "norm_output": True},
    "eagle3.1, every norm": {"kind": "eagle3", "norm_before_fc": True, "fc_norm": True, "norm_output": True},
}
HEADS = {"eagle": EagleHead, "eagle3": Eagle3Head}
every_head = pytest.mark.parametrize("case", HEAD_CASES.values(), ids=HEAD_CASES)
TWO_KINDS = {name: HEAD_CASES[name] for name in ("eagle", "eagle3", "eagle3 with a window")}


def random_pair(
    kind: str,
    model: dict | None = None,
    without: str = "",
    own: str = "",
    draft_vocab_size: int = 29,
    feature_layers: tuple[int, ...] = (1, 2, 4),
    **changes,
) -> Pair:
    """Make a random target of five layers and a random head, with a d2t of different gaps."""
    target = random_target(tiny_config(num_layers=5), context=0.2)
    model, eagle3 = tiny_config(**{"num_layers": 1, **(model or {})}), kind == "eagle3"
    vocab, layers = (draft_vocab_size, feature_layers) if eagle3 else (model.vocab_size, ())
    make = Eagle3Config if eagle3 else EagleConfig
    config = make(model, vocab, target.config.hidden_size, layers, **changes)
    required, optional = drafter_layout(config)
    wanted = required | {
        name: shape for name, shape in optional.items() if name == own or (name == "fc.bias" and not without)
    }
    tensors = {name: torch.randn(shape, dtype=torch.float64) * 0.2 for name, shape in wanted.items()}
    tensors |= {name: 1 + tensor for name, tensor in tensors.items() if "norm" in name}
    if eagle3:
        chosen = torch.randperm(model.vocab_size)[:vocab].sort().values
        tensors["d2t"] = chosen - torch.arange(vocab)
    return Pair(target, DrafterCheckpoint(config, tensors), None, kind)


class DenseEagle:
    """EAGLE-1/2 from transformers' Llama layers: fc first, no norm before the first attention or at the end."""

    def __init__(self, pair: Pair):
        self.tensors, self.head = pair.drafter.tensors, pair.target.tensors["lm_head.weight"]
        self.model = LlamaModel(llama_config(pair.drafter.config.model)).double()
        self.model.norm = self.model.layers[0].input_layernorm = torch.nn.Identity()
        names = self.model.state_dict()
        self.model.load_state_dict({name: self.tensors[name] for name in names})

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def __call__(self, ids: list[int], hidden_RH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute (next hidden, draft logits) of every row.

        Row p has position p.
        """
        both = torch.cat([self.tensors["embed_tokens.weight"][ids], hidden_RH], dim=-1)
        fused = linear(both, self.tensors["fc.weight"], self.tensors.get("fc.bias"))
        with torch.no_grad():
            hidden = self.model(inputs_embeds=fused[None], use_cache=False).last_hidden_state[0]
        return hidden, hidden @ self.head.T


class DenseEagle3:
    """EAGLE-3 from its checkpoint format: one layer over the normed embedding and the normed hidden, concatenated."""

    def __init__(self, pair: Pair):
        self.config, self.model, self.tensors = pair.drafter.config, pair.drafter.config.model, pair.drafter.tensors
        self.embedding = self.tensors.get("embed_tokens.weight", pair.target.tensors["model.embed_tokens.weight"])
        self.head = self.tensors.get("lm_head.weight", pair.target.tensors["lm_head.weight"])
        self.rotary = LlamaRotaryEmbedding(llama_config(self.model))

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        if self.config.norm_before_fc:
            features = self.norm(features, "input_norm")
        if self.config.fc_norm:
            chunks = features.chunk(len(self.config.feature_layers), dim=-1)
            features = torch.cat([self.norm(chunk, f"fc_norm.{i}") for i, chunk in enumerate(chunks)], dim=-1)
        return features @ self.tensors["fc.weight"].T

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self.tensors[f"{name}.weight"], self.model.rms_norm_eps)

    def project(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.tensors[f"midlayer.{name}_proj.weight"].T

    def __call__(self, ids: list[int], hidden_RH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute (next hidden, draft logits) of every row.

        Row p has position p.
        """
        normed = self.norm(hidden_RH, "midlayer.hidden_norm")
        residual = normed if self.config.norm_before_residual else hidden_RH
        hidden = residual + self.project(self.attend(*self.query_key_value(ids, hidden_RH)), "self_attn.o")
        normed = self.norm(hidden, "midlayer.post_attention_layernorm")
        hidden = hidden + self.project(
            silu(self.project(normed, "mlp.gate")) * self.project(normed, "mlp.up"), "mlp.down"
        )
        normed = self.norm(hidden, "norm")
        return normed if self.config.norm_output else hidden, normed @ self.head.T

    def query_key_value(self, ids: list[int], hidden_RH: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute query, key and value, each [1, heads, R, D], the first two rotated."""
        embedded = self.norm(self.embedding[ids], "midlayer.input_layernorm")
        both = torch.cat([embedded, self.norm(hidden_RH, "midlayer.hidden_norm")], dim=-1)
        query, key, value = (
            self.project(both, f"self_attn.{name}").view(1, len(ids), -1, self.model.head_dim).transpose(1, 2)
            for name in "qkv"
        )
        cos, sin = self.rotary(both, torch.arange(len(ids))[None])
        return *apply_rotary_pos_emb(query, key, cos, sin), value

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        rows, window = query.shape[2], self.model.window(0) or query.shape[2]
        mask = torch.tensor([[row - window < column <= row for column in range(rows)] for row in range(rows)])
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)


def dense_head(pair: Pair) -> DenseEagle | DenseEagle3:
    return (DenseEagle if pair.drafter.config.kind == "eagle" else DenseEagle3)(pair)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, budget: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=budget, atol=budget)


# A run of the real engine.


def poisoned(pools: KVPool) -> KVPool:
    """Fill empty pools with NaN in every slot, and put pages and rows in random order."""
    for buffer in filter(None, (pools.target, pools.draft)):
        buffer.keys.fill_(math.nan)
        buffer.values.fill_(math.nan)
    taken = [pools.open() for _ in pools.req_to_token]
    for row in taken:
        pools.reserve(row, 1)
    for index in torch.randperm(len(taken)).tolist():
        pools.close(taken[index])
    return pools


def make_batch(rows: list[int], lengths: list[int], prompt_lens: list[int], temperature: float = 0.0) -> Batch:
    batch = Batch.of(range(len(rows)), rows, prompt_lens, [SamplingParams(temperature)] * len(rows), vocab_size=48)
    return replace(batch, seq_lens=torch.tensor(lengths, dtype=torch.int64))


class Run:
    """Two or more requests under one setting, prefilled in chunks.

    `round` continues from there.
    """

    def __init__(self, pair: Pair, config: SpecConfig, lengths: list[int], chunks: int = 1):
        self.pair, self.engine = pair, Engine(pair, config, EngineOptions(dtype=torch.float64))
        self.config = self.engine.config
        num_pages = 640 // config.page_size
        self.pools = poisoned(self.engine.make_pools(num_pages, 640))
        self.prompts = [torch.randint(48, (length,)).tolist() for length in lengths]
        self.rows = [self.pools.open() for _ in lengths]
        for row, length in zip(self.rows, lengths, strict=True):
            self.pools.reserve(row, length)
        cuts = [[length * part // chunks for length in lengths] for part in range(chunks + 1)]
        for starts, ends in pairwise(cuts):
            self.prefill(starts, ends)

    def prefill(self, starts: list[int], ends: list[int]) -> None:
        """Prefill tokens starts..ends of every prompt.

        The token after is known unless the prompt ends there.
        """
        chunks = [prompt[start:end] for prompt, start, end in zip(self.prompts, starts, ends, strict=True)]
        known = [prompt[end] if end < len(prompt) else -1 for prompt, end in zip(self.prompts, ends, strict=True)]
        counts = torch.tensor([len(chunk) for chunk in chunks])
        row_starts = pad(counts.cumsum(0), (1, 0))
        ids = torch.tensor([token for chunk in chunks for token in chunk])
        prefill = PrefillInput(ids, row_starts, torch.tensor(starts), torch.tensor(known))
        self.batch = make_batch(self.rows, ends, [len(prompt) for prompt in self.prompts])
        self.draft_input = self.engine.prefill(self.batch, prefill, self.pools).draft_input

    def propose(self) -> tuple[Candidates, list[torch.Tensor]]:
        """Run the draft phase: its candidates, and the logits [B·K, draft vocabulary] of each forward."""
        reserve_lanes(self.pools, self.rows, self.batch.seq_lens.tolist(), self.config)
        head, calls = HEADS[self.pair.kind], []
        logits = head.logits
        with patch.object(head, "logits", lambda self, hidden: calls.append(logits(self, hidden)) or calls[-1]):
            return self.engine.drafter.propose(self.batch, self.draft_input, self.pools), calls

    def round(self) -> None:
        _, output, self.draft_input = self.engine.round(self.batch, self.draft_input, self.pools)
        lengths = (self.batch.seq_lens + output.verdict.num_accepted_tokens).tolist()
        self.batch = make_batch(self.rows, lengths, self.batch.prompt_lens.tolist())

    def drafter_rows(self, request: int) -> tuple[list[int], torch.Tensor]:
        """List the inputs that the drafter should have read: ids of tokens 1..L, fused features of tokens 0..L-1."""
        length = int(self.batch.seq_lens[request])
        tokens = self.pools.token_ids[self.rows[request], : length + 1]
        return tokens[1:].tolist(), dense_head(self.pair).fuse(self.features(tokens[:-1]))

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the target's features of one sequence in a single prefill with its own pool."""
        pools, row_starts = self.engine.make_pools(1, 160), torch.tensor([0, len(tokens)])
        row = pools.open()
        pools.reserve(row, len(tokens))
        slots = pools.slots(row, torch.arange(len(tokens)))
        metadata = causal_metadata(torch.tensor([row]), torch.tensor([0]), row_starts, slots, pools)
        return self.engine.target.forward(tokens, metadata, pools.target, self.engine.drafter.feature_layers).features


def tree(page_size: int = 4, draft_kv: str = "lane", **changes) -> SpecConfig:
    return SpecConfig(
        **{"topk": 3, "num_steps": 4, "num_draft_tokens": 8, "page_size": page_size, "draft_kv": draft_kv, **changes}
    )


# After prefill and draft-extend.


@every_head
def test_the_draft_input_after_prefill_equals_a_dense_forward(case):
    """The last row's hidden and its best tokens agree, with their probabilities and target ids."""
    run = Run(random_pair(**case), tree(), [13, 1, 8])
    assert_draft_input(run)


@every_head
def test_the_draft_input_after_extend_equals_a_dense_forward(case):
    run = Run(random_pair(**case), tree(), [13, 1, 8])
    for _ in range(3):
        run.round()
        assert_draft_input(run)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("extend_release", [("fixed", "finish"), ("ragged", "round")], ids="-".join)
def test_draft_extend_of_accepted_drafts_equals_a_dense_forward(extend_release, kind):
    """Drafts of a random head are hardly ever accepted, those of a synthetic pair are."""
    extend, release = extend_release
    run = Run(synthetic_pair(kind, num_layers=5), tree(extend=extend, release=release), [13, 1, 8])
    for _ in range(6):
        run.round()
        assert_draft_input(run)
    assert int(run.batch.seq_lens.sum()) - 22 > 6 * 3


def assert_draft_input(run: Run) -> None:
    dense, offsets = dense_head(run.pair), run.pair.drafter.tensors.get("d2t")
    for request in range(run.batch.size):
        ids, hidden = run.drafter_rows(request)
        out, logits = dense(ids, hidden)
        prob, best = softmax(logits[-1], dim=-1).sort(descending=True)
        target_ids = best if offsets is None else best + offsets[best]
        assert_close(run.draft_input.hidden[request], out[-1])
        assert run.draft_input.topk_index[request].tolist() == target_ids[:3].tolist()
        assert_close(run.draft_input.topk_scores[request].double(), prob[:3], budget=1e-6)
        assert run.draft_input.bonus_tokens[request] == ids[-1]


@pytest.mark.parametrize("case", TWO_KINDS.values(), ids=TWO_KINDS)
@pytest.mark.parametrize("chunks", [2, 3, 7])
def test_a_prompt_in_chunks_gives_the_state_of_the_whole_prompt(chunks, case):
    """The draft KV of a chunk's last token is that of the next known token."""
    run = Run(random_pair(**case), tree(), [13, 9], chunks)
    assert_draft_input(run)


def test_draft_slot_p_holds_token_p_plus_1_at_position_p():
    run = Run(random_pair("eagle3"), tree(), [13, 6])
    dense = dense_head(run.pair)
    for _ in range(3):
        for request, row in enumerate(run.rows):
            ids, hidden = run.drafter_rows(request)
            _, key, value = dense.query_key_value(ids, hidden)
            slots = run.pools.slots(row, torch.arange(len(ids)))
            assert_close(run.pools.draft.keys[0, slots], key[0].transpose(0, 1))
            assert_close(run.pools.draft.values[0, slots], value[0].transpose(0, 1))
        run.round()


# The draft phase.

PAGES_AND_LENGTHS = [(1, [5, 9]), (4, [8, 7]), (4, [3, 12]), (16, [16, 15]), (16, [31, 5])]


def lanes_at(candidates: Candidates, request: int, step: int, k: int) -> list[tuple[int, int]]:
    """List (flat candidate, parent's lane) of each lane at a step that runs a forward."""
    parent_list = candidates.parent_list[request].tolist()
    flats = parent_list[1 + k * step : 1 + k * (step + 1)]
    return [(flat, (flat // k - 1) % k) for flat in flats]


def dense_lanes(run: Run, candidates: Candidates, request: int, see_ancestors: bool) -> list[torch.Tensor]:
    """Compute draft logits [K, draft vocabulary] of each step, one dense forward per lane over the rows it should see.

    Those are the prefix's rows, and the rows that the lane itself or its ancestors wrote.
    """
    dense, (ids, hidden), k = dense_head(run.pair), run.drafter_rows(request), run.config.topk
    rows, handed_on, steps = [[] for _ in range(k)], [run.draft_input.hidden[request]] * k, []
    for step in range(run.config.num_steps - 1):
        lanes = lanes_at(candidates, request, step, k)
        parents = [parent if step else lane for lane, (_, parent) in enumerate(lanes)]
        own = [
            (int(candidates.tokens[request, flat]), handed_on[p]) for (flat, _), p in zip(lanes, parents, strict=True)
        ]
        rows = [[*rows[parents[lane] if see_ancestors else lane], own[lane]] for lane in range(k)]
        outs = [dense(ids + [t for t, _ in lane], torch.stack([*hidden, *(h for _, h in lane)])) for lane in rows]
        handed_on = [out[-1] for out, _ in outs]
        steps.append(torch.stack([logits[-1] for _, logits in outs]))
    return steps


def reparented(candidates: Candidates, config: SpecConfig) -> bool:
    """Check whether some lane continued another lane before the last forward."""
    steps = [(request, step) for request in range(len(candidates.tokens)) for step in range(1, config.num_steps - 1)]
    return any(
        parent != lane
        for request, step in steps
        for lane, (_, parent) in enumerate(lanes_at(candidates, request, step, config.topk))
    )


@pytest.mark.parametrize("case", TWO_KINDS.values(), ids=TWO_KINDS)
@pytest.mark.parametrize("draft_kv", ["lane", "ancestor"])
@pytest.mark.parametrize(("page_size", "lengths"), PAGES_AND_LENGTHS)
def test_every_lane_equals_a_dense_forward_over_its_path(page_size, lengths, draft_kv, case):
    """The first round is compared, and the next two on KV rewritten by draft-extend."""
    run, changed_parents = Run(random_pair(**case), tree(page_size, draft_kv), lengths), False
    for _ in range(3):
        candidates, calls = run.propose()
        assert len(calls) == run.config.num_steps - 1
        for request in range(2):
            expected = dense_lanes(run, candidates, request, see_ancestors=draft_kv == "ancestor")
            for logits, wanted in zip(calls, expected, strict=True):
                assert_close(logits.view(2, run.config.topk, -1)[request], wanted)
        changed_parents |= reparented(candidates, run.config)
        run.round()
    assert changed_parents


def test_lane_and_ancestor_differ_once_a_lane_is_reparented():
    """Otherwise the test above would compare the same mode twice."""
    run = Run(random_pair("eagle3"), tree(), [7, 8])
    candidates, _ = run.propose()
    lane, ancestor = (dense_lanes(run, candidates, 0, see_ancestors)[-1] for see_ancestors in (False, True))
    assert (lane - ancestor).abs().max() > 1e-4


@pytest.mark.parametrize("shape", [(1, 4, 5), (2, 2, 5), (5, 3, 12)], ids=str)
@pytest.mark.parametrize("extend_release", [("fixed", "finish"), ("ragged", "round")], ids="-".join)
def test_chains_and_other_widths_equal_dense_forwards_too(shape, extend_release):
    topk, num_steps, num_draft_tokens = shape
    extend, release = extend_release
    config = SpecConfig(topk, num_steps, num_draft_tokens, page_size=4, extend=extend, release=release)
    run = Run(random_pair("eagle3"), config, [7, 12])
    for _ in range(3):
        candidates, calls = run.propose()
        for request in range(2):
            for logits, wanted in zip(calls, dense_lanes(run, candidates, request, see_ancestors=False), strict=True):
                assert_close(logits.view(2, topk, -1)[request], wanted)
        run.round()


@pytest.mark.parametrize("score", ["prob", "logprob"])
@pytest.mark.parametrize("beyond", [0, 1, 2])
def test_lanes_at_the_length_limit_propose_nothing(beyond, score):
    """Request 0 of 9 tokens drafts at positions 9, 10 and 11.

    Positions from max_len on have probability 0.
    """
    pair = random_pair("eagle3")
    config = tree(score=score)
    impossible = 0 if score == "prob" else -torch.inf
    torch.manual_seed(1)
    free, _ = Run(pair, config, [9, 4]).propose()
    torch.manual_seed(1)
    limited, _ = Run(pair, replace(config, max_len=9 + beyond + 1), [9, 4]).propose()
    first_dropped = 3 + 9 * (beyond + 1)
    assert (limited.scores[0, first_dropped:] == impossible).all()
    assert (limited.scores[0, :first_dropped] > impossible).all()
    assert torch.equal(limited.tokens[0, :first_dropped], free.tokens[0, :first_dropped])
    assert limited.tokens[0, first_dropped:].tolist() == [0, 1, 2] * ((len(free.tokens[0]) - first_dropped) // 3)
    assert torch.equal(limited.tokens[1], free.tokens[1])


# No requests, and no drafter.


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_no_requests_pass_through_the_draft_phases(kind):
    run = Run(random_pair(kind), tree(), [7])
    run.rows, run.batch, idle = [], make_batch([], [], []), run.engine.drafter.idle()
    run.draft_input = idle
    candidates, _ = run.propose()
    assert candidates.tokens.shape == candidates.scores.shape == (0, 30)
    assert candidates.parent_list.shape == (0, 10)
    run.round()
    for name in ("topk_scores", "topk_index", "hidden", "bonus_tokens"):
        mine, idle_one = getattr(run.draft_input, name), getattr(idle, name)
        assert (mine.shape, mine.dtype) == (idle_one.shape, idle_one.dtype), name


def test_no_drafter_hands_on_the_root_and_proposes_nothing():
    drafter, batch = NoDrafter(), make_batch([0, 1], [4, 5], [4, 5])
    draft_input = drafter.seed(batch, None, torch.tensor([7, 8], dtype=torch.int32), None, None)
    candidates = drafter.propose(batch, draft_input, None)
    assert draft_input.bonus_tokens.tolist() == [7, 8]
    assert draft_input.bonus_tokens.dtype == torch.int32
    assert candidates.tokens.shape == candidates.scores.shape == (2, 0)
    assert candidates.parent_list.tolist() == [[-1], [-1]]
    assert isinstance(drafter.idle(), DraftInput)
    assert drafter.idle().is_idle
    assert drafter.kv_layout is None
    assert drafter.feature_layers == ()


# The fast implementation.


def rounded(pair: Pair, dtype: torch.dtype) -> Pair:
    """Round the pair's weights to dtype, so that both implementations read the same numbers."""

    def tensors(checkpoint):
        kept = {n: t.to(dtype) if t.is_floating_point() else t for n, t in checkpoint.tensors.items()}
        return replace(checkpoint, tensors=kept)

    return replace(pair, target=tensors(pair.target), drafter=tensors(pair.drafter))


def two_rounds(
    pair: Pair, config: SpecConfig, impl: str, dtype: torch.dtype, device: str | None = None, temperature: float = 0.0
) -> list:
    """Compute the DraftInput after prefill, then the candidates of a round and the DraftInput after it."""
    engine = load_engine(pair, config, EngineOptions(impl, dtype, device, "eager"))
    pools = poisoned(engine.make_pools(8, 640))
    prompts = [
        torch.randint(48, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (13, 1, 8)
    ]
    rows = [pools.open() for _ in prompts]
    for row, prompt in zip(rows, prompts, strict=True):
        pools.reserve(row, len(prompt))
    lengths = [len(prompt) for prompt in prompts]
    batch = make_batch(rows, lengths, lengths, temperature).to(engine.device)
    prefill = PrefillInput.of_prompts(prompts).to(engine.device)
    with torch.inference_mode():
        first = engine.prefill(batch, prefill, pools).draft_input
        tree, _, second = engine.round(batch, first, pools)
    return [state.to("cpu") for state in (first, tree.candidates, second)]


@pytest.mark.parametrize(
    ("case", "draft_kv"),
    [*zip(HEAD_CASES.values(), cycle(("lane", "ancestor")), strict=False), (HEAD_CASES["eagle"], "ancestor")],
    ids=[*HEAD_CASES, "eagle, ancestor"],
)
def test_the_fast_drafter_proposes_the_references_candidates(case, draft_kv, device):
    pair, config = rounded(random_pair(**case), torch.float32), tree(draft_kv=draft_kv)
    fast = two_rounds(pair, config, "fast", torch.float32, device)
    plain, exact = (two_rounds(pair, config, "reference", dtype) for dtype in (torch.float32, torch.float64))
    for mine, theirs, truth in zip(fast, plain, exact, strict=True):
        for name in ("topk_index", "tokens", "parent_list", "bonus_tokens"):
            assert not hasattr(truth, name) or torch.equal(getattr(mine, name), getattr(truth, name)), name
        for name in ("topk_scores", "scores", "hidden"):
            if hasattr(truth, name):
                found, plainly, truly = (getattr(state, name).double() for state in (mine, theirs, truth))
                # A probability has the rounding error of its logit, whose exponential it is.
                scale = truly.abs().max() if name == "hidden" else exact[1].draft_logits[0].abs().max()
                budget = 4 * (plainly - truly).abs().max() + 8 * torch.finfo(torch.float32).eps * scale
                assert (found - truly).abs().max() <= budget, name


@pytest.mark.parametrize(("topk", "num_draft_tokens"), [(1, 5), (3, 25)])
def test_a_fast_peaked_drafter_scores_as_the_reference_does(topk, num_draft_tokens, device):
    """Logits are spread over 300, for first drafts after prefill and after draft-extend, and for every step."""
    pair = rounded(random_pair("eagle3"), torch.float32)
    tensors = pair.drafter.tensors | {"lm_head.weight": 64 * pair.drafter.tensors["lm_head.weight"]}
    pair = replace(pair, drafter=replace(pair.drafter, tensors=tensors))
    config = tree(topk=topk, num_draft_tokens=num_draft_tokens, score="logprob")
    fast = two_rounds(pair, config, "fast", torch.float32, device)
    plain, exact = (two_rounds(pair, config, "reference", dtype) for dtype in (torch.float32, torch.float64))
    logits = torch.stack(exact[1].draft_logits)
    assert (logits.amax(-1) - logits.amin(-1)).max() > 300
    for mine, theirs, truth in zip(fast, plain, exact, strict=True):
        for name in ("topk_index", "tokens", "parent_list"):
            assert not hasattr(truth, name) or torch.equal(getattr(mine, name), getattr(truth, name)), name
        name = "scores" if hasattr(truth, "scores") else "topk_scores"
        found, plainly, truly = (getattr(state, name).double() for state in (mine, theirs, truth))
        budget = 4 * (plainly - truly).abs().max() + 8 * torch.finfo(torch.float32).eps * logits.abs().max()
        assert found.isfinite().all()
        assert (found - truly).abs().max() <= budget
    assert topk == 1 or exact[1].scores.min() < -104


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("verifier", ["rejection", "gumbel", "multi_round", "recursive"])
@pytest.mark.parametrize("score", ["prob", "logprob"])
def test_the_fast_drafter_samples_the_references_drafts(verifier, kind, score, device):
    """Drafts by uniforms, by noise and in several lanes agree in every step, and so do their distributions."""
    pair, topk = rounded(random_pair(kind), torch.float32), 3 if KIND_OF[verifier].has_lanes else 1
    config = tree(topk=topk, num_draft_tokens=1 + 4 * topk, verifier=verifier, score=score)
    fast = two_rounds(pair, config, "fast", torch.float32, device, temperature=1.0)
    exact = two_rounds(pair, config, "reference", torch.float64, temperature=1.0)
    for mine, truth in zip(fast, exact, strict=True):
        for name, expected in truth.tensors.items():
            if expected.is_floating_point():
                assert_close(getattr(mine, name).double(), expected.double(), budget=1e-4)
            else:
                assert torch.equal(getattr(mine, name), expected), name


def test_the_fast_plain_drafter_proposes_nothing(device):
    pair, config = replace(rounded(random_pair("eagle"), torch.float32), drafter=None), SpecConfig.plain(page_size=4)
    fast, exact = (two_rounds(pair, config, impl, torch.float32) for impl in ("fast", "reference"))
    assert type(fast[0]) is type(exact[0]) is DraftInput
    assert fast[1].tokens.shape == (3, 0)
    assert torch.equal(fast[2].bonus_tokens, exact[2].bonus_tokens)
    idle = load_engine(pair, config, EngineOptions("fast", torch.float32, device)).drafter.idle()
    for name, live in fast[0].tensors.items():
        assert idle.tensors[name].shape == (0, *live.shape[1:]), name
