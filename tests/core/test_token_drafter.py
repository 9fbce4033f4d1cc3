"""Settings of token drafters: defaults, and one sentence for each bad value."""

import math

import pytest

from specsim.core.errors import InputError
from specsim.core.token_drafter import NgramConfig, SuffixConfig

BAD = [
    (NgramConfig, {"min_ngram": 5}, "min_ngram", "at most max_ngram, 4"),
    (NgramConfig, {"min_ngram": 0}, "min_ngram", "an integer of at least 1"),
    (NgramConfig, {"min_ngram": True}, "min_ngram", "an integer of at least 1"),
    (NgramConfig, {"max_ngram": 0}, "max_ngram", "an integer of at least 1"),
    (NgramConfig, {"max_ngram": 2.0}, "max_ngram", "an integer of at least 1"),
    (NgramConfig, {"trie_depth": 4}, "trie_depth", "more than max_ngram, 4"),
    (NgramConfig, {"trie_depth": "18"}, "trie_depth", "an integer of at least 1"),
    (NgramConfig, {"order": "age"}, "order", "recency or probability"),
    (NgramConfig, {"min_breadth": 0}, "min_breadth", "an integer of at least 1"),
    (SuffixConfig, {"max_depth": 1}, "max_depth", "an integer of at least 2"),
    (SuffixConfig, {"factor": -0.5}, "factor", "a finite number of at least 0"),
    (SuffixConfig, {"factor": math.inf}, "factor", "a finite number of at least 0"),
    (SuffixConfig, {"offset": math.nan}, "offset", "a finite number"),
    (SuffixConfig, {"offset": -math.inf}, "offset", "a finite number"),
    (SuffixConfig, {"min_prob": 1.5}, "min_prob", "a number from 0 to 1"),
    (SuffixConfig, {"shared": 1}, "shared", "True or False"),
    (SuffixConfig, {"max_cached_requests": 0}, "max_cached_requests", "an integer of at least 1"),
]


@pytest.mark.parametrize(("config", "fields", "name", "allowed"), BAD)
def test_bad_setting_is_refused_in_one_sentence(config, fields, name, allowed):
    with pytest.raises(InputError) as error:
        config(**fields)
    assert (error.value.name, error.value.allowed) == (name, allowed)
    assert str(error.value) == f"{name} is {fields[name]!r}; allowed: {allowed}"


def test_settings_name_their_kind():
    assert (NgramConfig.kind, SuffixConfig.kind) == ("ngram", "suffix")
    assert NgramConfig(min_ngram=4) == NgramConfig(4, 4, 18, "recency", 1)
    assert SuffixConfig(offset=-2) == SuffixConfig(24, 1.0, -2, 0.1, True, 10_000)
