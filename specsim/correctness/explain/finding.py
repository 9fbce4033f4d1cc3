"""First difference between two answers, and whether rounding explains it.

A correct logit is off by at most e, its rounding error. So the distance of two logits is off by at most 2e in each
engine, and so is a token's log probability, because its normaliser is off by no more than the logits. Compare greedy
answers after the same tokens. The first engine's margin between its token and the other's, and the second's margin
between its token and the first's, add up to at most 4e. Log probabilities of the same token differ by at most 4e.

A token that an engine did not report is less likely than all that it did, the chosen one aside, and has at most the
probability that they leave: without alternatives 1 - P(chosen).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, isnan, log
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from specsim.core.arguments import check_arguments
from specsim.core.errors import InputError, require, require_choice
from specsim.correctness.explain.answers import UNCLEAR, Answer, Token, Unit

if TYPE_CHECKING:
    import torch

    from specsim.core.pair import TargetCheckpoint

Verdict = Literal["equal", "numerics", "fault", "undecided"]

# One unit of roundoff at a logit of 32; in float32 and float64 sums of thousands of products err more than that.
_LEAST_LEFT = 2.0**-24  # probability that reported ones leave: float32, in which engines compute them, has no less
_UNSURE_SUM = 1.001  # above it reported values are not probabilities of one distribution
_EXCERPT = 20  # characters of a text that are shown from its first difference on
ERRORS = {"float64": 1e-10, "float32": 1e-4, "float16": 2.0**-11 * 32, "bfloat16": 2.0**-8 * 32}


@check_arguments
@dataclass(frozen=True, slots=True)
class Noise:
    """A bound on the error of a logit."""

    error: float
    source: str  # of the bound, in words

    @classmethod
    def of(cls, dtype: str) -> "Noise":
        """Bound the rounding error of a large model's logits in the arithmetic of a type."""
        require_choice("dtype", dtype, ERRORS)
        return cls(ERRORS[dtype], f"rounding in {dtype}")

    @property
    def most(self) -> float:
        """Bound the sum of two margins, and the difference of two log probabilities."""
        return 4 * self.error


@dataclass(frozen=True, slots=True)
class AnswerComparison:
    """Comparison of two answers to one request.

    Margins and drift are infinite where a log probability is NaN.
    """

    request: int  # place of the request in the files, from 0
    verdict: Verdict  # equal; numerics: rounding explains the difference; fault: it does not; undecided
    says: str  # reason for the verdict
    place: int | None = None  # place of the first token that differs; None for none
    tokens: tuple[Token | None, Token | None] | None = None  # both answers' token there, None where one has ended
    margins: tuple[float | None, float | None] | None = None  # each engine's between its own token and the other's
    at_least: tuple[float, float] | None = None  # lower bounds of margins, some infinite; also without the other token
    is_drawn: bool = False  # whether an engine sampled: its file says so, or reports a likelier token than its own
    drift: float = 0.0  # largest difference of log probabilities of equal tokens before `place`, or infinite
    drift_place: int | None = None  # place of the drift; None for none
    unit: Unit = "token"  # what `place` counts; characters where a file has the text alone
    exact: float | None = None  # distance of the two tokens' logits in float64, where weights were given


@check_arguments
def explain(a: Sequence[Answer], b: Sequence[Answer], noise: Noise) -> Iterator[AnswerComparison]:
    """Compare answers to the same prompts in the same order, one finding per request.

    InputError for answers that differ in number, in their prompts, or in naming tokens by id or by text.
    """
    require(len(a) == len(b), "b", f"{len(b)} answers", f"the number that a has, {len(a)}")
    for request, (one, other) in enumerate(zip(a, b, strict=True)):
        missing = _without_logprobs(one, other)
        if "character" in (one.unit, other.unit):
            one, other = one.by_character(), other.by_character()
        if type(one.prompt) is type(other.prompt) and one.prompt != other.prompt:
            raise InputError("b", f"an answer to another prompt (request {request})", "answers to the prompts of a")
        if one.tokens and other.tokens and type(one.tokens[0]) is not type(other.tokens[0]):
            by = "text" if isinstance(other.tokens[0], str) else "id"
            allowed = "answers named as a's are, by text or by id (vLLM's server: return_tokens_as_token_ids)"
            raise InputError("b", f"an answer that names tokens by {by} (request {request})", allowed)
        yield _finding(request, one, other, noise, missing)


