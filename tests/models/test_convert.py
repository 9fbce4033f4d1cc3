"""Heads are written in both layouts and read back equal, or nothing is written."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from specsim.cli.main import main
from specsim.core.errors import InputError
from specsim.core.pair import DrafterCheckpoint
from specsim.core.target import ModelConfig
from specsim.models.checkpoint import load_drafter, load_target
from specsim.models.checkpoint.drafter_format import drafter_layout
from specsim.models.convert import convert, head_fields, head_tensors
from specsim.models.load import load
from specsim.models.shipped import TINY
from specsim.models.synthetic_pair import synthetic_pair
from specsim.reference.oracle_forward import in_dtype, target_forward

TARGET = TINY / "target"
HEAD = TINY / "eagle3"


def same(first: DrafterCheckpoint, second: DrafterCheckpoint) -> bool:
    assert first.config == second.config
    assert first.tensors.keys() == second.tensors.keys()
    return all(
        tensor.dtype == second.tensors[name].dtype and torch.equal(tensor, second.tensors[name])
        for name, tensor in first.tensors.items()
    )


def folder_of(path: Path, head: DrafterCheckpoint, layout: str, **changes: Any) -> Path:
    """Write a head without the check, in float32."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(head_fields(head.config, layout) | changes))
    tensors = {name: each.contiguous().clone() for name, each in head_tensors(head, layout).items()}
    save_file(tensors, path / "model.safetensors")
    return path


def windowed(model: ModelConfig, window: int | None) -> ModelConfig:
    return model.with_windows((window,) * model.num_layers)


def target_folder(path: Path, model: ModelConfig) -> Path:
    """Write the config.json of a target."""
    path.mkdir()
    sizes = ("vocab_size", "hidden_size", "rms_norm_eps", "max_position_embeddings", "num_heads", "num_kv_heads")
    names = dict(num_heads="num_attention_heads", num_kv_heads="num_key_value_heads")
    fields = {names.get(name, name): getattr(model, name) for name in sizes}
    fields |= {"model_type": model.family, "num_hidden_layers": model.num_layers, "intermediate_size": model.mlp.size}
    (path / "config.json").write_text(json.dumps(fields | {"head_dim": model.head_dim}))
    return path


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *product(("eagle3", "p-eagle"), ("eagle", "speculators")),
        *product(("dflash",), ("z-lab", "speculators")),
        *product(("dspark",), ("deepspec", "speculators")),
    ],
)
def test_the_shipped_heads_read_back_equal(kind: str, layout: str, tmp_path: Path):
    """All but EAGLE-3 borrow lm_head, and none is written for them."""
    done = convert(TARGET, TINY / kind, tmp_path / "new", layout)
    model = load_target(TARGET).config
    written = load_drafter(tmp_path / "new", model)
    assert same(load_drafter(TINY / kind, model), written)
    assert ("lm_head.weight" in written.tensors) is (kind == "eagle3")
    fields = json.loads((tmp_path / "new" / "config.json").read_text())
    assert ("transformer_layer_config" in fields) is (layout == "speculators")
    assert (done.layout, done.config.kind) == (layout, kind)
    assert [each.name for each in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize(
    ("kind", "model_type", "num_drafts"), [("eagle3", "eagle3", 3), ("p-eagle", "peagle", 3), ("dspark", "dspark", 7)]
)
def test_a_speculators_head_tells_an_engine_all_it_needs(kind: str, model_type: str, num_drafts: int, tmp_path: Path):
    """The fields that vLLM and speculators ask for; tests/engines shows both reading them."""
    convert(TARGET, TINY / kind, tmp_path / "new", "speculators")
    fields = json.loads((tmp_path / "new" / "config.json").read_text())
    speculation = fields["speculators_config"]
    assert fields["speculators_model_type"] == speculation["algorithm"] == model_type
    assert speculation["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": num_drafts}]
    assert speculation["default_proposal_method"] == "greedy"
    assert speculation["verifier"] == {"name_or_path": str(TARGET.absolute()), "architectures": ["LlamaForCausalLM"]}
    assert (fields["dtype"], fields["transformer_layer_config"]["hidden_act"]) == ("bfloat16", "silu")
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    assert kind != "p-eagle" or tensors["mask_hidden"].shape == (1, 1, 768)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("kind", ["eagle3", "eagle3.1", "p-eagle"])
def test_every_kind_goes_there_and_back(kind: str, window: int | None, tmp_path: Path):
    """EAGLE layout, then speculators, then EAGLE again: the first and the last folder have equal files."""
    pair = synthetic_pair(kind, num_layers=4)
    layer = windowed(pair.drafter.config.model, window)
    head = replace(pair.drafter, config=replace(pair.drafter.config, model=layer, norm_before_residual=True))
    model = pair.target.config
    target = target_folder(tmp_path / "target", model)
    first = folder_of(tmp_path / "first", head, "eagle")
    convert(target, first, tmp_path / "second", "speculators")
    convert(target, tmp_path / "second", tmp_path / "third", "eagle")
    assert (first / "config.json").read_text() != (tmp_path / "second" / "config.json").read_text()
    assert json.loads((first / "config.json").read_text()) == json.loads(
        (tmp_path / "third" / "config.json").read_text()
    )
    assert same(head, load_drafter(tmp_path / "third", model))


