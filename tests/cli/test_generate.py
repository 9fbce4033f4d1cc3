"""specsim generate: text and JSON of a continuation, prompts, shapes with synthetic acceptance."""

import json
import shutil

import pytest

import specsim.core.provenance
import specsim.models.shipped
from specsim import load
from specsim.models.shipped import load_prompts

pytestmark = pytest.mark.usefixtures("shipped")
FEW = ("generate", "--max-new-tokens", "5")
CHAIN = ("--topk", "1", "--num-draft-tokens", "4")
SYNTHETIC = {"synthetic": True, "rates": [1.0, 0.5, 0.5], "schedule": "minimum-variance", "seed": 0}
RATES = ("--accept-rates", "1,0.5,0.5")


@pytest.mark.parametrize("drafter", ["eagle", "eagle3", "none"])
def test_generate_prints_text_and_figures(call, drafter):
    status, out, err = call(*FEW, "--drafter", drafter, "--prompt", "def f", "--seed", "3", "--temperature", "1")
    assert (status, err) == (0, "")
    expected = specsim.generate(
        load(drafter=drafter), "def f", None, specsim.SamplingParams(temperature=1, max_new_tokens=5, seed=3)
    )
    assert out.startswith(expected.outputs[0].text)
    figures = [line.split("  ")[0] for line in out.splitlines()]
    assert {"pair", "setting", "finish reason", "tokens", "rounds", "tokens a second"} <= set(figures)
    shares = {"accept length", "accept rate", "node rate", "accepted by position"}
    assert (shares <= set(figures)) == (drafter != "none")
    assert "\x1b" not in out


def test_generate_takes_every_option(call, tmp_path):
    file = tmp_path / "out.json"
    numbers = "--topk 2 --num-steps 4 --num-draft-tokens 7 --page-size 4 --max-len 64"
    filters = "--temperature 1 --top-k 20 --top-p 0.9 --min-p 0.01"
    penalties = (
        "--repetition-penalty 1.1 --presence-penalty 0.5 --frequency-penalty -0.5 --dtype float64 --impl reference"
    )
    modes = "--draft-kv ancestor --score logprob --penalties relaxed --extend ragged --release round"
    status, _, err = call(
        *FEW, *numbers.split(), *filters.split(), *penalties.split(), *modes.split(), "--json", str(file)
    )
    assert (status, err) == (0, "")
    config = json.loads(file.read_text())["config"]
    given = {"topk": 2, "max_len": 64, "page_size": 4, "draft_kv": "ancestor", "extend": "ragged", "release": "round"}
    given |= {"score": "logprob", "penalties": "relaxed"}
    assert {name: config[name] for name in given} == given


@pytest.mark.parametrize(
    ("options", "nodes"), [("--topk 1", 4), ("--topk 1 --num-steps 5", 6), ("--topk 2 --num-steps 1", 3), ("", 8)]
)
def test_the_number_of_nodes_follows_from_the_others(call, tmp_path, options, nodes):
    file = tmp_path / "out.json"
    assert call(*FEW, *options.split(), "--json", str(file))[::2] == (0, "")
    written = json.loads(file.read_text())
    assert written["config"]["num_draft_tokens"] == nodes
    assert "--num-draft-tokens" not in written["command"]


