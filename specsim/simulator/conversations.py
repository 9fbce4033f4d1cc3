"""Requests of conversations: each answer of the assistant is one, with everything before it as its prompt."""

from collections.abc import Callable, Mapping
from typing import Any

from specsim.core.config import SamplingParams
from specsim.core.errors import InputError, require
from specsim.core.files import parse_json
from specsim.simulator.bounds import count
from specsim.simulator.request_file import Turn

Count = Callable[[str], int]  # tokens of a text
_MESSAGES = ("conversations", "conversation", "messages")
_SPEAKER = ("from", "role")
_TEXT = ("value", "content")
_ASSISTANTS = ("gpt", "assistant", "chatgpt", "bing", "bard", "model")


def read_conversations(value: Any, path: str, tokens: Count) -> tuple[tuple[tuple[Turn, ...], ...], None, int]:
    """Read a list of conversations as ShareGPT's, messages with from and value, or with role and content.

    Returns turns by conversation, no times, and the number of answers left out, since they or their prompts are empty.
    The tokens of a chat template are not counted.
    """
    found = []
    skipped = 0
    for number, conversation in enumerate(value, start=1):
        place = f"{path}, conversation {number}"
        turns, empty = _turns(_messages(conversation, place), place, tokens)
        skipped += empty
        if turns:
            found.append(tuple(turns))
    require(found, "workload", path, "conversations with at least one answer of gpt or assistant")
    return tuple(found), None, skipped


def _turns(messages: list, place: str, tokens: Count) -> tuple[list[Turn], int]:
    turns: list[Turn] = []
    before = known = empty = 0
    for number, message in enumerate(messages, start=1):
        where = f"{place}, message {number}"
        speaker, text = _field(message, _SPEAKER, where), _field(message, _TEXT, where)
        size = tokens(text)
        if speaker.lower() in _ASSISTANTS:
            if before and size:
                turns.append(Turn(before, size, known))
                known = before + size
            else:
                empty += 1
        before += size
    return turns, empty


def _messages(conversation: Any, place: str) -> list:
    named = [conversation.get(name) for name in _MESSAGES] if isinstance(conversation, Mapping) else [conversation]
    messages = next((each for each in named if isinstance(each, list)), None)
    if messages is None:
        raise InputError("workload", place, "an object with a list of messages under conversations or messages")
    return messages


def _field(message: Any, names: tuple[str, str], place: str) -> str:
    values = [message.get(name) for name in names] if isinstance(message, Mapping) else []
    text = next((each for each in values if isinstance(each, str)), None)
    if text is None:
        raise InputError("workload", place, f"a message with a text under {' or '.join(names)}")
    return text


def read_prompts(text: str, path: str, tokens: Count) -> tuple[tuple[tuple[Turn, ...], ...], None, int]:
    """Read the requests of a file of specsim run: an output has max_new_tokens, whether or not it would end before.

    Their arrival is a step, not a time: it is not used. `continues` makes a turn of a conversation.
    """
    conversations: dict[Any, list[Turn]] = {}  # by the id of the last turn
    found: list[list[Turn]] = []
    for index, line in enumerate(text.split("\n")):
        if not line.strip():
            continue
        place = f"{path}, line {index + 1}"
        value = parse_json(line, "workload", place, "a line that is a JSON object")
        if not isinstance(value, Mapping):
            raise InputError("workload", place, "a line that is a JSON object")
        output = _output(value, place)
        continued = value.get("continues")
        request_id = value.get("id", index)
        for name, key in (("id", request_id), ("continues", continued)):
            require(key is None or isinstance(key, (str, int)), "workload", place, f"a line whose {name} is a text")
        turns = [] if continued is None else conversations.pop(continued, None)
        if turns is None:
            raise InputError("workload", place, f"a line that continues the id of an earlier one, not {continued!r}")
        known = turns[-1].prompt_tokens + turns[-1].output_tokens if turns else 0
        if not turns:
            found.append(turns)
        turns.append(Turn(known + _prompt(value, place, tokens), output, known))
        conversations[request_id] = turns
    return tuple(map(tuple, found)), None, 0


def _output(value: Mapping[str, Any], place: str) -> int:
    try:
        return count("max_new_tokens", value.get("max_new_tokens", SamplingParams().max_new_tokens))
    except InputError as error:
        raise InputError("workload", place, f"a max_new_tokens that is {error.allowed}") from error


def _prompt(value: Mapping[str, Any], place: str, tokens: Count) -> int:
    """Count the tokens of a prompt."""
    ids = value.get("prompt_ids")
    size = len(ids) if isinstance(ids, list) else 0
    if isinstance(value.get("prompt"), str):
        size = tokens(value["prompt"])
    require(size, "workload", place, "a request with a prompt or prompt_ids, not empty")
    return size
