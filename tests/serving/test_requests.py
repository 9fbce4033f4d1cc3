"""Requests: their ends by tokens and stop strings, later turns, bad input."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specsim import InputError, SamplingParams, SpecConfig, generate
from specsim.models.load import load
from specsim.models.synthetic_pair import synthetic_pair
from specsim.serving.requests import Request, make_request, make_requests

PAIR = load()
TOKENIZER = PAIR.tokenizer
MAX_LEN = 64
TEXT = "héllo → wörld 🎉 def f():\n    return 1\n"


def made(max_len=MAX_LEN, pair=PAIR, prompt="x = 1", request_id=0, place=None, **params):
    arguments = (request_id, prompt, SamplingParams(**params))
    request = make_request(pair.target.config, pair.tokenizer, *arguments, **(place or {}))
    request.fit(max_len)
    return request


def take(request: Request, token_ids, sizes=None) -> int:
    """Deliver the tokens in parts of these sizes, and the rest last."""
    kept = 0
    for size in [*(sizes or ()), len(token_ids)]:
        kept += request.take(token_ids[:size], [-float(token) for token in token_ids[:size]])
        token_ids = token_ids[size:]
    assert request.logprobs == [-float(token) for token in request.token_ids]
    return kept


def by_definition(token_ids: list[int], stops: list[str]) -> tuple[int, str | None]:
    """Compute the number of kept tokens, and the text up to the stop string, by definition."""
    for end in range(1, len(token_ids) + 1):
        text = TOKENIZER.decode(token_ids[:end]).rstrip("\ufffd")
        if places := [text.index(stop) for stop in stops if stop in text]:
            return end, text[: min(places)]
    return len(token_ids), None


@st.composite
def stopped_texts(draw):
    text = draw(st.text("ab é→🎉\n\ufffd", min_size=1, max_size=20))
    start = draw(st.integers(0, len(text) - 1))
    within = text[start : start + draw(st.integers(1, 4))]
    sizes = draw(st.lists(st.integers(1, 5), max_size=6))
    return text, [within, *draw(st.lists(st.text("ab🎉", min_size=1, max_size=2), max_size=2))], sizes


@given(stopped_texts())
def test_a_stop_string_ends_at_the_first_token_that_completes_it(case):
    text, stops, sizes = case
    token_ids = TOKENIZER.encode(text)
    kept, cut = by_definition(token_ids, stops)
    request = made(max_new_tokens=60, stop=stops)
    assert take(request, token_ids, sizes) == kept
    assert request.token_ids == token_ids[:kept]
    assert request.finish_reason == (None if cut is None else "stop")
    assert request.text == (text if cut is None else cut)
    assert (request.stop_reason in stops) == (cut is not None)
    assert cut is None or not any(stop in request.text for stop in stops)


# Text, parameters from its tokens, and (finish reason, stop reason, text).
ENDS = {
    "part of a character is no replacement character": (
        "🎉 ok \ufffd.", lambda ids: dict(stop=("\ufffd",)), ("stop", "\ufffd", "🎉 ok ")
    ),
    "a stop string at the cap": (
        "return None", lambda ids: dict(stop=("None",), max_new_tokens=len(ids)), ("stop", "None", "return ")
    ),
    "a stop token before a stop string and the cap": (
        "return None", lambda ids: dict(stop=("None",), max_new_tokens=len(ids), stop_token_ids=(ids[-1],)),
        ("stop", TOKENIZER.encode(" None")[-1], "return None"),
    ),
    "a prompt is not searched": (" sto", lambda ids: dict(stop=("stop",), prompt="stop here: "), (None, None, " sto")),
}  # fmt: skip


@pytest.mark.parametrize(("text", "params", "end"), ENDS.values(), ids=ENDS)
def test_ends_of_a_request(text, params, end):
    token_ids = TOKENIZER.encode(text)
    request = made(**params(token_ids))
    take(request, token_ids)
    assert (request.finish_reason, request.stop_reason, request.text) == end


def test_the_stop_string_that_starts_first_counts():
    token_ids = TOKENIZER.encode("return None")
    assert [TOKENIZER.decode([token]) for token in token_ids][-1] == " None"
    for stops, reason in ((("one", " No", "None"), " No"), (("No", "None"), "No"), (("None", "No"), "None")):
        request = made(stop=stops)
        take(request, token_ids)
        assert request.stop_reason == reason
        assert request.text + reason == "return None"[: len(request.text + reason)]


def test_a_stop_string_before_a_stop_token_in_one_path_wins():
    request = made(stop=("None",))
    assert take(request, [*TOKENIZER.encode("return None"), 0]) == len(TOKENIZER.encode("return None"))
    assert request.stop_reason == "None"


def test_eos_is_a_stop_token_unless_it_is_ignored():
    request, ignoring = made(), made(ignore_eos=True)
    assert (take(request, [5, 0, 6]), take(ignoring, [5, 0, 6])) == (2, 3)
    assert (request.stop_reason, ignoring.stop_reason) == (0, None)
    assert request.text.endswith("<|endoftext|>")


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "rejected"])
def test_a_finished_request_takes_no_tokens(reason):
    request = made()
    request.finish_reason = reason
    assert take(request, [5, 6]) == 0
    assert (request.token_ids, request.logprobs, request.stop_reason) == ([], [], None)


def test_lengths_while_it_is_prefilled_decodes_and_resumes():
    request = made(prompt=[7, 8, 9])
    assert (request.known_ids, request.prefill_len) == ([7, 8, 9], 3)
    take(request, [5])
    assert (request.known_ids, request.prefill_len) == ([7, 8, 9, 5], 3)
    take(request, [6, 4])
    assert (request.known_ids, request.prefill_len) == ([7, 8, 9, 5, 6, 4], 5)


def test_a_turn_follows_all_known_tokens():
    first = made(prompt=[7, 8, 9], max_new_tokens=2)
    take(first, [5, 6])
    turn = made(prompt=[1, 2], max_new_tokens=60, place={"continues": 0}, request_id=1)
    assert turn.max_tokens == 60
    turn.follow(first)
    turn.fit(MAX_LEN)
    assert (turn.prompt_ids, turn.max_tokens) == ([7, 8, 9, 5, 6, 1, 2], MAX_LEN - 7)
    assert first.prompt_ids == [7, 8, 9]
    turn = made(prompt=[1] * 60, place={"continues": 0}, request_id=1)
    turn.follow(first)
    turn.fit(MAX_LEN)
    assert turn.max_tokens == -1


class Beginning:
    """A tokenizer that begins a text with token 1, as many do."""

    def encode(self, text, add_special_tokens=True):
        return [1] * add_special_tokens + [ord(letter) for letter in text]


def test_only_the_first_turn_begins_a_text():
    pair = replace(PAIR, tokenizer=Beginning())
    assert made(pair=pair, prompt="ab").prompt_ids == [1, 97, 98]
    assert made(pair=pair, prompt="ab", place={"continues": 3}).prompt_ids == [97, 98]
    with pytest.raises(InputError, check=lambda error: error.name == "prompt"):
        made(pair=pair, prompt="", place={"continues": 3})


def test_only_generate_refuses_a_long_prompt():
    request = made(prompt=[5] * MAX_LEN)
    assert (len(request.prompt_ids), request.max_tokens) == (MAX_LEN, 0)
    with pytest.raises(InputError, check=lambda error: error.name == "prompt"):
        make_requests(PAIR, [[5] * MAX_LEN], None, None, MAX_LEN)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"request_id": -1}, "id"),
        ({"request_id": 2**32}, "id"),
        ({"request_id": None}, "request_id"),
        ({"place": {"continues": True}}, "continues"),
        ({"place": {"arrival": -1}}, "arrival"),
        ({"place": {"arrival": 1.0}}, "arrival"),
        ({"place": {"abort_at": -1}}, "abort_at"),
        ({"place": {"priority": "high"}}, "priority"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [4096]}, "prompt"),
        ({"prompt": [5, -1]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"stop_token_ids": (4096,)}, "stop_token_ids"),
        ({"stop": "end"}, "stop"),
    ],
)
def test_bad_requests_are_refused(changes, name):
    with pytest.raises(InputError, check=lambda error: error.name == name):
        made(**changes)


def test_stop_strings_need_a_tokenizer():
    pair = synthetic_pair("eagle3")
    with pytest.raises(InputError, check=lambda error: error.name == "stop"):
        generate(pair, [[5, 17]], sampling=SamplingParams(stop=("end",)))
    assert generate(pair, [[5, 17]], sampling=SamplingParams(max_new_tokens=2)).outputs[0].text == ""


@pytest.mark.parametrize("config", [SpecConfig(), SpecConfig.plain()])
def test_generate_cuts_the_text_inside_an_accepted_path(config):
    prompts = ["class Inventory:\n    def __len__(self):", "def main():\n    return"]
    whole = generate(PAIR, prompts, config, SamplingParams(max_new_tokens=16)).outputs
    stop = whole[0].text[8:13]
    cut = generate(PAIR, prompts, config, [SamplingParams(max_new_tokens=16, stop=(stop,)), SamplingParams()]).outputs
    kept, text = by_definition(list(whole[0].token_ids), [stop])
    assert (cut[0].text, cut[0].token_ids, cut[0].finish_reason) == (text, whole[0].token_ids[:kept], "stop")
    assert cut[0].logprobs == pytest.approx(whole[0].logprobs[:kept], abs=1e-5)
    assert cut[1].token_ids[:16] == whole[1].token_ids


def test_prompts_of_tensors_are_lists():
    assert made(prompt=torch.tensor([5, 6])).prompt_ids == [5, 6]
