"""Properties of a server's greedy answers and of single answers: each a function of a session."""

from collections.abc import Iterator, Sequence
from math import exp

from specsim.correctness.explain import Answer
from specsim.correctness.explain.answers import UNCLEAR
from specsim.correctness.probe.server import Refused, Reply
from specsim.correctness.probe.session import (
    NO_IDS,
    ProbeSession,
    PropertyResult,
    all_alike_prob,
    greedy_deficit,
    verdict_on,
)

RARE = 1e-6  # probability below which equal answers are no chance
_REPEATS = 3
_SEEDS = 6
_CHOICES = 3
_LENGTHS = (1, 2, 3, 5, 8, 13)
_PLACES = 8  # of an answer that are scored again
_STOPS = 4  # stop strings of an answer
_UNSURE_SUM = 1.001
_COLOURS = ("red", "green", "blue")
_SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": list(_COLOURS)}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}
_LANGUAGE = tuple(f'{{"colour":"{colour}","sure":{sure}}}' for colour in _COLOURS for sure in ("true", "false"))


def greedy(session: ProbeSession) -> PropertyResult:
    """Compare greedy answers with those of the same model without speculation."""
    plain = session.ask_plain([session.body(prompt) for prompt in session.prompts])
    return _compared(session, "greedy", [reply.answer for reply in plain])


def repeat(session: ProbeSession) -> PropertyResult:
    """Compare greedy answers with those to the same prompts again, each alone."""
    again = [session.server.ask([session.body(prompt)])[0].answer for prompt in session.prompts * (_REPEATS - 1)]
    return _compared(session, "repeat", again)


