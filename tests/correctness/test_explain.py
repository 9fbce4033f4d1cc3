"""specsim explain: the first difference of two engines' answers, and whether rounding explains it."""

import json
import re
from math import exp, inf, log, nan

import pytest
import torch

from specsim.core.errors import InputError
from specsim.correctness.explain import Answer, Noise, explain, read_answers
from specsim.correctness.explain.finding import ERRORS, AnswerComparison, ComparedWeights, decide
from specsim.models.load import load
from specsim.reference.oracle_forward import target_forward

NOISE = Noise(0.01, "given")  # so 0.04 is the bound


def answer(tokens, logprobs, top=None, prompt=None) -> Answer:
    return Answer.of(list(zip(tokens, logprobs, strict=True)), top, prompt)


def one(a: Answer, b: Answer, noise: Noise = NOISE) -> AnswerComparison:
    (finding,) = explain([a], [b], noise)
    return finding


def parted(mine: float, theirs: float) -> tuple[Answer, Answer]:
    """Make two answers of three tokens with different last tokens, by each engine's margin for its own token."""
    a = answer([5, 6, 7], [-0.1, -0.2, -0.6], [{}, {}, {8: -0.6 - mine}])
    b = answer([5, 6, 8], [-0.1, -0.2, -0.6], [{}, {}, {7: -0.6 - theirs}])
    return a, b


@pytest.mark.parametrize(
    ("mine", "theirs", "verdict"),
    [(0.0, 0.0, "numerics"), (0.02, 0.0199, "numerics"), (0.0, 0.041, "fault"), (0.021, 0.02, "fault")],
)
def test_two_margins_are_compared_with_four_errors(mine, theirs, verdict):
    finding = one(*parted(mine, theirs))
    assert (finding.verdict, finding.place, finding.tokens) == (verdict, 2, (7, 8))
    assert finding.margins == pytest.approx((mine, theirs))
    assert f"{NOISE.most:.3g}" in finding.says


def test_the_bound_is_sharp():
    """Two engines with an error of e per logit can differ by exactly 4e."""
    for name in ("float16", "bfloat16"):  # whose error is a roundoff at a logit of 32
        assert Noise.of(name).error == 32 * torch.finfo(getattr(torch, name)).eps / 2
    logits, error = torch.tensor([1.0, 1.0], dtype=torch.float64), 0.25
    shifts = torch.tensor([error, -error], dtype=torch.float64)
    first, second = (logits + shifts).log_softmax(0), (logits - shifts).log_softmax(0)
    a = answer([0], [float(first[0])], [{1: float(first[1])}])
    b = answer([1], [float(second[1])], [{0: float(second[0])}])
    assert sum(one(a, b, Noise(error, "")).margins) == pytest.approx(4 * error)
    assert one(a, b, Noise(1.0001 * error, "")).verdict == "numerics"
    assert one(a, b, Noise(0.9999 * error, "")).verdict == "fault"


def test_drift_before_the_first_difference_is_a_fault():
    for tokens in ([5, 6, 7], [5, 6, 8]):
        finding = one(answer([5, 6, 7], [-0.1, -0.2, -0.3]), answer(tokens, [-0.1, -0.25, -0.3]))
        assert (finding.verdict, finding.drift_place) == ("fault", 1)
        assert finding.drift == pytest.approx(0.05)
    for logprobs in ([-0.1, None], [-0.1, -9.0]):
        finding = one(answer([5, 6], logprobs), answer([5, 6], [-0.1, -9.0]))
        assert (finding.verdict, finding.place, finding.drift) == ("equal", None, 0.0)


def test_a_nan_differs_from_every_log_probability():
    """NaN is found at any place, whatever else differs; equal minus infinities are equal."""
    sound = answer([5, 6], [-0.1, -0.2])
    for logprobs in ([nan, -0.2], [-0.1, nan], [nan, -9.0]):
        assert one(answer([5, 6], logprobs), sound).verdict == "fault"
        assert one(sound, answer([5, 6], logprobs)).verdict == "fault"
    assert one(answer([5, 6], [-inf, -0.2]), answer([5, 6], [-inf, -9.0])).drift_place == 1
    assert one(*[answer([5, 6], [-inf, -0.2])] * 2).drift == 0.0


