"""The table of a round's states shows each shared name with its shapes, coloured by what a row stands for."""

import pytest

pytest.importorskip("matplotlib")

from matplotlib.colors import to_hex

from specsim import SamplingParams, SpecConfig, plots, trace
from specsim.core.errors import InputError
from specsim.models.synthetic_pair import synthetic_pair
from specsim.plots.states import NODE, REQUEST, ROW

PROMPTS = [[5, 17, 3, 40, 8], [1, 2, 3, 4, 5, 6, 7]]


def states_of(**changes):
    config = SpecConfig(topk=2, num_steps=3, num_draft_tokens=6, page_size=4, **changes)
    (found,) = trace(synthetic_pair("eagle"), PROMPTS, config, SamplingParams(max_new_tokens=8), most_rounds=1)
    return found


def drawn(found):
    return plots.states(found.draft_input, found.verify_input, found.verify_output, found.next_draft_input)


@pytest.mark.parametrize("extend", ["fixed", "ragged"])
def test_cells_hold_the_shapes_and_the_colours_of_rows(extend):
    found = states_of(extend=extend)
    figure = drawn(found)
    colours = {patch.get_gid(): to_hex(patch.get_facecolor()).upper() for patch in figure.axes[0].patches}
    assert colours["state:0:hidden"] == colours["state:4:hidden"] == REQUEST.face
    assert colours["state:1:positions"] == NODE.face
    assert colours["state:3:hidden"] == colours["state:3:positions"] == ROW.face
    assert colours["state:3:num_accepted_tokens"] == colours["state:2:num_accepted_tokens"] == REQUEST.face
    rows = found.verify_output.draft_extend_input.hidden
    words = f"hidden: {list(found.draft_input.hidden.shape)} in AutoregressiveInput, {list(rows.shape)} in DraftExtend"
    assert words in figure.alternative
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts.count(str(list(rows.shape))) >= 1


def test_names_of_one_state_only_are_left_out():
    figure = drawn(states_of())
    names = {str(patch.get_gid()).rpartition(":")[2] for patch in figure.axes[0].patches}
    assert "bonus_tokens" in names
    assert "retrieve_index" not in names


def test_another_state_is_an_input_error():
    found = states_of()
    with pytest.raises(InputError) as caught:
        plots.states(found.draft_input, found.verify_output, found.verify_output, found.next_draft_input)
    assert caught.value.name == "verify_input"
