"""A short training lowers the loss, repeats itself, starts from the target's last layer, and rejects bad options."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specsim.core.errors import InputError
from specsim.core.kinds import TRAINABLE
from specsim.training import (
    ENGINE,
    Roots,
    TrainingOptions,
    TrainingText,
    continue_windows,
    join_texts,
    read_eagle3,
    train_drafter,
)
from specsim.training.train import (
    build_drafter,
    draw_roots,
    draw_windows,
    learning_rate,
    make_optimizers,
)

CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=1, initializer_range=0.2,
)  # fmt: skip
OPTIONS = TrainingOptions(
    num_steps=24, num_windows=4, window=12, num_drafts=2, draft_vocab_size=16, feature_layers=(0, 1, 2)
)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(CONFIG).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(CONFIG.vocab_size, (200,), generator=torch.Generator().manual_seed(4))


def test_training_lowers_the_loss_and_repeats_itself(target, tokens):
    before = torch.random.get_rng_state()
    trained = train_drafter(target, tokens, OPTIONS)
    assert len(trained.losses) == OPTIONS.num_steps
    assert sum(trained.losses[-4:]) < sum(trained.losses[:4])
    assert train_drafter(target, tokens, OPTIONS).losses == trained.losses
    assert train_drafter(target, tokens, replace(OPTIONS, seed=1)).losses != trained.losses
    assert torch.equal(torch.random.get_rng_state(), before)


def test_written_head_is_read_again(target, tokens, tmp_path):
    head = train_drafter(target, tokens, OPTIONS).drafter
    head.write(tmp_path)
    again = read_eagle3(tmp_path, target)
    assert again.feature_layers == [0, 1, 2]
    assert head.state_dict().keys() == again.state_dict().keys()
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in head.state_dict().items())


def test_head_starts_as_the_last_layer_of_its_target(target, tokens):
    """Before training, the head's output is what the target's last layer makes of the same hidden states."""
    head = build_drafter(target, tokens, OPTIONS)
    windows = tokens[None, :12]
    reading = head.read(target, windows)
    head.borrowed["embed_tokens"] = torch.nn.Embedding.from_pretrained(torch.zeros(CONFIG.vocab_size, 16))
    hidden = head(windows, head.first_hidden(reading), 0, [])
    norm, _ = head.readout
    torch.testing.assert_close(norm(hidden), reading.hidden_BCH)


@pytest.mark.parametrize("kind", TRAINABLE)
def test_every_kind_learns(target, tokens, kind):
    options = replace(OPTIONS, drafter=kind, num_steps=12, num_roots=3)
    losses = train_drafter(target, tokens, options).losses
    assert sum(losses[-3:]) < sum(losses[:3])


@pytest.mark.parametrize(("loss", "weights"), [("lk", "d-pace"), ("tv", "equal"), ("log-acceptance", "decay")])
def test_every_objective_trains_a_block(target, tokens, loss, weights):
    options = replace(OPTIONS, drafter="dflash", num_steps=12, num_roots=3, loss=loss, position_weights=weights)
    losses = train_drafter(target, tokens, options).losses
    assert sum(losses[-3:]) < sum(losses[:3])


# Runs that are ended.


class Ended(KeyboardInterrupt):
    """Ctrl-C in the middle of a step."""


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_an_ended_run_continues_as_if_it_had_not_been(target, tokens, tmp_path, monkeypatch, kind):
    options = replace(OPTIONS, drafter=kind, num_steps=6, num_roots=3)
    whole_run = train_drafter(target, tokens, options)
    checkpoint = tmp_path / "training.pt"
    steps = iter(range(100))

    def draw(*arguments):
        if next(steps) == 4:
            raise Ended
        return draw_windows(*arguments)

    monkeypatch.setattr("specsim.training.train.draw_windows", draw)
    with pytest.raises(Ended):
        train_drafter(target, tokens, options, checkpoint=checkpoint)
    assert checkpoint.exists()
    continued = train_drafter(target, tokens, options, checkpoint=checkpoint)
    assert next(steps) == 7  # six steps, one of them begun twice
    assert continued.losses == whole_run.losses
    expected = whole_run.drafter.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in continued.drafter.state_dict().items())
    assert not checkpoint.exists()


@pytest.mark.parametrize("content", [None, b"", b"no checkpoint"])
def test_another_checkpoint_is_refused(target, tokens, tmp_path, content, monkeypatch):
    checkpoint = tmp_path / "training.pt"
    if content is None:  # of a training with another seed
        monkeypatch.setattr("specsim.training.train.SECONDS_A_CHECKPOINT", -1.0)
        monkeypatch.setattr("pathlib.Path.unlink", lambda *_, **__: None)
        train_drafter(target, tokens, replace(OPTIONS, num_steps=1, seed=1), checkpoint=checkpoint)
    else:
        checkpoint.write_bytes(content)
    with pytest.raises(InputError, check=lambda error: error.name == "checkpoint"):
        train_drafter(target, tokens, OPTIONS, checkpoint=checkpoint)
    assert checkpoint.exists()


# Windows and roots.


def test_continuations_begin_with_the_text(target, tokens):
    text = continue_windows(target, tokens, 3, prompt_len=4, length=9)
    assert text.greedy_NC is not None
    assert text.sampled_NC is not None
    assert text.greedy_NC.shape == text.sampled_NC.shape == (3, 9)
    windows = {tuple(tokens[start : start + 4].tolist()) for start in range(len(tokens) - 4)}
    assert {tuple(row[:4].tolist()) for row in (*text.greedy_NC, *text.sampled_NC)} <= windows
    following = target(text.greedy_NC[:, :8]).logits.argmax(-1)
    assert torch.equal(following[:, 3:], text.greedy_NC[:, 4:])


def test_windows_have_the_shares_of_their_sources():
    """Each source has tokens of its own; 4.5 standard deviations."""
    text = TrainingText(torch.zeros(50, dtype=torch.long), torch.full((5, 9), 1), torch.full((5, 9), 2), 4)
    options = replace(OPTIONS, window=8, num_windows=4000, greedy_share=0.75, text_share=0.2)
    windows = draw_windows(text, options, torch.Generator().manual_seed(0))
    assert windows.shape == (4000, 8)
    shares = torch.bincount(windows[:, 0], minlength=3) / 4000
    torch.testing.assert_close(shares, torch.tensor([0.2, 0.6, 0.2]), atol=0.035, rtol=0)


def test_roots_are_inside_and_mostly_in_the_continuation():
    options = replace(OPTIONS, num_roots=8, num_drafts=4, window=33)
    roots: Roots = draw_roots(50, 33, 16, options, torch.Generator().manual_seed(0))
    assert roots.columns_BA.shape == roots.num_drafts_BA.shape == (50, 8)
    assert (roots.columns_BA.min(), roots.columns_BA.max() + 4) == (1, 33)
    assert ((roots.columns_BA >= 16).sum(1) == 6).all()
    assert set(roots.num_drafts_BA.flatten().tolist()) == {1, 2, 3, 4}
    assert draw_roots(50, 6, 16, options, torch.Generator()).columns_BA.max() <= 2


def test_tables_and_heads_are_not_trained_as_matrices(target, tokens):
    drafter = build_drafter(target, tokens, replace(OPTIONS, drafter="dspark"))
    names = {id(parameter): name for name, parameter in drafter.named_parameters()}
    matrices, rest = (
        {names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]}
        for optimizer in make_optimizers(drafter, 1e-3)
    )
    assert {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight"} <= rest
    assert {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= matrices
    assert not any("embed_tokens" in name or "lm_head" in name for name in matrices | rest)


@pytest.mark.parametrize("mistake", ["label_column", "feature_states", "read_out"])
def test_other_conventions_train_another_head(target, tokens, mistake):
    wrong = {
        "label_column": lambda row, step: row + step,
        "feature_states": lambda states, layers, convention: [states[layer + 1] for layer in layers],
        "read_out": lambda hidden, norm, lm_head: (lm_head(norm(hidden)), norm(hidden)),
    }
    options = replace(OPTIONS, num_steps=2)
    right = train_drafter(target, tokens, options)
    other = train_drafter(target, tokens, replace(options, conventions=replace(ENGINE, **{mistake: wrong[mistake]})))
    assert right.losses[0] != other.losses[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_steps", 0),
        ("window", 3),
        ("draft_vocab_size", 0),
        ("drafter", "ngram"),
        ("loss", "l2"),
        ("position_weights", "late"),
        ("greedy_share", 1.5),
        ("feature_layers", (1, 3)),
        ("feature_layers", (2, 1)),
        ("feature_layers", ()),
        ("peak_rate", 2.0),
    ],
)
def test_bad_options_are_input_errors(target, tokens, field, value):
    with pytest.raises(InputError, check=lambda error: error.name == field):
        train_drafter(target, tokens, replace(OPTIONS, **{field: value}))


def test_short_text_is_an_input_error(target, tokens):
    with pytest.raises(InputError, check=lambda error: error.name == "tokens"):
        train_drafter(target, tokens[: OPTIONS.window], OPTIONS)


def test_texts_are_joined_by_the_separator():
    assert join_texts([[3, 4], [5]], 0).tolist() == [0, 3, 4, 0, 5, 0]


def test_learning_rate_rises_holds_and_ends_at_zero():
    assert 0 < learning_rate(0, 0) <= 0.01
    assert learning_rate(0.02, 99) == learning_rate(0.3, 500) == learning_rate(0.1, 9, warm_up=10) == 1
    assert learning_rate(2 / 3, 500) == pytest.approx(0.5)
    assert learning_rate(1, 500) == 0
