"""Block drafters (DFlash, DSpark) against transformers' candidate generator and the oracle."""

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

from specsim.core.block import BlockConfig
from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.errors import InputError
from specsim.core.pair import Pair
from specsim.core.phases import ExplicitCandidates
from specsim.models.checkpoint.drafter_format import drafter_layout
from specsim.serving.generation import load_engine

from . import rounds
from .rounds import CHAIN, EXACT, FAST, PROMPTS, TREE, both, draft_phases
from .transformers_models import norm_in_its_type, sizes_of

SETTINGS = {
    "chain": CHAIN,
    "chain, round": rounds.SETTINGS["chain, round"],
    "tree": TREE,
    "tree, sums": replace(TREE, score="logprob", num_draft_tokens=14, release="round"),
    "tree, large pages": SpecConfig(2, 7, 12, page_size=16),
    "near the limit": replace(TREE, max_len=14),
}
SAMPLED = rounds.SAMPLED | {"sampled near the limit": replace(CHAIN, verifier="rejection", max_len=13)}
uncaptured = pytest.mark.parametrize("options", [EXACT, replace(FAST, graph="eager")], ids=["reference", "fast"])
every_kind = pytest.mark.parametrize("kind", ["dflash", "dspark"])


def pair_of(kind: str, family: str = "llama", **changes) -> Pair:
    return rounds.pair_of(kind, family, **{"window": 4 if family == "mistral" else None} | changes)


def with_block(pair: Pair, **changes) -> Pair:
    config = pair.checkpoint.config
    return replace(
        pair, drafter=replace(pair.checkpoint, config=replace(config, block=replace(config.block, **changes)))
    )


# The candidate generator of transformers, whose drafter has the layers of Qwen3.


def assistant_of(pair: Pair, monkeypatch) -> MuseGlimmerAssistantModel:
    monkeypatch.setattr(MuseGlimmerAssistantRMSNorm, "forward", norm_in_its_type)
    own = pair.checkpoint.config
    model = own.model
    config = MuseGlimmerAssistantConfig(
        **sizes_of(model) | {"attn_implementation": "eager"}, layer_types=["full_attention"] * model.num_layers,
        block_size=own.block.size, mask_token_id=own.block.mask_token,
        target_layer_ids=[layer - 1 for layer in own.feature_layers],
    )  # fmt: skip
    theirs = MuseGlimmerAssistantModel(config).double().eval()
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    theirs.load_state_dict({names.get(name, name): tensor for name, tensor in pair.checkpoint.tensors.items()})
    return theirs


def qwen_of(pair: Pair):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **sizes_of(pair.target.config) | {"tie_word_embeddings": False, "attn_implementation": "eager"}
    )
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
    for tokens, tree, *_ in draft_phases(pair, CHAIN, options, chunks):
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


# The oracle.


@every_kind
@rounds.settings_and_families(SETTINGS, SAMPLED)
def test_rounds_are_the_oracles(name, family, kind):
    pair = pair_of(kind, family, noise=0.05)
    rounds.assert_equal_to_the_oracle(pair, (SETTINGS | SAMPLED)[name], 0.9 if name in SAMPLED else 0.0)


@pytest.mark.parametrize("changes", [{"predicts": "next"}, {"predicts": "own"}], ids=str)
def test_the_shift_is_that_of_the_config(changes):
    """The same tensors draft other tokens under the other shift, and the oracle knows both."""
    pairs = [with_block(pair_of("dflash", noise=0.1), **each) for each in (changes, {"predicts": "own"})]
    rounds.assert_equal_to_the_oracle(pairs[0], TREE)
    trees = [next(draft_phases(pair, CHAIN)).tree.draft_tokens.tolist() for pair in pairs]
    assert (trees[0] == trees[1]) == (changes["predicts"] == "own")


# Rows that see only the block's rows up to their own, and windows.


