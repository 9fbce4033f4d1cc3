"""The demo shows a real round and computes the equality that it prints."""

import re
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from itertools import pairwise

import pytest
import torch

import specsim.cli.walkthrough as demo
from specsim import SamplingParams, generate
from specsim.core.display import stdout_console
from specsim.correctness.differential import Divergence
from specsim.models.synthetic_pair import synthetic_pair

PROMPTS = ["abc", "xyz0", "hello"]


class Letters:
    """Token i is character i of an alphabet of 48."""

    alphabet = "abcdefghijklmnopqrstuvwxyz0123456789()[]{}<>=+-,"

    def encode(self, text):
        return [self.alphabet.index(letter) for letter in text]

    def decode(self, ids):
        return "".join(self.alphabet[token] for token in ids)


@pytest.fixture(scope="module")
def pair():
    return replace(synthetic_pair(), tokenizer=Letters())


@pytest.fixture(scope="module")
def shown(pair) -> str:
    with redirect_stdout(StringIO()) as out:
        assert demo.run(pair, PROMPTS, stdout_console(), max_new_tokens=24)
    return out.getvalue()


def test_output_is_plain_text_of_at_most_100_columns(shown):
    assert shown.isascii()
    assert max(map(len, shown.splitlines())) <= 100


def test_equality_is_shown_for_tree_and_chain(shown):
    claims = [line for line in shown.splitlines() if "plain decoding's" in line]
    assert [claim.split(":")[0] for claim in claims] == ["chain of 3", "tree 4/3/8"]
    assert all(claim.endswith("the 72 tokens of 3 prompts equal plain decoding's: yes") for claim in claims)


@pytest.mark.parametrize("config", [demo.CHAIN, demo.TREE])
def test_equality_is_computed(pair, capsys, monkeypatch, config):
    def altered(pair, prompts, setting, *rest):
        generation = generate(pair, prompts, setting, *rest)
        first, *others = generation.outputs
        wrong = replace(first, token_ids=(*first.token_ids[:-1], first.token_ids[-1] ^ 1))
        return replace(generation, outputs=(wrong, *others)) if setting == config else generation

    monkeypatch.setattr(demo, "generate", altered)
    assert not demo.run(pair, PROMPTS, stdout_console(), max_new_tokens=8)
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.endswith("NO")]
    assert [line.split(":")[0] for line in wrong] == [demo.NAMES[config]]


def test_both_columns_are_compared(shown):
    (table,) = re.findall(r"requests x rounds .*\n +(\d+) +(\d+) +(\d+) +(\d+) ", shown)
    rounds, decisions, within_rounding_error, mismatches = map(int, table)
    assert rounds >= 3
    assert decisions > 20
    assert within_rounding_error <= 1
    assert mismatches == 0
    assert "The implementations are equal." in shown


def test_a_difference_between_the_columns_is_shown(pair, capsys, monkeypatch):
    divergence = Divergence("demo", 2, "verify", 1, 3, "logprobs", -1.0, -2.0)
    wrong = replace(demo.check(demo.compared_cell(pair, PROMPTS), pair=pair), mismatches=1, first_divergence=divergence)
    monkeypatch.setattr(demo, "check", lambda *arguments, **options: wrong)
    assert not demo.run(pair, PROMPTS, stdout_console(), max_new_tokens=8)
    shown = capsys.readouterr().out
    assert "The implementations are NOT equal" in shown
    assert str(divergence) in " ".join(shown.split())


def test_rounds_are_those_of_generate(pair):
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    (output,) = generate(pair, ["abc"], demo.TREE, params).outputs
    counts = output.num_accepted_tokens_per_round
    with torch.inference_mode():
        rounds = [each for _, each in zip(counts, demo.rounds(pair, Letters().encode("abc")), strict=False)]
    assert [len(each.path) for each in rounds] == list(counts)
    assert [each.number for each in rounds] == list(range(1, len(counts) + 1))
    tokens = [token for each in rounds for token in each.output.verdict.accepted_tokens()[0]]
    assert tuple(tokens)[:23] == output.token_ids[1:]


def test_tree_shows_every_node_once_below_its_parent(pair, shown):
    rows = [re.match(r"( *\d+)  ( *)'.'  +(\d\.\d{3})( .*)?$", line) for line in shown.splitlines()]
    rows = [row for row in rows if row]
    depths = [len(row[2]) // 2 for row in rows]
    assert sorted(int(row[1]) for row in rows) == list(range(demo.TREE.num_draft_tokens))
    assert depths[0] == 0
    assert all(0 < after <= before + 1 for before, after in pairwise(depths))
    scores = [float(row[3]) for row in rows]
    assert scores[0] == max(scores) == 1
    said = [row[4].strip() for row in rows if row[4] and row[4].strip()]
    assert said[0].startswith("the root")
    (count,) = re.findall(r"num_accepted_drafts (\d)", shown)
    assert len(said) == int(count) + 1
    assert said[-1].endswith("the bonus")


def test_figures_are_of_all_prompts(shown):
    tables = shown.split("Acceptance on these prompts")[1]
    rows = [line.split() for line in tables.splitlines() if line.startswith(("plain", "chain", "tree"))]
    assert len(rows) == 5
    assert all("72" in row for row in rows)
