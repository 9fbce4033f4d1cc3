"""Block drafters (DFlash, DSpark) against transformers' candidate generator, the oracle and plain decoding."""

from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator
from transformers.models.muse_glimmer_assistant.configuration_muse_glimmer_assistant import MuseGlimmerAssistantConfig
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import (
    MuseGlimmerAssistantModel,
    MuseGlimmerAssistantRMSNorm,
)

from specsim import SamplingParams, SpecConfig
from specsim.core.block import BlockConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.pair import Pair
from specsim.core.phases import Batch, ExplicitCandidates, PrefillInput
from specsim.correctness.differential import Cell
from specsim.correctness.differential.oracle import compare_with_oracle
from specsim.models.synthetic_pair import synthetic_pair
from specsim.serving.generation import generate, load_engine

from .served import PREFIXED, SAMPLING, served

PROMPTS = ((5, 17, 3, 40, 8, 9, 30), (1, 2, 3, 4), (30,))
EXACT = EngineOptions(dtype=torch.float64)
FAST = EngineOptions(impl="fast")
FAMILIES = ["llama", "qwen3", "mistral"]
KINDS = ["dflash", "dspark"]
WINDOW = {"mistral": 4}
CHAIN = SpecConfig(1, 3, page_size=4)
TREE = SpecConfig(4, 3, 8, page_size=4)
SETTINGS = {
    "chain": CHAIN,
    "chain, round": replace(CHAIN, page_size=1, release="round", extend="ragged"),
    "tree": TREE,
    "tree, sums": replace(TREE, score="logprob", num_draft_tokens=14, release="round"),
    "tree, large pages": SpecConfig(2, 7, 12, page_size=16),
    "near the limit": replace(TREE, max_len=14),
}
SAMPLED = {
    "rejection": replace(CHAIN, verifier="rejection"),
    "block": replace(CHAIN, verifier="block", page_size=1),
    "gumbel": replace(CHAIN, verifier="gumbel", release="round"),
    "multi_round": SpecConfig(2, 3, page_size=4, verifier="multi_round"),
    "near the limit": replace(CHAIN, verifier="rejection", max_len=13),
    "target_only": TREE,
}
every_kind = pytest.mark.parametrize("kind", KINDS)
both = pytest.mark.parametrize("options", [EXACT, FAST], ids=["reference", "fast"])


def pair_of(kind: str, family: str = "llama", **changes) -> Pair:
    return synthetic_pair(kind, family, **{"window": WINDOW.get(family), **changes})


def with_block(pair: Pair, **changes) -> Pair:
    config = pair.checkpoint.config
    return replace(
        pair, drafter=replace(pair.checkpoint, config=replace(config, block=replace(config.block, **changes)))
    )


def run(pair: Pair, config: SpecConfig, options: EngineOptions, chunks=(7,), prompt=PROMPTS[0]):
    """Yield (tokens with the root, tree, pools) of some rounds, after the draft phase."""
    engine = load_engine(pair, config, options)
    pools = engine.make_pools(1, 160)
    row = pools.open()
    pools.reserve(row, len(prompt))
    start = 0
    for end in chunks:
        known = torch.tensor([prompt[end] if end < len(prompt) else -1])
        part = replace(
            PrefillInput.of_prompts([prompt[start:end]]), start_lens=torch.tensor([start]), next_tokens=known
        )
        batch = Batch.of([0], [row], [end], [SamplingParams()], pair.target.config.vocab_size)
        batch = replace(batch, prompt_lens=torch.tensor([len(prompt)])).to(engine.device)
        draft_input = engine.prefill(batch, part.to(engine.device), pools).draft_input
        start = end
    for _ in range(5):
        tokens = pools.token_ids[row, : int(batch.seq_lens) + 1].tolist()
        tree = engine.draft(batch, draft_input, pools)
        yield tokens, tree, pools
        output = engine.verify(batch, tree, pools)
        draft_input = engine.draft_extend(batch, output.draft_extend_input, pools)
        batch = batch.after(output.verdict.num_accepted_tokens)


# The candidate generator of transformers, whose drafter has the layers of Qwen3.