def masked(kind: str, causal_layers: tuple[int, ...], num_layers: int = 2, **changes) -> Pair:
    """Make a block drafter of some layers, those of them causal, whose random weights let every row see others."""
    pair = pair_of(kind, **changes)
    config = pair.checkpoint.config
    model = replace(config.model, layers=config.model.layers[:num_layers])
    config = replace(config, model=model, causal_layers=causal_layers)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5 + (len(shape) == 1)
        for name, shape in drafter_layout(config).required.items()
    }
    return replace(pair, drafter=replace(pair.checkpoint, config=config, tensors=tensors))


def hidden_rows(pair: Pair, num_steps: int, options, column: int | None = None) -> torch.Tensor:
    """Hidden states of the first block's rows, [R, H], after the draft keys of one column were moved."""
    run = rounds.prefilled(pair, SpecConfig(1, num_steps, page_size=4), options, [rounds.LONG])
    if column is not None:
        run.pools.draft.keys[:, run.pools.slots(0, torch.tensor([column], device=run.engine.device))] += 3.0
    head = run.engine.drafter._head
    recorded = []
    with pytest.MonkeyPatch.context() as patch:
        forward = type(head).forward
        patch.setattr(type(head), "forward", lambda *args: recorded.append(forward(*args)) or recorded[0])
        run.engine.draft(run.batch, run.draft_input, run.pools)
    return recorded[0].double().cpu()


def moved_rows(before: torch.Tensor, after: torch.Tensor) -> list[bool]:
    return ((before - after).abs().amax(1) > 1e-4).tolist()


LAYERS = [(), (0,), (1,), (0, 1)]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.parametrize("causal_layers", LAYERS[1:], ids=str)
def test_rounds_of_causal_blocks_are_the_oracles(causal_layers, kind, window):
    """The window is shorter than the block."""
    pair = masked(kind, causal_layers, window=window)
    rounds.assert_equal_to_the_oracle(pair, SpecConfig(2, 6, 9, page_size=4))


@uncaptured
@pytest.mark.parametrize("causal_layers", LAYERS, ids=str)
def test_a_draft_sees_later_rows_unless_every_layer_is_causal(causal_layers, options):
    """A row of a longer block has the same hidden state where no layer reads the rows after it."""
    pair = masked("dflash", causal_layers)
    few, more = (hidden_rows(pair, num_steps, options) for num_steps in (2, 5))
    assert any(moved_rows(few, more[:3])) == (causal_layers != (0, 1))


@uncaptured
@pytest.mark.parametrize("causal_layers", [(), (0,)], ids=str)
def test_a_window_ends_at_the_row_itself(causal_layers, options):
    """In one layer the row at L + j sees the columns after L + j - window and no others."""
    window = 6
    length = len(rounds.LONG)
    pair = masked("dflash", causal_layers, num_layers=1, window=window)
    before = hidden_rows(pair, 4, options)
    for column in range(length):
        after = hidden_rows(pair, 4, options, column)
        assert moved_rows(before, after) == [column > length + row - window for row in range(5)], column


@pytest.mark.parametrize("causal_layers", [(2,), (-1,), (1, 0), (0, 0)], ids=str)
def test_causal_layers_that_are_none(causal_layers):
    with pytest.raises(InputError, check=lambda error: error.name == "causal_layers"):
        masked("dflash", causal_layers)


# The tree over the slots.


