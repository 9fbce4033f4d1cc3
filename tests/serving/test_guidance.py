"""Grammars of requests: those of llguidance, settings that exclude them, and the options of the command line."""

import json
import re
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec

import pytest
import torch

import specsim
from specsim.cli.main import main
from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.serving.generation import load_engine
from specsim.serving.guidance import Guidance

PAIR = specsim.load()
END = 0
PROMPT = "PRIMES = ["
SETTING = SpecConfig(topk=3, num_steps=3, num_draft_tokens=8)
needs_library = pytest.mark.skipif(not find_spec("llguidance"), reason="llguidance is an extra: specsim[grammar]")


@needs_library
@pytest.mark.parametrize("pattern", ["ab", "(ab)+"])
def test_the_library_removes_tokens_also_at_the_end(pattern):
    matcher = Guidance.regex(PAIR, pattern).matcher()
    a, b = (PAIR.tokenizer.encode(char, add_special_tokens=False)[0] for char in "ab")
    before = matcher.allowed()
    assert matcher.advance(a)
    within = matcher.allowed()
    assert not matcher.advance(a)
    assert not matcher.advance(END)
    assert matcher.advance(b)
    complete = matcher.allowed()
    assert matcher.advance(END)
    assert matcher.has_ended
    matcher.roll_back(1)
    assert not matcher.has_ended
    assert torch.equal(matcher.allowed(), complete)
    matcher.advance(END)
    matcher.roll_back(2)
    assert torch.equal(matcher.allowed(), within)
    matcher.roll_back(1)
    assert torch.equal(matcher.allowed(), before)


@needs_library
def test_json_of_a_schema():
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    grammar = Guidance.json_schema(PAIR, schema)
    params = SamplingParams(temperature=1.0, max_new_tokens=40, seed=1)
    (output,) = specsim.generate(PAIR, [PROMPT], SETTING, params, grammars=grammar).outputs
    assert output.finish_reason == "stop"
    assert list(json.loads(PAIR.tokenizer.decode(list(output.token_ids[:-1])))) == ["a"]


@dataclass
class Unused:
    """A grammar with only a vocabulary."""

    vocab_size: int

    def matcher(self) -> "Unused":
        return self


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (
            {"engine": EngineOptions("fast", graph="round"), "grammars": Unused(PAIR.target.config.vocab_size)},
            ("graph", "round"),
        ),
        ({}, ("grammars", "one over 6 tokens")),
        ({"acceptance": SyntheticAcceptance((0.5, 0.5, 0.5))}, ("grammars", 1)),
        ({"config": SpecConfig(threshold_single=0.0)}, ("threshold_single", 0.0)),
        ({"grammars": [Unused(6), Unused(6)]}, ("grammars", "2 values")),
        ({"grammars": "a+"}, ("grammars", "a+")),
    ],
)
def test_settings_that_a_grammar_excludes_are_refused(change, field):
    arguments = {"prompts": [PROMPT], "config": SETTING, "grammars": Unused(6)} | change
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == field):
        specsim.generate(PAIR, **arguments)


def test_graphs_are_those_of_phases_where_there_are_grammars():
    config = SpecConfig()
    found = [{0: Unused(PAIR.target.config.vocab_size)}, {}, None]
    engines = [load_engine(PAIR, config, EngineOptions("fast"), grammars=grammars) for grammars in found]
    assert [engine.options.graph for engine in engines] == ["phase", "round", "round"]


@needs_library
@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Guidance.regex(PAIR, "(a"), ("regex", "(a")),
        (lambda: Guidance.regex(PAIR, 5), ("regex", 5)),
        (lambda: Guidance.regex(PAIR, "a{1000000000}"), ("regex", "a{1000000000}")),
        (lambda: Guidance.regex(PAIR, "(a?){5000}a{5000}"), ("regex", "(a?){5000}a{5000}")),
        (lambda: Guidance.regex(PAIR, "\udcff"), ("regex", "\udcff")),
        (lambda: Guidance.lark(PAIR, 'start: "\udcff"'), ("lark", 'start: "\udcff"')),
        (lambda: Guidance.json_schema(PAIR, {"const": "\udcff"}), ("json_schema", '{"const": "\\udcff"}')),
        (lambda: Guidance.json_schema(PAIR, [1]), ("json_schema", "[1]")),
        (lambda: Guidance.lark(PAIR, "a b"), ("lark", "a b")),
    ],
)
def test_a_grammar_that_is_none_is_refused(make, field):
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == field):
        make()