def assistant_of(pair: Pair, monkeypatch) -> MuseGlimmerAssistantModel:
    monkeypatch.setattr(
        MuseGlimmerAssistantRMSNorm,
        "forward",
        lambda self, x: self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon),
    )
    own = pair.checkpoint.config
    model = own.model
    config = MuseGlimmerAssistantConfig(
        hidden_size=model.hidden_size, intermediate_size=model.intermediate_size, num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads, num_key_value_heads=model.num_kv_heads, head_dim=model.head_dim,
        rms_norm_eps=model.rms_norm_eps, rope_parameters={"rope_theta": model.rope.theta, "rope_type": "default"},
        layer_types=["full_attention"] * model.num_layers, block_size=own.block.size,
        mask_token_id=own.block.mask_token, target_layer_ids=[layer - 1 for layer in own.feature_layers],
        attn_implementation="eager",
    )  # fmt: skip
    theirs = MuseGlimmerAssistantModel(config).double().eval()
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    theirs.load_state_dict({names.get(name, name): tensor for name, tensor in pair.checkpoint.tensors.items()})
    return theirs


def qwen_of(pair: Pair):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = pair.target.config
    config = Qwen3Config(
        vocab_size=model.vocab_size, hidden_size=model.hidden_size, intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers, num_attention_heads=model.num_heads, head_dim=model.head_dim,
        num_key_value_heads=model.num_kv_heads, rms_norm_eps=model.rms_norm_eps, tie_word_embeddings=False,
        rope_parameters={"rope_theta": model.rope.theta, "rope_type": "default"}, attn_implementation="eager",
    )  # fmt: skip
    theirs = Qwen3ForCausalLM(config).double().eval()
    theirs.load_state_dict(pair.target.tensors)
    return theirs


@both
@pytest.mark.parametrize("chunks", [(7,), (3, 7)], ids=str)
def test_drafts_are_those_of_transformers_generator(chunks, options, monkeypatch):
    """One generator for all rounds, whose cache drops the block and appends the accepted rows' context."""
    pair = with_block(pair_of("dflash", "qwen3", num_layers=4, noise=0.05), size=4)
    target = qwen_of(pair)
    generator = DFlashTokenCandidateGenerator(
        assistant_of(pair, monkeypatch),
        target.model.embed_tokens,
        target.lm_head,
        GenerationConfig(max_length=200, do_sample=False),
    )
    known = 0
    found = []
    for tokens, tree, _ in run(pair, CHAIN, options, chunks):
        with torch.no_grad():
            hidden = target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
            new = SimpleNamespace(hidden_states=[each[:, known:] for each in hidden])
            whole = torch.arange(len(tokens))[None]
            fields = {"position_ids": whole, "attention_mask": torch.ones_like(whole)}
            ids, _ = generator.get_candidates(
                torch.tensor([tokens]), fields, new, is_first_iteration=False, n_last_matches=len(tokens) - 2 - known
            )
        known = len(tokens) - 1
        assert tree.draft_tokens[0, 1:].tolist() == ids[0, len(tokens) :].tolist()
        found.append(known)
    assert max(b - a for a, b in pairwise(found)) > 1  # some draft was accepted


# The oracle and plain decoding.


@every_kind
@pytest.mark.parametrize(("name", "family"), [*zip(SETTINGS, FAMILIES * 2, strict=True)])
def test_greedy_rounds_are_the_oracles(name, family, kind):
    sampling = tuple(SamplingParams(max_new_tokens=10) for _ in PROMPTS)
    cell = Cell("one", f"{kind}-llama", PROMPTS, sampling, SETTINGS[name])
    assert compare_with_oracle(cell, pair_of(kind, family, noise=0.05)) == []


@every_kind
@pytest.mark.parametrize(("name", "family"), [*zip(SAMPLED, FAMILIES * 2, strict=True)])
def test_sampled_rounds_are_the_oracles(name, family, kind):
    sampling = tuple(SamplingParams(temperature=0.9, seed=seed, max_new_tokens=10) for seed in range(3))
    cell = Cell("one", f"{kind}-llama", PROMPTS, sampling, SAMPLED[name])
    assert compare_with_oracle(cell, pair_of(kind, family, noise=0.05)) == []


@pytest.mark.parametrize("changes", [{"predicts": "next"}, {"predicts": "own"}], ids=str)
def test_the_shift_is_that_of_the_config(changes):
    """The same tensors draft other tokens under the other shift, and the oracle knows both."""
    pairs = [with_block(pair_of("dflash", noise=0.1), **each) for each in (changes, {"predicts": "own"})]
    sampling = tuple(SamplingParams(max_new_tokens=10) for _ in PROMPTS)
    assert compare_with_oracle(Cell("one", "dflash-llama", PROMPTS, sampling, TREE), pairs[0]) == []
    trees = [next(run(pair, CHAIN, EXACT))[1].draft_tokens.tolist() for pair in pairs]
    assert (trees[0] == trees[1]) == (changes["predicts"] == "own")


