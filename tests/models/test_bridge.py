"""Vocabularies bridged by their intersection, against transformers' translator, and losslessness."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.generation.candidate_generator import AssistantToTargetTranslator

from specsim import SamplingParams, SpecConfig, load
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.pair import Pair
from specsim.core.phases import Batch, PrefillInput
from specsim.models.checkpoint.vocabulary import bridge, bridge_vocabularies, vocabulary_map
from specsim.models.synthetic_pair import OtherVocabulary, bridged_pair, other_vocabulary, synthetic_pair
from specsim.serving.generation import generate, load_engine

TEXTS = ["the cat sat on the mat and the dog ate the cat food", "a dog and a cat and a mat", "on and on"]
PROMPTS = ((5, 17, 3, 40, 8, 9, 30), (1, 2, 4, 4), (30,))  # with the ids 4 and 20, which have no counterpart
PAIR = synthetic_pair("standalone")
CHAIN = SpecConfig(1, 3, page_size=4)
FAST = EngineOptions("fast")


def byte_level(size: int = 290) -> PreTrainedTokenizerFast:
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    own.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=own)


def metaspace() -> PreTrainedTokenizerFast:
    own = Tokenizer(models.BPE(unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.Metaspace()
    own.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=48, special_tokens=["<pad>", "<unk>"], show_progress=False)
    own.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=own, unk_token="<unk>")


def words(folder: Path, *tokens: str) -> None:
    folder.mkdir(exist_ok=True)
    ids = {token: index for index, token in enumerate(tokens)}
    Tokenizer(models.WordLevel(ids, unk_token=tokens[0])).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


# The map


@pytest.mark.parametrize("swapped", [False, True])
def test_the_map_is_transformers_translators(swapped: bool):
    tokenizers: list[Any] = [byte_level(), metaspace()]
    target, draft = tokenizers[::-1] if swapped else tokenizers
    theirs = AssistantToTargetTranslator(target, draft, len(target))
    pairs = vocabulary_map(target, draft).tolist()
    assert len(pairs) > 20
    assert dict(pairs) == theirs.target_to_assistant_input_ids
    assert any(target.convert_ids_to_tokens(one) != draft.convert_ids_to_tokens(other) for one, other in pairs)


# The drafter's distribution


def first_draft_prob(pair: Pair, prompt: tuple[int, ...], options: EngineOptions) -> tuple[list[int], torch.Tensor]:
    """Give the text up to the first root, and the distribution of its first draft."""
    engine = load_engine(pair, replace(CHAIN, verifier="rejection"), options)
    pools = engine.make_pools(1, 64)
    row = pools.open()
    pools.reserve(row, len(prompt) + 1)
    sampling = SamplingParams(temperature=0.8, seed=5)
    batch = Batch.of([0], [row], [len(prompt)], [sampling], pair.target.config.vocab_size).to(engine.device)
    state: Any = engine.prefill(batch, PrefillInput.of_prompts([prompt]).to(engine.device), pools).draft_input
    return [*prompt, int(state.bonus_tokens[0])], state.draft_prob[0].double().cpu()


@pytest.mark.parametrize("options", [EngineOptions(dtype=torch.float64), FAST], ids=["reference", "fast"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_drafts_have_transformers_masked_distribution(prompt, options, monkeypatch, llama_of):
    """transformers runs the drafter with its own ids, and removes the other tokens' logits."""
    other = other_vocabulary(PAIR)
    text, draft_prob_V = first_draft_prob(_bridged(other), prompt, options)
    draft_ids = dict(other.pairs.tolist())
    own_ids = [draft_ids.get(token, other.stand_in) for token in text]
    theirs = llama_of(other.drafter.config.model, other.drafter.tensors)
    logits_V = theirs(torch.tensor([own_ids])).logits[0, -1].detach()
    expected = _translator(other, monkeypatch).get_target_logits(logits_V[None].float())[0].div(0.8).softmax(-1)
    assert draft_prob_V.sum() == pytest.approx(1, abs=1e-6)
    assert ((draft_prob_V == 0) == (expected == 0)).all()
    torch.testing.assert_close(draft_prob_V, expected.double(), atol=1e-5, rtol=0)


def _bridged(other: OtherVocabulary) -> Pair:
    return replace(PAIR, drafter=bridge(other.drafter, PAIR.target.config, other.pairs, other.stand_in))


def _translator(other: OtherVocabulary, monkeypatch: pytest.MonkeyPatch) -> AssistantToTargetTranslator:
    to_target = torch.full((other.drafter.config.model.vocab_size,), -1)
    to_target[other.pairs[:, 1]] = other.pairs[:, 0]
    maps = to_target, dict(other.pairs.tolist())
    monkeypatch.setattr(AssistantToTargetTranslator, "_get_assistant_to_target_input_ids", lambda self: maps)
    nothing: Any = None
    return AssistantToTargetTranslator(nothing, nothing, PAIR.target.config.vocab_size)


