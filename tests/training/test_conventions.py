"""Conventions name the columns, hidden states and hiddens that a head is served with."""

import pytest
import torch

from specsim.core.errors import InputError
from specsim.training import feature_states, label_column, read_out


def test_label_of_a_row_is_the_token_after_those_it_read():
    tokens = "The quick brown fox jumps".split()
    row, step = 1, 1
    read = tokens[: row + step + 2]  # the row's own token, and those before it
    predicted_from = label_column(row, step)  # the target's column c predicts token c + 1
    assert tokens[predicted_from + 1] == tokens[len(read)]
    assert torch.equal(label_column(torch.arange(3), 2), torch.tensor([3, 4, 5]))


def test_both_conventions_of_layer_ids_name_the_same_states():
    states = ["embedding", "output of 0", "output of 1", "output of 2"]
    assert feature_states(states, [1, 2], "entering") == ["output of 0", "output of 1"]
    assert feature_states(states, [0, 1], "output") == ["output of 0", "output of 1"]
    with pytest.raises(InputError) as caught:
        feature_states(states, [0], "outputs")
    assert caught.value.name == "convention"


def test_next_step_reads_the_hidden_before_its_norm():
    logits, hidden = read_out(torch.tensor([2.0]), lambda x: x / 2, lambda x: 10 * x)
    assert (logits.item(), hidden.item()) == (10.0, 2.0)