@pytest.mark.by_default(
    "tree, large pages-fast-dspark",
    "chain, round-fast-dflash",
    "tree, sums-reference-dflash",
    "near the limit-reference-dspark",
)
@every_kind
@both
@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_output_is_that_of_plain_decoding(name, options, kind):
    pair = pair_of(kind, "mistral")
    config = SETTINGS[name]
    plain = SpecConfig.plain(page_size=config.page_size, max_len=config.max_len)
    sampling = SamplingParams(max_new_tokens=10)
    expected = generate(pair, PROMPTS, plain, sampling, engine=EXACT).outputs
    found = generate(pair, PROMPTS, config, sampling, engine=options).outputs
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]


@pytest.mark.by_default("round")
@pytest.mark.parametrize("graph", ["eager", "round"])
def test_bfloat16_runs_and_accepts_drafts(graph):
    engine = EngineOptions("fast", torch.bfloat16, graph=graph)
    outputs = generate(pair_of("dspark"), PROMPTS, CHAIN, SamplingParams(max_new_tokens=8), engine=engine).outputs
    assert max(max(each.num_accepted_tokens_per_round) for each in outputs) > 1


# The tree over the slots.


@both
@pytest.mark.parametrize("score", ["prob", "logprob"])
def test_the_tree_holds_the_best_of_all_paths(score, options):
    """Slots are independent in DFlash, so every path's score is a product of the slots' own probabilities."""
    pair = pair_of("dflash", noise=0.1)
    config = SpecConfig(3, 3, 10, page_size=4, score=score)
    wide = SpecConfig(3, 3, 22, page_size=4, score=score)
    for (_, tree, _), (_, whole, _) in zip(run(pair, config, options), run(pair, wide, EXACT), strict=True):
        logits = [each[0, 0].double().log_softmax(-1) for each in whole.candidates.draft_logits]
        best = [sorted(range(len(row)), key=lambda token, row=row: -float(row[token]))[:3] for row in logits]
        scores = {
            path: sum(float(row[token]) for row, token in zip(logits, path, strict=False))
            for depth in (1, 2, 3)
            for path in product(*best[:depth])
        }
        expected = set(sorted(scores, key=lambda path: -scores[path])[:9])
        assert set(paths_of(tree)) == expected
        assert int(tree.proposed_depth) == max(map(len, expected))


def paths_of(tree) -> list[tuple[int, ...]]:
    tokens = tree.draft_tokens[0].tolist()
    parents = tree.parents[0].tolist()
    paths = [()]
    for node in range(1, len(tokens)):
        if parents[node] >= 0:
            paths.append((*paths[parents[node]], tokens[node]))
    return paths[1:]


@pytest.mark.parametrize("config", [*SETTINGS.values(), *SAMPLED.values()])
def test_candidates_have_the_sizes_of_their_depths(config):
    """No depth has more children than the setting's tree could use, and all together suffice for it."""
    sizes = config.level_sizes
    assert len(sizes) == config.num_steps
    assert sum(sizes) >= config.num_draft_tokens - 1
    assert max(sizes) <= (config.num_draft_tokens - 1) * config.topk


# The confidence head.


@pytest.mark.every_value
@both
@pytest.mark.parametrize("name", ["chain", "tree", "rejection", "multi_round"])
def test_drafts_end_before_a_low_confidence(name, options):
    """A cut leaves dead nodes: the tree is that of all slots, without the depths behind the cut."""
    config = (SETTINGS | SAMPLED)[name]
    pairs = [with_block(pair_of("dspark"), threshold=threshold) for threshold in (0.0, 0.6)]
    depths = []
    for prompt in PROMPTS:
        first = [next(run(pair, config, options, (len(prompt),), prompt))[1] for pair in pairs]
        confidence = torch.sigmoid(candidates(first[0]).confidence[0])
        depth = int((confidence >= 0.6).long().cumprod(0).sum())
        depths.append(depth)
        assert int(first[1].proposed_depth) <= depth
        assert int(candidates(first[1]).num_alive) == sum(config.level_sizes[:depth])
        for name in ("tokens", "scores", "parents"):
            assert torch.equal(getattr(candidates(first[0]), name), getattr(candidates(first[1]), name))
    assert min(depths) < config.num_steps


def candidates(tree) -> ExplicitCandidates:
    assert isinstance(tree.candidates, ExplicitCandidates)
    return tree.candidates


