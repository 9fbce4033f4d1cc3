"""Log probabilities of a text's tokens and their alternatives, by a further forward of the target."""

from collections.abc import Sequence
from math import isnan
from typing import NamedTuple

import torch

from specsim.core.engine import Engine
from specsim.core.grammar import Grammar
from specsim.core.state import Sampling
from specsim.core.text_forward import TextForward
from specsim.serving.requests import Request

Alternatives = Sequence[tuple[int, float]]  # (token, log probability), most likely first


class TokenScore(NamedTuple):
    """A token after a text."""

    token: int
    logprob: float
    top: Alternatives  # the most likely tokens
    listed: tuple[float, ...]  # log probabilities of the tokens that were asked for

    def top_with(self, logprob: float) -> Alternatives:
        """Put the log probability that a round reports for the token in place of its own among the alternatives."""
        values = dict(self.top)
        if self.token in values and not isnan(logprob):
            values[self.token] = logprob
        return sorted(values.items(), key=lambda entry: (-entry[1], entry[0] != self.token))


class ScoreRequest(NamedTuple):
    """The scores that are wanted."""

    num_top: int = 0  # alternatives of every token
    first: int | None = None  # position of the first prompt token with a score; None: no prompt token has one
    listed_ids: tuple[int, ...] | None = None  # tokens with a log probability at every position


NO_SCORES = ScoreRequest()


class Scorer:
    """The scores of a request's tokens, as the request grows.

    Tokens of the prompt are scored by the target's own distribution, generated ones under penalties, bias, grammar and
    temperature, as the rounds report theirs.
    """

    def __init__(self, engine: Engine, request: Request, wanted: ScoreRequest, grammar: Grammar | None) -> None:
        self.scores: list[TokenScore] = []
        self._engine = engine
        self._request = request  # whose prompt may not be complete yet: a turn's follows earlier ones
        self._wanted = wanted
        self._matcher = None if grammar is None else grammar.matcher()
        self._sampling = Sampling.of([request.params], engine.target.config.vocab_size)
        self._forward: TextForward | None = None

    def extend(self, known_ids: list[int]) -> None:
        """Score the tokens of prompt and output that have no score yet."""
        prompt_len = len(self._request.prompt_ids)
        if self._forward is None:
            length = min(prompt_len + self._request.params.max_new_tokens, self._engine.config.length_limit)
            self._forward = TextForward(self._engine, length)
        first = prompt_len if self._wanted.first is None else max(self._wanted.first, 1)
        position = self._forward.num_rows
        for hidden_R in self._forward.extend(known_ids[position:-1]):
            for logits_V in self._engine.target.logits(hidden_R[:, -1].contiguous()).double().cpu():
                position += 1
                if position >= first:
                    self.scores.append(self._score(known_ids, position, logits_V))

    def _score(self, known_ids: list[int], position: int, logits_V: torch.Tensor) -> TokenScore:
        from specsim.reference.sampling import topk

        token = known_ids[position]
        if position >= len(self._request.prompt_ids):
            logits_V = self._processed(known_ids, position, logits_V)
        logprob_V = torch.log_softmax(logits_V, dim=-1)
        values, tokens = topk(logprob_V, self._wanted.num_top)
        top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
        return TokenScore(
            token, float(logprob_V[token]), top, tuple(logprob_V[list(self._wanted.listed_ids or ())].tolist())
        )

    def _processed(self, known_ids: list[int], position: int, logits_V: torch.Tensor) -> torch.Tensor:
        """Apply what changes the distribution of a generated token."""
        from specsim.reference.sampling import adjust_logits

        allowed_V = None
        if self._matcher is not None and not self._matcher.has_ended:
            allowed_V = self._matcher.allowed()
            self._matcher.advance(known_ids[position])
        context = torch.tensor(known_ids[:position])
        logits_V = adjust_logits(logits_V, context, len(self._request.prompt_ids), self._sampling, 0, allowed_V)
        return logits_V / (float(self._sampling.temperature[0]) or 1.0)


def likeliest(engine: Engine, request: Request, count: int, grammar: Grammar | None) -> tuple[dict[int, float], ...]:
    """Find the most likely tokens at every place of a finished output, with log probabilities by id.

    Returns () for a count of 0.
    """
    if not count:
        return ()
    scorer = Scorer(engine, request, ScoreRequest(count), grammar)
    scorer.extend(request.known_ids)
    rows = zip(scorer.scores, request.logprobs, strict=True)
    return tuple(dict(score.top_with(logprob)) for score, logprob in rows)
