"""Where two answers part, and whether rounding explains it.

A logit that is right but for rounding is off by at most e. So the distance of two logits is off by at most 2e in each
engine, and so is a token's log probability, its normaliser being off by no more than the logits. Hence, for greedy
answers and after the same tokens: what the first engine puts between its token and the other's, and what the second
puts between its token and the first's, come to at most 4e; and log probabilities of a token differ by at most 4e.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isnan
from typing import Literal

from specsim.core.errors import InputError
from specsim.correctness.explain.answers import UNCLEAR, Answer, Token

Verdict = Literal["equal", "numerics", "fault", "undecided"]

# A unit of roundoff at a logit of 32; in float32 and float64 sums of thousands of products err more than that.
ERRORS = {"float64": 1e-10, "float32": 1e-4, "float16": 2.0**-11 * 32, "bfloat16": 2.0**-8 * 32}


@dataclass(frozen=True, slots=True)
class Noise:
    """How far a logit may be off, and where that comes from."""

    error: float
    source: str

    @classmethod
    def of(cls, dtype: str) -> "Noise":
        """What the arithmetic of a type explains of a large model's logits."""
        if dtype not in ERRORS:
            raise InputError("dtype", dtype, " or ".join(ERRORS))
        return cls(ERRORS[dtype], f"rounding in {dtype}")

    @property
    def most(self) -> float:
        """Most that two margins may come to in all, and that two log probabilities may differ by."""
        return 4 * self.error


@dataclass(frozen=True, slots=True)
class Finding:
    """What two answers to one request come to.

    place: of the first token that differs, None where none does; tokens: both answers' token there, None where one has
    ended. margins: what either engine puts between its own token and the other's, None where it did not report the
    other's; at_least: then the least that it can be. is_drawn: whether an engine reported a likelier token than its
    own there: greedy decoding did not choose it. drift: the largest difference of log probabilities of equal tokens
    before, and drift_place where. Margins and drift are infinite where a log probability is NaN. exact: the distance
    of the two tokens' logits in float64, where weights were given.
    """

    request: int
    verdict: Verdict
    says: str
    place: int | None = None
    tokens: tuple[Token | None, Token | None] | None = None
    margins: tuple[float | None, float | None] | None = None
    at_least: tuple[float, float] | None = None
    is_drawn: bool = False
    drift: float = 0.0
    drift_place: int | None = None
    exact: float | None = None


def explain(a: Sequence[Answer], b: Sequence[Answer], noise: Noise) -> Iterator[Finding]:
    """A finding for each request, the answers being to the same prompts in the same order, tokens named alike.

    InputError for answers that differ in number, in their prompts, or in naming tokens by id or by text.
    """
    if len(a) != len(b):
        raise InputError("b", f"{len(b)} answers", f"as many as a has, {len(a)}")
    for request, (one, other) in enumerate(zip(a, b, strict=True)):
        if type(one.prompt) is type(other.prompt) and one.prompt != other.prompt:
            raise InputError("b", f"an answer to another prompt (request {request})", "answers to the prompts of a")
        if one.tokens and other.tokens and type(one.tokens[0]) is not type(other.tokens[0]):
            by = "text" if isinstance(other.tokens[0], str) else "id"
            allowed = "answers named as a's are, by text or by id (vLLM's server: return_tokens_as_token_ids)"
            raise InputError("b", f"an answer that names tokens by {by} (request {request})", allowed)
        yield _finding(request, one, other, noise)


def first_difference(one: Answer, other: Answer) -> int | None:
    """The first place at which the tokens differ, or one answer has ended; None where they are equal."""
    both = zip(one.tokens, other.tokens, strict=False)
    place = next((place for place, (mine, theirs) in enumerate(both) if mine != theirs), None)
    if place is None and len(one.tokens) != len(other.tokens):
        return min(len(one.tokens), len(other.tokens))
    return place