def test_json_of_generate(call, tmp_path):
    file = tmp_path / "out.json"
    assert call(*FEW, "--json", str(file))[0] == 0
    result = json.loads(file.read_text(), parse_constant=pytest.fail)
    (output,) = result["outputs"]
    keys = {"text", "token_ids", "logprobs", "finish_reason", "num_accepted_tokens_per_round", "prompt_token_ids"}
    keys |= {"proposed_depth_per_round", "setting_per_round", "draft_steps_per_round", "top_logprobs"}
    assert set(output) == keys | {"temperature"}
    assert len(output["token_ids"]) == len(output["logprobs"]) == result["metrics"]["tokens"] == 5
    shares = {"accept_length", "accept_rate", "node_rate", "accepted_by_position"}
    assert shares | {"rounds", "tokens_per_s"} <= set(result["metrics"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json"]


def test_json_holds_null_where_a_figure_is_not_defined(call, tmp_path):
    file = tmp_path / "out.json"
    assert call(*FEW, "--drafter", "none", "--json", str(file))[0] == 0
    assert json.loads(file.read_text(), parse_constant=pytest.fail)["metrics"]["accept_rate"] is None


def test_json_replaces_what_a_link_points_to(call, tmp_path):
    file, link = tmp_path / "out.json", tmp_path / "link.json"
    file.write_text("old")
    link.symlink_to(file)
    assert call(*FEW, "--json", str(link))[0] == 0
    assert link.is_symlink()
    assert json.loads(file.read_text())["outputs"]


def test_prompt_file_is_one_text(call, tmp_path):
    text = "def f():\r\n    x = 'é'\n"
    file = tmp_path / "prompt.py"
    file.write_bytes(text.encode())
    from_file, given = call(*FEW, "--prompt-file", str(file)), call(*FEW, "--prompt", text)
    assert from_file[0] == given[0] == 0
    assert from_file[1].split("\n\n")[0] == given[1].split("\n\n")[0]


def test_first_shipped_prompt_is_the_default(call):
    assert call(*FEW)[1].split("\npair")[0] == call(*FEW, "--prompt", load_prompts()[0]["text"])[1].split("\npair")[0]


@pytest.mark.parametrize("impl", ["reference", "fast"])
def test_generate_times_a_shape_at_synthetic_acceptance(call, shape, tmp_path, impl):
    pytest.importorskip("triton")
    options = ("--shape", f"{shape}-tp2-slice", *CHAIN, *RATES, "--impl", impl)
    status, out, err = call("generate", *options, "--max-new-tokens", "7", "--json", str(tmp_path / "out.json"))
    assert (status, err) == (0, "")
    assert "random weights of" in out
    assert "synthetic, minimum-variance at rates 1, 0.5, 0.5: not the target's" in out
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["acceptance"] == SYNTHETIC
    assert result["pair"].startswith("random weights of")
    assert result["command"].startswith("specsim generate --")
    (output,) = result["outputs"]
    assert out.startswith(" ".join(map(str, output["token_ids"])))
    assert set(output["num_accepted_tokens_per_round"]) <= {2, 4}


def test_acceptance_of_trained_weights_can_be_synthetic_too(call):
    status, out, _ = call(*FEW, "--accept-rates", "1,1,1", *CHAIN)
    assert status == 0
    assert "accepted by position  1.00 1.00 1.00 of the rounds" in out


def test_fields_of_a_drafter_are_said_on_the_command_line(call, tiny, tmp_path, assert_one_sentence):
    shutil.copytree(tiny / "eagle3", tmp_path / "head")
    fields = json.loads((tiny / "eagle3" / "config.json").read_text())
    del fields["eagle_aux_hidden_state_convention"]
    (tmp_path / "head" / "config.json").write_text(json.dumps(fields))
    own = (*FEW, "--target", str(tiny / "target"), "--draft", str(tmp_path / "head"))
    assert_one_sentence(call(*own), "eagle_aux_hidden_state_convention")
    assert call(*own, "--draft-field", "eagle_aux_hidden_state_convention=entering")[0] == 0
    assert_one_sentence(call(*own, "--draft-field", "entering"), "draft_field")


def test_a_drafter_with_another_vocabulary(call, tiny, tmp_path, assert_one_sentence):
    """Its tokenizer has a token that the target lacks, and lacks one; the text is that of plain decoding."""
    shutil.copytree(tiny / "standalone", tmp_path / "other")
    tokenizer = (tiny / "target" / "tokenizer.json").read_text()
    (tmp_path / "other" / "tokenizer.json").write_text(tokenizer.replace('"!"', '"never"'))
    shutil.copy(tiny / "target" / "tokenizer_config.json", tmp_path / "other")
    pair = ("--target", str(tiny / "target"), "--draft", str(tmp_path / "other"))
    assert_one_sentence(call(*FEW, *pair), f"the vocabulary of {tmp_path / 'other'}")
    texts = []
    for options in ((*pair, "--bridge-vocabularies"), ("--drafter", "none")):
        assert call(*FEW, *options, "--json", str(tmp_path / "out.json"))[::2] == (0, "")
        result = json.loads((tmp_path / "out.json").read_text())
        texts.append(result["outputs"][0]["token_ids"])
        assert ("--bridge-vocabularies" in result["command"]) == ("--draft" in options)
    assert texts[0] == texts[1]


def test_an_adaptive_policy_switches_and_is_written(call, tmp_path):
    file = tmp_path / "policy.json"
    file.write_text(json.dumps({"policy": "scripted", "script": [2, 0, 1]}))
    out = tmp_path / "out.json"
    few = ("generate", "--max-new-tokens", "12")
    status, text, err = call(*few, "--num-steps", "2", "--adaptive", str(file), "--json", str(out))
    assert (status, err) == (0, "")
    written = json.loads(out.read_text())
    fixed = call(*few, "--drafter", "none", "--json", str(tmp_path / "plain.json"))
    assert fixed[0] == 0
    (plain,) = json.loads((tmp_path / "plain.json").read_text())["outputs"]
    (output,) = written["outputs"]
    assert output["token_ids"] == plain["token_ids"]
    adaptive = written["adaptive"]
    assert adaptive["policy"]["policy"] == "scripted"
    rounds = written["metrics"]["rounds"] + written["metrics"]["undrafted_rounds"]
    assert sum(adaptive["rounds_by_setting"]) == rounds
    assert adaptive["switches"] == rounds - 1
    assert written["metrics"]["undrafted_rounds"] == output["setting_per_round"].count(0)
    assert output["setting_per_round"][:3] == [2, 0, 1]  # numbers of the settings with 2, 0 and 1 steps
    assert "rounds: no drafts" in text


def test_a_policy_chooses_steps_for_every_request(call, tmp_path):
    """The only request has id 0, so it follows the script from the first entry on."""
    file, out = tmp_path / "script.json", tmp_path / "out.json"
    file.write_text('{"policy": "scripted", "script": [2, [2, 0], [2, 1]]}')
    few = ("generate", "--max-new-tokens", "12", "--num-steps", "2")
    status, text, err = call(*few, "--adaptive", str(file), "--adaptive-per-request", "--json", str(out))
    assert (status, err) == (0, "")
    written = json.loads(out.read_text())
    (output,) = written["outputs"]
    steps = output["draft_steps_per_round"]
    assert steps[:4] == [2, 0, 1, 2]
    assert all(made - 1 <= most for made, most in zip(output["num_accepted_tokens_per_round"], steps, strict=True))
    assert written["adaptive"]["rounds_by_steps"] == [steps.count(count) for count in range(3)]
    assert "rounds of requests with 1 draft steps" in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((), "adaptive_per_request"),
        (("--adaptive", "throughput"), "per_request"),
    ],
)
def test_steps_of_requests_need_a_policy_that_chooses_them(options, text, call):
    status, _, err = call("generate", "--max-new-tokens", "4", "--adaptive-per-request", *options)
    assert status == 2
    assert text in err