@pytest.mark.parametrize("kind", ["eagle3.1", "p-eagle"])
@pytest.mark.parametrize(("family", "layouts"), [("qwen3", ["speculators"]), ("qwen2", [])])
def test_layers_that_a_layouts_readers_lack_are_refused(kind: str, family: str, layouts: list[str], tmp_path: Path):
    """Readers of the EAGLE layout have layers of Llama only, those of speculators also of Qwen3."""
    pair = synthetic_pair(kind, family, num_layers=4)
    head = replace(pair.drafter, config=replace(pair.drafter.config, norm_before_residual=True))
    target = target_folder(tmp_path / "target", pair.target.config)
    for layout in layouts:
        first = folder_of(tmp_path / layout, head, layout)
        convert(target, first, tmp_path / f"{layout}, again", layout)
        assert same(head, load_drafter(tmp_path / f"{layout}, again", pair.target.config))
    for layout in {"eagle", "speculators"} - {*layouts}:
        with pytest.raises(InputError, check=lambda error: error.name == "layout"):
            head_fields(head.config, layout)


NO_HEADS = {"markov_rank": 0, "confidence": "none", "threshold": 0.0}
BLOCKS = {
    "a dflash drafter": ("dflash", "z-lab", {}),
    "a dflash drafter that drafts the next token": ("dflash", "z-lab", {"predicts": "next"}),
    "a dspark drafter": ("dspark", "deepspec", {}),
    "a dspark drafter without heads": (
        "dspark",
        "deepspec",
        {"markov_rank": 0, "confidence": "none", "threshold": 0.0},
    ),
    "a dspark drafter whose confidence reads no token": ("dspark", "deepspec", {"confidence": "hidden"}),
    "a dspark drafter that drafts its own token": ("dspark", "deepspec", {"predicts": "own"}),
}


def block_head(kind: str, family: str, changes: dict[str, Any], draft_vocab_size: int | None = None) -> Any:
    """A pair with a block drafter of random weights."""
    pair = synthetic_pair(kind, family, num_layers=4)
    config = replace(pair.drafter.config, block=replace(pair.drafter.config.block, **changes))
    config = config if draft_vocab_size is None else replace(config, draft_vocab_size=draft_vocab_size)
    generator = torch.Generator().manual_seed(0)
    layout = drafter_layout(config).required
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in layout.items()}
    if draft_vocab_size is not None:
        tensors["d2t"] = torch.arange(draft_vocab_size) // 2
    return replace(pair, drafter=DrafterCheckpoint(config, tensors))


@pytest.mark.parametrize(
    ("windows", "causal_layers"),
    [((None, None), ()), ((8, 8), ()), ((8, 8), (0, 1)), ((8, None), (0,)), ((3, 3), (0, 1))],
)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("case", BLOCKS)
def test_block_drafters_go_there_and_back(case: str, family: str, windows: tuple, causal_layers: tuple, tmp_path: Path):
    kind, layout, changes = BLOCKS[case]
    pair = block_head(kind, family, changes)
    model = pair.drafter.config.model.with_windows(windows)
    head = replace(pair.drafter, config=replace(pair.drafter.config, model=model, causal_layers=causal_layers))
    model = pair.target.config
    target = target_folder(tmp_path / "target", model)
    first = folder_of(tmp_path / "first", head, layout)
    assert same(head, load_drafter(first, model))
    convert(target, first, tmp_path / "second", "speculators")
    convert(target, tmp_path / "second", tmp_path / "third", layout)
    fields = json.loads((tmp_path / "third" / "config.json").read_text())
    assert fields == json.loads((first / "config.json").read_text())
    assert same(head, load_drafter(tmp_path / "second", model))
    assert same(head, load_drafter(tmp_path / "third", model))
    ids = (fields["dflash_config"] if layout == "z-lab" else fields)["target_layer_ids"]
    assert [layer + 1 for layer in ids] == list(head.config.feature_layers)
    assert fields["model_type"] == family