def first_difference(one: Answer, other: Answer) -> int | None:
    """Find the first place where the tokens differ or one answer has ended; None where they are equal."""
    both = zip(one.tokens, other.tokens, strict=False)
    index = next((index for index, (mine, theirs) in enumerate(both) if mine != theirs), None)
    if index is None and len(one.tokens) != len(other.tokens):
        return min(len(one.tokens), len(other.tokens))
    return index


def _finding(request: int, one: Answer, other: Answer, noise: Noise, missing: Sequence[str]) -> AnswerComparison:
    index = first_difference(one, other)
    drift, drift_place = _drift(one, other, index)
    finding = AnswerComparison(request, "undecided", "", index, drift=drift, drift_place=drift_place, unit=one.unit)
    if index is not None:
        finding = replace(finding, tokens=(_token_at(one, index), _token_at(other, index)))
    if reason := _proves_nothing(one, other, index, missing):
        return replace(finding, says=reason)
    if index is not None and index < min(len(one.tokens), len(other.tokens)):
        mine = _margin(one, other, index)
        theirs = _margin(other, one, index)
        finding = replace(
            finding,
            margins=(mine.reported, theirs.reported),
            at_least=(mine.at_least, theirs.at_least),
            is_drawn=any(_is_drawn(answer, index) for answer in (one, other)),
        )
    verdict, says = verdict_of(finding, noise)
    if verdict == "fault" and _is_unclear(one, other, drift_place if drift > noise.most else index):
        says = f"{UNCLEAR} stands for several tokens, which may differ: have the engines report ids or bytes"
        verdict = "undecided"
    if not (one.tokens or other.tokens):
        verdict, says = "undecided", "neither answer has a token"
    return replace(finding, verdict=verdict, says=says)


def _without_logprobs(one: Answer, other: Answer) -> list[str]:
    """Name the answers that have tokens and no log probability of any."""
    answers = {"a": one, "b": other}
    return [name for name, answer in answers.items() if answer.tokens and set(answer.logprobs) == {None}]


def _proves_nothing(one: Answer, other: Answer, index: int | None, missing: Sequence[str]) -> str:
    """Say why the log probabilities decide nothing; "" if they do, or if neither has any and the tokens are equal."""
    for name, answer in (("a", one), ("b", other)):
        if answer.tokens and set(answer.logprobs) == {0.0}:
            return f"all log probabilities of {name} are 0, which no model gives: they prove nothing"
    names = " and ".join(missing)
    if not (one.tokens and other.tokens) or not missing or (index is None and len(missing) == 2):
        return ""
    if index is None:
        return f"all {one.unit}s are equal, but {names} has no log probabilities to compare"
    where = f"the first {one.unit} that differs is number {index}, counted from 0"
    return f"{where}; without log probabilities of {names} nothing tells rounding from a fault"


def verdict_of(finding: AnswerComparison, noise: Noise) -> tuple[Verdict, str]:
    """Decide by the engines' own log probabilities under that noise; with the reason."""
    if finding.drift > noise.most:
        says = f"the same token after the same tokens has log probabilities {finding.drift:.3g} apart"
        return "fault", f"{says}, more than {noise.most:.3g}"
    if finding.place is None:
        has_logprobs = finding.drift_place is not None
        return "equal", f"all {finding.unit}s are equal" + ("" if has_logprobs else "; no log probabilities compared")
    if finding.at_least is None or finding.margins is None:
        says = "one answer ends here, the other goes on: limits or stops differ, or one engine missed the end of text"
        return "undecided", says
    if finding.is_drawn:
        return "undecided", "an answer was sampled, and engines draw different random numbers"
    least = sum(finding.at_least)
    if least > noise.most:
        says = f"the two tokens lie {least:.3g} apart or more, rounding explains {noise.most:.3g}"
        return "fault", says + ("; unless an answer was sampled" if None in finding.margins else "")
    if None in finding.margins:
        says = "the other's token is not among the reported log probabilities: have the engines report more of them"
        return "undecided", says
    return "numerics", f"a near-tie: the two tokens lie {least:.3g} apart, rounding explains {noise.most:.3g}"


def _token_at(answer: Answer, index: int) -> Token | None:
    """Look up the token at a place, or the next characters of a text; None where the answer has ended."""
    if answer.unit == "character":
        return "".join(map(str, answer.tokens[index : index + _EXCERPT])) or None
    return answer.tokens[index] if index < len(answer.tokens) else None


