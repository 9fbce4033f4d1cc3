"""The form of OpenAI: completions, chat and models, with the fields that vLLM and SGLang add."""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from specsim.core.errors import InputError, require, require_choice, require_type
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
from specsim.serving.http.service import Service
from specsim.serving.requests import Request
from specsim.serving.scoring import Alternatives, ScoreRequest

_LEAST_LOGPROB = -9999.0  # in place of -inf, which JSON does not have
# Fields that would change an answer, and that this server does not have.
_REFUSED = ("suffix", "tools", "functions", "prompt_logprobs", "lora_path", "use_beam_search")
_STOP_NAMES = ("stop_reason", "matched_stop")  # vLLM's, SGLang's
_COMPLETION_TOKENS = 16  # of a completion that names no number


@dataclass(frozen=True, slots=True)
class OpenAICall:
    """A call of a client, and the form of its answer."""

    asks: tuple[Ask, ...]  # choices of the first prompt, then of the next
    model: str
    is_chat: bool
    streams: bool
    reports_usage: bool  # of a stream
    logprobs: int | None  # alternatives of every token; None: no logprobs
    echo: bool
    returns_ids: bool
    names_tokens: bool  # tokens are written token_id:7 in logprobs
    num_choices: int
    name: str
    created: int

    def envelope(self, choices: Sequence[Any], **more: Any) -> dict[str, Any]:
        """Make an answer or a chunk of a stream."""
        kind = "text_completion" if not self.is_chat else f"chat.completion{'.chunk' * self.streams}"
        head = {"id": self.name, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": list(choices), **more}


def read_completion(service: Service, body: Body) -> OpenAICall:
    """Read a body of /v1/completions."""
    logprobs = body.get("logprobs")
    logprobs = None if logprobs is None else count(body, "logprobs", 0, 0, service.limits.logprobs)
    echo = flag(body, "echo")
    require(not (echo and flag(body, "stream")), "echo", True, "false in a stream")
    prompts = prompts_of(body.get("prompt"), "prompt")
    return _call(service, body, prompts, _COMPLETION_TOKENS, is_chat=False, logprobs=logprobs, echo=echo)


def read_chat(service: Service, body: Body) -> OpenAICall:
    """Read a body of /v1/chat/completions."""
    wants_logprobs = flag(body, "logprobs")
    top = count(body, "top_logprobs", 0, 0, service.limits.logprobs)
    require(wants_logprobs or not top, "top_logprobs", top, "0 without logprobs")
    logprobs = top if wants_logprobs else None
    prompt = _chat_prompt(service, body.get("messages"))
    most = service.config.length_limit
    return _call(service, body, [prompt], most, is_chat=True, logprobs=logprobs, echo=False)


def _call(
    service: Service, body: Body, prompts: Sequence[str | list[int]], most_tokens: int, **form: Any
) -> OpenAICall:
    refuse(body, _REFUSED)
    params = sampling_params(body, temperature=1.0, max_new_tokens=most_tokens)
    requested = body.get("max_completion_tokens", body.get("max_tokens"))
    num_choices = count(body, "n", 1, 1, service.limits.choices)
    require(body.get("best_of") in (None, num_choices), "best_of", body.get("best_of"), f"n, {num_choices}")
    require_type("model", body.get("model", ""), str, "a text")
    name = f"{'chatcmpl' if form['is_chat'] else 'cmpl'}-{uuid4().hex}"
    options = body.get("stream_options") or {}
    require_type("stream_options", options, dict, "an object")
    ask = Ask(
        prompt="",
        params=params,
        num_steps=num_steps(body),
        grammar=_grammar(service, body),
        scores=ScoreRequest(form["logprobs"] or 0, 1 if form["echo"] and form["logprobs"] is not None else None),
        scores_only=requested == 0,
        streams=flag(body, "stream"),
        skips_special=flag(body, "skip_special_tokens", True),
        keeps_stop=flag(body, "include_stop_str_in_output"),
        min_tokens=min_tokens(body),
        rid=name,
    )
    is_seeded = body.get("seed") is not None
    asks = [
        replace(ask, prompt=prompt, seeded_stream=choice if is_seeded else None)
        for prompt in prompts
        for choice in range(num_choices)
    ]
    return OpenAICall(
        asks=tuple(asks),
        model=body.get("model") or service.model,
        streams=ask.streams,
        reports_usage=flag(options, "include_usage"),
        returns_ids=flag(body, "return_token_ids"),
        names_tokens=flag(body, "return_tokens_as_token_ids"),
        num_choices=num_choices,
        name=name,
        created=int(time.time()),
        **form,
    )


def _chat_prompt(service: Service, messages: Any) -> str:
    """Write a conversation as the tokenizer's template does, or without one as paragraphs."""
    allowed = "a list of objects with role and content"
    require(isinstance(messages, list) and messages, "messages", type(messages), allowed)
    conversation = [_message(message) for message in messages]
    require(service.tokenizer is not None, "messages", len(messages), "none: the target has no tokenizer")
    if getattr(service.tokenizer, "chat_template", None):
        return service.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    return "\n\n".join(message["content"] for message in conversation) + "\n"


def _message(message: Any) -> dict[str, str]:
    allowed = "an object with role and content"
    require(isinstance(message, dict) and isinstance(message.get("role"), str), "messages", type(message), allowed)
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise InputError("content", type(content), "a text, or a list of parts of type text")
    return {"role": message["role"], "content": "".join(map(str, texts))}


def _grammar(service: Service, body: Body) -> Grammar | None:
    """Read what the output has to match; None: it is free."""
    form: Any = body.get("response_format") or {"type": "text"}
    require_type("response_format", form, dict, "an object with type")
    kind = form.get("type")
    require_choice("response_format", kind, ("text", "json_object", "json_schema"))
    if kind == "json_object":
        return json_grammar(service, "response_format", {"type": "object"})
    if kind == "json_schema":
        inner: Any = form.get("json_schema")
        require_type("json_schema", inner, dict, "an object with schema")
        return json_grammar(service, "schema", inner.get("schema"))
    structure = body.get("structured_outputs") or {}
    require_type("structured_outputs", structure, dict, "an object with regex or json")
    regex = text_grammar(service, "regex", structure.get("regex") or body.get("regex"))
    if regex is None and "json" in structure:
        return json_grammar(service, "json", structure["json"])
    return regex


def answer(service: Service, call: OpenAICall, results: Sequence[Progress]) -> dict[str, Any]:
    """Make the answer of a call that does not stream."""
    choices = [_choice(service, call, index, progress) for index, progress in enumerate(results)]
    return call.envelope(choices, usage=_usage(call, results))


async def chunks(
    service: Service, call: OpenAICall, updates: AsyncIterator[tuple[int, Progress]]
) -> AsyncIterator[dict[str, Any]]:
    """Make the chunks of a stream."""
    sent = [("", 0)] * len(call.asks)  # text and tokens of each choice
    final: dict[int, Progress] = {}
    async for index, progress in updates:
        text, num_tokens = sent[index]
        sent[index] = (progress.text, progress.num_tokens)
        if progress.is_final:
            final[index] = progress
        elif progress.text == text:
            sent[index] = (text, num_tokens)
            continue
        choice = _choice(service, call, index, progress, len(text), num_tokens)
        more = {"usage": None} if call.reports_usage else {}
        yield call.envelope([choice], **more)
    if call.reports_usage:
        yield call.envelope([], usage=_usage(call, [final[index] for index in sorted(final)]))


def _choice(
    service: Service, call: OpenAICall, index: int, progress: Progress, first_char: int = 0, first: int = 0
) -> dict[str, Any]:
    """Make a choice of an answer, or in a stream what follows some characters and tokens."""
    request = progress.request
    text = progress.text[first_char:]
    if call.echo:
        text = _prompt_text(service, call.asks[index], request) + text
    choice: dict[str, Any] = {"index": index, "finish_reason": None, "logprobs": None}
    if call.is_chat:
        message = {"content": text, **({"role": "assistant"} if first == 0 or not call.streams else {})}
        choice["delta" if call.streams else "message"] = message
    else:
        choice["text"] = text
    if progress.is_final:
        choice |= {"finish_reason": request.finish_reason} | dict.fromkeys(_STOP_NAMES, request.stop_reason)
    if call.logprobs is not None:
        choice["logprobs"] = _logprobs(service, call, progress, first)
    if call.returns_ids:
        choice["token_ids"] = request.token_ids[first : progress.num_tokens]
        choice["prompt_token_ids"] = request.prompt_ids
    return choice


def _prompt_text(service: Service, ask: Ask, request: Request) -> str:
    return ask.prompt if isinstance(ask.prompt, str) else service.tokenizer.decode(request.prompt_ids)


def _logprobs(service: Service, call: OpenAICall, progress: Progress, first: int) -> dict[str, Any]:
    """Write the log-probabilities of the tokens from `first` on, before them those of an echoed prompt."""
    entries = _entries(call, progress, first)
    named = [(_name(service, call, token), logprob, top) for token, logprob, top in entries]
    if call.is_chat:
        content = [
            {**_chat_entry(name, logprob), "top_logprobs": [_chat_entry(_name(service, call, t), p) for t, p in top]}
            for name, logprob, top in named
        ]
        return {"content": content}
    offsets, end = [], 0
    for name, _, _ in named:
        offsets.append(end)
        end += len(name)
    return {
        "tokens": [name for name, _, _ in named],
        "token_logprobs": [logprob for _, logprob, _ in named],
        "top_logprobs": [
            {_name(service, call, token): value for token, value in top} if logprob is not None and top else None
            for _, logprob, top in named
        ],
        "text_offset": offsets,
    }


def _entries(call: OpenAICall, progress: Progress, first: int) -> list[tuple[int, float | None, Alternatives]]:
    """List (token, logprob, alternatives): a generated token's logprob is that of its round, among the others too."""
    request = progress.request
    entries: list[tuple[int, float | None, Alternatives]] = []
    scores = list(progress.scores)
    if call.echo and request.prompt_ids:
        entries.append((request.prompt_ids[0], None, ()))
        for token in request.prompt_ids[1:]:
            score = scores.pop(0)
            entries.append((token, clipped(score.logprob), _clipped_top(score.top)))
    for position in range(first, progress.num_tokens):
        token, logprob = request.token_ids[position], request.logprobs[position]
        top = scores[position].top_with(logprob) if call.logprobs else ()
        entries.append((token, clipped(logprob), _clipped_top(top)))
    return entries


def _clipped_top(top: Alternatives) -> Alternatives:
    return [(token, clipped(logprob)) for token, logprob in top]


def clipped(logprob: float) -> float:
    """Give a log-probability that JSON can hold."""
    return max(logprob, _LEAST_LOGPROB)


def _name(service: Service, call: OpenAICall, token: int) -> str:
    return f"token_id:{token}" if call.names_tokens else token_text(service, token)


def _chat_entry(name: str, logprob: float | None) -> dict[str, Any]:
    return {"token": name, "logprob": logprob, "bytes": list(name.encode(errors="replace"))}


def _usage(call: OpenAICall, results: Sequence[Progress]) -> dict[str, Any]:
    """Count tokens, those of a prompt once for all its choices."""
    prompts = [progress.request for progress in results[:: call.num_choices]]
    prompt_tokens = sum(len(request.prompt_ids) for request in prompts)
    completion_tokens = sum(progress.num_tokens for progress in results)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(request.num_reused for request in prompts)},
    }


def models(service: Service) -> dict[str, Any]:
    """Make the answer of /v1/models."""
    most = service.engine.config.length_limit
    model = {"id": service.model, "object": "model", "created": 0, "owned_by": "specsim", "max_model_len": most}
    return {"object": "list", "data": [model]}
