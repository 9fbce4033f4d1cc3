"""The form of SGLang: /generate, sessions, control and information."""

import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any
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
from specsim.serving.http.job import Ask, Progress, Session
from specsim.serving.http.openai import clipped, top_with
from specsim.serving.http.service import Service
from specsim.serving.requests import Request

MOST_SESSIONS = 1024
# Fields that would change an answer, and that this server does not have.
_REFUSED = ("input_embeds", "image_data", "lora_path", "return_hidden_states", "return_sampling_mask")
_NEW_TOKENS = 128  # of a request that names no number


@dataclass(frozen=True, slots=True)
class NativeOutput:
    """An output of /generate, and the form of its answer."""

    ask: Ask
    returns_logprobs: bool
    score_from: int | None  # position of the first prompt token in the answer
    names_tokens: bool  # logprobs have the tokens' texts
    listed_ids: tuple[int, ...] | None  # tokens whose logprobs are wanted at every position


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A call of /generate."""

    outputs: tuple[NativeOutput, ...]
    is_list: bool
    streams: bool


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
        refuse(sampling, ("stop_regex", "structural_tag", "custom_params"))
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
    score_from = start if returns_logprobs and start >= 0 else None
    listed = prompt_body.get("token_ids_logprob")
    if listed is not None:
        vocab_size = service.pair.target.config.vocab_size
        is_valid = isinstance(listed, list) and all(type(token) is int and 0 <= token < vocab_size for token in listed)
        require(is_valid, "token_ids_logprob", listed, f"a list of token ids below {vocab_size}")
    num_top = count(prompt_body, "top_logprobs_num", 0, 0, service.limits.logprobs)
    rid = prompt_body.get("rid")
    require(rid is None or isinstance(rid, str), "rid", rid, "a text")
    sampled = {**sampling, "stop_token_ids": _known_ids(service, sampling.get("stop_token_ids"))}
    ask = Ask(
        prompt=prompt,
        params=sampling_params(sampled, temperature=1.0, max_new_tokens=_NEW_TOKENS),
        num_steps=num_steps(prompt_body),
        grammar=_grammar(service, sampling),
        top_logprobs=max(num_top, listed is not None) if returns_logprobs else 0,
        score_from=score_from,
        scores_only=sampling.get("max_new_tokens") == 0,
        streams=flag(prompt_body, "stream"),
        skips_special=flag(sampling, "skip_special_tokens", True),
        keeps_stop=flag(sampling, "no_stop_trim"),
        min_tokens=min_tokens(sampling),
        rid=rid or uuid4().hex,
    )
    tokens = None if listed is None or not returns_logprobs else tuple(listed)
    names_tokens = flag(prompt_body, "return_text_in_logprobs")
    return NativeOutput(ask, returns_logprobs, score_from, names_tokens, tokens)


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
    first = prompt_len if output.score_from is None else min(output.score_from, prompt_len)
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
    if output.ask.top_logprobs:
        values["input_top_logprobs"] = none + [[entry(p, t) for t, p in score.top] for score in of_prompt]
        values["output_top_logprobs"] = [
            [entry(p, t) for t, p in top_with(score.top, *of)] for score, of in zip(of_output, generated, strict=False)
        ]
    if output.listed_ids is not None:
        for name, rows, start in (("input", of_prompt, none), ("output", of_output, [])):
            values[f"{name}_token_ids_logprobs"] = start + [
                [entry(float(score.distribution[token]), token) for token in output.listed_ids] for score in rows
            ]
    return values


class Sessions:
    """Open sessions by their ids."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._sessions: dict[str, Session] = {}

    def open(self, body: Body) -> str:
        """Open a session, and return its id."""
        count(body, "capacity_of_str_len", 1, 0, 2**62)
        name = body.get("session_id") or uuid4().hex
        require_type("session_id", name, str, "a text")
        require(name not in self._sessions, "session_id", name, "the id of no open session")
        require(len(self._sessions) < MOST_SESSIONS, "session_id", name, f"at most {MOST_SESSIONS} open sessions")
        self._sessions[name] = Session()
        return name

    def close(self, body: Body) -> None:
        """Close a session, and free its KV."""
        session = self._find("session_id", body.get("session_id"))
        del self._sessions[body["session_id"]]
        self._service.close_session(session)

    def _find(self, field: str, name: Any) -> Session:
        session = self._sessions.get(name) if isinstance(name, str) else None
        if session is None:
            raise InputError(field, name, "the id of an open session")
        return session

    def turn(self, body: Body, call: GenerateCall) -> GenerateCall:
        """Make a call the next turn of its session, if it names one."""
        params = body.get("session_params")
        if params is None:
            return call
        require_type("session_params", params, dict, "an object with id and rid")
        session = self._find("session_params", params.get("id"))
        require(len(call.outputs) == 1, "session_params", f"{len(call.outputs)} outputs", "one output in a session")
        require(session.running is None, "session_params", params["id"], "a session whose last turn has ended")
        for name in ("offset", "replace", "drop_previous_output"):
            require(not params.get(name), name, params.get(name), "none: a turn is appended to the session")
        rid = params.get("rid")
        require(rid in (None, session.rid), "rid", rid, "the rid of the session's last turn")
        (output,) = call.outputs
        return replace(call, outputs=(replace(output, ask=replace(output.ask, session=session)),))


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