def _drift(one: Answer, other: Answer, end: int | None) -> tuple[float, int | None]:
    """Find the largest difference of log probabilities of equal tokens, and its place; 0 without any."""
    both = zip(one.logprobs[:end], other.logprobs[:end], strict=False)
    drift = 0.0
    drift_place = None
    for index, (mine, theirs) in enumerate(both):
        if mine is None or theirs is None:
            continue
        difference = abs(_above(mine, theirs))
        if drift_place is None or difference > drift:
            drift = difference
            drift_place = index
    return drift, drift_place


def _above(mine: float, theirs: float) -> float:
    """Difference of two log probabilities, infinite where one is NaN."""
    if mine == theirs:  # also where both are minus infinity
        return 0.0
    return inf if isnan(mine - theirs) else mine - theirs


class _Margin(NamedTuple):
    """An engine's margin between its own token and the other's."""

    reported: float | None
    at_least: float


def _margin(mine: Answer, theirs: Answer, index: int) -> _Margin:
    logprob = mine.logprobs[index]
    if logprob is None:
        return _Margin(None, 0.0)
    top = mine.top[index]
    other_logprob = top.get(theirs.tokens[index])
    if other_logprob is not None:
        margin = _above(logprob, other_logprob)
        return _Margin(margin, max(0.0, margin))
    return _Margin(
        None, max([0.0, _above(logprob, _most_left(top)), *(_above(logprob, value) for value in top.values())])
    )


def _most_left(top: Mapping[Token, float]) -> float:
    """Bound the log probability of a token that is not reported by what the reported ones leave; infinite without one.

    Reported values that are no probabilities of one distribution bound nothing.
    """
    total = sum(exp(value) for value in top.values())
    if isnan(total) or total > _UNSURE_SUM:
        return inf
    return log(max(1 - total, _LEAST_LEFT))


def _is_drawn(answer: Answer, index: int) -> bool:
    """Check whether the answer was sampled: it says so, or reports another token as likelier than its own."""
    if answer.is_sampled:
        return True
    logprob = answer.logprobs[index]
    others = (value for token, value in answer.top[index].items() if token != answer.tokens[index])
    return logprob is not None and any(value > logprob for value in others)


def _is_unclear(one: Answer, other: Answer, index: int | None) -> bool:
    """Whether texts do not show if the tokens up to that place are equal."""
    end = None if index is None else index + 1
    return any(UNCLEAR in str(token) for answer in (one, other) for token in answer.tokens[:end])


@dataclass(frozen=True, slots=True)
class ComparedWeights:
    """A target's weights in two number formats."""

    exact: Any  # config and tensors, f64
    rounded: Any  # config and tensors in dtype
    dtype: "torch.dtype"  # of the engines' arithmetic

    @classmethod
    def of(cls, target: "TargetCheckpoint", dtype: "torch.dtype") -> "ComparedWeights":
        """Convert a loaded target to both formats."""
        import torch

        from specsim.reference.oracle_forward import in_dtype

        return cls(in_dtype(target, torch.float64), in_dtype(target, dtype), dtype)

    def measure(self, token_ids: Sequence[int], tokens: tuple[int, int]) -> tuple[float, Noise]:
        """Measure the difference of two tokens' logits in float64, and the error of a logit in dtype.

        token_ids: the context, prompt included. The error is four times the largest of any logit in a plain forward in
        dtype, because another order of the same sums errs about as much; in float64 it is the assumed one.
        """
        import torch

        from specsim.reference.oracle_forward import target_forward

        with torch.inference_mode():
            exact, rounded = (
                target_forward(model.config, model.tensors, list(token_ids), ())[0][-1].double()
                for model in (self.exact, self.rounded)
            )
        error = max(4 * float((exact - rounded).abs().max()), ERRORS["float64"])
        name = str(self.dtype).removeprefix("torch.")
        return float(exact[tokens[0]] - exact[tokens[1]]), Noise(error, f"measured: {name} against float64")


def decide(finding: AnswerComparison, exact: float, noise: Noise) -> AnswerComparison:
    """Decide by the exact distance of the two tokens' logits: beyond two errors, one engine is wrong.

    At a near-tie the same noise also has to explain the engines' own log probabilities; otherwise it is a fault.
    """
    is_near = abs(exact) <= 2 * noise.error
    verdict, says = verdict_of(finding, noise)
    if is_near and verdict == "fault":
        return replace(finding, verdict=verdict, says=f"{says} ({noise.source})", exact=exact)
    says = f"in float64 their logits lie {abs(exact):.3g} apart; rounding ({noise.source}) moves them by "
    says += f"{2 * noise.error:.3g} at most" + ("" if is_near else f": {'b' if exact > 0 else 'a'} is wrong")
    return replace(finding, verdict="numerics" if is_near else "fault", says=says, exact=exact)
