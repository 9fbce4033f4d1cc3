"""States, pools and engines print shapes, types and contents at a glance."""

import pytest
import torch

import specsim
from specsim.core.phases import AutoregressiveInput
from specsim.core.printed import tensor_content, tensor_type


@pytest.fixture(scope="module")
def recorded():
    config = specsim.SpecConfig(topk=2, num_steps=2, num_draft_tokens=4)
    rounds = specsim.trace("tiny", "def add(a, b):", config, specsim.SamplingParams(max_new_tokens=6))
    return rounds[0].states


@pytest.mark.parametrize(
    ("value", "content"),
    [
        (torch.tensor([3, -1]), "3 -1"),
        (torch.tensor([[True, False], [True, True]]), "1 0 | 1 1"),
        (torch.linspace(-2, 1, 64), "from -2 to 1"),
        (torch.ones(5, 5, dtype=torch.bool).tril(), "15 of 25 true"),
        (torch.zeros(0, 4), ""),
        (torch.tensor(7), "7"),
        (torch.zeros(2, device="meta"), ""),
    ],
)
def test_a_tensor_shows_its_values_or_what_they_range_over(value, content):
    assert tensor_content(value) == content


def test_a_tensor_names_its_type_and_shape():
    assert tensor_type(torch.zeros(2, 8, dtype=torch.bfloat16)) == "bf16 [2, 8]"


def test_every_state_of_a_round_prints_a_line_for_each_tensor(recorded):
    states = (recorded.batch, recorded.draft_input, recorded.verify_input, recorded.verify_output)
    for state in states:
        text = repr(state)
        assert text.startswith(type(state).__name__)
        assert all(f"  {name} " in text for name in state.tensors)
        assert max(map(len, text.splitlines())) <= 120
        assert "tensor(" not in text + state._repr_html_()


def test_a_state_shows_the_figures_that_it_holds(recorded):
    tree = recorded.verify_input
    tokens = " ".join(map(str, tree.draft_tokens[0].tolist()))
    assert f"draft_tokens           i64 [1, 4]      {tokens}" in repr(tree)
    assert f"<td>{tokens}</td>" in tree._repr_html_()


def test_a_state_without_requests_prints():
    assert "f32 [0, 2]" in repr(AutoregressiveInput.empty(2, 8))


@pytest.mark.parametrize(("impl", "target"), [("reference", "DecoderTarget"), ("fast", "DecoderTarget")])
def test_an_engine_names_its_setting_and_a_pool_its_free_pages(impl, target):
    config = specsim.SpecConfig(topk=2, num_steps=2, num_draft_tokens=4, page_size=4)
    engine = specsim.load_engine(specsim.load(), config, specsim.EngineOptions(impl=impl))
    assert repr(engine).startswith(f"{impl} Engine: topk 2, 2 steps, 4 draft tokens; target {target}")
    pools = engine.make_pools(2, 32)
    free = pools.free_slots // 4
    row = pools.open()
    pools.reserve(row, 5)
    shown = repr(pools).splitlines()
    assert shown[0].startswith(f"KVPool: {free - 2} of {free} pages of 4 slots free; float32 on ")
    assert shown[1] == f"  row {row}: 0 committed columns on pages 0, 1"


def test_acceptance_and_outputs_have_a_form_for_notebooks():
    made = specsim.generate("tiny", "def add(a, b):", None, specsim.SamplingParams(max_new_tokens=6))
    assert "tokens a round, bonus included" in made.acceptance._repr_html_()
    page = made._repr_html_()
    assert "<span title='round 0: " in page
    assert "def add(a, b):</span>" in page
