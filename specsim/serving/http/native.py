"""The form of SGLang: /generate, sessions, control and information."""

import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self
from uuid import uuid4

from specsim import __version__
from specsim.core.errors import InputError, require, require_type
from specsim.core.grammar import Grammar
from specsim.serving.http.forms import (
    Body,
    count,
    flag,
    json_grammar,
    min_tokens,
    num_steps,
    prompts_of,
    refuse,
    sampling_params,
    text_grammar,
    token_text,
)
from specsim.serving.http.job import Ask, Progress
from specsim.serving.http.openai import clipped
from specsim.serving.http.service import Service
from specsim.serving.http.sessions import SessionTurn
from specsim.serving.requests import Request
from specsim.serving.scoring import NO_SCORES, ScoreRequest

# Fields that would change an answer, and that this server does not have.
_REFUSED = ("input_embeds", "image_data", "lora_path", "return_hidden_states", "return_sampling_mask")
_NEW_TOKENS = 128  # of a request that names no number


@dataclass(frozen=True, slots=True)
class NativeOutput:
    """An output of /generate, and the form of its answer."""

    ask: Ask
    returns_logprobs: bool
    names_tokens: bool  # logprobs have the tokens' texts


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A call of /generate."""

    outputs: tuple[NativeOutput, ...]
    is_list: bool
    streams: bool

    @property
    def asks(self) -> list[Ask]:
        """The outputs without the form of their answers."""
        return [output.ask for output in self.outputs]

    def in_session(self, turn: SessionTurn) -> Self:
        """Make the call of a turn, which has one output."""
        require(len(self.outputs) == 1, "session_params", f"{len(self.outputs)} outputs", "one output in a session")
        return replace(
            self, outputs=tuple(replace(output, ask=replace(output.ask, turn=turn)) for output in self.outputs)
        )


def read_generate(service: Service, body: Body) -> GenerateCall:
    """Read a body of /generate."""
    refuse(body, _REFUSED)
    ids = body.get("input_ids")
    name = "text" if ids is None else "input_ids"
    prompts = prompts_of(body.get(name), name)
    is_list = isinstance(body[name], list) and isinstance(body[name][0], (str, list))
    outputs = []
    for index, prompt in enumerate(prompts):
        prompt_body = {key: _value_of(body, key, index, is_list) for key in body}
        sampling = prompt_body.get("sampling_params") or {}
        require_type("sampling_params", sampling, dict, "an object, or a list of one for each prompt")
        refuse(sampling, ("structural_tag", "custom_params"))
        num_choices = count(sampling, "n", 1, 1, service.limits.choices)
        is_list |= num_choices > 1
        output = _output(service, prompt_body, sampling, prompt)
        outputs += [_choice(output, choice, num_choices, sampling) for choice in range(num_choices)]
    return GenerateCall(tuple(outputs), is_list, flag(body, "stream"))


_BY_PROMPT = ("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "rid", "speculative")


def _value_of(body: Body, key: str, index: int, is_list: bool) -> Any:
    """Take a prompt's own value of a field that may have one for each."""
    value = body[key]
    is_split = isinstance(value, list) and is_list
    if is_split and key == "token_ids_logprob":
        is_split = any(entry is None or isinstance(entry, list) for entry in value)
    elif key not in _BY_PROMPT:
        is_split = False
    if not is_split:
        return value
    require(index < len(value), key, f"{len(value)} values", "one for each prompt")
    return value[index]


