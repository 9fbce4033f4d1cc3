"""Grammars over trees: test automata, masks of nodes, the distribution of generated text."""

import functools
import itertools
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from fractions import Fraction
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specsim
from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.grammar import after, allowed_first, allowed_nodes, allowed_trees, stacked
from specsim.core.phases import Batch
from specsim.correctness.differential import check
from specsim.correctness.differential.cell import cell_of
from specsim.models.synthetic_pair import synthetic_pair
from specsim.reference.acceptance import Tree, greedy, target_only
from specsim.reference.sampling import adjust_logits, target_prob
from specsim.reference.tree import links
from specsim.serving.guidance import Guidance

needs_library = pytest.mark.skipif(not find_spec("llguidance"), reason="llguidance is an extra: specsim[grammar]")


@dataclass(frozen=True)
class Automaton:
    """A grammar of texts over tokens: transitions by state and character from state 0, and states that may end.

    The end token ends an output.
    """

    transitions: dict[int, dict[str, int]]
    ends: tuple[int, ...]
    texts: tuple[str, ...]
    end: int
    allowed: dict[int, torch.Tensor] = field(default_factory=dict, compare=False)  # by state, as that takes long

    def after(self, state: int | None, text: str) -> int | None:
        for char in text:
            state = self.transitions.get(state, {}).get(char)
        return state if text else None

    def matcher(self) -> "AutomatonMatcher":
        return AutomatonMatcher(self)


class AutomatonMatcher:
    """A matcher that keeps all its past states.

    `moves` counts its calls.
    """

    def __init__(self, automaton: Automaton):
        self.automaton, self.states, self.moves = automaton, [0], 0
        self.vocab_size = len(automaton.texts)

    @property
    def has_ended(self) -> bool:
        return self.states[-1] is None

    def allowed(self) -> torch.Tensor:
        assert not self.has_ended, "nothing is asked after the end"
        state, grammar = self.states[-1], self.automaton
        if state not in grammar.allowed:
            tokens = range(self.vocab_size)
            grammar.allowed[state] = torch.tensor([self._next(token) is not False for token in tokens])
        return grammar.allowed[state].clone()

    def _next(self, token: int):
        """Compute the state after a token, None for the end, False if it is not allowed."""
        state, grammar = self.states[-1], self.automaton
        if token == grammar.end:
            return None if state in grammar.ends else False
        after = grammar.after(state, grammar.texts[token])
        return False if after is None else after

    def advance(self, token: int) -> bool:
        assert not self.has_ended, "nothing is taken after the end"
        self.moves += 1
        after = self._next(token)
        if after is not False:
            self.states.append(after)
        return after is not False

    def roll_back(self, count: int) -> None:
        assert count < len(self.states)
        del self.states[len(self.states) - count :]


END = 0
TEXTS = ("", "a", "b", "ab", "ba", "c")  # token 0 ends
AB = Automaton({0: {"a": 1, "c": 2}, 1: {"b": 2}, 2: {"a": 1, "c": 2}}, (2,), TEXTS, END)  # (ab|c)+


def tree_of(parents: list[int], tokens: list[int], depth_limit: int = 99) -> Tree:
    return Tree(tokens, parents, *links(parents), depth_limit)


def masks(matcher, tree: Tree) -> torch.Tensor:
    return allowed_nodes(matcher, tree.tokens, tree.next_token, tree.next_sibling)


def texts_of(allowed_V: torch.Tensor) -> set[str]:
    return {TEXTS[token] or "end" for token in allowed_V.nonzero().flatten().tolist()}


# root ─┬─ "a" ─┬─ "b" ─── end
#       │       └─ "ba"
#       ├─ "b", which is forbidden ─── "a"
#       └─ "ab" ─┬─ end ─── "c"
#                └─ "c"
TREE = tree_of([-1, 0, 0, 0, 1, 1, 2, 3, 3, 4, 7], [9, 1, 2, 3, 2, 4, 1, 0, 5, 0, 5])


def test_masks_by_hand():
    allowed_NV = masks(AB.matcher(), TREE)
    after_piece, everything = {"end", "a", "ab", "c"}, set(TEXTS) - {""} | {"end"}
    expected = [
        {"a", "ab", "c"}, {"b", "ba"}, everything, after_piece, after_piece, {"b", "ba"}, everything, everything,
        after_piece, everything, everything,
    ]  # fmt: skip
    assert [texts_of(row) for row in allowed_NV] == expected


def test_the_matcher_returns_to_its_state():
    matcher = after(AB, [1, 4])
    before = list(matcher.states)
    masks(matcher, TREE)
    assert matcher.states == before


