"""Requests: what is asked for, checked, and what has come of it so far."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path

import torch

from specsim.config import InputError, SamplingParams

_PROMPTS = "a text, or a list of texts or of lists of token ids"


@dataclass(slots=True)
class Request:
    """A request on its way: max_tokens new tokens at most, stop_ids end it, row is its place in the pool's tables."""

    request_id: int
    prompt_ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    max_tokens: int
    row: int = -1
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def take(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append tokens up to the first that ends the request and drop the rest. A stop token at the cap is a stop."""
        for token, logprob in zip(token_ids, logprobs, strict=True):
            self.token_ids.append(token)
            self.logprobs.append(logprob)
            if token in self.stop_ids or len(self.token_ids) == self.max_tokens:
                self.finish_reason = "stop" if token in self.stop_ids else "length"
                return


def make_requests(pair, prompts, sampling, request_ids, max_len: int) -> list[Request]:
    """One request a prompt; arguments as in specsim.generate. InputError names what cannot be run."""
    if isinstance(prompts, (bytes, Path)) or not isinstance(prompts, Iterable):
        raise InputError("prompts", prompts, _PROMPTS)
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    sampling = SamplingParams() if sampling is None else sampling
    sampling = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    if not isinstance(sampling, Sequence) or not all(isinstance(each, SamplingParams) for each in sampling):
        raise InputError("sampling", sampling, "SamplingParams, one for all prompts or one each")
    ids = list(range(len(prompts)) if request_ids is None else request_ids)
    if len(sampling) != len(prompts):
        raise InputError(
            "sampling", f"{len(sampling)} parameter sets", f"one, or one for each of the {len(prompts)} prompts"
        )
    if len(set(ids)) != len(prompts) or not all(type(each) is int and 0 <= each < 2**32 for each in ids):
        raise InputError("request_ids", request_ids, f"{len(prompts)} different integers from 0 to 2^32 - 1")
    return [_request(pair, *item, max_len) for item in zip(ids, prompts, sampling, strict=True)]


def _request(pair, request_id: int, prompt: str | Sequence[int], params: SamplingParams, max_len: int) -> Request:
    target = pair.target.config
    ids = _token_ids(pair.tokenizer, prompt)
    if not ids:
        raise InputError("prompt", prompt, "at least one token")
    if len(ids) >= max_len:
        raise InputError("prompt", f"{len(ids)} tokens", f"at most {max_len - 1}, one less than max_len")
    for name, tokens in (("prompt", ids), ("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= token < target.vocab_size:
                raise InputError(name, token, f"token ids from 0 to {target.vocab_size - 1}")
    stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else target.eos_token_ids)
    return Request(request_id, list(map(int, ids)), params, stop_ids, min(params.max_new_tokens, max_len - len(ids)))


def _token_ids(tokenizer, prompt: str | Sequence[int]) -> list[int]:
    if not isinstance(prompt, str):
        if isinstance(prompt, (bytes, Path)) or not isinstance(prompt, Iterable):
            raise InputError("prompts", prompt, _PROMPTS)
        return prompt.tolist() if isinstance(prompt, torch.Tensor) else list(prompt)
    if tokenizer is None:
        raise InputError("prompt", prompt, "token ids: the target has no tokenizer")
    if not prompt or prompt.encode(errors="replace").decode() != prompt:  # a lone surrogate cannot be encoded
        raise InputError("prompt", prompt, "UTF-8 text of at least one character")
    return tokenizer.encode(prompt)
