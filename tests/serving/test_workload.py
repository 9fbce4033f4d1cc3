"""Request files: valid lines, bad lines and their reasons, and the shipped file."""

import json
import os
from dataclasses import fields

import pytest

from specsim import InputError, SamplingParams, SpecConfig, generate
from specsim.models.load import load
from specsim.models.shipped import REQUESTS
from specsim.models.synthetic_pair import synthetic_pair
from specsim.serving.workload import read_requests

PAIR = load()
MAX_LEN = PAIR.target.config.max_position_embeddings
GOOD = '{"prompt": "x = 1"}'


@pytest.fixture
def read(tmp_path):
    """Write a file of these lines and read it."""

    def read(*lines, pair=PAIR, encoding="utf-8", end="\n", **options):
        path = tmp_path / "requests.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_bytes((end.join(texts) + end).encode(encoding))
        return read_requests(path, pair, **options)

    return read


def test_a_line_sets_every_field_of_a_request(read):
    sampling = dict(
        temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.2, presence_penalty=-1,
        frequency_penalty=1, logit_bias={"0": 2, "17": -1.5}, max_new_tokens=9, stop_token_ids=[4, 5], ignore_eos=True,
        seed=2**64 - 1, stop=["end", "\n\n"], stop_regex=["a+b"],
    )  # fmt: skip
    assert set(sampling) == {field.name for field in fields(SamplingParams)}
    place = dict(arrival=3, priority=-2, continues=9, abort_at=7)
    workload = read({"id": 9, "prompt": "x = 1"}, {"id": 2**32 - 1, "prompt_ids": [7, 8], **place, **sampling})
    first, second = workload.requests
    assert workload.skipped == []
    assert (first.request_id, first.prompt_ids, first.params) == (9, PAIR.tokenizer.encode("x = 1"), SamplingParams())
    assert (first.arrival, first.priority, first.continues, first.abort_at) == (0, 0, None, None)
    assert (second.request_id, second.prompt_ids) == (2**32 - 1, [7, 8])
    assert second.params == SamplingParams(**sampling | {"logit_bias": {0: 2, 17: -1.5}})
    assert {name: getattr(second, name) for name in place} == place
    assert (second.stop_ids, second.max_tokens, second.tokenizer) == ({4, 5}, 9, PAIR.tokenizer)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_blank_lines_count_and_hold_nothing(read, encoding, end):
    requests = read("", GOOD, "  \t", GOOD, encoding=encoding, end=end).requests
    assert [request.request_id for request in requests] == [1, 3]


def test_a_line_ends_at_a_line_feed_only(read):
    (request,) = read('{"prompt": "a\u2028b\u0085c"}').requests
    assert request.prompt_ids == PAIR.tokenizer.encode("a\u2028b\u0085c")


def test_null_stands_for_no_conversation_and_no_abort(read):
    (request,) = read({"prompt": "x", "continues": None, "abort_at": None}).requests
    assert (request.continues, request.abort_at) == (None, None)


def test_a_prompt_that_is_too_long_reaches_the_scheduler(read):
    (request,) = read({"prompt_ids": [5] * MAX_LEN}).requests
    assert len(request.prompt_ids) == MAX_LEN


BAD = [
    ("{", "text"),
    ("[1]", "text"),
    ("7", "text"),
    ("[" * 100000, "text"),
    ('{"prompt": "x", "seed": ' + "9" * 5000 + "}", "text"),
    ('{"prompt": "x", "temperature": NaN}', "text"),
    ('{"prompt": "x", "temperature": -Infinity}', "text"),
    ('{"prompt": "x", "temperature": 1e999}', "temperature"),
    ('{"prompt": "x", "prompt": "y"}', "text"),
    ({}, "input"),
    ({"prompt": "x", "prompt_ids": [1]}, "input"),
    ({"prompt": "x", "temprature": 1}, "every field"),
    ({"prompt": "x", "messages": []}, "every field"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ["x"]}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt_ids": []}, "prompt"),
    ({"prompt_ids": "12"}, "prompt_ids"),
    ({"prompt_ids": [1, 4096]}, "prompt"),
    ({"prompt_ids": [True]}, "prompt"),
    ({"prompt_ids": [[1]]}, "prompt"),
    ({"prompt": "x", "id": 3}, "id"),
    ({"prompt": "x", "id": -1}, "id"),
    ({"prompt": "x", "id": "a"}, "id"),
    ({"prompt": "x", "id": [1]}, "id"),
    ({"prompt": "x", "id": None}, "id"),
    ({"prompt": "x", "continues": 4}, "continues"),
    ({"prompt": "x", "id": 9, "continues": 9}, "continues"),
    ({"prompt": "x", "continues": 3.0}, "continues"),
    ({"prompt": "x", "continues": [3]}, "continues"),
    ({"prompt": "x", "arrival": -1}, "arrival"),
    ({"prompt": "x", "arrival": 0.5}, "arrival"),
    ({"prompt": "x", "arrival": None}, "arrival"),
    ({"prompt": "x", "abort_at": "3"}, "abort_at"),
    ({"prompt": "x", "priority": True}, "priority"),
    ({"prompt": "x", "temperature": "0"}, "temperature"),
    ({"prompt": "x", "top_k": 1.5}, "top_k"),
    ({"prompt": "x", "max_new_tokens": 0}, "max_new_tokens"),
    ({"prompt": "x", "seed": -1}, "seed"),
    ({"prompt": "x", "ignore_eos": 1}, "ignore_eos"),
    ({"prompt": "x", "stop": "end"}, "stop"),
    ({"prompt": "x", "stop": [""]}, "stop"),
    ({"prompt": "x", "stop_regex": ["("]}, "stop_regex"),
    ({"prompt": "x", "stop_token_ids": 3}, "stop_token_ids"),
    ({"prompt": "x", "stop_token_ids": [4096]}, "stop_token_ids"),
    ({"prompt": "x", "logit_bias": [1]}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"01": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"1": None}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"4096": 1}}, "logit_bias"),
]


