"""Flags of engines' servers."""

import json
import shlex

import pytest

from specsim import SpecConfig
from specsim.core.errors import InputError
from specsim.simulator.candidates import sglang_flags, vllm_flags
from specsim.simulator.cell import Cell

TREE = SpecConfig(4, 3, 8)
CHAIN = SpecConfig(1, 3, 4)


def options(flags: str | None) -> dict[str, str]:
    assert flags is not None
    words = shlex.split(flags)
    return dict(zip(words[::2], words[1::2], strict=True))


def test_flags_are_those_of_the_engines():
    flags = options(sglang_flags(Cell(), TREE, "a/head"))
    assert flags["--speculative-algorithm"] == "EAGLE3"
    assert flags["--speculative-draft-model-path"] == "a/head"
    assert (flags["--speculative-num-steps"], flags["--speculative-eagle-topk"]) == ("3", "4")
    assert flags["--speculative-num-draft-tokens"] == "8"
    assert flags["--max-running-requests"] == str(Cell().max_running)  # SGLang resets it to 48 with drafts
    assert "--max-running-requests" not in sglang_flags(Cell(), SpecConfig.plain())
    flags = options(vllm_flags(Cell(), CHAIN, "a/head"))
    expected = {"method": "eagle3", "model": "a/head", "num_speculative_tokens": 3}
    assert json.loads(flags["--speculative-config"]) == expected
    assert "speculative" not in sglang_flags(Cell(), SpecConfig.plain()) + vllm_flags(Cell(), SpecConfig.plain())
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("topk", 4)):
        vllm_flags(Cell(), TREE)


@pytest.mark.parametrize(
    ("model", "page_size", "backend"),
    [
        ("llama-3.1-8b", 16, "flashinfer"),
        ("llama-3.1-8b", 1, "flashinfer"),
        ("gpt-oss-20b", 16, "triton"),
        ("glm-4.7-flash", 1, "triton"),
    ],
)
def test_a_tree_names_a_backend_that_takes_it(model, page_size, backend):
    """https://docs.sglang.io/advanced_features/attention_backend.html: Spec topk>1; sglang#9784 for pages."""
    cell = Cell(model=model, page_size=page_size)
    tree = options(sglang_flags(cell, SpecConfig(4, 3, 8, page_size)))
    assert (tree["--attention-backend"], tree["--page-size"]) == (backend, str(page_size))
    for config in (SpecConfig(1, 3, 4, page_size), SpecConfig.plain(page_size)):
        assert "--attention-backend" not in options(sglang_flags(cell, config))


def test_trees_of_latent_attention_on_pages_are_refused():
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("page_size", 16)):
        sglang_flags(Cell(model="glm-4.7-flash"), TREE)


def test_flags_are_quoted_for_a_shell():
    name = "my heads/it's one"
    assert options(sglang_flags(Cell(), CHAIN, name))["--speculative-draft-model-path"] == name
    assert json.loads(options(vllm_flags(Cell(), CHAIN, name))["--speculative-config"])["model"] == name


def test_flags_of_parallel_drafters():
    """DFLASH and DSPARK are SGLang's names; vLLM reads a P-EAGLE head as EAGLE-3's with parallel_drafting."""
    flags = options(sglang_flags(Cell(drafter="dflash"), CHAIN, "a/head"))
    assert (flags["--speculative-algorithm"], flags["--speculative-num-draft-tokens"]) == ("DFLASH", "4")
    flags = options(sglang_flags(Cell(drafter="dspark"), CHAIN, "a/head"))
    assert not {"--speculative-num-steps", "--speculative-num-draft-tokens"} & set(flags)
    assert flags["--speculative-algorithm"] == "DSPARK"
    assert sglang_flags(Cell(drafter="p-eagle"), CHAIN) is None
    assert sglang_flags(Cell(drafter="p-eagle"), SpecConfig.plain()) is not None
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("topk", 4)):
        sglang_flags(Cell(drafter="dflash"), TREE)
    for kind, method in (("dflash", "dflash"), ("dspark", "dspark"), ("p-eagle", "eagle3")):
        settings = json.loads(options(vllm_flags(Cell(drafter=kind), CHAIN, "a/head"))["--speculative-config"])
        assert settings["method"] == method
        assert settings.get("parallel_drafting", False) is (kind == "p-eagle")