@pytest.mark.parametrize("top", [{8: nan}, {7: nan, 8: -0.6}, {3: nan, 4: -0.7}, {4: -0.7, 3: nan}])
def test_a_nan_where_tokens_differ_is_a_fault(top):
    _, b = parted(0.0, 0.0)
    own = top.get(7, -0.6)
    assert one(answer([5, 6, 7], [-0.1, -0.2, own], [{}, {}, top]), b).verdict == "fault"
    assert one(b, answer([5, 6, 7], [-0.1, -0.2, own], [{}, {}, top])).verdict == "fault"


def test_reported_tokens_bound_the_margin_of_others():
    a, b = parted(0.0, 0.0)
    hidden = answer([5, 6, 7], [-0.1, -0.2, -0.6], [{}, {}, {3: -0.61}])
    assert one(hidden, b).verdict == "undecided"
    assert one(hidden, b).margins[0] is None
    hidden = answer([5, 6, 7], [-0.1, -0.2, -0.6], [{}, {}, {3: -0.61, 4: -0.7}])
    finding = one(hidden, b)
    assert (finding.verdict, finding.at_least[0]) == ("fault", pytest.approx(0.1))
    assert one(a, answer([5, 6, 8], [None] * 3)).verdict == "undecided"


def test_a_drawn_token_and_an_early_end_are_undecided():
    assert one(*parted(-0.5, 0.0)).verdict == "undecided"
    assert one(*parted(-0.5, 0.0)).is_drawn
    finding = one(answer([5, 6], [-0.1, -0.2]), answer([5], [-0.1]))
    assert (finding.verdict, finding.place, finding.tokens) == ("undecided", 1, (6, None))
    finding = one(answer([5], [-0.1]), answer([5, 6], [-0.1, -0.2]))
    assert (finding.verdict, finding.place, finding.tokens) == ("undecided", 1, (None, 6))


@pytest.mark.parametrize(("temperature", "verdict"), [(0.0, "fault"), (0.7, "undecided")])
def test_an_answer_of_ours_says_if_it_was_sampled(temperature, verdict, tmp_path):
    """Without alternatives a sampled token would be a fault, as soon as the weights decide."""
    ours = {"token_ids": [8], "logprobs": [-3.0], "prompt_token_ids": [1], "temperature": temperature}
    (tmp_path / "a.json").write_text(json.dumps({"outputs": [ours]}))
    (one_answer,) = read_answers(tmp_path / "a.json", "a")
    finding = one(one_answer, answer([9], [-0.1], [{8: -9.0}]))
    assert (finding.is_drawn, finding.verdict) == (temperature > 0, verdict)


def test_a_token_below_any_reported_one_was_drawn():
    """Even if the other engine's token is not reported; a tie does not count, nor does its own token."""
    b = answer([7], [-0.05], [{1: -4.0, 2: -6.0}])
    finding = one(answer([5], [-5.0], [{1: -0.1, 2: -3.0}]), b)
    assert (finding.verdict, finding.is_drawn) == ("undecided", True)
    assert one(b, answer([5], [-5.0], [{1: -0.1, 2: -3.0}])).verdict == "undecided"
    for top in ({1: -0.7, 2: -3.0}, {5: -0.69999, 2: -3.0}):
        assert one(answer([5], [-0.7], [top]), b).verdict == "fault"


def test_answers_have_to_belong_together():
    mine = answer([5], [-0.1], prompt=[1, 2])
    for prompt in (None, "x = 1"):  # which may be the same
        assert one(mine, answer([5], [-0.1], prompt=prompt)).verdict == "equal"
    named = answer([" x"], [-0.1])
    for a, b, value in (
        ([mine], [mine, mine], "2 answers"),
        ([mine], [answer([5], [-0.1], prompt=[1, 3])], "an answer to another prompt (request 0)"),
        ([mine], [named], "an answer that names tokens by text (request 0)"),
        ([named], [mine], "an answer that names tokens by id (request 0)"),
    ):
        with pytest.raises(InputError, check=lambda error, value=value: (error.name, error.value) == ("b", value)):
            list(explain(a, b, NOISE))
    assert one(answer([" x"], [-0.1]), answer([], [])).verdict == "undecided"
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("dtype", "int8")):
        Noise.of("int8")