def batched(session: ProbeSession) -> PropertyResult:
    """Compare greedy answers with those in a batch of requests that are sampled, penalised and biased."""
    copies = max(1, session.server.connection.concurrency // (2 * len(session.prompts)))
    others = [
        session.body(prompt, temperature=1.0, presence_penalty=2.0, frequency_penalty=1.0, seed=session.settings.seed)
        for prompt in session.prompts
    ]
    bodies = [session.body(prompt) for prompt in session.prompts]
    replies = session.server.ask([body for pair in zip(others, bodies, strict=True) for body in pair] * copies)
    return _compared(session, "batched", [reply.answer for reply in replies[1::2]])


def _compared(session: ProbeSession, name: str, answers: Sequence[Answer]) -> PropertyResult:
    """Compare answers to all prompts, in order and again from the first, with the solo ones."""
    solo = [reply.answer for reply in session.solo] * (len(answers) // len(session.prompts))
    return verdict_on(name, session.compare(solo, answers))


def logprobs(session: ProbeSession) -> PropertyResult:
    """Score tokens of greedy answers again, each as the first new token, and compare log probabilities."""
    if not session.has_ids:
        return PropertyResult("logprobs", "cannot be shown", NO_IDS)
    scored = []
    for prompt, reply in zip(session.prompts, session.solo, strict=True):
        answer = reply.answer
        places = range(0, len(answer.tokens), max(1, len(answer.tokens) // _PLACES))
        scored += [(prompt, answer, index) for index in places]
    bodies = [session.body([*prompt, *answer.tokens[:index]], max_tokens=1) for prompt, answer, index in scored]
    checked = 0
    for (_, answer, index), reply in zip(scored, session.server.ask(bodies), strict=True):
        again = reply.answer.top[0].get(answer.tokens[index]) if reply.answer.top else None
        logprob = answer.logprobs[index]
        if again is None or logprob is None:
            continue
        checked += 1
        if not abs(again - logprob) <= session.noise.most:
            says = (
                f"token {index} has log probability {logprob:.4g} in the answer and {again:.4g} as the first new token"
            )
            return PropertyResult("logprobs", "fails", f"{says} after the same tokens", checked)
    if not checked:
        return PropertyResult("logprobs", "cannot be shown", "no token was listed when it was scored again")
    says = "tokens of an answer have the log probabilities that they have as first new tokens"
    return PropertyResult("logprobs", "holds", says, checked)


def listing(session: ProbeSession) -> PropertyResult:
    """Check that listed log probabilities are of one distribution, hold the chosen token's, and rank it as greedy."""
    checked = 0
    for number, reply in enumerate(session.solo):
        answer = reply.answer
        for index, (token, logprob, top) in enumerate(zip(answer.tokens, answer.logprobs, answer.top, strict=True)):
            where = f"prompt {number}, token {index}"
            total = sum(map(exp, top.values()))
            checked += 1
            if logprob is None or not abs(logprob - top[token]) <= session.noise.error:
                says = f"{where}: its log probability is {logprob} and {top[token]:.4g} in the list"
            elif not total <= _UNSURE_SUM:
                says = f"{where}: the listed probabilities sum to {total:.4g}"
            elif greedy_deficit(answer, index) > session.noise.error:
                says = f"{where}: a greedy choice is {greedy_deficit(answer, index):.3g} below the best listed token"
            else:
                continue
            return PropertyResult("listing", "fails", says, checked)
    says = "chosen tokens have the listed log probability, the best one, and no list exceeds probability 1"
    return PropertyResult("listing", "holds", says, checked)


def stop(session: ProbeSession) -> PropertyResult:
    """Check that an answer ends before a stop string that lies anywhere in its text."""
    checked = 0
    for prompt, reply in zip(session.prompts, session.solo, strict=True):
        text = reply.answer.text or ""
        strings = list(_stop_strings(text))
        replies = session.server.ask([session.body(prompt, stop=[string]) for string in strings])
        for string, stopped in zip(strings, replies, strict=True):
            expected = text[: text.index(string)]
            stopped_text = stopped.answer.text or ""
            if stopped_text == expected and stopped.finish_reasons[0] == "stop":
                checked += 1
            elif string in stopped_text or expected.startswith(stopped_text) or stopped_text.startswith(expected):
                says = (
                    f"with stop {string!r} the text is {stopped_text[-40:]!r} and ends by {stopped.finish_reasons[0]}"
                )
                return PropertyResult("stop", "fails", f"{says}; it should end in {expected[-40:]!r}", checked + 1)
    if not checked:
        return PropertyResult("stop", "cannot be shown", "answers have no text, or differ from run to run")
    return PropertyResult("stop", "holds", "texts end before their stop strings", checked)


def _stop_strings(text: str) -> Iterator[str]:
    """List short parts of a text that begin at different places."""
    for number in range(1, _STOPS + 1):
        start = len(text) * number // (_STOPS + 1)
        string = text[start : start + 3]
        if string.strip() and UNCLEAR not in string:
            yield string


def seed(session: ProbeSession) -> PropertyResult:
    """Check that a seed repeats a sampled answer, and that another seed gives another one."""
    prompt = session.prompts[0]
    seeds = range(session.settings.seed, session.settings.seed + _SEEDS)
    bodies = [session.body(prompt, temperature=1.0, seed=number) for number in seeds]
    first, again = ([session.server.ask([body])[0].answer for body in bodies] for _ in range(2))
    different = [number for number, a, b in zip(seeds, first, again, strict=True) if a.tokens != b.tokens]
    is_alike = len({answer.tokens for answer in first}) == 1
    if len(different) > 1:
        says = f"with the same seed, {len(different)} of {_SEEDS} answers change from run to run"
        return PropertyResult("seed", "fails", says, _SEEDS)
    if is_alike and all_alike_prob(first) < RARE:
        return PropertyResult("seed", "fails", f"{_SEEDS} seeds give the same answer", _SEEDS)
    if is_alike or different:
        says = "one answer changed, which rounding can do" if different else "one answer has nearly all probability"
        return PropertyResult("seed", "cannot be shown", says, _SEEDS)
    return PropertyResult("seed", "holds", "equal seeds repeat an answer, and others give others", _SEEDS)


def choices(session: ProbeSession) -> PropertyResult:
    """Check that n gives as many answers, drawn independently, and equal ones where they are greedy."""
    sampled, best = session.server.ask(
        [
            session.body(session.prompts[0], n=_CHOICES, temperature=1.0, seed=session.settings.seed),
            session.body(session.prompts[0], n=_CHOICES),
        ]
    )
    counts = {len(sampled.answers), len(best.answers)}
    if counts != {_CHOICES}:
        return PropertyResult("choices", "fails", f"n={_CHOICES} gives {sorted(counts)} answers", 2)
    alike = [answer for answer in sampled.answers if answer.tokens == sampled.answer.tokens]
    if len(alike) > 1 and all_alike_prob(alike) < RARE:
        return PropertyResult("choices", "fails", f"{len(alike)} sampled answers of one request are equal", 2)
    greedy_verdict = verdict_on("choices", session.compare([best.answer] * _CHOICES, best.answers))
    if greedy_verdict.verdict == "fails":
        return greedy_verdict
    return PropertyResult("choices", "holds", f"n={_CHOICES} gives {_CHOICES} independent answers", 2 * _CHOICES)


def usage(session: ProbeSession) -> PropertyResult:
    """Check max_tokens and the counts of tokens in a response."""
    bodies = [session.body(prompt, max_tokens=count) for prompt in session.prompts for count in _LENGTHS]
    checked = 0
    for body, reply in zip(bodies, session.server.ask(bodies), strict=True):
        if wrong := _wrong_count(session, body["prompt"], body["max_tokens"], reply):
            return PropertyResult("usage", "fails", wrong, checked + 1)
        checked += bool(reply.usage)
    if not checked:
        return PropertyResult("usage", "cannot be shown", "its responses have no usage")
    return PropertyResult("usage", "holds", "token counts are those of prompts and answers", checked)


def _wrong_count(session: ProbeSession, prompt: str | list[int], most: int, reply: Reply) -> str:
    """Describe a wrong count of one response; "" for none. An end token may be counted or not."""
    count = len(reply.answer.tokens)
    is_cut = reply.finish_reasons[0] == "length"
    if count > most or (is_cut and count != most):
        return f"max_tokens={most} gives {count} tokens, finish_reason {reply.finish_reasons[0]}"
    if not reply.usage:
        return ""
    stated, prompt_count, total = (
        reply.usage.get(name) or 0 for name in ("completion_tokens", "prompt_tokens", "total_tokens")
    )
    if stated != count and (is_cut or stated not in (count - 1, count + 1)):
        return f"completion_tokens is {stated} for {count} tokens"
    if session.has_ids and prompt_count != len(prompt):
        return f"prompt_tokens is {prompt_count} for {len(prompt)} tokens"
    is_sum = total == prompt_count + stated
    return "" if is_sum else f"total_tokens is {total} for {prompt_count} + {stated} tokens"


def stream(session: ProbeSession) -> PropertyResult:
    """Compare streamed greedy answers with whole ones."""
    bodies = [session.body(prompt, stream=True) for prompt in session.prompts]
    replies = [session.server.ask([body])[0] for body in bodies]
    for number, (solo, streamed) in enumerate(zip(session.solo, replies, strict=True)):
        text = streamed.answer.text
        if solo.answer.tokens == streamed.answer.tokens and solo.answer.text != text:
            says = f"prompt {number}: the streamed text is {text!r}, the whole one {solo.answer.text!r}"
            return PropertyResult("stream", "fails", says, number + 1)
    return _compared(session, "stream", [reply.answer for reply in replies])


def grammar(session: ProbeSession) -> PropertyResult:
    """Check that sampled answers match the JSON schema of the request."""
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA, "strict": True}}
    seeds = range(session.settings.seed, session.settings.seed + _SEEDS)
    bodies = [
        session.body(prompt, temperature=1.0, seed=number, response_format=form, max_tokens=64, logprobs=None)
        for prompt in session.prompts
        for number in seeds
    ]
    finished = 0
    for reply in session.server.ask(bodies):
        text = reply.answer.text or ""
        compact = "".join(text.split())
        if not any(word.startswith(compact) for word in _LANGUAGE):
            return PropertyResult("grammar", "fails", f"{text[:80]!r} does not match the JSON schema", len(bodies))
        finished += compact in _LANGUAGE
        if reply.finish_reasons[0] != "length" and compact not in _LANGUAGE:
            return PropertyResult("grammar", "fails", f"{text[:80]!r} ends before its JSON does", len(bodies))
    if not finished:
        return PropertyResult("grammar", "cannot be shown", "all answers reach max_tokens before their JSON ends")
    says = f"all answers match their JSON schema, {finished} of them whole"
    return PropertyResult("grammar", "holds", says, len(bodies))


def checked(name: str, session: ProbeSession) -> PropertyResult:
    """Decide one property; a request that the server refuses shows nothing."""
    from specsim.correctness.probe.sampling import SETTINGS, sampled

    try:
        return sampled(session, name) if name in SETTINGS else CHECKS[name](session)
    except Refused as refusal:
        return PropertyResult(name, "fails" if refusal.is_failure else "cannot be shown", str(refusal))


CHECKS = {
    "greedy": greedy,
    "repeat": repeat,
    "batched": batched,
    "logprobs": logprobs,
    "listing": listing,
    "stop": stop,
    "stream": stream,
    "seed": seed,
    "choices": choices,
    "usage": usage,
    "grammar": grammar,
}