@both
def test_q_is_conditional_on_the_draft_before(options):
    """DSpark's distribution of a draft is that of its slot and the token before it, not of the slot alone."""
    pair = with_block(pair_of("dspark"), threshold=0.0)
    sampling = [SamplingParams(temperature=3.0, seed=seed) for seed in range(6)]
    engine = load_engine(pair, SAMPLED["rejection"], options)
    pools = engine.make_pools(6, 300)
    rows = [pools.open() for _ in sampling]
    for row in rows:
        pools.reserve(row, 7)
    batch = Batch.of([*range(6)], rows, [7] * 6, sampling, pair.target.config.vocab_size).to(engine.device)
    prefill = replace(PrefillInput.of_prompts([PROMPTS[0]] * 6), next_tokens=torch.full((6,), 11)).to(engine.device)
    tree = engine.draft(batch, engine.prefill(batch, prefill, pools).draft_input, pools)
    first = tree.draft_tokens[:, 1].tolist()
    assert len(set(first)) > 1
    draft_prob = tree.draft_prob.double().cpu()
    assert torch.allclose(draft_prob.sum(-1), torch.ones(6, 3, dtype=torch.float64))
    for one, other in product(range(6), repeat=2):
        assert torch.allclose(draft_prob[one, 0], draft_prob[other, 0], rtol=0, atol=1e-6)
        is_equal = torch.allclose(draft_prob[one, 1], draft_prob[other, 1], rtol=0, atol=1e-6)
        assert is_equal == (first[one] == first[other])


# KV of the context and of the block.


@pytest.mark.every_value
@both
@every_kind
@pytest.mark.parametrize("name", ["chain", "chain, round", "tree, sums"])
def test_the_block_leaves_no_kv_in_committed_columns(name, kind, options):
    """After draft-extend every committed column holds the context, as a prefill of the same tokens writes it."""
    pair = pair_of(kind, noise=0.05)
    config = SETTINGS[name]
    *_, (tokens, _, pools) = run(pair, config, options)
    prompt = tuple(tokens[:-1])
    *_, (_, _, fresh) = [next(run(pair, config, options, (len(prompt),), prompt))]
    # A block has been run in both pools; its columns begin after the committed ones.
    slots = [each.slots(0, torch.arange(len(prompt))) for each in (pools, fresh)]
    for part in ("keys", "values"):
        written, expected = (getattr(p.draft, part)[:, s].double() for p, s in zip((pools, fresh), slots, strict=True))
        assert torch.allclose(written, expected, rtol=0, atol=1e-4)


# Serving.


@every_kind
@pytest.mark.parametrize("release", ["finish", "round"])
@pytest.mark.parametrize(
    "setting",
    [dict(prefix_cache=True, max_running=2), dict(chunk_tokens=3), dict(num_slots=44, prefix_cache=True)],
    ids=["prefix cache", "chunks", "preemption"],
)
def test_served_rounds_are_those_of_a_solo_run(setting, release, kind):
    pair = pair_of(kind, "mistral", noise=0.05)
    config = replace(CHAIN, release=release)
    _, requests = served(pair, config, setting, EXACT)
    for request, prompt in zip(requests, PREFIXED, strict=True):
        (solo,) = generate(pair, [prompt], config, SAMPLING, engine=EXACT).outputs
        found = (tuple(request.token_ids), tuple(request.accepted))
        assert found == (solo.token_ids, solo.num_accepted_tokens_per_round)


# Limits.


@both
@pytest.mark.parametrize(("kind", "most"), [("dflash", 7), ("dspark", 8)])
def test_more_steps_than_a_block_drafts_are_refused(kind, most, options):
    with pytest.raises(InputError) as error:
        load_engine(pair_of(kind), SpecConfig(1, most + 1), options)
    assert (error.value.name, error.value.value) == ("num_steps", most + 1)
    assert load_engine(pair_of(kind), SpecConfig(1, most), options).drafter.block_rows == 8


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"size": 1}, "block_size"),
        ({"predicts": "both"}, "predicts"),
        ({"confidence": "hidden_and_token"}, "markov_rank"),
        ({"threshold": 0.5}, "confidence_threshold"),
        ({"confidence": "hidden", "threshold": 1.5}, "confidence_threshold"),
    ],
)
def test_impossible_blocks_are_refused(fields, name):
    with pytest.raises(InputError) as error:
        BlockConfig(**{"size": 4, "mask_token": 0} | fields)
    assert error.value.name == name
