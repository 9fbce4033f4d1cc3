"""specsim parity: known causes of low acceptance are named from an engine's tensors, and nothing without one."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.pair import Pair
from specsim.correctness.parity import Parity, PrefillScene, Tokens, compare, read_dump, select, tokens_of
from specsim.correctness.parity.trace import DrafterInput
from specsim.models.load import load_shipped
from specsim.models.synthetic_pair import synthetic_pair
from tests.operations.rounds import CHAIN, draft_phases

TOKENS = Tokens((5, 17, 3, 40, 8, 9, 30, 11, 2))
VLLM = Path(__file__).with_name("engine_tensors") / "vllm-0.32-cpu-dflash.safetensors"


@cache
def pair(kind: str) -> Pair:
    """Make a small pair whose norms have weights of their own."""
    pair = synthetic_pair(kind, "qwen3" if kind == "dflash" else "llama", num_layers=4, noise=0.3)
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: 1 + 0.3 * torch.randn(x.shape, generator=generator, dtype=x.dtype) if name.endswith("norm.weight") else x
        for name, x in pair.checkpoint.tensors.items()
    }
    if "fc.bias" in tensors:
        tensors["fc.bias"] = torch.randn(tensors["fc.bias"].shape, generator=generator, dtype=torch.float64)
    return replace(pair, drafter=replace(pair.checkpoint, tensors=tensors))


@cache
def scene(kind: str, dtype: torch.dtype = torch.float64) -> PrefillScene:
    return PrefillScene(pair(kind), TOKENS, dtype)


class Fault(NamedTuple):
    """A cause of low acceptance, injected into an engine's drafter."""

    kind: str
    inject: Callable[[PrefillScene, DrafterInput], DrafterInput]
    first: str  # tensor that differs first
    says: str  # part of the reading


def config(**changes: Any) -> Callable[[PrefillScene, DrafterInput], DrafterInput]:
    return both(lambda drafter: replace(drafter, config=replace(drafter.config, **changes)))


def model(change: Callable[[Any], Any]) -> Callable[[PrefillScene, DrafterInput], DrafterInput]:
    return both(lambda drafter: replace(drafter, config=replace(drafter.config, model=change(drafter.config.model))))


def weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], where: str = "context drafting"):
    return both(
        lambda drafter: replace(
            drafter,
            tensors={**drafter.tensors, **{name: x.clone() for name, x in change(dict(drafter.tensors)).items()}},
        ),
        where,
    )


def both(change: Callable[[Any], Any], where: str = "context drafting"):
    def inject(_: PrefillScene, run: DrafterInput) -> DrafterInput:
        parts = {name: getattr(run, name) for name in where.split()}
        return replace(run, **{name: replace(rows, drafter=change(rows.drafter)) for name, rows in parts.items()})

    return inject


def rows(**changes: Any) -> Callable[[PrefillScene, DrafterInput], DrafterInput]:
    return lambda _, run: replace(
        run, context=replace(run.context, **changes), drafting=replace(run.drafting, **changes)
    )


def features(make: Callable[[PrefillScene], torch.Tensor]) -> Callable[[PrefillScene, DrafterInput], DrafterInput]:
    return lambda scene, run: replace(run, features_RF=make(scene))


