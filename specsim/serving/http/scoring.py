"""Log-probabilities of all tokens of a request and of their alternatives, by a forward of the target of their own."""

from dataclasses import replace
from typing import NamedTuple

import torch

from specsim.core.engine import Engine
from specsim.core.grammar import Grammar
from specsim.core.phases import Batch, PrefillInput
from specsim.serving.requests import Request

_ROWS = 512  # of one forward


class TokenScore(NamedTuple):
    """A token after a text."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the most likely tokens with their log-probabilities, in this order
    distribution: torch.Tensor  # f64 [V], log-probabilities


class Scorer:
    """The scores of a request's tokens, in a pool of its own, row by row as the request grows.

    Tokens of the prompt are scored by the target's own distribution, generated ones under penalties, bias, grammar and
    temperature, as the rounds report theirs. first: position of the first prompt token that is scored; None: none is.
    """

    def __init__(
        self, engine: Engine, request: Request, num_top: int, first: int | None, grammar: Grammar | None
    ) -> None:
        self.scores: list[TokenScore] = []
        self._engine = engine
        self._prompt_len = len(request.prompt_ids)
        self._num_top = num_top
        self._first = self._prompt_len if first is None else max(first, 1)
        self._matcher = None if grammar is None else grammar.matcher()
        self._filled = 0  # columns of the pool
        length = min(self._prompt_len + request.params.max_new_tokens, engine.config.length_limit)
        self._pools = engine.make_pools(1, length + engine.config.page_size)
        row = self._pools.open()
        self._pools.reserve(row, length)
        vocab_size = engine.target.config.vocab_size
        self._batch = Batch.of([0], [row], [self._prompt_len], [request.params], vocab_size)

    def extend(self, known_ids: list[int]) -> None:
        """Score the tokens of prompt and output that have no score yet."""
        while self._filled < len(known_ids) - 1:
            end = min(self._filled + _ROWS, len(known_ids) - 1)
            logits_RV = self._forward(known_ids[self._filled : end])
            for position, logits_V in enumerate(logits_RV, start=self._filled + 1):
                if position >= self._first:
                    self.scores.append(self._score(known_ids, position, logits_V))
            self._filled = end

    def _forward(self, token_ids: list[int]) -> torch.Tensor:
        """Compute the logits after each of the next tokens, [R, V]."""
        start, device = self._filled, self._engine.device
        chunk = replace(PrefillInput.of_prompts([token_ids]), start_lens=torch.tensor([start]))
        batch = replace(self._batch, seq_lens=torch.tensor([start + len(token_ids)]))
        hidden_R = self._engine.hidden_states(batch.to(device), chunk.to(device), self._pools)
        width = self._engine.target.config.hidden_size
        return self._engine.target.logits(hidden_R[:, -width:].contiguous()).cpu()

    def _score(self, known_ids: list[int], position: int, logits_V: torch.Tensor) -> TokenScore:
        from specsim.reference.sampling import adjust_logits, topk

        token = known_ids[position]
        logits_V = logits_V.double()
        if position >= self._prompt_len:
            sampling = self._batch.sampling
            context = torch.tensor(known_ids[:position])
            allowed_V = None if self._matcher is None or self._matcher.has_ended else self._matcher.allowed()
            logits_V = adjust_logits(logits_V, context, self._prompt_len, sampling, 0, allowed_V)
            logits_V = logits_V / (float(sampling.temperature[0]) or 1.0)
            if self._matcher is not None and not self._matcher.has_ended:
                self._matcher.advance(token)
        logprob_V = torch.log_softmax(logits_V, dim=-1)
        values, tokens = topk(logprob_V, self._num_top)
        top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
        return TokenScore(token, float(logprob_V[token]), top, logprob_V)
