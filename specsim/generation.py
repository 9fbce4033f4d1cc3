"""generate(...): the one public entry. It runs a batch of prompts to their ends on the column that is named."""

import importlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from numbers import Integral
from pathlib import Path

import torch
from tqdm.auto import tqdm

from specsim.config import InputError, SamplingParams, SpecConfig
from specsim.metrics import Acceptance, acceptance, without_nan
from specsim.phases import Batch, DraftInput, PrefillInput

COLUMNS = ("reference",)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_PROMPTS = "a text, or a list of texts or of lists of token ids"


@dataclass(frozen=True, slots=True)
class Output:
    """One finished request. num_accepted_tokens_per_round counts whole rounds, also where the output was cut inside
    one.

    logprobs are natural logarithms under penalties, bias and temperature; finish_reason is `stop` (EOS or a stop
    token, which is kept) or `length`.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    num_accepted_tokens_per_round: tuple[int, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Generation:
    """What a run produced: outputs in the order of the prompts, the setting, and wall-clock seconds without loading."""

    outputs: tuple[Output, ...]
    config: SpecConfig
    seconds: float

    @property
    def acceptance(self) -> Acceptance:
        drafts = [count - 1 for output in self.outputs for count in output.num_accepted_tokens_per_round]
        return acceptance(drafts, self.config.num_steps)

    @property
    def metrics(self) -> dict:
        """The acceptance figures of specsim.metrics, new tokens, seconds and tokens_per_s (tokens over seconds, all
        requests).
        """
        tokens = sum(len(output.token_ids) for output in self.outputs)
        timing = {"tokens": tokens, "seconds": self.seconds, "tokens_per_s": tokens / self.seconds}
        return {**asdict(self.acceptance), **timing}

    def __repr__(self) -> str:
        metrics = self.metrics
        counts = f"{len(self.outputs)} outputs, {metrics['tokens']} tokens, {metrics['rounds']} rounds"
        return f"Generation({counts}, accept length {metrics['accept_length']:.2f}, {self.seconds:.2f} s)"

    def to_json(self) -> dict:
        """A value that json can write; null where a figure is not defined (no rounds)."""
        outputs = [asdict(output) for output in self.outputs]
        return without_nan({"outputs": outputs, "metrics": self.metrics, "config": asdict(self.config)})

    def _repr_html_(self) -> str:
        from specsim.display import generation_html

        return generation_html(self)


@dataclass(slots=True)
class _Request:
    """A request on its way to an Output."""

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
        """Append tokens up to the first that ends the request; what follows it is dropped. A stop token at the cap is
        a stop.
        """
        for token, logprob in zip(token_ids, logprobs, strict=True):
            self.token_ids.append(token)
            self.logprobs.append(logprob)
            if token in self.stop_ids or len(self.token_ids) == self.max_tokens:
                self.finish_reason = "stop" if token in self.stop_ids else "length"
                return

    def output(self, tokenizer) -> Output:
        text = tokenizer.decode(self.token_ids) if tokenizer is not None else ""
        return Output(text, tuple(self.token_ids), tuple(self.logprobs), self.finish_reason, tuple(self.accepted))


def load_engine(pair, config: SpecConfig, impl: str, dtype: torch.dtype = torch.float32):
    """The engine of a column by name; another column is never taken instead."""
    if impl not in COLUMNS:
        raise InputError("impl", impl, " or ".join(COLUMNS))
    return importlib.import_module(f"specsim.{impl}.engine").Engine(pair, config, dtype)


def generate(
    pair,
    prompts: str | Sequence[str] | Sequence[Sequence[int]],
    config: SpecConfig | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    request_ids: Sequence[int] | None = None,
    impl: str = "reference",
    dtype: torch.dtype = torch.float32,
    progress: bool = False,
) -> Generation:
    """Continue every prompt (text or token ids) with the pair under one setting, all prompts in one batch.

    config None is SpecConfig(), or plain decoding for a pair without a drafter. sampling: one for all prompts or one
    each. request_ids (0, 1, ... unless given) name the random streams: a request with the same id, seed and prompt
    gives the same tokens in any batch. Raises InputError for an empty or too long prompt and for token ids outside
    the vocabulary.
    """
    config = (SpecConfig() if pair.drafter else SpecConfig.plain()) if config is None else config
    if not isinstance(config, SpecConfig):
        raise InputError("config", config, "a SpecConfig")
    if dtype not in DTYPES:
        raise InputError("dtype", dtype, " or ".join(map(str, DTYPES)))
    engine = load_engine(pair, config, impl, dtype)
    requests = _requests(pair, prompts, sampling, request_ids, engine.config.max_len)
    start = time.perf_counter()
    with torch.inference_mode():
        _run(engine, requests, progress)
    seconds = time.perf_counter() - start
    return Generation(tuple(request.output(pair.tokenizer) for request in requests), config, seconds)


def _requests(pair, prompts, sampling, request_ids, max_len: int) -> list[_Request]:
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


def _request(pair, request_id: int, prompt: str | Sequence[int], params: SamplingParams, max_len: int) -> _Request:
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
    return _Request(request_id, list(map(int, ids)), params, stop_ids, min(params.max_new_tokens, max_len - len(ids)))


def _token_ids(tokenizer, prompt: str | Sequence[int]) -> list[int]:
    if not isinstance(prompt, str):
        if isinstance(prompt, (bytes, Path)) or not isinstance(prompt, Iterable):
            raise InputError("prompts", prompt, _PROMPTS)
        return prompt.tolist() if isinstance(prompt, torch.Tensor) else list(prompt)
    if tokenizer is None:
        raise InputError("prompt", prompt, "token ids: the target has no tokenizer")
    if prompt.encode(errors="replace").decode() != prompt:
        raise InputError("prompt", prompt, "text without lone surrogates")
    return tokenizer.encode(prompt)


def _run(engine, requests: list[_Request], progress: bool) -> None:
    """Prefill everything, then rounds over the requests that have not finished."""
    if not requests:
        return
    config, longest = engine.config, max(len(request.prompt_ids) + request.max_tokens for request in requests)
    pools = engine.make_pools(len(requests), len(requests) * config.reserved_columns(longest))
    bar = tqdm(total=sum(request.max_tokens for request in requests), unit="token", disable=None if progress else True)
    batch, draft_input = _prefill(engine, requests, pools)
    running = list(requests)
    while True:
        bar.update(sum(len(request.token_ids) for request in requests) - bar.n)
        running, batch, draft_input = _drop_finished(running, batch, draft_input, pools, engine)
        if not running:
            break
        output, draft_input = engine.round(batch, draft_input, pools)
        counts = output.num_accepted_tokens.tolist()
        for request, tokens, logprobs, count in zip(
            running, output.accepted_tokens(), output.logprobs.tolist(), counts, strict=True
        ):
            request.take(tokens, logprobs[:count])
            request.accepted.append(count)
        batch = batch.after(output.num_accepted_tokens)
    bar.close()
    pools.audit()


def _prefill(engine, requests: list[_Request], pools) -> tuple[Batch, DraftInput]:
    for request in requests:
        request.row = pools.open()
        pools.reserve(request.row, len(request.prompt_ids))
    batch = Batch.of(
        request_ids=[request.request_id for request in requests],
        rows=[request.row for request in requests],
        prompt_lens=[len(request.prompt_ids) for request in requests],
        params=[request.params for request in requests],
        vocab_size=engine.target.config.vocab_size,
    )
    prefill = PrefillInput.whole([request.prompt_ids for request in requests])
    output = engine.prefill(batch, prefill, pools)
    for request, token, logprob in zip(requests, output.next_tokens.tolist(), output.logprobs.tolist(), strict=True):
        request.take([token], [logprob])
    return batch, output.draft_input


def _drop_finished(running, batch: Batch, draft_input: DraftInput, pools, engine):
    """Filter by row index; when nothing runs any more the empty state takes the place of the last."""
    for request in running:
        if request.finish_reason:
            pools.close(request.row)
    kept = [index for index, request in enumerate(running) if not request.finish_reason]
    rows = torch.tensor(kept, dtype=torch.int64)
    draft_input = draft_input.filter(rows) if kept else engine.drafter.idle()
    return [running[index] for index in kept], batch.filter(rows), draft_input
