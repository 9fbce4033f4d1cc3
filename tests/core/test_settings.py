"""Settings of one engine: the fields in which they may differ, and what they have in common."""

from dataclasses import replace

import pytest

from specsim import SpecConfig
from specsim.core.errors import InputError
from specsim.core.settings import Settings, with_steps

TREE = SpecConfig(topk=3, num_steps=4, num_draft_tokens=10, page_size=4, max_len=99, draft_kv="ancestor")


def test_settings_of_steps_keep_the_other_fields():
    settings = Settings.of_steps(TREE, (0, 1, 2, 4))
    assert [(each.topk, each.num_steps, each.num_draft_tokens) for each in settings] == [
        (1, 0, 1),
        (3, 1, 4),
        (3, 2, 10),
        (3, 4, 10),
    ]
    assert {(each.page_size, each.max_len, each.draft_kv) for each in settings} == {(4, 99, "ancestor")}


@pytest.mark.parametrize("verifier", ["rejection", "block", "gumbel", "typical"])
def test_plain_decoding_has_a_verifier_of_its_own_if_needed(verifier):
    chain = SpecConfig(topk=1, num_steps=3, verifier=verifier)
    plain = with_steps(chain, 0)
    assert plain.verifier == ("target_only" if chain.has_draft_prob else verifier)
    assert Settings((chain, plain)).widest == chain


def test_the_carried_setting_has_the_most_of_everything():
    wide = SpecConfig(topk=4, num_steps=1, num_draft_tokens=5)
    full = SpecConfig(topk=2, num_steps=3, num_draft_tokens=11)
    widest = Settings((SpecConfig.plain(), wide, full)).widest
    assert (widest.topk, widest.num_steps, widest.num_draft_tokens) == (4, 3, 11)
    assert widest.need >= max(wide.need, full.need)
    static = SpecConfig(topk=2, num_steps=2, verifier="multi_round")
    widest = Settings((static, replace(static, topk=1, num_steps=4, num_draft_tokens=5))).widest
    assert (widest.topk, widest.num_steps, widest.num_draft_tokens) == (2, 4, 9)


@pytest.mark.parametrize(
    ("others", "name"),
    [
        ((TREE, replace(TREE, page_size=16)), "page_size"),
        ((TREE, replace(TREE, num_steps=2, verifier="typical")), "verifier"),
        ((TREE, SpecConfig.plain(16, 99)), "page_size"),
        ((TREE, replace(TREE, num_steps=2, release="round")), "release"),
        ((TREE, replace(TREE, num_steps=2, max_len=None)), "max_len"),
        ((TREE, TREE), "settings"),
        ((), "settings"),
    ],
)
def test_settings_differ_in_the_tree_only(others, name):
    with pytest.raises(InputError, check=lambda error: error.name == name):
        Settings(others)