def normed(scene: PrefillScene) -> torch.Tensor:
    states = scene.features((1, 2, 3)).unflatten(-1, (3, -1))
    scale = (states.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    return (states * scale * scene.target_checkpoint.tensors["model.norm.weight"]).flatten(1)


ATTENTION = "extend/midlayer.self_attn"
FAULTS = {
    "feature ids off by one": Fault(
        "eagle3",
        features(lambda scene: torch.cat([*scene.entering[2:], scene.last_output], -1)),
        "target/features",
        "ids one too high (inputs of layers 2, 3, 4)",
    ),
    "features in reverse": Fault(
        "eagle3", features(lambda scene: scene.features((3, 2, 1))), "target/features", "layers 3, 2, 1"
    ),
    "features normed": Fault("eagle3", features(normed), "target/features", "after the target's final norm"),
    "features not normed": Fault(
        "eagle", features(lambda scene: scene.last_output), "target/features", "before the target's final norm"
    ),
    "features of the wrong position": Fault(
        "dflash", features(lambda scene: scene.features((1, 2, 3)).roll(1, 0)), "target/features", "position before"
    ),
    "ids not shifted": Fault(
        "eagle3",
        lambda _, run: replace(run, input_ids_R=run.input_ids_R.roll(1), next_token=int(run.input_ids_R[-1])),
        "extend/embed_tokens",
        "ids are not shifted",
    ),
    "embedding scaled": Fault(
        "eagle3",
        lambda scene, run: weights(
            lambda _: {"embed_tokens.weight": scene.target_checkpoint.tensors["model.embed_tokens.weight"] * 32**0.5}
        )(scene, run),
        "extend/embed_tokens",
        "times √H",
    ),
    "norm of the other input": Fault(
        "eagle3",
        weights(lambda x: {"midlayer.hidden_norm.weight": x["midlayer.input_layernorm.weight"]}),
        "extend/midlayer.hidden_norm",
        "with the weight of midlayer.input_layernorm",
    ),
    "norm left out": Fault(
        "eagle3",
        rows(without=frozenset(["midlayer.hidden_norm"])),
        "extend/midlayer.hidden_norm",
        "midlayer.hidden_norm left out",
    ),
    "inputs exchanged": Fault(
        "eagle3",
        weights(
            lambda x: {
                name: w.roll(32, 1) for name, w in x.items() if w.ndim == 2 and w.shape[1] == 64 and "self_attn" in name
            }
        ),
        f"{ATTENTION}.q_proj",
        "embedding and hidden state exchanged",
    ),
    "keys and values exchanged": Fault(
        "eagle3",
        weights(
            lambda x: {
                f"midlayer.self_attn.{a}_proj.weight": x[f"midlayer.self_attn.{b}_proj.weight"] for a, b in ("kv", "vk")
            }
        ),
        f"{ATTENTION}.k_proj",
        "k_proj and v_proj exchanged",
    ),
    "rope theta": Fault(
        "eagle3",
        model(lambda m: m.with_heads(rope=replace(m.rope, theta=500_000.0))),
        f"{ATTENTION}.k_rotated",
        "500000",
    ),
    "rotary pairs": Fault(
        "eagle3",
        model(lambda m: m.with_heads(rope=replace(m.rope, interleaved=True))),
        f"{ATTENTION}.k_rotated",
        "pairs (2i",
    ),
    "positions off by one": Fault("eagle3", rows(position_shift=1), f"{ATTENTION}.k_rotated", "off by +1"),
    "positions off by two": Fault(
        "dflash", rows(position_shift=-2), "extend/layers.0.self_attn.k_rotated", "off by -2"
    ),
    "values transposed": Fault(
        "dflash",
        weights(lambda x: {"layers.0.self_attn.v_proj.weight": x["layers.0.self_attn.v_proj.weight"].T}),
        "extend/layers.0.self_attn.v_proj",
        "v_proj.weight transposed",
    ),
    "residual after the norm": Fault(
        "eagle3", config(norm_before_residual=True), "extend/midlayer.after_attention", "norm_before_residual is True"
    ),
    "final norm left out": Fault("eagle3", rows(without=frozenset(["norm"])), "extend/norm", "norm left out"),
    "head of the target": Fault(
        "eagle3",
        lambda scene, run: weights(
            lambda x: {"lm_head.weight": scene.target_checkpoint.tensors["lm_head.weight"][: len(x["lm_head.weight"])]}
        )(scene, run),
        "extend/lm_head",
        "target's head as the draft head, rows from 0 on",
    ),
    "d2t as target ids": Fault(
        "eagle3",
        weights(lambda x: {"d2t": x["d2t"] - torch.arange(len(x["d2t"]))}),
        "extend/target_logits",
        "d2t read as target ids",
    ),
    "bias left out": Fault("eagle", weights(lambda x: {"fc.bias": x["fc.bias"] * 0}), "extend/fc", "biases left out"),
    "norms of heads left out": Fault(
        "dflash",
        rows(without=frozenset(f"layers.{layer}.self_attn.{part}_norm" for layer in (0, 1) for part in "qk")),
        "extend/layers.0.self_attn.k_norm",
        "norms of queries and keys left out",
    ),
    "key norm of layer 0 for the context": Fault(
        "dflash",
        weights(lambda x: {"layers.1.self_attn.k_norm.weight": x["layers.0.self_attn.k_norm.weight"]}, "context"),
        "extend/layers.1.self_attn.k_norm",
        "layer 0's k_norm used for all layers (rows of the prompt only)",
    ),
    "weights of another layer": Fault(
        "dflash",
        weights(lambda x: {"layers.1.mlp.down_proj.weight": x["layers.0.mlp.down_proj.weight"]}),
        "draft1/layers.1.mlp.down_proj",
        "replaced by layers.0.mlp.down_proj",
    ),
}


def compared(kind: str, dump: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> Parity:
    return compare(dump, scene(kind), scene(kind, dtype))


@pytest.mark.every_value
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name):
    fault = FAULTS[name]
    engine = scene(fault.kind, torch.float32)
    dump = engine.trace(fault.inject(engine, engine.drafter_input))
    result = compared(fault.kind, dump)
    assert result.first is not None
    assert result.first.name == fault.first
    best = [fit.reading for fit in result.fits if fit.next_difference is None]
    assert any(fault.says in reading for reading in best), (best, result.fits)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "p-eagle", "dflash", "dspark", "mtp", "frozen-kv", "standalone"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_is_reported_without_a_fault(kind, dtype):
    engine = scene(kind, dtype)
    noise = 1 + torch.finfo(dtype).eps  # another order of sums
    dump = {name: x * noise if x.is_floating_point() else x for name, x in engine.trace().items()}
    result = compared(kind, dump, dtype)
    assert result.first is None, result.first
    assert result.tie is not None or len(result.compared) == len(dump)


def sglang_dumper(dump: dict[str, torch.Tensor], folder: Path) -> dict[str, str]:
    """Write a file for each tensor as SGLang's dumper does, the layer as a tag; a later forward repeats names."""
    for number, (name, tensor) in enumerate(dump.items()):
        layer = re.match(r"(?:extend|draft1)/layers\.(\d+)\.(.*)", name)
        tags = f"name={layer[2]}___layer_id={layer[1]}" if layer else f"name={name.rpartition('/')[2]}"
        file = folder / f"step=1___rank=0___dump_index={number}___{tags}.pt"
        torch.save({"value": tensor, "meta": {"name": name}}, file)
    return {}


def sglang_passes(dump: dict[str, torch.Tensor], folder: Path) -> dict[str, str]:
    """Write one file for each forward as --debug-tensor-dump-output-folder does, and the map of its names."""
    for number, phase in enumerate(("extend", "draft1")):
        names = {name: f"model.{name.removeprefix(f'{phase}/')}.out" for name in dump if name.startswith(f"{phase}/")}
        tokens = {} if number else {"input_ids": dump["token_ids"]}
        torch.save({new: dump[name] for name, new in names.items()} | tokens, folder / f"Pass{number:05d}.pt")
    layers = {
        f"model.layers.*.{part}.out": f"extend/layers.*.{part}" for part in ("self_attn.k_norm", "self_attn.v_proj")
    }
    return layers | {"model.layers.*.self_attn.k_norm.out#2": "draft1/layers.*.self_attn.k_norm"}


def vllm_connector(dump: dict[str, torch.Tensor], folder: Path) -> dict[str, str]:
    """Write hidden states of several layers and the prompt, as vLLM's hidden-states connector does."""
    states = dump["target/features"].unflatten(-1, (3, -1)).contiguous()
    save_file({"hidden_states": states, "token_ids": dump["token_ids"]}, folder / "request-0.safetensors")
    return {}


FILES = {
    "SGLang's dumper": (sglang_dumper, "key norm of layer 0 for the context", "extend/layers.1.self_attn.k_norm"),
    "SGLang's passes and a map": (
        sglang_passes,
        "key norm of layer 0 for the context",
        "extend/layers.1.self_attn.k_norm",
    ),
    "vLLM's connector": (vllm_connector, "feature ids off by one", "target/features"),
}


@pytest.mark.parametrize("form", FILES)
@pytest.mark.parametrize("is_wrong", [False, True], ids=["right", "wrong"])
def test_files_of_engines_name_the_fault(form, is_wrong, tmp_path):
    write, name, first = FILES[form]
    fault = FAULTS[name]
    engine = scene(fault.kind, torch.float32)
    dump = engine.trace(fault.inject(engine, engine.drafter_input) if is_wrong else None)
    dump |= {"token_ids": torch.tensor(TOKENS.ids)}
    (tmp_path / "dump").mkdir()
    (tmp_path / "map.json").write_text(json.dumps(write(dump, tmp_path / "dump")))
    tensors = read_dump(tmp_path / "dump", tmp_path / "map.json")
    assert tokens_of(tensors).ids == TOKENS.ids
    vocab_size = pair(fault.kind).target.config.vocab_size
    result = compared(fault.kind, select(tensors, scene(fault.kind).trace(), vocab_size))
    assert first in {entry.name for entry in result.compared} | {result.first and result.first.name}
    assert (result.first and result.first.name) == (first if is_wrong else None)
    assert not is_wrong or any(fault.says in fit.reading for fit in result.fits)


@pytest.mark.parametrize(
    ("file", "content", "field"),
    [
        ("a.pt", b"no archive", "engine"),
        ("a.pt", [torch.ones(2)], "engine"),
        ("name=x___rank=1.pt", {"value": torch.ones(2), "meta": {}}, "engine"),
        ("a.safetensors", b"no header", "engine"),
        ("a.txt", b"", "engine"),
        ("map.json", b'["a"]', "map"),
    ],
)
def test_a_file_that_no_engine_writes_is_one_sentence(file, content, field, tmp_path):
    path = tmp_path / file
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(InputError, match=field) as caught:
        read_dump(VLLM, path) if field == "map" else read_dump(path)
    assert caught.value.name == field
    assert "\n" not in str(caught.value)


def test_the_command_reads_a_map(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("parity", "--dump", "names.safetensors", "--text", "def f")[0] == 0
    tensors = read_dump(Path("names.safetensors"))
    engine = {f"engine.{name}" if name == "extend/fc" else name: tensor for name, tensor in tensors.items()}
    save_file(engine, "engine.safetensors")
    Path("map.json").write_text('{"engine.extend/fc": "extend/fc"}')
    with_map, without = (
        call("parity", "--engine", "engine.safetensors", *words) for words in (("--map", "map.json"), ())
    )
    assert (with_map[0], without[0]) == (0, 0)
    count, fewer = (int(re.search(r"(\d+) tensors equal", output)[1]) for _, output, _ in (with_map, without))
    assert count == fewer + 1
    save_file(engine | {"engine.extend/fc": engine["engine.extend/fc"] + 1}, "engine.safetensors")
    status, output, _ = call("parity", "--engine", "engine.safetensors", "--map", "map.json")
    assert (status, "first difference: extend/fc" in output) == (1, True)


def test_real_engine_key_norm_is_named():
    """Read vLLM 0.32's own tensors on a CPU, made by tests/engines/vllm_dump.py."""
    tensors = read_dump(VLLM)
    shipped = load_shipped("dflash")
    exact, rounded = (PrefillScene(shipped, tokens_of(tensors), dtype) for dtype in (torch.float64, torch.float32))
    result = compare(select(tensors, exact.trace(), 4096), exact, rounded)
    assert result.first is not None
    assert result.first.name == "extend/layers.1.self_attn.k_norm"
    assert "layer 0's k_norm used for all layers (rows of the prompt only)" in result.fits[0].reading
    assert result.fits[0].next_difference is None
    assert [entry.name for entry in result.compared][:2] == ["target/features", "extend/fc"]


def test_keys_of_the_fast_implementation_are_equal():
    """A dump of KV alone, by kernels."""
    small = synthetic_pair("eagle3", num_layers=4)
    drafted = next(draft_phases(small, CHAIN, EngineOptions(impl="fast"), prompt=TOKENS.ids, chunks=(9,)))
    tokens = Tokens(tuple(drafted.tokens[:-1]), drafted.tokens[-1])
    exact, rounded = (PrefillScene(small, tokens, dtype) for dtype in (torch.float64, torch.float32))
    dump = {"extend/midlayer.self_attn.k_rotated": drafted.keys[0, : len(tokens.ids)]}
    assert compare(dump, exact, rounded).first is None
    dump = {name: x.roll(1, 0) for name, x in dump.items()}
    assert compare(dump, exact, rounded).first is not None
