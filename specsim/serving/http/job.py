"""Requests of clients: their settings, and their progress as text."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specsim.core.config import SamplingParams
from specsim.core.grammar import Grammar
from specsim.serving.http.sessions import SessionTurn
from specsim.serving.requests import Request
from specsim.serving.scoring import NO_SCORES, Scorer, ScoreRequest, TokenScore

_UNFINISHED = "\ufffd"  # decoders put it in place of an incomplete character


@dataclass(frozen=True, slots=True)
class Ask:
    """One output that a client asks for."""

    prompt: str | Sequence[int]
    params: SamplingParams
    seeded_stream: int | None = None  # random stream of the seed; None: one that no other request has
    num_steps: int | None = None  # most draft steps of a round; None: the server's
    grammar: Grammar | None = None
    scores: ScoreRequest = NO_SCORES
    scores_only: bool = False  # no token is generated
    streams: bool = False  # progress is delivered after every step
    skips_special: bool = True  # special tokens are left out of the text
    keeps_stop: bool = False  # the stop token or string stays in the text
    min_tokens: int = 0  # before which no stop token ends the output
    turn: SessionTurn | None = None  # its place in a session
    rid: str = ""  # name by which it can be aborted


@dataclass(frozen=True, slots=True)
class Progress:
    """A request's output so far, or its end."""

    request: Request  # which grows until the end
    text: str  # without an unfinished character, or what may become a stop string
    num_tokens: int
    scores: tuple[TokenScore, ...]  # of the tokens from the first that has a logprob on, where asked for
    is_final: bool
    seconds: float = 0.0  # since the request was received


@dataclass(eq=False, slots=True)
class Job:
    """A request in the engine thread."""

    ask: Ask
    request: Request
    deliver: Callable[[Progress | Exception], None]
    grammar: Grammar | None
    scorer: Scorer | None  # where scores are wanted
    num_delivered: int = 0
    start: float = field(default_factory=time.perf_counter)

    def progress(self, is_final: bool) -> Progress:
        self.num_delivered = len(self.request.token_ids)
        if self.scorer is not None and self.request.finish_reason != "rejected":
            self.scorer.extend(self.request.known_ids)
        scores = () if self.scorer is None else tuple(self.scorer.scores)
        seconds = time.perf_counter() - self.start
        return Progress(self.request, self._text(is_final), self.num_delivered, scores, is_final, seconds)

    def _text(self, is_final: bool) -> str:
        request, ask = self.request, self.ask
        if request.tokenizer is None:
            return ""
        cuts = isinstance(request.stop_reason, int) and not ask.keeps_stop
        text = request.tokenizer.decode(
            request.token_ids[:-1] if cuts else request.token_ids, skip_special_tokens=ask.skips_special
        )
        if (stop := request.stop_string) is not None and stop in text:
            return text[: text.index(stop) + len(stop) * ask.keeps_stop]
        return text if is_final else _streamable(text.rstrip(_UNFINISHED), request.params.stop)


def _streamable(text: str, stops: Sequence[str]) -> str:
    """Leave out the end of a text with which a stop string may begin."""
    most = max(map(len, stops), default=1) - 1
    for start in range(max(0, len(text) - most), len(text)):
        if any(stop.startswith(text[start:]) for stop in stops):
            return text[:start]
    return text
