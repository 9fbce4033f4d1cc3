"""Pairs: shipped and given ones, their arguments, tokenizers and tables."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from specsim.core.errors import InputError
from specsim.core.kinds import KINDS
from specsim.core.pair import Pair
from specsim.core.token_drafter import NgramConfig, SuffixConfig
from specsim.models.checkpoint.weights import read_weights
from specsim.models.load import load, load_config
from specsim.models.shipped import TINY

LOOKUPS = [name for name, kind in KINDS.items() if not kind.has_weights]


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


@pytest.fixture
def tiny_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published) -> Path:
    """Replace the shipped pair by one of random weights."""
    target, _ = published.write(tmp_path / "target", "llama-3.1-8b-instruct")
    write_tokenizer(target)
    published.write(tmp_path / "eagle", "eagle-llama2-chat-7b")
    published.write(tmp_path / "eagle3", "eagle3-llama3.1-instruct-8b")
    monkeypatch.setattr("specsim.models.shipped.TINY", tmp_path)
    return tmp_path


@pytest.mark.usefixtures("tiny_pair")
@pytest.mark.parametrize("drafter", ["eagle", "eagle3"])
def test_the_shipped_pair(drafter: str):
    pair = load(drafter=drafter)
    assert pair.drafter.config.kind == drafter
    assert pair.name == f"tiny, {drafter}"
    assert pair.tokenizer.encode("a b a") == [0, 1, 0]
    assert pair.tokenizer.decode([1, 0]) == "b a"
    assert pair.tokenizer.vocab_size == 3


@pytest.mark.usefixtures("tiny_pair")
def test_the_shipped_pair_has_a_name():
    assert load("tiny").name == load().name == "tiny, eagle3"
    assert load("tiny", drafter="eagle").drafter.config.kind == "eagle"
    assert load_config("tiny") == load_config() == load("tiny", drafter="none").target.config


def test_a_drafter_is_located_before_weights_are_read(tiny_pair: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("specsim.models.load.load_target", lambda *_: pytest.fail("read"))
    with pytest.raises(InputError, check=lambda error: error.name == "draft"):
        load(tiny_pair / "target", "/nonexistent/x")


def test_a_target_without_a_drafter(tiny_pair: Path):
    assert load(drafter="none").drafter is None
    assert load(tiny_pair / "target", drafter="none").name == str(tiny_pair / "target")


def test_the_kind_of_an_own_drafter_is_detected(tiny_pair: Path):
    for kind in ("eagle", "eagle3"):
        assert load(tiny_pair / "target", tiny_pair / kind).drafter.config.kind == kind


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_drafters_without_weights_come_with_any_target(drafter: str, tiny_pair: Path):
    for pair in (load(drafter=drafter), load(tiny_pair / "target", drafter=drafter)):
        assert pair.drafter == {"ngram": NgramConfig(), "suffix": SuffixConfig()}[drafter]
        assert pair.name.endswith(f", {drafter}")
    assert load_config(drafter=drafter) == load().target.config


def test_mtp_modules_come_from_the_folder_of_their_target(tiny_pair: Path, published, monkeypatch: pytest.MonkeyPatch):
    """Without such modules one sentence names the field; the weights of target and modules are read once."""
    target = tiny_pair / "target"
    with pytest.raises(
        InputError, check=lambda error: error.name == f"num_nextn_predict_layers in {target / 'config.json'}"
    ):
        load(target, drafter="mtp")
    config = published.config("llama-3.1-8b-instruct") | {"num_nextn_predict_layers": 1}
    tensors = published.tensors("llama-3.1-8b-instruct")
    layer = {key.removeprefix("model.layers.0."): each for key, each in tensors.items() if "layers.0." in key}
    norms = {f"{name}.weight": layer["input_layernorm.weight"] for name in ("enorm", "hnorm", "shared_head.norm")}
    module = layer | norms | {"eh_proj.weight": torch.cat([layer["self_attn.q_proj.weight"]] * 2, dim=1)}
    tensors |= {f"model.layers.32.{name}": tensor.clone() for name, tensor in module.items()}
    published.save(target, config, tensors)
    pair = load(target, drafter="mtp")
    assert (pair.drafter.config.kind, pair.name) == ("mtp", f"{target}, mtp")
    assert load(target, drafter="none").target.config.num_layers == 32
    fields = {"hidden_chain": False}
    reads = []
    monkeypatch.setattr(
        "specsim.models.load.read_weights",
        lambda folder, **given: reads.append(folder) or read_weights(folder, **given),
    )
    assert not load(target, drafter="mtp", draft_fields=fields).drafter.config.hidden_chain
    assert reads == [target]


def test_a_standalone_drafter_has_the_tokens_of_its_target(tiny_pair: Path, tmp_path: Path):
    shutil.copytree(tiny_pair / "target", tmp_path / "small")
    pair = load(tiny_pair / "target", tmp_path / "small")
    assert (pair.drafter.config.kind, pair.drafter.config.target_hidden_size) == ("standalone", 24)
    vocabulary = json.loads((tmp_path / "small" / "tokenizer.json").read_text())
    vocabulary["model"]["vocab"] = {"b": 0, "a": 1, "?": 2}
    (tmp_path / "small" / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(InputError, check=lambda error: "id 0 is 'b', not 'a'" in str(error)):
        load(tiny_pair / "target", tmp_path / "small", drafter="standalone")


@pytest.mark.usefixtures("tiny_pair")
@pytest.mark.parametrize("drafter", ["p-eagle", "mtp", "frozen-kv", "dflash", "dspark", "standalone"])
def test_a_drafter_that_is_not_shipped(drafter: str):
    with pytest.raises(InputError) as caught:
        load(drafter=drafter)
    assert (caught.value.name, caught.value.value) == ("drafter", drafter)
    assert caught.value.allowed.startswith(" or ".join(("eagle", "eagle3", *LOOKUPS, "none")))


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "p-eagle", "mtp", "frozen-kv", "dflash", "dspark", "standalone"])
def test_every_drafter_with_weights_is_shipped(kind: str):
    pair = load(drafter=kind)
    assert (pair.drafter.config.kind, pair.name) == (kind, f"tiny, {kind}")


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_shipped_blocks_have_seven_drafts(kind: str):
    """DSpark's rows draft the next token, so that its block has one row fewer; no draft is cut by default."""
    config = load(drafter=kind).drafter.config
    block = config.block
    assert (block.most_drafts, block.predicts, block.threshold) == (7, "own" if kind == "dflash" else "next", 0)
    assert (block.markov_rank > 0, block.confidence) == (
        (False, "none") if kind == "dflash" else (True, "hidden_and_token")
    )
    assert config.feature_layers == (1, 2, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"drafter": "medusa"},
            f"drafter is 'medusa'; allowed: {' or '.join(KINDS)} or none or MODULE:NAME",
        ),
        ({"draft": "x"}, "target is None; allowed: the target that the given drafter was trained for"),
        (
            {"target": "a/x"},
            "draft is None; allowed: a drafter of the given target (a folder or a hub id), or drafter none",
        ),
        (
            {"target": "/nonexistent/x"},
            "target is '/nonexistent/x'; allowed: an existing folder, "
            "or a hub id such as meta-llama/Llama-3.1-8B-Instruct",
        ),
        ({"target": "x", "draft": "y", "drafter": "none"}, "draft is 'y'; allowed: none where drafter is none"),
        ({"target": "x", "draft": "y", "drafter": "ngram"}, "draft is 'y'; allowed: none where drafter is ngram"),
    ],
)
def test_arguments_of_load(arguments: dict[str, str], message: str):
    with pytest.raises(InputError) as caught:
        load(**arguments)
    assert str(caught.value) == message


