"""Bad input ends in status 2 and one sentence that begins with the field."""

import pytest

import specsim.models.shipped
from specsim.cli.main import FUNCTIONS, command
from specsim.core.errors import InputError

pytestmark = pytest.mark.usefixtures("shipped")


BAD = [
    ("--topk 1 --num-draft-tokens 8", "num_draft_tokens"),
    ("--topk 240 --num-steps 1", "topk"),
    ("--num-draft-tokens 99", "num_draft_tokens"),
    ("--verifier multi_round --num-draft-tokens 8", "num_draft_tokens"),
    ("--top-k 5", "top_k"),
    ("--adaptive fastest", "adaptive"),
    ("--adaptive goodput", "adaptive"),
    ("--adaptive throughput --html x.html", "html"),
    ("--top-p 0.9", "top_p"),
    ("--min-p 0.1", "min_p"),
    ("--drafter none --score logprob", "score"),
    ("--drafter none --verifier block", "verifier"),
    ("--max-len 513", "max_len"),
    ("--max-len 8", "prompt"),
    ("--drafter medusa", "drafter"),
    ("--drafter none --topk 2", "topk"),
    ("--drafter none --release round", "release"),
    ("--topk 1 --num-steps 3000 --num-draft-tokens 3001", "num_steps"),
    ("--target ~nosuchuser --draft x", "target"),
    ("--draft-field norm=1", "draft_fields"),
    ("--drafter none --draft-field norm=1", "draft_fields"),
    ("--temperature nan", "temperature"),
    ("--prompt=", "prompt"),
    ("--prompt \udcff", "prompt"),
    ("--prompt-file {tmp}/missing", "prompt_file"),
    ("--prompt-file {tmp}", "prompt_file"),
    ("--prompt-file {tmp}/empty", "prompt_file"),
    ("--prompt-file {tmp}/latin1", "prompt_file"),
    ("--prompt x --prompt-file {tmp}/empty", "prompt_file"),
    ("--target {tmp}/missing --drafter none", "target"),
    ("--target {tiny}/target", "draft"),
    ("--draft {tiny}/eagle3", "target"),
    ("--target {tiny}/target --draft {tmp}/wider", "hidden_size in"),
    ("--target {tmp}/cut --drafter none", "{tmp}/cut/model.safetensors"),
    ("--shape llama-9", "shape"),
    ("--shape llama-3-8b-tp3-slice", "shape"),
    ("--shape {tmp}/latin1", "{tmp}/latin1"),
    ("--shape llama-3-8b --target {tmp}/cut", "target"),
    ("--shape llama-3-8b --draft-field a=1", "draft_field"),
    ("--shape llama-3-8b --bridge-vocabularies", "bridge_vocabularies"),
    ("--bridge-vocabularies", "bridge_vocabularies"),
    ("--drafter ngram --bridge-vocabularies", "bridge_vocabularies"),
    ("--preset naive-eagle --topk 2 --verifier block", "topk"),
    ("--preset naive-eagle --drafter none", "preset"),
    ("--shape llama-3-8b --drafter medusa", "drafter"),
    ("--shape llama-3-8b --prompt x", "prompt"),
    ("--accept-rates 0.5,x,0", "accept_rates"),
    ("--accept-rates 0.5,0.6,0", "accept_rates"),
    ("--accept-rates 0.5,0.4", "accept_rates"),
    ("--accept-rates 1,1,1 --drafter none", "accept_rates"),
    ("--accept-rates 1,1,1 --regex a", "regex"),
    ("--json-schema {tmp}/deep", "json_schema"),
    ("--prompt-file {tmp}/text --json {tmp}/text", "json"),
    ("--temperature warm", "temperature"),
    ("--seed=1.5", "seed"),
    ("--accept-rates 1,1,1 --accept-schedule often", "accept_schedule"),
    ("--accept-schedule independent", "accept_schedule"),
    ("--json {tmp}", "json"),
    ("--json {tmp}/missing/out.json", "json"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "name"), BAD, ids=[repr(case[0]) for case in BAD])
