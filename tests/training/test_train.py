"""A short training lowers the loss, repeats itself, starts from the target's last layer, and rejects bad options."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specsim.core.errors import InputError
from specsim.training import ENGINE, TrainingOptions, join_texts, read_eagle3, read_features, train_head, write_head
from specsim.training.train import _first_head, learning_rate

CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    initializer_range=0.2,
)
OPTIONS = TrainingOptions(
    num_steps=24, num_windows=4, window=12, num_unrolled=2, draft_vocab_size=16, feature_layers=(0, 1, 2)
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
    trained = train_head(target, tokens, OPTIONS)
    assert len(trained.losses) == OPTIONS.num_steps
    assert sum(trained.losses[-4:]) < sum(trained.losses[:4])
    assert train_head(target, tokens, OPTIONS).losses == trained.losses
    assert train_head(target, tokens, replace(OPTIONS, seed=1)).losses != trained.losses
    assert torch.equal(torch.random.get_rng_state(), before)


def test_written_head_is_read_again(target, tokens, tmp_path):
    head = train_head(target, tokens, OPTIONS).head
    write_head(head, tmp_path)
    again = read_eagle3(tmp_path, target)
    assert again.feature_layers == [0, 1, 2]
    assert head.state_dict().keys() == again.state_dict().keys()
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in head.state_dict().items())


def test_head_starts_as_the_last_layer_of_its_target(target, tokens):
    """Before training, the head's output is what the target's last layer makes of the same hidden states."""
    head = _first_head(target, tokens, OPTIONS)
    windows = tokens[None, :12]
    features = read_features(target, windows, OPTIONS.feature_layers)
    head.borrowed["embed_tokens"] = torch.nn.Embedding.from_pretrained(torch.zeros(CONFIG.vocab_size, 16))
    hidden = head(windows, head.first_hidden(features), 0, [])
    norm, _ = head.readout
    torch.testing.assert_close(norm(hidden), features.last_BCH)


@pytest.mark.parametrize("mistake", ["label_column", "feature_states", "read_out"])
def test_other_conventions_train_another_head(target, tokens, mistake):
    wrong = {
        "label_column": lambda row, step: row + step,
        "feature_states": lambda states, layers, convention: [states[layer + 1] for layer in layers],
        "read_out": lambda hidden, norm, lm_head: (lm_head(norm(hidden)), norm(hidden)),
    }
    options = replace(OPTIONS, num_steps=2)
    right = train_head(target, tokens, options)
    other = train_head(target, tokens, options, replace(ENGINE, **{mistake: wrong[mistake]}))
    assert right.losses[0] != other.losses[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_steps", 0),
        ("window", 3),
        ("draft_vocab_size", 33),
        ("feature_layers", (1, 3)),
        ("feature_layers", (2, 1)),
        ("feature_layers", ()),
        ("peak_rate", 2.0),
    ],
)
def test_bad_options_are_input_errors(target, tokens, field, value):
    with pytest.raises(InputError) as caught:
        train_head(target, tokens, replace(OPTIONS, **{field: value}))
    assert caught.value.name == field


def test_short_text_is_an_input_error(target, tokens):
    with pytest.raises(InputError) as caught:
        train_head(target, tokens[: OPTIONS.window], OPTIONS)
    assert caught.value.name == "tokens"


def test_texts_are_joined_by_the_separator():
    assert join_texts([[3, 4], [5]], 0).tolist() == [0, 3, 4, 0, 5, 0]


def test_learning_rate_rises_holds_and_ends_at_zero():
    assert 0 < learning_rate(0, 0) <= 0.01
    assert learning_rate(0.02, 99) == learning_rate(0.3, 500) == learning_rate(0.1, 9, warm_up=10) == 1
    assert learning_rate(2 / 3, 500) == pytest.approx(0.5)
    assert learning_rate(1, 500) == 0
