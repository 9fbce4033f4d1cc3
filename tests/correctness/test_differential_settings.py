"""The differential test finds an implementation with another setting, batch, model or verifier."""

from dataclasses import replace

import pytest
import torch

from specsim.correctness.differential import check
from specsim.correctness.differential.cell import SAMPLINGS, cell_of
from specsim.correctness.differential.pairs import make_pair
from specsim.serving.generation import load_engine

pytestmark = pytest.mark.usefixtures("budgets_once")
CELL = cell_of(dict(topk=4, num_steps=3, num_draft_tokens=8, page_size=4, batch=3))


@pytest.mark.parametrize(
    ("right", "wrong"), [("rejection", "target_only"), ("block", "rejection"), ("rejection", "block")]
)
def test_another_verifier_is_found(check_changed, monkeypatch, right, wrong):
    def verify(own, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(own.__self__, "config", replace(own.__self__.config, verifier=wrong))
            return own(*arguments)

    setting = dict(topk=1, num_steps=3, page_size=4, batch=3, sampling="warm", verifier=right)
    found = check_changed(replace(cell_of(setting), rounds=6), verify=verify).first_divergence
    assert found.phase == "verify"
    assert found.field in ("accept_index", "predict")


SETTINGS = [
    dict(draft_kv="ancestor"),
    dict(score="logprob"),
    dict(penalties="relaxed"),
    dict(threshold_single=0.3),
    dict(threshold_acc=0.8),
    dict(extend="ragged"),
    dict(release="round"),
    dict(max_len=14),
]


@pytest.mark.every_value
@pytest.mark.parametrize("graph", ["eager", "round"])
@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_another_setting_is_found(changes, graph):
    """No field contains these settings; the difference shows in the computed values."""
    setting = dict(topk=4, num_steps=4, num_draft_tokens=16, page_size=4, batch=3, sampling="biased")
    cell = cell_of(setting | {"graph": graph, "threshold_acc": 0.6 if "threshold_acc" in changes else 1.0})

    def wrap(implementation):
        return replace(implementation, engine=load_engine(make_pair(cell.pair), replace(cell.config, **changes)))

    assert check(cell, "reference", wrap=wrap).mismatches > 0


def with_sampling(**changes):
    def change(batch):
        sampling = {name: getattr(batch.sampling, name) * factor for name, factor in changes.items()}
        return replace(batch, sampling=replace(batch.sampling, **sampling))

    return change


BATCHES = {
    "seeds": lambda batch: replace(batch, seeds=batch.seeds + 1),
    "request ids": lambda batch: replace(batch, request_ids=batch.request_ids.flip(0)),
    "prompt lengths": lambda batch: replace(batch, prompt_lens=batch.prompt_lens + 1),
    **{
        name: with_sampling(**{name: factor})
        for name, factor in {
            "temperature": 1.001, "top_k": 0, "top_p": 0.7, "min_p": 3, "repetition_penalty": 1.001,
            "presence_penalty": 1.01, "frequency_penalty": 1.01, "logit_bias": 1.01,
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("change", BATCHES.values(), ids=BATCHES)
def test_a_batch_that_is_read_wrongly_is_found(check_changed, change):
    """Every sampling parameter is on; with seven tokens per request, an equal result by chance is excluded."""
    everything = replace(
        SAMPLINGS["biased"], top_k=6, top_p=0.8, min_p=0.05, presence_penalty=0.5, frequency_penalty=0.5,
        temperature=1.3, max_new_tokens=24,
    )  # fmt: skip
    cell = replace(CELL, sampling=(everything,) * 3, rounds=12)

    def misread(own, batch, state, pools):
        return own(change(batch), state, pools)

    phases = ("prefill", "draft", "verify", "draft_extend")
    assert check_changed(cell, **dict.fromkeys(phases, misread)).mismatches > 0


MODELS = {
    "a window one too wide": lambda model: model.with_windows([window + 1 for window in model.sliding_windows]),
    "no window": lambda model: model.with_windows([None] * model.num_layers),
    "an epsilon": lambda model: replace(model, rms_norm_eps=1e-2),
    "a rotary base": lambda model: model.with_heads(rope=replace(model.rope, theta=10001.0)),
}


@pytest.mark.parametrize("part", ["target", "drafter"])
@pytest.mark.parametrize("change", MODELS.values(), ids=MODELS)
def test_another_model_is_found(change, part):
    """Most of these change no token."""
    cell = cell_of(dict(topk=4, num_steps=3, num_draft_tokens=8, page_size=4, batch=3, family="mistral"))
    pair = make_pair(cell.pair, torch.float32)
    if part == "target":
        other = replace(pair.target, config=change(pair.target.config))
    else:
        config = replace(pair.drafter.config, model=change(pair.drafter.config.model))
        other = replace(pair.drafter, config=config)
    engine = load_engine(replace(pair, **{part: other}), cell.config)
    assert check(cell, "reference", wrap=lambda each: replace(each, engine=engine)).mismatches > 0