def test_every_child_of_an_allowed_node_is_tried_once():
    matcher = AB.matcher()
    masks(matcher, TREE)
    assert matcher.moves == 3 + 2 + 1 + 2


def test_the_matcher_is_not_called_after_the_end():
    matcher = after(AB, [3, END, 1, 1])
    assert matcher.has_ended
    assert masks(matcher, TREE).all()


@pytest.mark.parametrize("method", ["matcher", "allowed", "advance"])
def test_a_grammar_that_fails_is_named_by_its_request(method):
    def fail(*_):
        raise SystemExit(0)

    class Failing:
        def matcher(self):
            return SimpleNamespace(vocab_size=size, has_ended=False, **{**methods, method: fail})

    methods = dict(allowed=lambda: torch.ones(size, dtype=torch.bool), advance=lambda _: True, roll_back=lambda _: None)
    failing = Failing() if method != "matcher" else SimpleNamespace(matcher=fail)
    pair = synthetic_pair("eagle")
    size = pair.target.config.vocab_size
    arguments = pair, [[1, 2]] * 3, SpecConfig(topk=2, num_steps=2), SamplingParams(max_new_tokens=4)
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("grammars", "that of request 1")):
        specsim.generate(*arguments, grammars=[None, failing, None])


def test_an_output_that_is_forbidden_is_refused():
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("output", 5)):
        after(AB, [5, 1, 5])


def pools_of(*rows: list[int]) -> SimpleNamespace:
    width = max(map(len, rows)) + 3
    return SimpleNamespace(token_ids=torch.tensor([row + [-1] * (width - len(row)) for row in rows]))


def test_masks_of_a_batch_follow_each_requests_own_output():
    """Request 7 has prompt length 2 and output "a", "b".

    Request 8 has no grammar, request 9 its first token, "a".
    """
    batch = Batch.of([7, 8, 9], [0, 1, 2], [2, 3, 1], [SamplingParams()] * 3, 6)
    batch = replace(batch, seq_lens=torch.tensor([3, 3, 1]))
    pools = pools_of([4, 4, 1, 2], [4, 4, 4, 4], [4, 1])
    columns = {
        "draft_tokens": torch.tensor([[2, 3], [4, 1], [1, 4]]),
        "retrieve_next_token": torch.tensor([[1, -1]] * 3),
        "retrieve_next_sibling": torch.full((3, 2), -1),
    }
    allowed_BNV = stacked(allowed_trees(batch, SimpleNamespace(**columns), pools, {7: AB, 9: AB}), 3)
    assert [texts_of(row) for row in allowed_BNV[0]] == [{"end", "a", "ab", "c"}] * 2
    assert allowed_BNV[1].all()
    assert [texts_of(row) for row in allowed_BNV[2]] == [{"b", "ba"}] * 2
    assert stacked(allowed_trees(batch, SimpleNamespace(**columns), pools, {5: AB}), 3) is None


def test_the_first_token_is_masked_where_the_prompt_is_complete():
    batch = Batch.of([0, 1, 2], [0, 1, 2], [2, 2, 2], [SamplingParams()] * 3, 6)
    batch = replace(batch, seq_lens=torch.tensor([2, 1, 3]))  # complete; a chunk of it; resumed with one known token
    pools = pools_of([4, 4], [4, 4], [4, 4, 1])
    allowed_B1V = stacked(allowed_first(batch, pools, {0: AB, 1: AB, 2: AB}), 3)
    assert [texts_of(row) for row in allowed_B1V[[0, 2], 0]] == [{"a", "ab", "c"}, {"b", "ba"}]
    assert allowed_B1V[1].all()


V = 4
CELLS = 12
WEIGHTS = ((1, 1, 1, 1), (2, 1, 1, 0), (3, 1, 0, 0))  # the sum of any of them divides 12: edges are those of cells
WORDS = ("", "a", "b", "aa")
GRAMMARS = [
    Automaton({0: {"a": 1}, 1: {"b": 0}}, (0,), WORDS, END),  # (ab)*
    Automaton({0: {"a": 0, "b": 1}, 1: {"a": 2}}, (1, 2), WORDS, END),  # a*(b|ba)
    Automaton({0: {"a": 1, "b": 2}, 1: {"a": 0}, 2: {"b": 2}}, (0, 2), WORDS, END),  # (aa)*b*
]


