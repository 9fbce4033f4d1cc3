"""Requests: what is asked for, checked, and what has come of it so far."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from specsim.core.config import SamplingParams
from specsim.core.errors import InputError

_PROMPTS = "a text, or a list of texts or of lists of token ids"
_UNFINISHED = "\ufffd"  # what decoders put where the bytes of a character are not complete


@dataclass(slots=True, eq=False)
class Request:
    """A request on its way; it is itself and equal to no other.

    What is asked for: prompt_ids, at most max_tokens new tokens, stop_ids end it. arrival: the first step in which it
    may be planned. priority: the higher is admitted first and gives way last. continues: the id of the request whose
    conversation this is the next turn of; prompt_ids is only that turn until `follow`. abort_at: the step at whose
    start it is aborted. keep: whether its KV is held after it has finished (not after an abort), for a next turn that
    nobody has submitted yet. tokenizer: needed for stop strings and `text`.

    What has come of it: row, its place in the pool's tables (-1: none). accepted: num_accepted_tokens of each round.
    finish_reason: `stop`, `length`, `abort` or `rejected`. stop_reason: the token id or the stop string that ended it.
    error: why it was rejected. emissions: (step, seconds, tokens) of each delivery. arrived: step and seconds at which
    it could first have been planned. num_reused: columns that were not prefilled, since a tree or a session had them.
    """

    request_id: int
    prompt_ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    max_tokens: int
    arrival: int = 0
    priority: int = 0
    continues: int | None = None
    abort_at: int | None = None
    keep: bool = False
    tokenizer: Any = None
    row: int = -1
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    emissions: list[tuple[int, float, int]] = field(default_factory=list)
    arrived: tuple[int, float] | None = None
    num_preemptions: int = 0
    num_reused: int = 0

    @property
    def known_ids(self) -> list[int]:
        """The tokens of prompt and output."""
        return self.prompt_ids + self.token_ids

    @property
    def prefill_len(self) -> int:
        """Columns to fill before its next round: a resumed request keeps its last token as root."""
        return len(self.prompt_ids) + len(self.token_ids) - bool(self.token_ids)

    @property
    def text(self) -> str:
        """The decoded output up to the stop string that ended it; empty without a tokenizer."""
        text = self._decoded()
        return text[: text.index(self.stop_reason)] if isinstance(self.stop_reason, str) else text

    def take(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> int:
        """Append tokens up to the first that ends the request, drop the rest, and give how many were kept.

        A stop token ends it, then the token with which the decoded output first contains a stop string (an unfinished
        character at its end is no text yet), then the cap: a stop at the cap is a stop. Of several strings the one that
        starts first in the text counts. A request that has finished takes nothing.
        """
        before = len(self.token_ids)
        for token, logprob in zip(token_ids, logprobs, strict=True):
            if self.finish_reason is not None:
                break
            self.token_ids.append(token)
            self.logprobs.append(logprob)
            self.stop_reason = token if token in self.stop_ids else self._stop_string()
            if self.stop_reason is not None:
                self.finish_reason = "stop"
            elif len(self.token_ids) == self.max_tokens:
                self.finish_reason = "length"
        return len(self.token_ids) - before

    def follow(self, previous: "Request") -> None:
        """Make the prompt the conversation so far and this turn."""
        self.prompt_ids = previous.known_ids + self.prompt_ids

    def fit(self, max_len: int) -> None:
        """End at max_len tokens, prompt included, at the latest; max_tokens is below 1 where the prompt is too long."""
        self.max_tokens = min(self.params.max_new_tokens, max_len - len(self.prompt_ids))

    def _stop_string(self) -> str | None:
        if not self.params.stop:
            return None
        text = self._decoded().rstrip(_UNFINISHED)
        return min((stop for stop in self.params.stop if stop in text), key=text.index, default=None)

    def _decoded(self) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode(self.token_ids)


def make_requests(pair, prompts, sampling, request_ids, max_len: int) -> list[Request]:
    """One request a prompt; arguments as in specsim.generate. InputError names what cannot be run."""
    prompts = [prompts] if isinstance(prompts, str) else _items("prompts", prompts, _PROMPTS)
    sampling = SamplingParams() if sampling is None else sampling
    sampling = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    if not isinstance(sampling, Sequence) or not all(isinstance(each, SamplingParams) for each in sampling):
        raise InputError("sampling", sampling, "SamplingParams, one for all prompts or one each")
    allowed_ids = f"{len(prompts)} different integers from 0 to 2^32 - 1"
    ids = _items("request_ids", range(len(prompts)) if request_ids is None else request_ids, allowed_ids)
    if len(sampling) != len(prompts):
        raise InputError(
            "sampling", f"{len(sampling)} parameter sets", f"one, or one for each of the {len(prompts)} prompts"
        )
    are_ids = all(type(each) is int and 0 <= each < 2**32 for each in ids)
    if not are_ids or not len(ids) == len(set(ids)) == len(prompts):
        raise InputError("request_ids", request_ids, allowed_ids)
    requests = [
        make_request(pair.target.config, pair.tokenizer, *item) for item in zip(ids, prompts, sampling, strict=True)
    ]
    for request in requests:
        request.fit(max_len)
        if len(request.prompt_ids) >= max_len:
            most = f"at most {max_len - 1}, one less than max_len"
            raise InputError("prompt", f"{len(request.prompt_ids)} tokens", most)
    return requests


def make_request(
    target_config,
    tokenizer,
    request_id: int,
    prompt: str | Sequence[int],
    params: SamplingParams,
    *,
    arrival: int = 0,
    priority: int = 0,
    continues: int | None = None,
    abort_at: int | None = None,
    keep: bool = False,
) -> Request:
    """Give a request of text or token ids. InputError names what no schedule could run.

    Its length is not looked at: whoever runs it makes it `fit`. A turn that continues another is encoded without the
    tokens that begin a text.
    """
    _check_place(request_id, arrival, priority, continues, abort_at)
    ids = _token_ids(tokenizer, prompt, continues is None)
    if not ids:
        raise InputError("prompt", prompt, "at least one token")
    for name, tokens in (("prompt", ids), ("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        for token in tokens:
            in_vocabulary = isinstance(token, Integral) and 0 <= token < target_config.vocab_size
            if isinstance(token, bool) or not in_vocabulary:
                raise InputError(name, token, f"token ids from 0 to {target_config.vocab_size - 1}")
    if params.stop and tokenizer is None:
        raise InputError("stop", params.stop, "none: the target has no tokenizer")
    stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else target_config.eos_token_ids)
    place = (arrival, priority, continues, abort_at, keep)
    return Request(request_id, list(map(int, ids)), params, stop_ids, params.max_new_tokens, *place, tokenizer)


def _check_place(request_id, arrival, priority, continues, abort_at) -> None:
    for name, value in (("id", request_id), ("continues", continues)):
        if (type(value) is not int or not 0 <= value < 2**32) and (name == "id" or value is not None):
            raise InputError(name, value, "an integer from 0 to 2^32 - 1")
    for name, value in (("arrival", arrival), ("abort_at", 0 if abort_at is None else abort_at)):
        if type(value) is not int or not 0 <= value < 2**62:
            raise InputError(name, value, "an integer from 0 to 2^62 - 1")
    if type(priority) is not int:
        raise InputError("priority", priority, "an integer")


def _items(name: str, value: Any, allowed: str) -> list:
    """What a sequence, an array or a tensor holds; InputError for what has no order, for a text and for bytes."""
    items = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(items, Sequence) or isinstance(value, (str, bytes, bytearray, memoryview)):
        raise InputError(name, value, allowed)
    return list(items)


def _token_ids(tokenizer, prompt: str | Sequence[int], begins: bool) -> list[int]:
    if not isinstance(prompt, str):
        return _items("prompts", prompt, _PROMPTS)
    if tokenizer is None:
        raise InputError(
            "prompt", prompt, "token ids: the target has no tokenizer (in a file of requests they are prompt_ids)"
        )
    if not prompt or prompt.encode(errors="replace").decode() != prompt:  # a lone surrogate cannot be encoded
        raise InputError("prompt", prompt, "UTF-8 text of at least one character")
    return tokenizer.encode(prompt) if begins else tokenizer.encode(prompt, add_special_tokens=False)