@pytest.mark.parametrize(("line", "name"), BAD)
def test_a_bad_line_is_refused_or_skipped_with_its_reason(read, line, name):
    first = {"id": 3, "prompt": "x"}
    workload = read(first, line, GOOD, skip_bad_lines=True)
    assert [request.request_id for request in workload.requests] == [3, 2]
    (skipped,) = workload.skipped
    assert skipped.line == 2
    assert skipped.reason.startswith(f"a line whose {name} is ")
    assert "\n" not in skipped.reason
    assert len(skipped.reason) < 400
    with pytest.raises(InputError) as caught:
        read(first, line, GOOD)
    assert (caught.value.name, caught.value.allowed) == ("requests", skipped.reason)
    assert caught.value.value.endswith("requests.jsonl, line 2")


def test_a_continuation_of_a_skipped_line_is_skipped_too(read):
    lines = [{"id": 5, "prompt": ""}, {"id": 6, "prompt": "x", "continues": 5}, {"prompt": "x", "continues": 6}, GOOD]
    workload = read(*lines, skip_bad_lines=True)
    assert [number for number, _ in workload.skipped] == [1, 2, 3]
    assert [request.request_id for request in workload.requests] == [3]


@pytest.mark.parametrize("lines", [(), ("", " ")])
@pytest.mark.parametrize("skip_bad_lines", [False, True])
def test_a_file_without_a_request_is_refused(read, lines, skip_bad_lines):
    with pytest.raises(InputError, check=lambda error: error.name == "requests"):
        read(*lines, skip_bad_lines=skip_bad_lines)


def test_a_file_of_bad_lines_names_the_first_reason(read):
    with pytest.raises(InputError, check=lambda error: error.name == "requests" and "input is one of" in error.allowed):
        read("", "{}", "{", skip_bad_lines=True)


@pytest.mark.parametrize("skip_bad_lines", [False, True])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, read, skip_bad_lines):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(InputError, check=lambda error, path=path: error.value == str(path)):
            read_requests(path, PAIR, skip_bad_lines)
    with pytest.raises(InputError, check=lambda error: error.name == "requests"):
        read('{"prompt": "\xff"}', encoding="latin-1", skip_bad_lines=skip_bad_lines)


def test_a_path_may_be_text(tmp_path):
    (tmp_path / "a.jsonl").write_text(GOOD)
    assert len(read_requests(os.fspath(tmp_path / "a.jsonl"), PAIR).requests) == 1


def test_texts_need_a_tokenizer(read):
    pair = synthetic_pair("eagle3")
    assert read({"prompt_ids": [5, 17]}, pair=pair).requests[0].prompt_ids == [5, 17]
    for line in ({"prompt": "x"}, {"prompt_ids": [5], "stop": ["x"]}):
        with pytest.raises(InputError, check=lambda error: error.value.endswith("line 1")):
            read(line, pair=pair)


SHIPPED = read_requests(REQUESTS, PAIR).requests


@pytest.fixture(scope="module")
def finished():
    """Run the shipped requests to their ends solo, a turn after the one it continues, and map them by id."""
    done = {}
    for request in read_requests(REQUESTS, PAIR).requests:
        if request.continues is not None:
            request.follow(done[request.continues])
        params, ids = request.params, [request.request_id]
        (output,) = generate(PAIR, [request.prompt_ids], SpecConfig(), params, request_ids=ids).outputs
        assert request.take(output.token_ids, output.logprobs) == len(output.token_ids)
        assert (request.text, request.finish_reason) == (output.text, output.finish_reason)
        done[request.request_id] = request
    return done


def test_shipped_requests_share_a_prefix_of_three_pages():
    starts = [tuple(request.prompt_ids[:48]) for request in SHIPPED if request.continues is None]
    assert max(starts.count(start) for start in starts) >= 5


def test_shipped_requests_cover_the_cases_of_a_schedule():
    assert len({request.request_id for request in SHIPPED}) == len(SHIPPED) == 14
    assert {min(request.arrival for request in SHIPPED), max(request.arrival for request in SHIPPED)} == {0, 12}
    assert all(8 <= request.params.max_new_tokens <= 24 for request in SHIPPED)
    assert sum(request.abort_at is not None for request in SHIPPED) == 1
    assert len({request.priority for request in SHIPPED}) > 1
    assert {request.params.temperature > 0 for request in SHIPPED} == {False, True}
    assert {request.request_id: request.continues for request in SHIPPED if request.continues} == {4: 2, 8: 7, 9: 8}


def test_shipped_requests_have_every_finish_reason(finished):
    stopped = [request for request in finished.values() if request.finish_reason == "stop"]
    reasons = {request.request_id: request.stop_reason for request in stopped}
    assert reasons == {2: "\n\n", 7: "\n\n\n", 10: 9, 12: 0}
    assert {request.finish_reason for request in finished.values()} == {"stop", "length"}
    assert finished[2].text == "\n        return len(self.items)"
