"""State of a probe: how the server takes requests, its greedy answers, and the noise of its log probabilities."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import exp
from typing import Any, Literal

from specsim.core.errors import require
from specsim.correctness.explain import Answer, AnswerComparison, Noise, explain
from specsim.correctness.explain.finding import first_difference, verdict_of
from specsim.correctness.probe.server import Refused, Reply, Server

Verdict = Literal["holds", "fails", "cannot be shown"]
PROMPTS = (
    "The three most important ideas in computer science are",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "Q: Why is the sky blue?\nA:",
)
WITHOUT_SPECULATION = {"speculative": {"num_steps": 0}}
NO_IDS = "the server does not name tokens by ids"
_NO_SPECULATION = {"speculative": {"num_steps": -1}}  # refused by a server that reads the key
_IDS = {"return_tokens_as_token_ids": True, "return_token_ids": True}
_FORMS = ({"logprobs": 20, **_IDS}, {"logprobs": 5, **_IDS}, {"logprobs": 20}, {"logprobs": 5})


@dataclass(frozen=True, slots=True)
class PropertyResult:
    """Verdict on one property."""

    name: str  # property
    verdict: Verdict  # holds, fails, or cannot be shown by this server
    says: str  # reason for the verdict
    checked: int = 0  # answers that were compared, or tokens for a distribution
    differences: tuple[AnswerComparison, ...] = field(default=(), repr=False)  # pairs of greedy answers that differ


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """Amount of work of a probe."""

    noise: Noise  # bound on the error of a logit
    prompts: Sequence[str] = PROMPTS
    max_tokens: int = 32  # most new tokens of a greedy answer
    samples: int = 512  # sampled answers of each setting
    seed: int = 0  # first seed of sampled answers


class ProbeSession:
    """A server under test, with answers that several checks use.

    plain: the same model without speculation, None where --url is to do it. InputError if the server gives no log
    probabilities.
    """

    def __init__(self, server: Server, plain: Server | None, settings: ProbeSettings) -> None:
        self.server = server
        self.plain = plain
        self.settings = settings
        self.noise = settings.noise
        self.measured_noise = 0.0  # largest difference of a log probability between two answers of equal tokens
        self.form = self._find_form()
        self.prompts: list[Any] = list(settings.prompts)
        if self.has_ids:
            self.prompts = self._prompt_ids()

    def body(self, prompt: Any, **params: Any) -> dict[str, Any]:
        """Make a greedy request with log probabilities; params change it."""
        greedy = {"prompt": prompt, "max_tokens": self.settings.max_tokens, "temperature": 0}
        return {**greedy, **self.form, **params}

    def _find_form(self) -> Mapping[str, Any]:
        """Find the most log probabilities that the server gives, with tokens named by id if it can."""
        for form in _FORMS:
            body = {"prompt": self.settings.prompts[0], "max_tokens": 4, "temperature": 0, **form}
            with suppress(*[Refused] if form != _FORMS[-1] else []):
                answer = self.server.ask([body])[0].answer
                has_logprobs = answer.tokens and None not in answer.logprobs and set(answer.logprobs) != {0.0}
                allowed = "a server that gives log probabilities (logprobs)"
                require(has_logprobs and answer.unit == "token", self.server.name, self.server.address, allowed)
                self.has_ids = isinstance(answer.tokens[0], int)
                return form
        raise AssertionError

    def _prompt_ids(self) -> list[Any]:
        """Name the prompts by token ids: their own, or those of the answers to them; texts if ids are refused."""
        answers = [reply.answer for reply in self.server.ask([self.body(text) for text in self.settings.prompts])]
        prompts = [list(answer.prompt if isinstance(answer.prompt, tuple) else answer.tokens) for answer in answers]
        try:
            self.server.ask([self.body(prompts[0], max_tokens=1)])
        except Refused:
            self.has_ids = False
            return list(self.settings.prompts)
        return prompts

    @cached_property
    def solo(self) -> list[Reply]:
        """Greedy answers to each prompt while the server does nothing else."""
        return [self.server.ask([self.body(prompt)])[0] for prompt in self.prompts]

    def ask_plain(self, bodies: Sequence[Mapping[str, Any]]) -> list[Reply]:
        """Send requests, one after the other, to the model without speculation; Refused if nothing serves it."""
        if self.plain is not None:
            return [self.plain.ask([body])[0] for body in bodies]
        try:
            self.server.ask([self.body(self.prompts[0], max_tokens=1, **_NO_SPECULATION)])
        except Refused:
            return [self.server.ask([{**body, **WITHOUT_SPECULATION}])[0] for body in bodies]
        raise Refused(0, "it does not turn speculation off by request: give --url-plain")

    def compare(self, a: Sequence[Answer], b: Sequence[Answer]) -> list[AnswerComparison]:
        """Compare the tokens of greedy answers; their log probabilities only tell rounding from a fault."""
        comparisons = [self._of_tokens(*pair) for pair in zip(explain(a, b, self.noise), a, b, strict=True)]
        drifts = [comparison.drift for comparison in comparisons if comparison.drift <= self.noise.most]
        self.measured_noise = max(self.measured_noise, *drifts, 0.0)
        return comparisons

    def _of_tokens(self, comparison: AnswerComparison, one: Answer, other: Answer) -> AnswerComparison:
        index = first_difference(one, other)
        if index is None and comparison.verdict == "fault":
            return replace(comparison, verdict="equal", says="all tokens are equal")
        if index is not None and comparison.is_drawn:
            deficit = max(greedy_deficit(answer, index) for answer in (one, other))
            if deficit > self.noise.most:
                says = f"a greedy answer has a token {deficit:.3g} below the best by its own log probabilities"
                return replace(comparison, verdict="fault", says=says)
        if comparison.drift > self.noise.most:
            verdict, says = verdict_of(replace(comparison, drift=0.0), self.noise)
            return replace(comparison, verdict=verdict, says=says)
        return comparison


def greedy_deficit(answer: Answer, index: int) -> float:
    """Compute by how much the best listed log probability exceeds that of the chosen token."""
    logprob = answer.logprobs[index]
    return 0.0 if logprob is None else max(answer.top[index].values(), default=logprob) - logprob


def verdict_on(name: str, comparisons: Sequence[AnswerComparison]) -> PropertyResult:
    """Decide a property by pairs of greedy answers."""
    counts = {kind: sum(entry.verdict == kind for entry in comparisons) for kind in ("equal", "numerics", "fault")}
    decided = sum(counts.values())
    different = tuple(entry for entry in comparisons if entry.verdict != "equal")
    if counts["fault"]:
        fault = next(entry for entry in comparisons if entry.verdict == "fault")
        says = f"{counts['fault']} of {decided} answers differ beyond rounding; prompt {fault.request}: {fault.says}"
        return PropertyResult(name, "fails", says, decided, different)
    if not decided:
        says = different[0].says if different else "there was no answer"
        return PropertyResult(name, "cannot be shown", says, 0, different)
    says = f"{counts['equal']} answers are equal, {counts['numerics']} differ by rounding at a near-tie"
    return PropertyResult(name, "holds", says, decided, different)


def all_alike_prob(answers: Sequence[Answer]) -> float:
    """Bound the probability that independent draws give these equal answers, by their log probabilities."""
    total = sum(logprob or 0.0 for logprob in answers[0].logprobs)
    return exp(total * (len(answers) - 1))