def test_bad_input_is_one_sentence(call, tiny, bad_files, arguments, name, assert_one_sentence):
    before = sorted(bad_files.rglob("*"))
    filled = [word.format(tmp=bad_files, tiny=tiny) for word in arguments.split(" ")]
    result = call("generate", *filled)
    assert_one_sentence(result, name.format(tmp=bad_files))
    assert sorted(bad_files.rglob("*")) == before


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_value_out_of_range_is_refused(name):
    for field in command(name).fields.values():
        limits = field.option.range
        outside = ["no such"] if field.choices else []
        outside += [] if limits.above is None else [limits.above]
        outside += [] if limits.at_least is None else [limits.at_least - 1]
        outside += [] if limits.at_most is None else [limits.at_most + 1]
        for value in outside:
            with pytest.raises(InputError) as raised:
                field.parse(str(value))
            assert raised.value.name == field.name


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "--topk 0",
            "topk is 0; allowed: an integer of at least 1, drafts kept at each step "
            "(top_k is another: tokens kept by sampling)",
        ),
        (
            "--top-k 5",
            "top_k is 5; allowed: only 0, the default, at temperature 0, which is greedy; the tree's width is --topk",
        ),
        (
            "--drafter medusa",
            "drafter is 'medusa'; allowed: "
            "eagle or eagle3 or p-eagle or mtp or frozen-kv or dflash or dspark or standalone or ngram or suffix or "
            "none or MODULE:NAME",
        ),
        ("--temperature warm", "temperature is 'warm'; allowed: a number"),
        ("--drafter none --topk 2", "topk is 2; allowed: only 4, the default, with drafter none"),
        (
            "--accept-rates 0.5,x",
            "accept_rates is '0.5,x'; allowed: numbers with commas between them, such as 0.8,0.6,0.4",
        ),
    ],
)
def test_sentences_of_bad_input(call, arguments, sentence):
    assert call("generate", *arguments.split()) == (2, "", f"specsim: {sentence}\n")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ("accept --prompts 0", "prompts"),
        ("accept --prompts 4", "prompts"),
        ("accept --json /", "json"),
        ("accept --drafter none", "drafter"),
        ("accept --drafter missing:Drafter", "module"),
        ("diff --family gpt", "family"),
        ("diff --drafter medusa", "drafter"),
        ("accept --target= --drafter ngram --prompts 1", "target"),
        ("diff --impl reference --graph round", "graph"),
        ("soak --requests 0", "requests"),
        ("soak --json /", "json"),
        ("soak --program=", "program"),
        ("soak --program 0-0-1 --requests 10000", "program"),
        ("soak --program 0-0-1 --seed 0", "program"),
    ],
)
def test_bad_input_of_accept_diff_and_soak(call, arguments, name, assert_one_sentence):
    assert_one_sentence(call(*arguments.split()), name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate --topk many", "topk is 'many'; allowed: an integer"),
        ("generate --no-such", "No such option"),
        ("generate more", "Got unexpected extra argument"),
        ("nothing", "No such command 'nothing'."),
        ("accept --prompts", "Option '--prompts' requires an argument."),
        ("sweep --vary seed=1", "Missing option '--out'."),
    ],
)
def test_usage_errors_are_one_sentence(call, arguments, message):
    status, out, err = call(*arguments.split())
    assert (status, out) == (2, "")
    assert err.startswith(f"specsim: {message}")
    assert err.count("\n") == 1


def test_missing_prompts_are_told(call, tmp_path, monkeypatch, assert_one_sentence):
    monkeypatch.setattr(specsim.models.shipped, "TINY", tmp_path)
    assert_one_sentence(call("demo"), str(tmp_path / "prompts.jsonl"))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ("generate --device cuda", "device"),
        ("generate --impl fast --device tpu", "device"),
        ("generate --impl fast --graph round --release round", "graph"),
        ("generate --impl fast --graph round --regex a", "graph"),
        ("generate --max-len 513", "max_len"),
        ("generate --max-len 3", "num_steps"),
        ("generate --json-schema {tmp}/text", "json_schema"),
        ("generate --target {tiny}/target --draft {tmp}/missing", "draft"),
        ("run --slots 15", "slots"),
        ("run --schedule overlap --release round", "schedule"),
        ("run --impl fast --bucket 2", "bucket"),
        ("run --max-len 513", "max_len"),
        ("run --requests {tmp}/missing", "requests"),
        ("run --compare --html {tmp}/page.html", "html"),
    ],
)
def test_what_needs_no_weights_is_checked_before_them(
    call, tiny, bad_files, monkeypatch, arguments, name, assert_one_sentence
):
    monkeypatch.setattr("specsim.models.checkpoint.loading.read_weights", lambda folder: pytest.fail("read"))
    assert_one_sentence(call(*arguments.format(tmp=bad_files, tiny=tiny).split()), name)


def test_a_device_is_checked_before_weights(call, monkeypatch, assert_one_sentence):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("specsim.models.checkpoint.loading.read_weights", lambda folder: pytest.fail("read"))
    for name in ("generate", "run"):
        assert_one_sentence(call(name, "--impl", "fast", "--device", "cuda"), "device")


def test_a_shape_is_checked_before_it_has_weights(call, shape, monkeypatch, assert_one_sentence):
    monkeypatch.setattr("specsim.models.shapes.random_pair", lambda *_: pytest.fail("made"))
    assert_one_sentence(call("generate", "--shape", str(shape), "--max-len", "257"), "max_len")