def _output(service: Service, prompt_body: Body, sampling: Body, prompt: str | list[int]) -> NativeOutput:
    returns_logprobs = flag(prompt_body, "return_logprob")
    start = count(prompt_body, "logprob_start_len", -1, -1, 2**31 - 1)
    listed = prompt_body.get("token_ids_logprob")
    if listed is not None:
        vocab_size = service.pair.target.config.vocab_size
        is_valid = isinstance(listed, list) and all(type(token) is int and 0 <= token < vocab_size for token in listed)
        require(is_valid, "token_ids_logprob", listed, f"a list of token ids below {vocab_size}")
    num_top = count(prompt_body, "top_logprobs_num", 0, 0, service.limits.logprobs)
    listed_ids = None if listed is None else tuple(listed)
    scores = ScoreRequest(num_top, start if start >= 0 else None, listed_ids)
    rid = prompt_body.get("rid")
    require(rid is None or isinstance(rid, str), "rid", rid, "a text")
    sampled = {**sampling, "stop_token_ids": _known_ids(service, sampling.get("stop_token_ids"))}
    ask = Ask(
        prompt=prompt,
        params=sampling_params(sampled, temperature=1.0, max_new_tokens=_NEW_TOKENS),
        num_steps=num_steps(prompt_body),
        grammar=_grammar(service, sampling),
        scores=scores if returns_logprobs else NO_SCORES,
        scores_only=sampling.get("max_new_tokens") == 0,
        streams=flag(prompt_body, "stream"),
        skips_special=flag(sampling, "skip_special_tokens", True),
        keeps_stop=flag(sampling, "no_stop_trim"),
        min_tokens=min_tokens(sampling),
        rid=rid or uuid4().hex,
    )
    names_tokens = flag(prompt_body, "return_text_in_logprobs")
    return NativeOutput(ask, returns_logprobs, names_tokens)


def _choice(output: NativeOutput, choice: int, num_choices: int, sampling: Body) -> NativeOutput:
    """Make one of the outputs of a prompt."""
    is_seeded = sampling.get("sampling_seed", sampling.get("seed")) is not None
    rid = output.ask.rid if num_choices == 1 else f"{output.ask.rid}_{choice}"
    return replace(output, ask=replace(output.ask, rid=rid, seeded_stream=choice if is_seeded else None))


def _known_ids(service: Service, tokens: Any) -> Any:
    """Leave out stop tokens that the vocabulary does not have, as SGLang does."""
    vocab_size = service.pair.target.config.vocab_size
    if not isinstance(tokens, list):
        return tokens
    return [token for token in tokens if type(token) is not int or token < vocab_size]


def _grammar(service: Service, sampling: Body) -> Grammar | None:
    """Read what the output has to match; None: it is free."""
    if (schema := sampling.get("json_schema")) is not None:
        try:
            schema = json.loads(schema) if isinstance(schema, str) else schema
        except ValueError:
            raise InputError("json_schema", schema, "a JSON schema as a text") from None
        return json_grammar(service, "json_schema", schema)
    regex = text_grammar(service, "regex", sampling.get("regex"))
    return text_grammar(service, "ebnf", sampling.get("ebnf")) if regex is None else regex


def answer(service: Service, call: GenerateCall, results: Sequence[Progress]) -> Any:
    """Make the answer of a call that does not stream."""
    answers = [output_answer(service, *pair) for pair in zip(call.outputs, results, strict=True)]
    return answers if call.is_list else answers[0]


async def chunks(
    service: Service, call: GenerateCall, updates: AsyncIterator[tuple[int, Progress]]
) -> AsyncIterator[dict[str, Any]]:
    """Make the chunks of a stream, each with all of an output so far."""
    async for index, progress in updates:
        position = {"index": index} if call.is_list else {}
        yield {**output_answer(service, call.outputs[index], progress), **position}


def output_answer(service: Service, output: NativeOutput, progress: Progress) -> dict[str, Any]:
    """Make the answer of one output."""
    request = progress.request
    meta = {
        "id": output.ask.rid,
        "finish_reason": _finish_reason(request) if progress.is_final else None,
        "prompt_tokens": len(request.prompt_ids),
        "completion_tokens": progress.num_tokens,
        "cached_tokens": request.num_reused,
        "weight_version": "default",
        "e2e_latency": progress.seconds,
        **_speculation(request, progress.num_tokens),
    }
    if output.returns_logprobs:
        meta |= _logprobs(service, output, progress)
    return {"text": progress.text, "output_ids": request.token_ids[: progress.num_tokens], "meta_info": meta}