# The same answer in each engine's format: tokens 11 and 12, and 13 as an alternative of the second.
VLLM = {
    "prompt_token_ids": [1, 2],
    "outputs": [
        {
            "token_ids": [11, 12],
            "logprobs": [
                {"11": {"logprob": -0.5, "rank": 1}},
                {"12": {"logprob": -0.25, "rank": 1}, "13": {"logprob": -2.5, "rank": 2}},
            ],
        }
    ],
}
SGLANG = {
    "text": "a b",
    "prompt_token_ids": [1, 2],
    "meta_info": {
        "output_token_logprobs": [[-0.5, 11, None], [-0.25, 12, None]],
        "output_top_logprobs": [None, [[-0.25, 12, None], [-2.5, 13, None]]],
    },
}
OURS = {
    "token_ids": [11, 12],
    "logprobs": [-0.5, -0.25],
    "top_logprobs": [None, {"13": -2.5}],
    "prompt_token_ids": [1, 2],
}
NAMED = {
    "tokens": ["token_id:11", "token_id:12"],
    "token_logprobs": [-0.5, -0.25],
    "top_logprobs": [{}, {"token_id:13": -2.5}],
}
CHAT = [
    {"token": "token_id:11", "logprob": -0.5, "top_logprobs": None},
    {"token": "token_id:12", "logprob": -0.25, "top_logprobs": [{"token": "token_id:13", "logprob": -2.5}]},
]


@pytest.mark.parametrize(
    "written",
    [
        VLLM,
        [SGLANG],
        {"outputs": [OURS]},
        {"prompt": [1, 2], "choices": [{"logprobs": NAMED}]},
        {"prompt": [1, 2], "choices": [{"logprobs": {"content": CHAT}}]},
    ],
)
def test_engines_are_read(written, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(written))
    (found,) = read_answers(tmp_path / "a.json", "a")
    assert found == answer([11, 12], [-0.5, -0.25], [{11: -0.5}, {12: -0.25, 13: -2.5}], [1, 2])
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(written)}\n\n{json.dumps(written)}\n")
    assert read_answers(tmp_path / "a.jsonl", "a") == (found, found)


def test_prompts_and_tokens_may_be_texts(tmp_path):
    logprobs = {"tokens": ["7", " x"], "token_logprobs": [-0.5, -0.1], "top_logprobs": None}
    value = [{"prompt": "x = 1"} | VLLM | {"prompt_token_ids": None}, {"choices": [{"logprobs": logprobs}]}]
    (tmp_path / "a.json").write_text(json.dumps(value))
    first, second = read_answers(tmp_path / "a.json", "a")
    assert (first.prompt, second.tokens) == ("x = 1", ("7", " x"))


def chat(tmp_path, *places: list[tuple[str, float, list[int] | None]]) -> Answer:
    """Read a chat completion with these reported tokens per place, the chosen one first; bytes may be None."""
    reported = [[dict(zip(("token", "logprob", "bytes"), each, strict=True)) for each in place] for place in places]
    content = [place[0] | {"top_logprobs": place} for place in reported]
    (tmp_path / "chat.json").write_text(json.dumps({"choices": [{"logprobs": {"content": content}}]}))
    (found,) = read_answers(tmp_path / "chat.json", "a")
    return found