def _finding(request: int, one: Answer, other: Answer, noise: Noise) -> Finding:
    place = first_difference(one, other)
    drift, drift_place = _drift(one, other, place)
    tokens = _tokens(one, other, place)
    finding = Finding(request, "undecided", "", place, tokens, drift=drift, drift_place=drift_place)
    if tokens and None not in tokens:
        margins, at_least = zip(*_margins(one, other, place), strict=True)
        is_drawn = any(_is_drawn(each, place) for each in (one, other))
        finding = replace(finding, margins=margins, at_least=at_least, is_drawn=is_drawn)
    verdict, says = verdict_of(finding, noise)
    if verdict == "fault" and _is_unclear(one, other, drift_place if drift > noise.most else place):
        verdict, says = "undecided", f"{UNCLEAR} stands for several tokens, which may differ: ask for ids, or bytes"
    return replace(finding, verdict=verdict, says=says)


def verdict_of(finding: Finding, noise: Noise) -> tuple[Verdict, str]:
    """What the engines' own log probabilities come to under that noise, and what is to be said of it."""
    if finding.drift > noise.most:
        says = f"the same token after the same tokens has log probabilities {finding.drift:.3g} apart"
        return "fault", f"{says}, more than {noise.most:.3g}"
    if finding.place is None:
        return "equal", "all tokens are equal"
    if None in finding.tokens:
        says = "one answer ends here, the other goes on: limits or stops differ, or an end of text was missed"
        return "undecided", says
    if finding.is_drawn:
        return "undecided", "a token was drawn that is not the likeliest, and two engines draw other numbers"
    least = sum(finding.at_least)
    if least > noise.most:
        return "fault", f"the two tokens lie {least:.3g} apart or more, rounding explains {noise.most:.3g}"
    if None in finding.margins:
        return "undecided", "the other's token is not among the log probabilities reported: ask for more of them"
    return "numerics", f"a near-tie: the two tokens lie {least:.3g} apart, rounding explains {noise.most:.3g}"


def _tokens(one: Answer, other: Answer, place: int | None) -> tuple[Token | None, Token | None] | None:
    if place is None:
        return None
    return tuple(each.tokens[place] if place < len(each.tokens) else None for each in (one, other))


def _drift(one: Answer, other: Answer, place: int | None) -> tuple[float, int | None]:
    """The largest difference of log probabilities of equal tokens, and where; 0 where there is none to compare."""
    both = zip(one.logprobs[:place], other.logprobs[:place], strict=False)
    known = [(abs(_above(mine, theirs)), at) for at, (mine, theirs) in enumerate(both) if None not in (mine, theirs)]
    return max(known, key=lambda each: each[0], default=(0.0, None))


def _above(mine: float, theirs: float) -> float:
    """By how much a log probability is above another: infinitely, where one is NaN."""
    if mine == theirs:  # also where both are minus infinity
        return 0.0
    return inf if isnan(mine - theirs) else mine - theirs


def _margins(one: Answer, other: Answer, place: int) -> Iterator[tuple[float | None, float]]:
    """By engine: its margin between its own token and the other's, and the least that it can be."""
    for mine, theirs in ((one, other), (other, one)):
        top, own = mine.top[place], mine.logprobs[place]
        if own is None:
            yield None, 0.0
            continue
        found = top.get(theirs.tokens[place])
        # A token that is not reported is less likely than all that are, the chosen one aside.
        bound = max((_above(own, value) for value in top.values()), default=0.0)
        margin = None if found is None else _above(own, found)
        yield margin, max(0.0, bound if margin is None else margin)


def _is_drawn(answer: Answer, place: int) -> bool:
    """Whether another token is reported as likelier than the one at that place."""
    token, own = answer.tokens[place], answer.logprobs[place]
    return own is not None and any(value > own for each, value in answer.top[place].items() if each != token)


def _is_unclear(one: Answer, other: Answer, place: int) -> bool:
    """Whether texts do not tell if the tokens up to that place are equal."""
    return any(UNCLEAR in str(token) for answer in (one, other) for token in answer.tokens[: place + 1])