@both
@pytest.mark.parametrize("score", ["prob", "logprob"])
def test_the_tree_holds_the_best_of_all_paths(score, options):
    """Slots are independent in DFlash, so every path's score is a product of the slots' own probabilities."""
    pair = pair_of("dflash", noise=0.1)
    config = SpecConfig(3, 3, 10, page_size=4, score=score)
    wide = SpecConfig(3, 3, 22, page_size=4, score=score)
    phases = zip(draft_phases(pair, config, options), draft_phases(pair, wide), strict=True)
    for (_, tree, *_), (_, wide_tree, *_) in phases:
        logits = [logits[0, 0].double().log_softmax(-1) for logits in wide_tree.candidates.draft_logits]
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
@uncaptured
@pytest.mark.parametrize("name", ["chain", "tree", "rejection", "multi_round"])
def test_drafts_end_before_the_first_low_confidence(name, options, monkeypatch):
    """Each request has its pattern of low and high ones. A cut tree is that of all slots, with fewer depths."""
    config = (SETTINGS | SAMPLED)[name]
    patterns = [*product((True, False), repeat=config.num_steps)]
    values = torch.logit(torch.where(torch.tensor(patterns), 0.61, 0.59)).T  # [S, B]
    trees = []
    for threshold in (0.0, 0.6):
        run = rounds.prefilled(with_block(pair_of("dspark"), threshold=threshold), config, options, [PROMPTS[1]] * 8)
        levels = iter(values.to(run.engine.device))
        head = type(run.engine.drafter._head)
        monkeypatch.setattr(head, "confidence", lambda *_, levels=levels: next(levels))
        trees.append(run.engine.draft(run.batch, run.draft_input, run.pools).to("cpu"))
    uncut, cut = map(candidates, trees)
    depths = [(*pattern, False).index(False) for pattern in patterns]
    assert cut.num_alive.tolist() == [sum(config.level_sizes[:depth]) for depth in depths]
    assert all(map(int.__le__, trees[1].proposed_depth.tolist(), depths))
    for field in ("tokens", "scores", "parents", "confidence"):
        assert torch.equal(getattr(uncut, field), getattr(cut, field))


@uncaptured
def test_the_threshold_is_a_probability(options):
    """A confidence head gives logits, by which the reference and the kernels end some drafts of a real pair."""
    pair = with_block(pair_of("dspark"), threshold=0.6)
    trees = [next(draft_phases(pair, CHAIN, options, (len(prompt),), prompt)).tree for prompt in PROMPTS]
    confident = [(torch.sigmoid(candidates(tree).confidence[0]) >= 0.6).long().cumprod(0).sum() for tree in trees]
    assert [int(candidates(tree).num_alive) for tree in trees] == [int(count) for count in confident]
    assert len({int(count) for count in confident}) > 1


def candidates(tree) -> ExplicitCandidates:
    assert isinstance(tree.candidates, ExplicitCandidates)
    return tree.candidates


@both
def test_q_is_conditional_on_the_draft_before(options):
    """DSpark's distribution of a draft is that of its slot and the token before it, not of the slot alone."""
    pair = with_block(pair_of("dspark"), threshold=0.0)
    sampling = [SamplingParams(temperature=3.0, seed=seed) for seed in range(6)]
    run = rounds.prefilled(pair, SAMPLED["rejection"], options, [PROMPTS[0]] * 6, sampling, next_token=11)
    tree = run.engine.draft(run.batch, run.draft_input, run.pools)
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
    *_, (tokens, _, pools, _) = draft_phases(pair, config, options)
    prompt = tuple(tokens[:-1])
    fresh = next(draft_phases(pair, config, options, (len(prompt),), prompt)).pools
    # A block has been run in both pools; its columns begin after the committed ones.
    slots = [each.slots(0, torch.arange(len(prompt))) for each in (pools, fresh)]
    for part in ("keys", "values"):
        written, expected = (getattr(p.draft, part)[:, s].double() for p, s in zip((pools, fresh), slots, strict=True))
        assert torch.allclose(written, expected, rtol=0, atol=1e-4)


# Serving.


@every_kind
@rounds.every_serving
def test_served_rounds_are_those_of_a_solo_run(serving, release, kind):
    config = replace(CHAIN, release=release)
    rounds.assert_served_rounds_are_solo(pair_of(kind, "mistral", noise=0.05), config, **rounds.SERVED[serving])


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
    with pytest.raises(InputError, check=lambda error: error.name == name):
        BlockConfig(**{"size": 4, "mask_token": 0} | fields)