def test_bytes_distinguish_tokens_of_equal_text(tmp_path):
    a = chat(tmp_path, [("A", -0.69, [65]), ("\ufffd", -0.70, [240]), ("\ufffd", -9.0, [241])])
    near = chat(tmp_path, [("\ufffd", -0.69, [240]), ("A", -0.70, [65])])
    far = chat(tmp_path, [("\ufffd", -0.69, [241]), ("A", -0.70, [65])])
    assert (one(a, near).verdict, one(a, near).tokens) == ("numerics", ("A", r"\xf0"))
    assert (one(a, far).verdict, one(a, far).at_least[0]) == ("fault", pytest.approx(8.31))
    assert one(near, far).place == 0
    # Without the bytes of one engine, the likeliest of equal texts counts, so that no margin is overestimated.
    b = chat(tmp_path, [("\ufffd", -0.69, None), ("A", -0.70, None)])
    for given in ([240], None):
        a = chat(tmp_path, [("A", -0.69, [65]), ("\ufffd", -0.70, given), ("\ufffd", -9.0, given)])
        assert one(a, b).verdict == "numerics"


def test_a_text_of_several_tokens_is_no_fault(tmp_path):
    """The engines may have differed there without a visible difference."""
    a, b = ([("\ufffd", -0.1, given), ("x", -9.0, None)] for given in (None, [240]))
    last, off = [("y", -0.2, None)], [("y", -3.0, None)]
    assert one(chat(tmp_path, a), chat(tmp_path, b)).verdict == "undecided"
    assert one(chat(tmp_path, a, last), chat(tmp_path, a, off)).verdict == "undecided"
    assert one(chat(tmp_path, b, last), chat(tmp_path, b, off)).verdict == "fault"
    assert one(chat(tmp_path, last, a), chat(tmp_path, off, a)).verdict == "fault"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", '{"outputs": [{"token_ids": 1}]}', '{"outputs": [{"token_ids": [1, 2], "logprobs": [-1]}]}',
     '{"choices": [{"logprobs": null}]}', '{"meta_info": {"output_token_logprobs": [7]}}', "[" * 100_000,
     '{"token_ids": [1.7], "logprobs": [-1]}', '{"token_ids": [true], "logprobs": [-1]}',
     '{"token_ids": [1], "logprobs": [-1' + "0" * 400 + "]}"],
)  # fmt: skip
def test_other_files_are_refused_in_one_line(text, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError, check=lambda error: error.name == "a") as error:
        read_answers(tmp_path / "a.json", "a")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("entry", [{"error": "overloaded"}, 5, "text", None, [], {"choices": []}, {"outputs": []}])
def test_an_entry_without_an_answer_is_refused(entry, tmp_path):
    """Otherwise later answers would be compared with answers to other prompts."""
    (tmp_path / "a.json").write_text(json.dumps([SGLANG, entry, SGLANG]))
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, (SGLANG, entry, SGLANG))))
    for name in ("a.json", "a.jsonl"):
        with pytest.raises(InputError, check=lambda error: "entry 1, counted from 0" in error.allowed):
            read_answers(tmp_path / name, "a")