# Losslessness


@pytest.mark.every_value
@pytest.mark.parametrize("options", [EngineOptions(), FAST], ids=["reference", "fast"])
@pytest.mark.parametrize("topk", [1, 4])
def test_greedy_output_is_that_of_plain_decoding(topk, options):
    """Some drafts are accepted, and some outputs have tokens that cannot be drafted."""
    pair = bridged_pair(PAIR)
    sampling = SamplingParams(max_new_tokens=16)
    found = generate(pair, PROMPTS, SpecConfig(topk, 3, page_size=4), sampling, engine=options)
    plain = generate(pair, PROMPTS, SpecConfig.plain(), sampling).outputs
    assert [each.token_ids for each in found.outputs] == [each.token_ids for each in plain]
    assert found.metrics["accept_length"] > 1
    assert any(not pair.checkpoint.tensors["t2d"][token] for each in plain for token in each.token_ids)


def test_equal_vocabularies_draft_what_they_drafted_before():
    ids = torch.arange(PAIR.target.config.vocab_size)
    same = replace(PAIR, drafter=bridge(PAIR.checkpoint, PAIR.target.config, torch.stack([ids, ids], 1), 0))
    sampling = SamplingParams(temperature=1.0, max_new_tokens=16)
    config = replace(CHAIN, verifier="block")
    found, expected = (generate(each, PROMPTS, config, sampling).outputs for each in (same, PAIR))
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.num_accepted_tokens_per_round == other.num_accepted_tokens_per_round


# Folders


@pytest.fixture
def folders(tmp_path: Path, published) -> tuple[Path, Path]:
    """Make a target with the tokens ? a b, and a language model with b c ? a."""
    target, _ = published.write(tmp_path / "target", "llama-3.1-8b-instruct")
    shutil.copytree(target, tmp_path / "draft")
    words(target, "?", "a", "b")
    words(tmp_path / "draft", "b", "c", "?", "a")
    return target, tmp_path / "draft"


def test_a_pair_of_folders_is_bridged_on_request(folders: tuple[Path, Path]):
    target, draft = folders
    with pytest.raises(InputError, check=lambda error: "bridge_vocabularies" in error.allowed):
        load(target, draft)
    pair = load(target, draft, bridge_vocabularies=True)
    own = load(draft, drafter="none").target
    tensors = pair.checkpoint.tensors
    assert (pair.checkpoint.config.draft_vocab_size, tensors["d2t"].tolist()) == (3, [0, 0, 0])
    embedding, head = (own.tensors[f"{name}.weight"] for name in ("model.embed_tokens", "lm_head"))
    assert torch.equal(tensors["model.embed_tokens.weight"][:4], embedding[[2, 3, 0, 0]])  # the last is not a token
    assert torch.equal(tensors["lm_head.weight"], head[[2, 3, 0]])
    assert len(tensors["model.embed_tokens.weight"]) == pair.target.config.vocab_size


def test_the_unknown_token_stands_for_missing_ones(folders: tuple[Path, Path]):
    target, draft = folders
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "?"}
    (draft / "tokenizer_config.json").write_text(json.dumps(fields))
    table = load(target, draft, bridge_vocabularies=True).checkpoint.tensors["model.embed_tokens.weight"]
    assert torch.equal(table[3], table[0])
    assert not torch.equal(table[3], table[2])


@pytest.mark.parametrize("drafter", ["eagle", "ngram", "none"])
def test_only_language_models_are_bridged(drafter: str, folders: tuple[Path, Path], published):
    target = folders[0]
    folder = published.write(target.parent / "eagle", "eagle-llama2-chat-7b")[0] if drafter == "eagle" else None
    with pytest.raises(InputError, check=lambda error: error.name == "bridge_vocabularies"):
        load(target, folder, drafter, bridge_vocabularies=True)


def test_vocabularies_that_cannot_be_bridged(folders: tuple[Path, Path]):
    target, draft = folders
    words(draft, "x", "y")
    with pytest.raises(InputError, match="have in common is 0"):
        load(target, draft, bridge_vocabularies=True)
    (draft / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="there is none in"):
        load(target, draft, bridge_vocabularies=True)


def test_ids_beyond_a_models_table_are_dropped(tmp_path: Path):
    words(tmp_path / "target", *(f"t{each}" for each in range(60)))
    words(tmp_path / "draft", *(f"t{each}" for each in range(40, 100)))
    made = bridge_vocabularies(PAIR.checkpoint, tmp_path / "draft", PAIR.target.config, tmp_path / "target")
    assert (torch.arange(8) + made.tensors["d2t"]).tolist() == [40, 41, 42, 43, 44, 45, 46, 47]