LATE = "[ab]{3}(a?){5000}a{5000}"  # too large for the library's lexer from the fourth character on


@needs_library
@pytest.mark.parametrize("impl", ["reference", "fast"])
@pytest.mark.parametrize("form", ["regex", "lark", "json_schema"])
def test_a_grammar_that_the_library_gives_up_ends_the_run(form, impl):
    texts = {"regex": LATE, "lark": f"start: /{LATE}/", "json_schema": {"type": "string", "pattern": f"^{LATE}$"}}
    grammar = getattr(Guidance, form)(PAIR, texts[form])
    a, b = (PAIR.tokenizer.encode(char, add_special_tokens=False)[0] for char in "ab")
    params = SamplingParams(max_new_tokens=8, logit_bias={a: 50.0, b: 40.0})
    config = SpecConfig.plain()
    with pytest.raises(InputError, match="of request 1", check=lambda error: error.name == form):
        specsim.generate(PAIR, [PROMPT] * 2, config, params, grammars=[None, grammar], engine=EngineOptions(impl))


@needs_library
def test_a_grammar_needs_a_tokenizer_and_an_end_token(monkeypatch):
    endless = replace(PAIR, target=replace(PAIR.target, config=replace(PAIR.target.config, eos_token_ids=())))
    for pair in (replace(PAIR, tokenizer=None), endless):
        with pytest.raises(InputError, check=lambda error: error.name == "regex"):
            Guidance.regex(pair, "a")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InputError, match=re.escape("pip install 'specsim[grammar]'")):
        Guidance.regex(PAIR, "a")


@needs_library
@pytest.mark.parametrize(
    ("form", "grammar"),
    [
        ("json_schema", {"$ref": "#"}),
        ("json_schema", {"$defs": {"x": {"$ref": "#/$defs/x"}}, "$ref": "#/$defs/x"}),
        ("json_schema", {"enum": [1], "extra": {1, 2}}),
        ("regex", r"[^\x00-\U0010FFFF]"),
        ("lark", "start: start"),
        ("lark", 5),
    ],
)
def test_a_grammar_that_nothing_satisfies_is_refused(form, grammar):
    with pytest.raises(InputError, check=lambda error: error.name == form):
        getattr(Guidance, form)(PAIR, grammar)


@needs_library
def test_a_grammar_of_the_empty_output_is_one():
    for grammar in (Guidance.regex(PAIR, ""), Guidance.lark(PAIR, 'start: ""')):
        assert grammar.matcher().allowed().nonzero().flatten().tolist() == sorted(grammar.end_ids)


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--prompt", PROMPT, "--max-new-tokens", "24", *arguments])
    return ended.value.code or 0


@needs_library
def test_generate_takes_an_expression_or_a_schema(tmp_path, capsys):
    assert command("--regex", "(no|yes)!", "--temperature", "1") == 0
    assert re.match("(no|yes)!", capsys.readouterr().out)
    (file := tmp_path / "schema.json").write_text('{"type": "integer", "minimum": 10, "maximum": 99}')
    assert command("--json-schema", str(file)) == 0
    assert re.match("[1-9][0-9]<", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("--regex", "a", "--json-schema", "a.json"),
            "json_schema is 'a.json'; allowed: nothing with --regex: leave out --json-schema or --regex",
        ),
        (("--json-schema", "no.json"), "json_schema is 'no.json'; allowed: a file with a JSON schema (No such file"),
        (("--json-schema", __file__), "a file with a JSON schema (no JSON: Extra data"),
        pytest.param(
            ("--regex", "[a"),
            "regex is '[a'; allowed: a grammar that llguidance accepts (unclosed character class)",
            marks=needs_library,
        ),
        pytest.param(
            ("--regex", "a", "--impl", "fast", "--graph", "round"),
            "graph is 'round'; allowed: eager, step or phase",
            marks=needs_library,
        ),
    ],
)
def test_bad_options_are_one_sentence(arguments, sentence, capsys):
    assert command(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line