class Masked:
    """A made-up target under a grammar, as in plain decoding, with no calls for tokens after the end."""

    def __init__(self, seed: int, grammar: Automaton):
        self.seed, self.grammar = seed, grammar

    def weights(self, context: tuple[int, ...], kept: list[bool]) -> list[int]:
        """Draw weights of the tokens after a context, before the mask, which leaves some."""
        generator = np.random.default_rng([self.seed, *context, 99])
        while True:
            weights = generator.permutation(WEIGHTS[generator.integers(len(WEIGHTS))]).tolist()
            if any(weight for weight, one in zip(weights, kept, strict=True) if one):
                return weights

    def logits(self, context: tuple[int, ...], allowed_V: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.weights(context, allowed_V.tolist())).double().log()

    @functools.cache  # noqa: B019 - a target lives as long as its test
    def distribution(self, context: tuple[int, ...]) -> list[Fraction]:
        try:
            matcher = after(self.grammar, context)
        except InputError:  # reached only with an injected fault
            return [Fraction(1, V)] * V
        kept = [True] * V if matcher.has_ended else matcher.allowed().tolist()
        weights = [weight * one for weight, one in zip(self.weights(context, kept), kept, strict=True)]
        return [Fraction(weight, sum(weights)) for weight in weights]


def until_end(tokens) -> tuple[int, ...]:
    tokens = tuple(tokens)
    return tokens[: tokens.index(END) + 1] if END in tokens else tokens


def chance_of(target: Masked, text: tuple[int, ...], start: int) -> Fraction:
    """Compute the probability of the tokens from `start` on, evaluating nothing after a forbidden token."""
    chance = Fraction(1)
    for at in range(start, len(text)):
        chance *= target.distribution(text[:at])[text[at]]
        if not chance:
            break
    return chance


def plain_distribution(target: Masked, count: int) -> dict:
    chances = Counter()
    for text in itertools.product(range(V), repeat=count):
        chances[until_end(text)] += chance_of(target, text, 0)
    return {text: chance for text, chance in chances.items() if chance}


def speculative_distribution(target: Masked, tree: Tree, count: int) -> dict:
    """Compute the distribution of the first `count` tokens: a round over the tree, then plain decoding."""
    sampling = Batch.of([0], [0], [0], [SamplingParams(temperature=1.0)], V).sampling
    allowed_NV = masks(target.grammar.matcher(), tree)
    rows = []
    for node, allowed_V in enumerate(allowed_NV):
        logits_V = target.logits(tuple(tree.path_tokens(node)[1:]), allowed_V)
        rows.append(target_prob(adjust_logits(logits_V, torch.tensor([1]), 1, sampling, 0, allowed_V), sampling, 0))
    prob_NV, outcomes, chances = torch.stack(rows), Counter(), Counter()
    points = [(cell + 0.5) / CELLS for cell in range(CELLS)]
    depth = max(len(tree.path(node)) - 1 for node in range(len(tree.tokens)))
    for *uniforms, final in itertools.product(points, repeat=depth + 1):
        path, bonus = target_only(tree, prob_NV, [*uniforms, 0.5], final, 1.0, 1.0)
        outcomes[(*(tree.tokens[node] for node in path[1:]), bonus)] += Fraction(1, CELLS ** (depth + 1))
    for tokens, share in outcomes.items():
        for rest in itertools.product(range(V), repeat=max(0, count - len(tokens))):
            text = (*tokens[:count], *rest)
            chances[until_end(text)] += share * chance_of(target, text, len(tokens))
    return {text: chance for text, chance in chances.items() if chance}


@st.composite
def draft_trees(draw):
    """Draw trees of two levels whose siblings have distinct tokens, among them end tokens and forbidden ones."""
    parents, tokens, depths = [-1], [9], [0]
    for node in range(1, draw(st.integers(2, 6))):
        parent = draw(st.sampled_from([other for other in range(node) if depths[other] < 2]))
        taken = {token for token, other in zip(tokens, parents, strict=True) if other == parent}
        free = [token for token in range(V) if token not in taken]
        if not free:
            break
        parents.append(parent)
        tokens.append(draw(st.sampled_from(free)))
        depths.append(depths[parent] + 1)
    return tree_of(parents, tokens)


@given(draft_trees(), st.integers(0, 10**6), st.sampled_from(GRAMMARS))
@settings(max_examples=12)
def test_masked_speculative_text_has_the_plain_distribution(tree, seed, grammar):
    target = Masked(seed, grammar)
    assert speculative_distribution(target, tree, 3) == plain_distribution(target, 3)


def test_a_mask_that_is_one_node_off_has_another_distribution(monkeypatch):
    """The distribution test fails with each node's mask at its parent, so it does test the traversal."""
    tree, target = tree_of([-1, 0, 1], [9, 1, 2]), Masked(3, GRAMMARS[0])
    assert speculative_distribution(target, tree, 3) == plain_distribution(target, 3)
    right = masks
    monkeypatch.setattr(sys.modules[__name__], "masks", lambda *each: right(*each).roll(-1, 0))
    assert speculative_distribution(target, tree, 3) != plain_distribution(target, 3)


