"""The shipped pair has the published formats, and its prompts are held out."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from email.message import Message
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from specsim.acceptance.settings import StudySetting, chain
from specsim.acceptance.study import Measurement, Study, measure
from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.metrics import acceptance
from specsim.maintain.shipped_pair.card import write_card
from specsim.maintain.shipped_pair.corpus import (
    Document,
    Source,
    build_corpus,
    compare_selection,
    declared_licence,
    first_bytes,
    follow_manifest,
    is_permissive,
    make_manifest,
    near_duplicates,
    read_documents,
    resemblance,
    sketch,
    write_documents,
)
from specsim.maintain.shipped_pair.recipe import SHIPPED
from specsim.models.load import load, load_shipped
from specsim.models.shipped import TINY, load_prompts
from specsim.serving.generation import generate

LAYER = {
    "self_attn.q_proj": "QI",
    "self_attn.k_proj": "KI",
    "self_attn.v_proj": "KI",
    "self_attn.o_proj": "HQ",
    "mlp.gate_proj": "MH",
    "mlp.up_proj": "MH",
    "mlp.down_proj": "HM",
    "post_attention_layernorm": "H",
}
MTP_ALONE = {"eh_proj": "HE", "enorm": "H", "hnorm": "H", "input_layernorm": "H", "norm": "H"}
BLOCK = {"fc.weight": "HF", "hidden_norm.weight": "H", "norm.weight": "H"} | {
    f"layers.{index}.{name}.weight": shape.replace("I", "H")
    for index in range(2)
    for name, shape in {**LAYER, "input_layernorm": "H", "self_attn.q_norm": "N", "self_attn.k_norm": "N"}.items()
}
FORMATS = {
    "eagle": {"embed_tokens.weight": "VH", "fc.weight": "HI", "fc.bias": "H"}
    | {
        f"layers.0.{name}.weight": shape if "self" not in name else shape.replace("I", "H")
        for name, shape in LAYER.items()
    },
    "eagle3": {"fc.weight": "HF", "norm.weight": "H", "lm_head.weight": "DH", "d2t": "D", "t2d": "V"}
    | {f"midlayer.{name}.weight": shape for name, shape in LAYER.items()}
    | {f"midlayer.{name}.weight": "H" for name in ("hidden_norm", "input_layernorm")},
    "p-eagle": {"fc.weight": "HF", "norm.weight": "H", "mask_hidden": "F", "layers.0.hidden_norm.weight": "H"}
    | {f"layers.0.{name}.weight": shape for name, shape in LAYER.items()}
    | {f"layers.1.{name}.weight": shape.replace("I", "H") for name, shape in LAYER.items()}
    | {f"layers.{index}.input_layernorm.weight": "H" for index in range(2)},
    "dflash": BLOCK,
    "dspark": BLOCK
    | {f"markov_head.markov_w{index}.weight": "VR" for index in (1, 2)}
    | {"confidence_head.proj.weight": "1C", "confidence_head.proj.bias": "1"},
    "mtp": {
        f"modules.{index}.{name}.weight": shape.replace("I", "H")
        for index in range(3)
        for name, shape in {**LAYER, **MTP_ALONE}.items()
    },
    "frozen-kv": {
        "pre_projection.weight": "HE",
        "post_projection.weight": "BH",
        "norm.weight": "H",
        "lm_head.weight": "VH",
    }
    | {
        f"layers.{index}.{name}.weight": shape.replace("I", "H")
        for index in range(2)
        for name, shape in {**LAYER, "input_layernorm": "H"}.items()
        if not name.endswith(("k_proj", "v_proj"))
    },
}


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a file is no mapping


def _assert_is_pair(pair: Path) -> None:
    trained = json.loads((pair / "training.json").read_text())
    assert {"eagle", "eagle3"} <= trained.keys()
    for name in {"target", "standalone"} & trained.keys():
        model = AutoModelForCausalLM.from_pretrained(pair / name)
        assert model.dtype == torch.bfloat16
        assert len(AutoTokenizer.from_pretrained(pair / "target")) == model.config.vocab_size
    for name, layout in FORMATS.items():
        if name not in trained:
            continue
        config = json.loads((pair / name / "config.json").read_text())
        wide = config.get("backbone_hidden_size", config["hidden_size"])
        sizes = {"V": config["vocab_size"], "H": config["hidden_size"], "M": config["intermediate_size"]}
        sizes |= {"I": 2 * sizes["H"], "F": 3 * sizes["H"], "D": config.get("draft_vocab_size")}
        sizes |= {"B": wide, "E": 2 * wide, "Q": config["num_attention_heads"] * config["head_dim"]}
        sizes |= {
            "1": 1,
            "N": config["head_dim"],
            "R": config.get("markov_rank", 0),
            "C": sizes["H"] + config.get("markov_rank", 0),
        }
        sizes |= {"K": config["num_key_value_heads"] * config["head_dim"]}
        expected = {tensor: tuple(sizes[letter] for letter in shape) for tensor, shape in layout.items()}
        assert {tensor: tuple(value.shape) for tensor, value in _tensors(pair / name).items()} == expected


def test_shipped_pair_has_the_published_formats():
    _assert_is_pair(TINY)
    config = json.loads((TINY / "eagle3" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_convention"] == "entering"
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]


def test_shipped_pair_is_small():
    assert sum(path.stat().st_size for path in TINY.rglob("*") if path.is_file()) <= 45_000_000


def test_shipped_draft_vocabulary_maps_in_both_directions():
    tensors = _tensors(TINY / "eagle3")
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    target_ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    assert torch.equal(target_ids, tensors["t2d"].nonzero()[:, 0])
    assert len(target_ids) < len(tensors["t2d"])


def test_shipped_prompts_are_of_held_out_files():
    prompts = load_prompts()
    manifest = json.loads((TINY / "manifest.json").read_text(encoding="utf-8"))
    heldout = manifest["heldout_files"]
    licences = {each["name"]: each["licence"] for each in manifest["distributions"]}
    digests = hashlib.sha256("\n".join(sorted(heldout)).encode()).hexdigest()
    assert len(prompts) >= 40
    assert len({prompt["id"] for prompt in prompts}) == len({prompt["text"] for prompt in prompts}) == len(prompts)
    assert all(heldout[prompt["file_sha256"]] == prompt["source"] for prompt in prompts)
    assert all(licences[prompt["source"].split()[0]] == prompt["licence"] for prompt in prompts)
    assert manifest["heldout"] == {**manifest["heldout"], "files": len(heldout), "sha256": digests}


def test_shipped_text_is_small_and_of_no_held_out_file():
    excerpts = load_prompts(name="text")
    heldout = json.loads((TINY / "manifest.json").read_text(encoding="utf-8"))["heldout_files"]
    assert sum(len(excerpt["text"].encode()) for excerpt in excerpts) < 1_000_000
    assert len({excerpt["file_sha256"] for excerpt in excerpts}) == len(excerpts)
    assert not heldout.keys() & {excerpt["file_sha256"] for excerpt in excerpts}

    def file(source: str) -> tuple[str, str]:
        distribution, path = source.split(": ", 1)
        return distribution.split()[0], path

    assert not set(map(file, heldout.values())) & {file(excerpt["source"]) for excerpt in excerpts}
    assert all(is_permissive(excerpt["licence"]) for excerpt in excerpts)


def test_shipped_distributions_are_permissive():
    manifest = json.loads((TINY / "manifest.json").read_text(encoding="utf-8"))
    assert all(is_permissive(distribution["licence"]) for distribution in manifest["distributions"])


@pytest.mark.parametrize(
    ("fields", "licence", "permissive"),
    [
        ({"License-Expression": "MIT"}, "MIT", True),
        ({"License-Expression": "(MIT OR GPL-2.0-only) AND ISC"}, "(MIT OR GPL-2.0-only) AND ISC", True),
        ({"License-Expression": "MPL-2.0 AND MIT"}, "MPL-2.0 AND MIT", False),
        ({"License-Expression": "Apache-2.0 WITH LLVM-exception"}, "Apache-2.0 WITH LLVM-exception", True),
        ({"Classifier": "License :: OSI Approved :: BSD License", "License": "GPL"}, "BSD", True),
        ({"Classifier": "License :: Other/Proprietary License"}, "Other/Proprietary License", False),
        ({"Classifier": "License :: OSI Approved", "License": "The MIT License\n\nCopyright"}, "The MIT", False),
        ({"License": "Apache License, Version 2.0"}, "Apache-2.0", True),
        ({"License": "BSD 3-Clause License\n\nCopyright"}, "BSD-3-Clause", True),
        ({"Name": "silent"}, None, False),
    ],
)
def test_licence_is_read_and_checked(fields, licence, permissive):
    metadata = Message()
    for name, value in fields.items():
        metadata[name] = value
    assert declared_licence(metadata) == licence
    assert is_permissive(licence) is permissive


def _program(seed: int, lines: int = 60) -> str:
    numbers = np.random.default_rng(seed).integers(10**6, size=lines)
    return "".join(f"value_{number} = compute({number % 977}, {index})\n" for index, number in enumerate(numbers))


def test_resemblance_is_the_shared_part():
    same = _program(1)
    other = _program(2)
    assert resemblance(sketch(same), sketch(same.replace("\n", "\n\n  "))) == 1
    assert resemblance(sketch(same), sketch(other)) < 0.2
    assert 0.5 < resemblance(sketch(same), sketch(same + _program(3, 15))) < 1
    assert len(sketch("too short")) == 0


def test_near_duplicates_are_found_among_strangers():
    candidates = [sketch(_program(seed)) for seed in range(5)]
    references = [sketch(_program(3) + "done = True\n"), sketch(_program(9))]
    assert near_duplicates(candidates, references, 0.5) == {3}


@pytest.fixture
def sources(tmp_path) -> list[Source]:
    texts = {f"{seed}.py": _program(seed) for seed in range(20)}
    texts |= {"copy.py": texts["0.py"], "short.py": "x = 1\n", "made.py": "# Autogenerated\n" + _program(30)}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / f"near_{name}").write_text(text + "done = True\n")
    paths = tuple(sorted(path.name for path in tmp_path.iterdir()))
    return [Source("library", "1.0", "MIT", tmp_path, paths)]


def test_corpus_holds_out_whole_files_without_near_duplicates(sources, tmp_path):
    corpus = build_corpus(sources, heldout_one_in=4)
    assert corpus.heldout
    assert all(int(document.sha256, 16) % 4 == 0 for document in corpus.heldout)
    assert corpus.removed["exact_duplicates"] == 2
    heldout = {Path(document.path).name.removeprefix("near_") for document in corpus.heldout}
    assert not heldout & {Path(document.path).name.removeprefix("near_") for document in corpus.train}
    assert not {"short.py", "made.py"} & {document.path for document in corpus.train}
    write_documents(corpus.train, tmp_path / "train.jsonl")
    assert read_documents(tmp_path / "train.jsonl") == corpus.train


def test_manifest_is_followed_and_differences_are_reported(sources):
    manifest = make_manifest(build_corpus(sources, heldout_one_in=4), 4)
    assert follow_manifest(sources, manifest) == (sources, [])
    newer = replace(sources[0], version="2.0", paths=sources[0].paths[12:])
    assert follow_manifest([newer], manifest) == ([newer], ["library is 2.0, the manifest has 1.0"])
    assert follow_manifest([], manifest) == ([], ["library 1.0 is missing"])
    again = make_manifest(build_corpus([newer], heldout_one_in=4), 4)
    assert compare_selection(manifest, manifest) == []
    assert compare_selection(again, manifest)


def test_first_bytes_are_whole_files():
    documents = [Document("library", "1", "MIT", f"{index}.py", "0", "é" * 5) for index in range(4)]
    assert list(first_bytes(documents, 25)) == documents[:2]
    assert list(first_bytes(documents, None)) == documents


@pytest.mark.whole  # tests/training trains every kind
def test_smoke_trains_a_loadable_pair(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "specsim.maintain.shipped_pair.train",
        "--smoke",
        "--out",
        "tiny",
        "--work",
        "work",
    ]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _assert_is_pair(tmp_path / "tiny")
    trained = json.loads((tmp_path / "tiny" / "training.json").read_text())
    assert trained.keys() >= {"target", "standalone", *FORMATS}
    assert trained["mtp"]["corpus"]["tokens"] == trained["target"]["tokens"]
    assert (tmp_path / "tiny" / "MODEL_CARD.md").exists()
    assert (tmp_path / "tiny" / "prompts.jsonl").read_text().count("\n") >= 1
    assert (tmp_path / "tiny" / "text.jsonl").read_text().count("\n") >= 1


def test_the_shipped_pair_speculates_as_transformers_decodes():
    """Greedy decoding gives equal tokens with either head, tokenizer and checkpoint loader included."""
    texts = [prompt["text"] for prompt in load_prompts()[:3]]
    model = AutoModelForCausalLM.from_pretrained(TINY / "target").double()
    tokenizer = AutoTokenizer.from_pretrained(TINY / "target")
    expected = []
    for text in texts:
        ids = torch.tensor([tokenizer.encode(text)])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32)
        expected.append(tuple(out[0, ids.shape[1] :].tolist()))
    for drafter in ("eagle", "eagle3"):
        found = generate(
            load(drafter=drafter),
            texts,
            sampling=SamplingParams(max_new_tokens=32),
            engine=EngineOptions(dtype=torch.float64),
        )
        assert [output.token_ids for output in found.outputs] == expected


def test_the_shipped_card_is_made_from_the_shipped_figures():
    assert (TINY / "MODEL_CARD.md").read_text(encoding="utf-8") == write_card(SHIPPED, TINY)


def _setting(row: dict) -> StudySetting:
    """A recorded setting; options that were added later have their defaults."""
    return StudySetting(**row | {"config": SpecConfig(**row["config"])})


def test_the_card_tells_prompt_sets_apart(tmp_path):
    for name in ("manifest", "training"):
        shutil.copy(TINY / f"{name}.json", tmp_path)
    figures = [acceptance([3, 0], 3, 4, [3, 1]), acceptance([1], 3, 4, [2])]
    rows = [Measurement(StudySetting("ngram", chain(3), prompt_set=name), *figures, 2) for name in ("prompts", "edits")]
    study = Study(2, 1, 64, tuple(rows), (), num_edits=2, num_fresh_edits=1)
    (tmp_path / "acceptance.json").write_text(json.dumps(study.to_json()))
    lines = write_card(SHIPPED, tmp_path).splitlines()
    for prompts in ("held-out", "edits"):
        assert f"| ngram, chain of 3 | 0 | {prompts} | 2.500 | 2.000 | 0.75 | 0.50, 0.50, 0.50 |" in lines
    assert any("2 edits of `edits.jsonl`" in line for line in lines)


def _recorded_drafters() -> list[str]:
    rows = json.loads((TINY / "acceptance.json").read_text())["measurements"]
    return sorted({row["setting"]["drafter"] for row in rows})


@pytest.mark.whole
@pytest.mark.parametrize("drafter", _recorded_drafters())
def test_the_shipped_acceptance_is_measured_again(drafter):
    """The chain of 3 at temperature 0, on all prompts in float64, has exactly the recorded rounds."""
    study = json.loads((TINY / "acceptance.json").read_text())
    wanted = StudySetting(drafter, chain(3))
    recorded = next(row for row in study["measurements"] if _setting(row["setting"]) == wanted)
    texts = [prompt["text"] for prompt in load_prompts()]
    measured = measure(load_shipped, {"prompts": texts}, study["max_new_tokens"], [wanted]).measurements[0]
    assert measured.num_equal == study["num_prompts"] == len(texts)
    for group in ("everything", "fresh"):
        figures = json.loads(json.dumps(asdict(getattr(measured, group))))
        assert {name: figures[name] for name in recorded[group]} == recorded[group]
