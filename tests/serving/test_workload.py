"""Request files: what a line may say, which lines are bad and why, and what the shipped file shows."""

import json
import os
from dataclasses import fields

import pytest

from specsim import InputError, SamplingParams, SpecConfig, generate
from specsim.models.load import load
from specsim.models.shipped import REQUESTS
from specsim.models.synthetic_pair import agreeing_pair
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


def test_a_line_says_all_of_a_request(read):
    sampling = dict(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=-1,
        frequency_penalty=1,
        logit_bias={"0": 2, "17": -1.5},
        max_new_tokens=9,
        stop_token_ids=[4, 5],
        ignore_eos=True,
        seed=2**64 - 1,
        stop=["end", "\n\n"],
    )
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


def test_a_prompt_that_is_too_long_is_left_to_the_scheduler(read):
    (request,) = read({"prompt_ids": [5] * MAX_LEN}).requests
    assert len(request.prompt_ids) == MAX_LEN


BAD = [
    ("{", "text is a JSON object .*at column 2"),
    ("[1]", "text is a JSON object, not '\\[1\\]'"),
    ("7", "text is a JSON object"),
    ("[" * 100000, "text is a JSON object"),
    ('{"prompt": "x", "seed": ' + "9" * 5000 + "}", "text is a JSON object"),
    ('{"prompt": "x", "temperature": NaN}', "text is a JSON object \\(NaN is no JSON\\)"),
    ('{"prompt": "x", "temperature": -Infinity}', "text is a JSON object \\(-Infinity is no JSON\\)"),
    ('{"prompt": "x", "temperature": 1e999}', "temperature is 0 \\(greedy\\) or a positive number, not inf"),
    ('{"prompt": "x", "prompt": "y"}', "text is a JSON object \\(a field stands twice\\)"),
    ({}, "input is one of prompt and prompt_ids, not 'neither'"),
    ({"prompt": "x", "prompt_ids": [1]}, "input is one of prompt and prompt_ids, not 'both'"),
    ({"prompt": "x", "temprature": 1}, "every field is one of id, prompt, .*, not 'temprature'"),
    ({"prompt": "x", "messages": []}, "every field is one of"),
    ({"prompt": ""}, "prompt is UTF-8 text of at least one character, not ''"),
    ({"prompt": None}, r"prompt is a text \(token ids: prompt_ids\), not None"),
    ({"prompt": ["x"]}, "prompt is a text"),
    ({"prompt": "\ud800"}, "prompt is UTF-8 text"),
    ({"prompt_ids": []}, "prompt is at least one token"),
    ({"prompt_ids": "12"}, "prompt_ids is a list, not '12'"),
    ({"prompt_ids": [1, 4096]}, "prompt is token ids from 0 to 4095, not 4096"),
    ({"prompt_ids": [True]}, "prompt is token ids"),
    ({"prompt_ids": [[1]]}, "prompt is token ids"),
    ({"prompt": "x", "id": 3}, "id is an integer that no earlier line has, not 3"),
    ({"prompt": "x", "id": -1}, "id is an integer from 0 to 2\\^32 - 1, not -1"),
    ({"prompt": "x", "id": "a"}, "id is an integer"),
    ({"prompt": "x", "id": [1]}, "id is an integer"),
    ({"prompt": "x", "id": None}, "id is an integer"),
    ({"prompt": "x", "continues": 4}, "continues is the id of an earlier line, not 4"),
    ({"prompt": "x", "id": 9, "continues": 9}, "continues is the id of an earlier line, not 9"),
    ({"prompt": "x", "continues": 3.0}, "continues is the id of an earlier line"),
    ({"prompt": "x", "continues": [3]}, "continues is the id of an earlier line"),
    ({"prompt": "x", "arrival": -1}, "arrival is an integer from 0 to 2.62 - 1, not -1"),
    ({"prompt": "x", "arrival": 0.5}, "arrival is an integer"),
    ({"prompt": "x", "arrival": None}, "arrival is an integer"),
    ({"prompt": "x", "abort_at": "3"}, "abort_at is an integer from 0 to 2.62 - 1"),
    ({"prompt": "x", "priority": True}, "priority is an integer, not True"),
    ({"prompt": "x", "temperature": "0"}, "temperature is 0 \\(greedy\\)"),
    ({"prompt": "x", "top_k": 1.5}, "top_k is an integer of at least 0"),
    ({"prompt": "x", "max_new_tokens": 0}, "max_new_tokens is an integer of at least 1"),
    ({"prompt": "x", "seed": -1}, "seed is an integer from 0 to 2\\^64 - 1"),
    ({"prompt": "x", "ignore_eos": 1}, "ignore_eos is true or false, not 1"),
    ({"prompt": "x", "stop": "end"}, "stop is a tuple of texts of at least one character, not 'end'"),
    ({"prompt": "x", "stop": [""]}, "stop is a tuple of texts"),
    ({"prompt": "x", "stop_token_ids": 3}, "stop_token_ids is a tuple of token ids"),
    ({"prompt": "x", "stop_token_ids": [4096]}, "stop_token_ids is token ids from 0 to 4095"),
    ({"prompt": "x", "logit_bias": [1]}, "logit_bias is an object of numbers by token id"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias is an object of numbers by token id"),
    ({"prompt": "x", "logit_bias": {"01": 1}}, "logit_bias is an object of numbers by token id"),
    ({"prompt": "x", "logit_bias": {"9" * 5000: 1}}, "logit_bias is an object of numbers by token id"),
    ({"prompt": "x", "logit_bias": {"1": None}}, "logit_bias is finite numbers"),
    ({"prompt": "x", "logit_bias": {"4096": 1}}, "logit_bias is token ids from 0 to 4095"),
]


@pytest.mark.parametrize(("line", "reason"), BAD)
def test_a_bad_line_is_refused_with_its_place_and_reason_or_skipped(read, line, reason):
    first = {"id": 3, "prompt": "x"}
    with pytest.raises(InputError, match=f"requests is '.*requests.jsonl, line 2'; allowed: a line whose {reason}"):
        read(first, line, GOOD)
    workload = read(first, line, GOOD, skip_bad_lines=True)
    assert [request.request_id for request in workload.requests] == [3, 2]
    ((number, said),) = workload.skipped
    assert number == 2
    with pytest.raises(InputError) as caught:
        read(first, line, GOOD)
    assert caught.value.allowed == said
    assert "\n" not in said
    assert len(said) < 400


def test_what_continues_a_skipped_line_is_skipped_too(read):
    lines = [{"id": 5, "prompt": ""}, {"id": 6, "prompt": "x", "continues": 5}, {"prompt": "x", "continues": 6}, GOOD]
    workload = read(*lines, skip_bad_lines=True)
    assert [number for number, _ in workload.skipped] == [1, 2, 3]
    assert [request.request_id for request in workload.requests] == [3]


@pytest.mark.parametrize("lines", [(), ("", " ")])
@pytest.mark.parametrize("skip_bad_lines", [False, True])
def test_a_file_without_a_request_is_refused(read, lines, skip_bad_lines):
    with pytest.raises(InputError, match=r"requests is '.*jsonl'; allowed: a file of at least one request$"):
        read(*lines, skip_bad_lines=skip_bad_lines)


def test_a_file_of_bad_lines_only_is_refused_with_the_first_reason(read):
    with pytest.raises(InputError, match="at least one request \\(line 2 is not a line whose input is one of"):
        read("", "{}", "{", skip_bad_lines=True)


@pytest.mark.parametrize("skip_bad_lines", [False, True])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, read, skip_bad_lines):
    for path, reason in ((tmp_path / "none.jsonl", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(InputError, match=rf"requests is '{path}'; allowed: a UTF-8 file .*\({reason}"):
            read_requests(path, PAIR, skip_bad_lines)
    with pytest.raises(InputError, match="allowed: a UTF-8 file that can be read \\(invalid start byte"):
        read('{"prompt": "\xff"}', encoding="latin-1", skip_bad_lines=skip_bad_lines)


def test_a_path_may_be_text(tmp_path):
    (tmp_path / "a.jsonl").write_text(GOOD)
    assert len(read_requests(os.fspath(tmp_path / "a.jsonl"), PAIR).requests) == 1


def test_texts_need_a_tokenizer(read):
    pair = agreeing_pair("eagle3")
    assert read({"prompt_ids": [5, 17]}, pair=pair).requests[0].prompt_ids == [5, 17]
    for line in ({"prompt": "x"}, {"prompt_ids": [5], "stop": ["x"]}):
        with pytest.raises(InputError, match="the target has no tokenizer"):
            read(line, pair=pair)


SHIPPED = read_requests(REQUESTS, PAIR).requests


@pytest.fixture(scope="module")
def finished():
    """The shipped requests by id, each run to its end alone, a turn after the one it continues."""
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


def test_shipped_requests_show_what_a_schedule_has_to_deal_with():
    assert len({request.request_id for request in SHIPPED}) == len(SHIPPED) == 14
    assert {min(request.arrival for request in SHIPPED), max(request.arrival for request in SHIPPED)} == {0, 12}
    assert all(8 <= request.params.max_new_tokens <= 24 for request in SHIPPED)
    assert sum(request.abort_at is not None for request in SHIPPED) == 1
    assert len({request.priority for request in SHIPPED}) > 1
    assert {request.params.temperature > 0 for request in SHIPPED} == {False, True}
    assert {request.request_id: request.continues for request in SHIPPED if request.continues} == {4: 2, 8: 7, 9: 8}


def test_shipped_requests_end_in_every_way(finished):
    stopped = [request for request in finished.values() if request.finish_reason == "stop"]
    reasons = {request.request_id: request.stop_reason for request in stopped}
    assert reasons == {2: "\n\n", 7: "\n\n\n", 10: 9, 12: 0}
    assert {request.finish_reason for request in finished.values()} == {"stop", "length"}
    assert finished[2].text == "\n        return len(self.items)"