def test_greedy_follows_the_best_allowed_tokens():
    tree = tree_of([-1, 0, 0, 1], [9, 1, 2, 2])
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.0]] * 4)
    allowed_NV = masks(GRAMMARS[0].matcher(), tree)
    path, bonus = greedy(tree, logits.masked_fill(~allowed_NV, -torch.inf))
    assert ([tree.tokens[node] for node in path[1:]], bonus) == ([1, 2], 1)


PAIR = specsim.load()
PIECES = tuple(PAIR.tokenizer.decode([token]) for token in range(PAIR.target.config.vocab_size))
NUMBERS = "[0-9]+(, [0-9]+)*"
PROMPT = "PRIMES = ["
SETTING = SpecConfig(topk=3, num_steps=3, num_draft_tokens=8)


def run(grammars, config=SETTING, prompts=(PROMPT,), **sampling):
    params = SamplingParams(**{"max_new_tokens": 12, **sampling})
    return specsim.generate(PAIR, list(prompts), config, params, grammars=grammars).outputs


DIGITS = "0123456789"
NUMBERS_GRAMMAR = Automaton(
    {0: dict.fromkeys(DIGITS, 1), 1: dict.fromkeys(DIGITS, 1) | {",": 2}, 2: {" ": 0}}, (1,), PIECES, END
)
BRACKETS = Automaton({0: {"]": 1, ",": 2}, 1: {",": 2}, 2: dict.fromkeys(DIGITS, 0) | {"[": 0}}, (0, 1), PIECES, END)


def one_of(*words: str, texts: tuple[str, ...] = PIECES) -> Automaton:
    """Allow these texts alone, which end where no other continues them."""
    prefixes = sorted(
        {word[:length] for word in words for length in range(len(word) + 1)}, key=lambda text: (len(text), text)
    )
    number = {prefix: index for index, prefix in enumerate(prefixes)}
    transitions = {number[prefix]: {} for prefix in prefixes}
    for prefix in prefixes[1:]:
        transitions[number[prefix[:-1]]][prefix[-1]] = number[prefix]
    return Automaton(transitions, tuple(number[word] for word in words), texts, END)


@needs_library
def test_the_library_allows_the_automatons_tokens():
    """Compare along a tree of tokens of the shipped pair, with the end inside it."""
    library, own = Guidance.regex(PAIR, NUMBERS), NUMBERS_GRAMMAR
    ids = {text: PAIR.tokenizer.encode(text, add_special_tokens=False)[0] for text in ("1", "2", ",", " ", "x")}
    tree = tree_of([-1, 0, 0, 1, 1, 3, 3, 5], [9, ids["1"], ids["x"], ids[","], END, ids[" "], ids["2"], ids["2"]])
    allowed_NV = masks(library.matcher(), tree)
    assert torch.equal(allowed_NV, masks(own.matcher(), tree))
    assert 0 < allowed_NV[5].sum() < allowed_NV.shape[1]


def test_greedy_text_is_plain_greedy_text_under_the_grammar():
    """Two requests with a grammar each and one without share a batch."""
    grammars = [NUMBERS_GRAMMAR, BRACKETS, None]
    speculative = run(grammars, prompts=[PROMPT] * 3)
    for own, grammar in zip(speculative, grammars, strict=True):
        (plain,) = run(grammar, SpecConfig.plain())
        assert own.token_ids == plain.token_ids
        assert own.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
        assert max(own.num_accepted_tokens_per_round) > 1
    assert len({own.token_ids for own in speculative}) == 3
    assert re.fullmatch(f"({NUMBERS})?[, 0-9]*", speculative[0].text.removesuffix(PIECES[END]))
    assert after(grammars[1], speculative[1].token_ids)


CHAIN = dict(topk=1, num_steps=3, num_draft_tokens=4)


@pytest.mark.parametrize(
    "config",
    [SETTING, *(SpecConfig(**CHAIN, verifier=verifier) for verifier in ("rejection", "block", "gumbel", "typical"))],
    ids=lambda config: config.verifier,
)
def test_a_request_ends_where_its_grammar_does(config):
    (output,) = run(one_of("no!", "yes!"), config, temperature=1.0, seed=4)
    assert output.finish_reason == "stop"
    assert re.fullmatch("(no|yes)!", PAIR.tokenizer.decode(list(output.token_ids[:-1])))
    assert output.token_ids[-1] == END