def test_lines_end_only_at_line_feeds(tmp_path):
    """A text may contain U+2028 and U+0085."""
    line = json.dumps(OURS | {"text": "a\u2028b\u0085c"}, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_bytes(f"{line}\r\n\r\n{line}".encode())
    assert len(read_answers(tmp_path / "a.jsonl", "a")) == 2


def test_the_rest_of_the_probability_bounds_the_other_token(tmp_path):
    """Another token has at most 1 - P(chosen): 0.049 and 0.030 here, so the two lie 6.4 apart or more."""
    a, b = (answer(["The", word], [-0.02, logprob]) for word, logprob in ((" blue", -0.05), (" grey", -0.03)))
    finding = one(a, b, Noise.of("bfloat16"))
    bounds = tuple(logprob - log(1 - exp(logprob)) for logprob in (-0.05, -0.03))
    assert (finding.verdict, finding.margins, finding.at_least) == ("fault", (None, None), pytest.approx(bounds))
    assert "unless an answer was sampled" in finding.says
    near = one(*(answer([word], [log(0.5)]) for word in "ab"), Noise.of("bfloat16"))
    assert (near.verdict, near.at_least) == ("undecided", (0.0, 0.0))
    certain = one(answer([5, 6], [-0.1, 0.0]), answer([5, 7], [-0.1, -0.1])).at_least
    assert certain[0] == pytest.approx(24 * log(2))


def test_log_probabilities_of_zero_or_none_prove_nothing():
    sound = answer([5, 6, 7], [-0.1, -0.2, -0.3])
    for logprobs, says in (([0.0] * 3, "all log probabilities of b are 0"), ([None] * 3, "b has no log probabilities")):
        for tokens in ([5, 6, 7], [5, 6, 8]):
            finding = one(sound, answer(tokens, logprobs))
            assert finding.verdict == "undecided"
        assert says in one(sound, answer([5, 6, 7], logprobs)).says
    assert one(answer([5, 6], [0.0, -0.1]), answer([5, 6], [0.0, -0.1])).verdict == "equal"
    ids = answer([5, 6, 7], [None] * 3)
    assert (one(ids, ids).verdict, one(ids, ids).says) == (
        "equal",
        "all tokens are equal; no log probabilities compared",
    )
    differs = one(ids, answer([5, 6, 8], [None] * 3))
    assert (differs.verdict, differs.place, differs.tokens) == ("undecided", 2, (7, 8))
    assert "number 2, counted from 0; without log probabilities of a and b" in differs.says


def read(tmp_path, *values: object) -> tuple[Answer, ...]:
    (tmp_path / "read.jsonl").write_text("\n".join(map(json.dumps, values)))
    return read_answers(tmp_path / "read.jsonl", "a")


@pytest.mark.parametrize(
    "form",
    [
        lambda text: {"choices": [{"message": {"content": text}, "logprobs": None}]},
        lambda text: {"choices": [{"text": text}]},
        lambda text: {"text": text, "meta_info": {"id": "r"}},
        lambda text: {"prompt": "x", "outputs": [{"text": text}]},
    ],
)
def test_texts_alone_are_compared(form, tmp_path):
    a, b = (read(tmp_path, form(text))[0] for text in ("The sky is blue.", "The sky is grey."))
    finding = one(a, b)
    assert (finding.verdict, finding.unit, finding.place) == ("undecided", "character", 11)
    assert finding.tokens == ("blue.", "grey.")
    assert (one(a, a).verdict, one(a, a).unit) == ("equal", "character")
    named = answer(["The", " sky", " is", " blue", "."], [-0.1] * 5)
    assert (one(named, b).place, one(named, a).verdict) == (11, "undecided")
    assert "without log probabilities of b" in one(named, b).says
    assert one(named, a).says == "all characters are equal, but b has no log probabilities to compare"
    shorter = one(a, read(tmp_path, form("The sky"))[0])
    assert (shorter.place, shorter.tokens) == (7, (" is blue.", None))
    with pytest.raises(InputError, match="names tokens by text"):
        one(answer([5], [-0.1]), b)


def test_ids_alone_are_decided_by_the_weights(tmp_path, call):
    for name, ids in (("a", [364, 322, 10]), ("b", [364, 321, 10])):
        (tmp_path / name).write_text(json.dumps({"token_ids": ids, "prompt_token_ids": [5, 6, 7]}))
    arguments = ["explain", "--a", str(tmp_path / "a"), "--b", str(tmp_path / "b")]
    assert call(*arguments)[0] == 2
    status, shown, _ = call(*arguments, "--target", "tiny", "--dtype", "float32")
    distance, _ = ComparedWeights.of(load().target, torch.float32).measure([5, 6, 7, 364], (322, 321))
    assert status == 1
    assert f"in float64 their logits lie {abs(distance):.3g} apart" in " ".join(shown.split())


def test_choices_of_a_response_are_answers_by_index(tmp_path):
    choices = [
        {"index": index, "logprobs": {"tokens": [text], "token_logprobs": [-0.1]}}
        for index, text in ((1, "b"), (0, "a"))
    ]
    assert [found.tokens for found in read(tmp_path, {"choices": choices})] == [("a",), ("b",)]
    assert [found.tokens for found in read(tmp_path, {"outputs": [OURS, OURS | {"token_ids": [1, 2]}]})] == [
        (11, 12),
        (1, 2),
    ]


def test_a_stream_is_one_answer(tmp_path):
    """OpenAI's chunks are joined for each choice; SGLang's events grow, and the last has all."""
    words = ["The", " sky", " is"]
    places = [{"content": [{"token": word, "logprob": -0.5}]} for word in words]
    chat = [
        {"id": "c", "choices": [{"index": choice, "delta": {"content": word}, "logprobs": place}]}
        for word, place in zip(words, places, strict=True)
        for choice in (0, 1)
    ]
    completion = [
        {"id": "c", "choices": [{"index": 0, "text": word, "logprobs": {"tokens": [word], "token_logprobs": [-0.5]}}]}
        for word in words
    ]
    grown = [
        {"text": "".join(words[:end]), "meta_info": {"id": "c", "output_token_logprobs": [[-0.5, 7, None]] * end}}
        for end in (1, 2, 3)
    ]
    for events, number, tokens in ((chat, 2, tuple(words)), (completion, 1, tuple(words)), (grown, 1, (7, 7, 7))):
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        (tmp_path / "stream").write_text("".join(lines) + "data: [DONE]\n")
        answers = read_answers(tmp_path / "stream", "a")
        assert [found.tokens for found in answers] == [tokens] * number
        assert {found.logprobs for found in answers} == {(-0.5,) * 3}
        assert {found.text for found in answers} == {"The sky is"}


def test_the_weights_decide():
    """The margin of two tokens of a real forward decides: within twice the error it is numerics."""
    target, context = load().target, [17, 300, 41]
    low, high = 5, 6
    coarse, fine = (ComparedWeights.of(target, dtype) for dtype in (torch.bfloat16, torch.float32))
    exact, noise = coarse.measure(context, (low, high))
    assert exact == pytest.approx(-fine.measure(context, (high, low))[0], abs=1e-9)
    assert 0 < fine.measure(context, (low, high))[1].error < noise.error / 100
    finding = one(*parted(0.0, 0.0))
    assert decide(finding, 2 * noise.error, noise).verdict == "numerics"
    assert decide(finding, 2.001 * noise.error, noise).verdict == "fault"
    assert "b is wrong" in decide(finding, 2.001 * noise.error, noise).says
    assert "a is wrong" in decide(finding, -2.001 * noise.error, noise).says


def test_weights_measure_at_the_end_of_the_context():
    """The error is four times the largest of a forward's logits."""
    weights, context = ComparedWeights.of(load().target, torch.bfloat16), [17, 300, 41]
    exact_V, rounded_V = (
        target_forward(each.config, each.tensors, context, ())[0][-1].double()
        for each in (weights.exact, weights.rounded)
    )
    found, noise = weights.measure(context, (5, 6))
    assert found == float(exact_V[5] - exact_V[6])
    assert noise.error == 4 * float((exact_V - rounded_V).abs().max())


def test_weights_do_not_excuse_drift_or_large_margins():
    """A near-tie in float64 does not excuse an engine with larger errors in its own log probabilities."""
    drifted = one(answer([5, 7], [-0.1, -0.5]), answer([5, 8], [-9.1, -0.5]))
    apart = one(*parted(0.5, 0.0))
    for finding in (drifted, apart):
        decided = decide(finding, 0.0, NOISE)
        assert (decided.verdict, decided.says) == ("fault", f"{finding.says} (given)")
        assert decide(finding, 0.0, Noise(3.0, "coarser")).verdict == "numerics"
    assert "b is wrong" in decide(drifted, 0.03, NOISE).says


def test_float64_is_not_measured_against_itself():
    target, context = load().target, [17, 300, 41]
    assert ComparedWeights.of(target, torch.float64).measure(context, (5, 6))[1].error == ERRORS["float64"]


@pytest.fixture
def command(tmp_path, call):
    """Run the command on two answers, or lists of outputs; its exit status and what it printed."""

    def run(a: object, b: object, *options: str) -> tuple[int, str, str]:
        paths = [tmp_path / "a.json", tmp_path / "b.json"]
        for path, value in zip(paths, (a, b), strict=True):
            path.write_text(json.dumps({"outputs": value} if isinstance(value, list) else value))
        return call("explain", "--a", str(paths[0]), "--b", str(paths[1]), *options)

    return run


def test_the_command(tmp_path, command):

    near = {"token_ids": [11, 13], "logprobs": [-0.5, -0.3], "top_logprobs": [None, {"12": -0.3}]}
    a = [OURS | {"top_logprobs": [None, {"13": -0.26}]}, OURS]
    b = [OURS | near, OURS | {"logprobs": [-0.5, -1.5]}]
    out = tmp_path / "out.json"
    status, shown, _ = command(a, b, "--json", str(out))
    assert status == 1
    assert [each["verdict"] for each in json.loads(out.read_text())["findings"]] == ["numerics", "fault"]
    assert "near-tie" in shown
    assert f"{ERRORS['bfloat16']:.3g}" in shown
    assert command(a, a)[0] == 0
    status, shown, _ = command(a, b, "--target", "tiny", "--dtype", "float32", "--json", str(out))
    assert status == 1
    distance, _ = ComparedWeights.of(load().target, torch.float32).measure([1, 2, 11], (12, 13))
    assert [each["exact"] for each in json.loads(out.read_text())["findings"]] == [distance, None]
    assert "in float64 their logits lie" in " ".join(shown.split())


def test_a_fault_of_a_drafter_changes_no_text(tmp_path, command):
    """Both sides have the same tokens; one accepted no draft. Counts of a server may come in a file of their own."""
    out = tmp_path / "out.json"

    def side(*accepted: int) -> dict:
        output = OURS | {"num_accepted_tokens_per_round": list(accepted)}
        setting = {"topk": 1, "num_steps": 2, "num_draft_tokens": 3}
        return {"schema": "specsim/generate/2", "pair": "a pair", "config": setting, "outputs": [output]}

    status, shown, _ = command(side(3, 2), side(1, 1, 1), "--json", str(out))
    drafts = json.loads(out.read_text())["drafts"]
    assert (status, drafts["a"], drafts["b"], drafts["request"]) == (0, [2, 2, 1], [3], 0)
    assert "only drafts differ" in shown
    assert "equal counts" in command(side(3, 2), side(3, 2))[1]
    assert "drafts" not in command(side(3, 2), [OURS])[1]
    page = tmp_path / "metrics.txt"
    page.write_text("vllm:spec_decode_num_drafts_total 2\nvllm:spec_decode_num_accepted_tokens_total 3\n")
    assert "equal counts" in command(side(3, 2), [OURS], "--accepted-b", str(page))[1]
    assert command([OURS], side(3, 2), "--accepted-b", str(page))[0] == 2


@pytest.mark.parametrize("tokens", [[], [7]])
def test_answers_of_which_none_is_decided_fail(tokens, command):
    a, b = ({"token_ids": ids, "logprobs": [-0.1] * len(ids)} for ids in ([], tokens))
    status, _, printed = command(a, b)
    assert (status, printed.startswith("specsim: b is ")) == (2, True)


def test_a_token_of_white_space_stays_in_its_row(command):
    a, b = (
        {"choices": [{"logprobs": {"content": [{"token": token, "logprob": -0.5, "top_logprobs": []}]}}]}
        for token in ("\n", " x")
    )
    assert r"'\n' | ' x'" in command(a, b)[1]


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        ({"token_ids": [4096]}, {}, r"a is 'an answer with token id 4096 \(request 0\)'; allowed: ids from 0 to 4095"),
        ({}, {"token_ids": [-3]}, r"b is 'an answer with token id -3 \(request 0\)'; allowed: ids from 0 to 4095"),
        ({"prompt_token_ids": [1, 9999]}, {}, "a is 'an answer with token id 9999"),
        ({"prompt_token_ids": ["x"]}, {}, "a is 'an answer with token id x"),
        ({"prompt_token_ids": []}, {}, "a is 'answers without prompt_token_ids'"),
    ],
)
def test_ids_outside_the_targets_vocabulary_are_refused(a, b, says, command):
    a = {"token_ids": [8], "prompt_token_ids": [1], "logprobs": [-0.1]} | a
    b = {"token_ids": [9], "logprobs": [-0.1]} | b
    status, _, printed = command(a, b, "--target", "tiny")
    assert status == 2
    assert re.search(says, " ".join(printed.split()))