@pytest.mark.usefixtures("tiny_pair")
def test_a_pair_shows_its_shapes():
    pair = load()
    for text in (repr(pair), pair._repr_html_()):
        for fact in ("llama", "eagle3", "the input of layers 2, 16, 29", "bfloat16", "float16", "14 tokens"):
            assert fact in text
    parameters = sum(tensor.numel() for tensor in pair.target.tensors.values())
    assert f"{parameters:,}" in repr(pair.target)
    plain = Pair(pair.target, None, None, "<plain>")
    assert "&lt;plain&gt;" in plain._repr_html_()
    assert "drafter: None" in repr(plain)


def test_a_folder_without_a_tokenizer(tiny_pair: Path):
    (tiny_pair / "target" / "tokenizer.json").unlink()
    assert load().tokenizer is None


def test_a_broken_tokenizer_is_reported_when_it_is_used(tiny_pair: Path):
    (tiny_pair / "target" / "tokenizer.json").write_text("{")
    tokenizer = load().tokenizer
    with pytest.raises(InputError, check=lambda error: error.name == f"the tokenizer in {tiny_pair / 'target'}"):
        tokenizer.encode("a")
    with pytest.raises(AttributeError):
        _ = tokenizer._private


def _without_unknown(tokenizer: dict) -> None:
    tokenizer["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}


def _backtracking(tokenizer: dict) -> None:
    pattern = {"Regex": "(?:a+a+)+c"}
    tokenizer["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize("damage", [_without_unknown, _backtracking])
def test_a_tokenizer_whose_library_fails_is_an_input_error(tiny_pair: Path, damage):
    file = tiny_pair / "target" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    damage(tokenizer)
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(InputError, check=lambda error: error.name == f"the tokenizer in {file.parent}"):
        load().tokenizer.encode("a" * 64 + "b")


def test_a_limit_of_a_tokenizer_that_is_a_text_is_an_input_error(tiny_pair: Path):
    file = tiny_pair / "target" / "tokenizer_config.json"
    settings = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(settings | {"model_max_length": "long"}))
    with pytest.raises(InputError, check=lambda error: error.name == f"the tokenizer in {file.parent}"):
        load().tokenizer.encode("a b")


def test_a_drafter_of_another_kind_than_named_is_refused():
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("drafter", "eagle")):
        load(TINY / "target", TINY / "eagle3", drafter="eagle")


def test_fields_that_a_head_lacks_are_given_when_loading(tmp_path: Path):
    shutil.copytree(TINY / "eagle3", tmp_path / "head")
    config = json.loads((TINY / "eagle3" / "config.json").read_text())
    del config["eagle_aux_hidden_state_convention"]
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    convention = f"eagle_aux_hidden_state_convention in {tmp_path / 'head' / 'config.json'}"
    with pytest.raises(InputError, check=lambda error: error.name == convention):
        load(TINY / "target", tmp_path / "head")
    fields = {"eagle_aux_hidden_state_convention": "output", "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    assert load(TINY / "target", tmp_path / "head", draft_fields=fields).drafter.config.feature_layers == (1, 2, 3)


def test_json_nested_too_deeply(tmp_path: Path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(InputError, check=lambda error: error.name == str(tmp_path / "config.json")):
        load(tmp_path, drafter="none")


def test_pairs_compare_by_identity():
    pair = load()
    assert pair == pair
    assert pair != load()
    assert hash(pair)
