"""Requests: their validated input, and their output so far."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

from specsim.core.arguments import check_arguments
from specsim.core.config import SamplingParams
from specsim.core.errors import InputError, require, require_int, require_type

if TYPE_CHECKING:
    from specsim.core.pair import Pair
    from specsim.core.target import ModelConfig

_PROMPTS = "a text, or a list of texts or of lists of token ids"
_UNFINISHED = "\ufffd"  # decoders put it in place of an incomplete character


class Arrival(NamedTuple):
    """Time at which a request could first have been planned."""

    step: int
    seconds: float


class Emission(NamedTuple):
    """Delivery of new tokens to a request."""

    step: int
    seconds: float
    num_tokens: int


class RequestSchedule(TypedDict, total=False):
    """Schedule and conversation of a request, with keys that are fields of Request."""

    arrival: int
    priority: int
    continues: int | None
    abort_at: int | None
    keep: bool


@dataclass(slots=True, eq=False)
class Request:
    """A request and its output so far, equal only to itself."""

    request_id: int
    prompt_ids: list[int]  # in a continued conversation only this turn, until `follow`
    params: SamplingParams
    stop_ids: frozenset[int]  # token ids that end it
    max_tokens: int  # most new tokens
    arrival: int = 0  # first step in which it may be planned
    priority: int = 0  # higher: admitted earlier, preempted later
    continues: int | None = None  # id of the request whose conversation it continues
    abort_at: int | None = None  # step at whose start it is aborted
    keep: bool = False  # whether its KV is kept after its finish (not an abort), for a later turn
    tokenizer: Any = None  # for stop strings and `text`
    row: int = -1  # of the pool's tables; -1: none
    token_ids: list[int] = field(default_factory=list)  # generated tokens: [T]
    # log-probability of each generated token, natural logarithm: [T]; nan where it is not reported
    logprobs: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # num_accepted_tokens of each round
    proposed: list[int] = field(default_factory=list)  # depth of each round's deepest draft
    settings: list[int] = field(default_factory=list)  # number of each round's setting, 0 where the engine has one
    draft_steps: list[int] = field(default_factory=list)  # its own of each round, where a policy gives it any
    side_outputs: dict[str, Any] = field(default_factory=dict)  # tensors by name at the end, [known tokens - 1, ...]
    finish_reason: str | None = None  # stop, length, abort or rejected
    stop_reason: int | str | None = None  # token id, stop string or pattern that ended it
    error: str | None = None  # reason of a rejection
    emissions: list[Emission] = field(default_factory=list)
    arrived: Arrival | None = None
    num_preemptions: int = 0  # number of preemptions
    num_reused: int = 0  # columns that a prefix or a session spared the prefill

    @property
    def known_ids(self) -> list[int]:
        """Tokens of prompt and output."""
        return self.prompt_ids + self.token_ids

    @property
    def prefill_len(self) -> int:
        """Number of columns to fill before the next round, which keeps a resumed request's last token as root."""
        return len(self.prompt_ids) + len(self.token_ids) - bool(self.token_ids)

    @property
    def text(self) -> str:
        """Decoded output up to the stop string that ended it, empty without a tokenizer."""
        text = self._decoded()
        return text if self.stop_string is None else text[: text.index(self.stop_string)]

    def take(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> int:
        """Append tokens up to the one that ends the request, drop the rest, and return the number kept.

        The request ends at a stop token, at the token with which the decoded output first contains a stop string or
        matches a pattern, or at max_tokens, in this order: a stop at the limit is a stop. An unfinished character at
        the output's end is not yet text. Of several stop strings the one that starts first counts, of patterns the
        first. A finished request takes no tokens.
        """
        before = len(self.token_ids)
        for token, logprob in zip(token_ids, logprobs, strict=True):
            if self.finish_reason is not None:
                break
            self.token_ids.append(token)
            self.logprobs.append(logprob)
            if token in self.stop_ids:
                self.stop_reason = token
            elif self.params.stop or self.params.stop_regex:
                self.stop_reason = self._stop_text()
            if self.stop_reason is not None:
                self.finish_reason = "stop"
            elif len(self.token_ids) == self.max_tokens:
                self.finish_reason = "length"
        return len(self.token_ids) - before

    def follow(self, previous: "Request") -> None:
        """Put the conversation so far before the prompt."""
        self.prompt_ids = previous.known_ids + self.prompt_ids

    def fit(self, max_len: int) -> None:
        """Limit the request to max_len tokens, prompt included.

        max_tokens below 1 means that the prompt is too long.
        """
        self.max_tokens = min(self.params.max_new_tokens, max_len - len(self.prompt_ids))

    def _stop_text(self) -> str | None:
        text = self._decoded().rstrip(_UNFINISHED)
        patterns = (pattern for pattern in self.params.stop_regex if re.search(pattern, text))
        return min((stop for stop in self.params.stop if stop in text), key=text.index, default=next(patterns, None))

    @property
    def stop_string(self) -> str | None:
        """Stop string that ended the output, which its text ends before."""
        return self.stop_reason if isinstance(self.stop_reason, str) and self.stop_reason in self.params.stop else None

    def _decoded(self) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode(self.token_ids)


def make_requests(
    pair: "Pair",
    prompts: str | Sequence[str] | Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    request_ids: Sequence[int] | None,
    max_len: int,
) -> list[Request]:
    """Make a request of each prompt, with arguments as in specsim.generate.

    Raises InputError for one that cannot run.
    """
    prompts = [prompts] if isinstance(prompts, str) else _items("prompts", prompts, _PROMPTS)
    sampling = SamplingParams() if sampling is None else sampling
    params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    if not isinstance(params, Sequence) or not all(isinstance(sampling, SamplingParams) for sampling in params):
        raise InputError("sampling", params, "SamplingParams, one for all prompts or one each")
    allowed_ids = f"{len(prompts)} different integers from 0 to 2^32 - 1"
    ids = _items("request_ids", range(len(prompts)) if request_ids is None else request_ids, allowed_ids)
    if len(params) != len(prompts):
        raise InputError(
            "sampling", f"{len(params)} parameter sets", f"one, or one for each of the {len(prompts)} prompts"
        )
    are_ids = all(type(request_id) is int and 0 <= request_id < 2**32 for request_id in ids)
    require(are_ids and len(ids) == len(set(ids)) == len(prompts), "request_ids", request_ids, allowed_ids)
    items = zip(ids, prompts, params, strict=True)
    requests = [make_request(pair.target.config, pair.tokenizer, *item) for item in items]
    for request in requests:
        request.fit(max_len)
        most = f"at most {max_len - 1}, one less than max_len"
        require(len(request.prompt_ids) < max_len, "prompt", f"{len(request.prompt_ids)} tokens", most)
    return requests


@check_arguments
def make_request(
    target_config: "ModelConfig",
    tokenizer: Any,
    request_id: int,
    prompt: str | Sequence[int],
    params: SamplingParams,
    **schedule: Unpack[RequestSchedule],
) -> Request:
    """Make a request from text or token ids.

    Raises InputError for one that no schedule could run. Its length is not checked here; a scheduler calls `fit`. A
    turn that continues another is encoded without the tokens that begin a text.
    """
    from specsim.core.target import ModelConfig  # needs torch, without which a simulated server is scheduled

    require_type("target_config", target_config, ModelConfig, "a target's shape, such as pair.target.config")
    require_type("params", params, SamplingParams, "SamplingParams")
    _check_schedule(request_id, schedule)
    ids = _token_ids(tokenizer, prompt, schedule.get("continues") is None)
    require(ids, "prompt", prompt, "at least one token")
    for name, tokens in (("prompt", ids), ("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        for token in tokens:
            in_vocabulary = isinstance(token, Integral) and 0 <= token < target_config.vocab_size
            if isinstance(token, bool) or not in_vocabulary:
                raise InputError(name, token, f"token ids from 0 to {target_config.vocab_size - 1}")
    for name in ("stop", "stop_regex"):
        texts = getattr(params, name)
        require(tokenizer is not None or not texts, name, texts, "none: the target has no tokenizer")
    stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else target_config.eos_token_ids)
    prompt_ids = list(map(int, ids))
    return Request(request_id, prompt_ids, params, stop_ids, params.max_new_tokens, tokenizer=tokenizer, **schedule)


def _check_schedule(request_id: int, schedule: RequestSchedule) -> None:
    require_int("id", request_id, 0, 2**32 - 1)
    require_int("arrival", schedule.get("arrival", 0), 0, 2**62 - 1)
    if (continues := schedule.get("continues")) is not None:
        require_int("continues", continues, 0, 2**32 - 1)
    if (abort_at := schedule.get("abort_at")) is not None:
        require_int("abort_at", abort_at, 0, 2**62 - 1)
    priority = schedule.get("priority", 0)
    require(type(priority) is int, "priority", priority, "an integer")


def _items(name: str, value: Any, allowed: str) -> list[Any]:
    """List the items of a sequence, an array or a tensor.

    Raises InputError for sets, text and bytes.
    """
    items = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(items, Sequence) or isinstance(value, (str, bytes, bytearray, memoryview)):
        raise InputError(name, value, allowed)
    return list(items)


def _token_ids(tokenizer: Any, prompt: str | Sequence[int], begins: bool) -> list[int]:
    if not isinstance(prompt, str):
        return _items("prompts", prompt, _PROMPTS)
    if tokenizer is None:
        raise InputError(
            "prompt", prompt, "token ids, as the target has no tokenizer (in a file of requests: prompt_ids)"
        )
    if not prompt or prompt.encode(errors="replace").decode() != prompt:  # a lone surrogate cannot be encoded
        raise InputError("prompt", prompt, "UTF-8 text of at least one character")
    return tokenizer.encode(prompt) if begins else tokenizer.encode(prompt, add_special_tokens=False)