def test_a_causal_block_without_windows_stays_in_its_layout(tmp_path: Path):
    """Blocks of JetSpec; speculators has no field for them. No layout has one for some layers without a window."""
    pair = block_head("dflash", "qwen3", {})
    target = target_folder(tmp_path / "target", pair.target.config)
    head = replace(pair.drafter, config=replace(pair.drafter.config, causal_layers=(0, 1)))
    first = folder_of(tmp_path / "first", head, "z-lab")
    assert json.loads((first / "config.json").read_text())["is_causal"] is True
    assert same(head, load_drafter(first, pair.target.config))
    with pytest.raises(InputError, check=lambda error: error.name == "causal_layers"):
        convert(target, first, tmp_path / "second", "speculators")
    for layout in ("z-lab", "speculators"):
        with pytest.raises(InputError, check=lambda error: error.name == "causal_layers"):
            head_fields(replace(head.config, causal_layers=(1,)), layout)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_vocabulary_of_its_own_stays_in_speculators(kind: str, tmp_path: Path):
    pair = block_head(kind, "qwen3", {}, draft_vocab_size=20)
    target = target_folder(tmp_path / "target", pair.target.config)
    first = folder_of(tmp_path / "first", pair.drafter, "speculators")
    convert(target, first, tmp_path / "second", "speculators")
    read = [load_drafter(each, pair.target.config) for each in (first, tmp_path / "second")]
    assert same(*read)
    assert torch.equal(read[1].tensors["lm_head.weight"], pair.drafter.tensors["lm_head.weight"])
    with pytest.raises(InputError, check=lambda error: error.name == "layout"):
        convert(target, first, tmp_path / "third", {"dflash": "z-lab", "dspark": "deepspec"}[kind])
    assert not (tmp_path / "third").exists()


@pytest.mark.parametrize(
    ("kind", "layout"), [("dflash", "eagle"), ("dflash", "deepspec"), ("dspark", "z-lab"), ("dspark", "eagle")]
)
def test_a_layout_of_other_drafters_is_refused(kind: str, layout: str, tmp_path: Path):
    pair = block_head(kind, "qwen3", {})
    target = target_folder(tmp_path / "target", pair.target.config)
    first = folder_of(tmp_path / "first", pair.drafter, "speculators")
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("layout", layout)):
        convert(target, first, tmp_path / "second", layout)


@pytest.mark.parametrize(
    ("draft", "layout", "name"),
    [
        ("eagle", "eagle", "draft"),
        ("mtp", "speculators", "draft"),
        ("eagle3", "vllm", "layout"),
        ("eagle3", "z-lab", "layout"),
    ],
)
def test_what_cannot_be_written_is_refused(draft: str, layout: str, name: str, tmp_path: Path):
    with pytest.raises(InputError, check=lambda error: error.name == name):
        convert(TARGET, TINY / draft, tmp_path / "new", layout)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_kept(tmp_path: Path):
    with pytest.raises(InputError, check=lambda error: error.name == "to"):
        convert(TARGET, HEAD, tmp_path, "eagle")
    with pytest.raises(InputError, check=lambda error: error.name == "to"):
        convert(TARGET, HEAD, tmp_path / "no" / "new", "eagle")


def test_a_head_that_reads_back_otherwise_leaves_nothing(tmp_path: Path, monkeypatch):
    def wrong(checkpoint: DrafterCheckpoint, layout: str) -> dict[str, torch.Tensor]:
        tensors = head_tensors(checkpoint, layout)
        return tensors | {"norm.weight": tensors["norm.weight"] + 1}

    monkeypatch.setattr("specsim.models.convert.head_tensors", wrong)
    with pytest.raises(InputError, check=lambda error: error.name == "layout"):
        convert(TARGET, HEAD, tmp_path / "new", "speculators")
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys):
    arguments = ["convert", "--target", str(TARGET), "--draft", str(HEAD), "--layout", "speculators"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--to", str(tmp_path / "new")])
    assert ended.value.code == 0
    assert "eagle3 head of" in capsys.readouterr().out
    with pytest.raises(SystemExit, check=lambda error: error.code == 2):
        main([*arguments, "--to", str(tmp_path / "new")])
    assert "to is" in capsys.readouterr().err


def test_a_full_disk_leaves_nothing(tmp_path: Path):
    """Files of the process may have 10,000 bytes, as on a full disk; it writes no bytecode."""
    code = (
        "import resource; from specsim.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        f"main('convert --target {TARGET} --draft {HEAD} --to new --layout speculators'.split())"
    )
    done = subprocess.run([sys.executable, "-B", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("specsim: to is 'new'")
    assert list(tmp_path.iterdir()) == []


def test_the_shipped_target_is_a_transformers_folder(tmp_path, call):
    folder = tmp_path / "target"
    assert call("convert", "--target", "tiny", "--to", str(folder))[::2] == (0, "")
    model = AutoModelForCausalLM.from_pretrained(folder).double()
    target = in_dtype(load(drafter="none").target, torch.float64)
    token_ids = [1, 2, 3, 500]
    expected = target_forward(target.config, target.tensors, token_ids, ())[0]
    with torch.inference_mode():
        assert torch.allclose(
            model(torch.tensor([token_ids])).logits[0], expected, atol=1e-3
        )  # its norms are in float32
    assert len(AutoTokenizer.from_pretrained(folder)) == target.config.vocab_size
    for options, name in ((("--to", str(folder)), "to"), (("--to", str(folder) + "2", "--layout", "eagle"), "layout")):
        status, _, err = call("convert", "--target", "tiny", *options)
        assert (status, f"specsim: {name} is" in err) == (2, True)
    head = ("--draft", str(TINY / "eagle3"), "--to", str(tmp_path / "head"))
    assert call("convert", "--target", "tiny", *head)[0] == 2
    assert call("convert", "--target", "tiny", *head, "--layout", "speculators")[0] == 0