def _finish_reason(request: Request) -> dict[str, Any]:
    if request.finish_reason == "stop":
        return {"type": "stop", "matched": request.stop_reason}
    if request.finish_reason == "abort":
        return {"type": "abort", "message": "the request was aborted", "status_code": None, "err_type": None}
    return {"type": "length", "length": len(request.token_ids)}


def _speculation(request: Request, num_tokens: int) -> dict[str, Any]:
    """Count the rounds of a request and their drafts."""
    rounds = list(request.accepted)
    accepted = sum(rounds) - len(rounds)
    proposed = sum(request.proposed[: len(rounds)])
    histogram = Counter(count - 1 for count in rounds)
    return {
        "spec_verify_ct": len(rounds),
        "spec_accept_length": num_tokens / len(rounds) if rounds else 0.0,
        "spec_accept_rate": accepted / proposed if proposed else 0.0,
        "spec_accept_token_num": accepted,
        "spec_draft_token_num": proposed,
        "spec_accept_histogram": [histogram[count] for count in range(max(histogram, default=-1) + 1)],
    }


def _logprobs(service: Service, output: NativeOutput, progress: Progress) -> dict[str, Any]:
    request = progress.request
    prompt_len = len(request.prompt_ids)
    wanted = output.ask.scores
    first = prompt_len if wanted.first is None else min(wanted.first, prompt_len)
    scores = progress.scores
    num_scored = prompt_len - max(first, 1) if scores else 0  # of the prompt
    of_prompt = scores[:num_scored]
    of_output = scores[num_scored:]
    generated = list(zip(request.token_ids, request.logprobs, strict=False))[: progress.num_tokens]
    starts = first == 0 and prompt_len > 0  # the first token has no probability

    def entry(logprob: float | None, token: int) -> list[Any]:
        text = token_text(service, token) if output.names_tokens else None
        return [None if logprob is None else clipped(logprob), token, text]

    head = [entry(None, request.prompt_ids[0])] if starts else []
    none: list[Any] = [None] * starts
    values: dict[str, Any] = {
        "input_token_logprobs": head + [entry(score.logprob, score.token) for score in of_prompt],
        "output_token_logprobs": [entry(logprob, token) for token, logprob in generated],
    }
    if wanted.num_top:
        values["input_top_logprobs"] = none + [[entry(p, t) for t, p in score.top] for score in of_prompt]
        values["output_top_logprobs"] = [
            [entry(p, t) for t, p in score.top_with(logprob)]
            for score, (_, logprob) in zip(of_output, generated, strict=False)
        ]
    if wanted.listed_ids is not None:
        for name, rows, start in (("input", of_prompt, none), ("output", of_output, [])):
            values[f"{name}_token_ids_logprobs"] = start + [
                [entry(p, token) for token, p in zip(wanted.listed_ids, score.listed, strict=True)] for score in rows
            ]
    return values


def server_info(service: Service) -> dict[str, Any]:
    """Make the answer of /get_server_info."""
    config = service.config
    state = {
        "avg_spec_accept_length": service.metrics.accept_length,
        "max_running_requests": service.serving.max_running,
    }
    return {
        "model_path": service.model,
        "version": __version__,
        "speculative_algorithm": None if config.is_plain else service.pair.kind,
        "speculative_num_steps": config.num_steps,
        "speculative_eagle_topk": config.topk,
        "speculative_num_draft_tokens": config.num_draft_tokens,
        "page_size": config.page_size,
        "context_length": config.length_limit,
        "disable_radix_cache": not service.serving.prefix_cache,
        "max_total_num_tokens": service.serving.num_slots,
        "serving": asdict(service.serving),
        "internal_states": [state],
    }


def model_info(service: Service) -> Mapping[str, Any]:
    """Make the answer of /get_model_info."""
    return {
        "model_path": service.model,
        "tokenizer_path": service.model,
        "is_generation": True,
        "weight_version": "default",
    }