def deviation(outputs, false_alarm: float = 1e-6) -> float:
    """Compute by how much the share of an output is too far from its probability under its own logprobs.

    Those are of plain decoding. The result is at most 0 except in a share false_alarm of runs (Chernoff).
    """
    chances = {output.token_ids: min(1.0, math.exp(sum(output.logprobs))) for output in outputs}
    counts, most = Counter(output.token_ids for output in outputs), math.log(2 * len(chances) / false_alarm)

    def divergence(share: float, chance: float) -> float:
        terms = ((share, chance), (1 - share, 1 - chance))
        return sum(one * math.log(one / max(other, 1e-12)) for one, other in terms if one > 0)

    return max(len(outputs) * divergence(counts[text] / len(outputs), chances[text]) - most for text in chances)


def test_sampled_texts_have_the_frequencies_of_plain_decoding():
    """160 requests of one prompt have a few texts, whose joint distribution is tested."""
    grammar = one_of(*(f"{first}, {second}" for first in "01" for second in "012"))
    outputs = run(grammar, prompts=[PROMPT] * 160, temperature=1.0, max_new_tokens=6)
    chances = {output.token_ids: math.exp(sum(output.logprobs)) for output in outputs}
    assert 4 <= len(chances) <= 8
    assert sum(chances.values()) <= 1 + 1e-5
    rounds = [count for output in outputs for count in output.num_accepted_tokens_per_round]
    assert sum(rounds) > 2 * len(rounds)
    assert deviation(outputs) <= 0
    often = max(outputs, key=lambda output: chances[output.token_ids])
    assert deviation(outputs[:80] + (often,) * 80) > 0


TINY = synthetic_pair("eagle3")  # 48 tokens; those after the last text are unused
LETTERS = ("", *'abc[],{}:"01', "ab", "ba", "[1", ',"')
LETTERS += tuple(chr(200 + token) for token in range(len(LETTERS), TINY.target.config.vocab_size))
MIXED = {0: one_of("ab", "aca", texts=LETTERS), 2: Automaton({0: {"b": 1}, 1: {"1": 1, ":": 1}}, (1,), LETTERS, END)}


def test_the_fast_engines_tokens_equal_the_references():
    """Buffers of four requests hold a greedy and a sampled request with a grammar each, and one without between them.

    The padded request has the id of the first. Some drafts are forbidden, and one output ends inside a tree.
    """
    config = SpecConfig(topk=2, num_steps=2, num_draft_tokens=5)
    prompts = [[1, 2, 3], [4, 5], [6]]
    grammars = [MIXED.get(id) for id in range(3)]
    sampling = [SamplingParams(temperature=float(id > 0), seed=id, max_new_tokens=3) for id in range(3)]
    both = [
        specsim.generate(TINY, prompts, config, sampling, grammars=grammars, engine=engine).outputs
        for engine in (EngineOptions(), EngineOptions("fast", bucket=4, graph="eager"))
    ]
    for expected, found in zip(*both, strict=True):
        assert found.token_ids == expected.token_ids
        assert found.num_accepted_tokens_per_round == expected.num_accepted_tokens_per_round
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    free = specsim.generate(TINY, prompts, config, sampling).outputs
    assert both[1][0].token_ids != free[0].token_ids
    assert both[1][1].token_ids == free[1].token_ids
    assert (both[1][2].token_ids[1], both[1][2].num_accepted_tokens_per_round) == (END, (3,))


@dataclass(frozen=True)
class Forgetful:
    """An engine that ignores grammars in one of its calls."""

    engine: object
    phase: str

    def __getattr__(self, name: str):
        return getattr(self.engine, name)

    def _call(self, name: str, *arguments):
        grammars = self.engine.grammars
        self.engine.grammars = {} if name == self.phase else grammars
        try:
            return getattr(self.engine, name)(*arguments)
        finally:
            self.engine.grammars = grammars

    def prefill(self, *arguments):
        return self._call("prefill", *arguments)

    def verify(self, *arguments):
        return self._call("verify", *arguments)


@pytest.mark.parametrize("phase", ["", "prefill", "verify"])
def test_the_differential_uses_grammars(phase):
    """The reference replaces the fast implementation.

    Where it ignores grammars the comparison fails.
    """
    setting = dict(topk=3, num_steps=2, num_draft_tokens=6, batch=3, sampling="warm")
    cell = replace(cell_of(setting), rounds=2, grammars=MIXED)
    result = check(cell, "reference", wrap=lambda column: replace(column, engine=Forgetful(column.engine, phase)))
    assert result.decisions > 20 or phase
    assert (result.first_divergence.phase if result.first_divergence else "") == phase
