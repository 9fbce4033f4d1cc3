"""Numbers of package files that name each verifier and each drafter, which a new one would add to."""

import kind_map
import pytest

from specsim.core.kinds import KINDS
from specsim.core.verifiers import VERIFIERS

MOST = 6  # the record, the reference, the kernels, the oracle, the certificate, the explorer's texts
# Operations of SGLang and vLLM with these names; two controls and a fault that need a verifier which reads every draft
# before it decides.
MORE = {"target_only": 8, "rejection": 7, "block": 9}

MOST_OF_A_DRAFTER = 12  # files that CONTRIBUTING.md lists, and one or two more
# Others than those: EAGLE heads share files and published acceptance, and MTP modules are in targets' checkpoints.
MORE_OF_DRAFTER = {"eagle": 20, "eagle3": 30, "p-eagle": 15, "mtp": 19, "dflash": 13}


@pytest.mark.parametrize("name", KINDS)
def test_few_files_name_a_drafter(name):
    found = kind_map.files_naming_drafter(name)
    assert len(found) <= MORE_OF_DRAFTER.get(name, MOST_OF_A_DRAFTER), found
    assert "specsim/core/kinds.py" in found


@pytest.mark.parametrize(
    ("name", "text", "is_found"),
    [
        ("p-eagle", "of a PEagleHead", True),
        ("p-eagle", "the p_eagle rows", True),
        ("eagle3", "an EAGLE-3 head", True),
        ("eagle3", "an EAGLE head", False),
        ("eagle", 'kind="eagle"', True),
        ("eagle", "Eagle3Head", False),
        ("eagle", "class EagleHead:", True),
        ("ngram", "the n-gram drafter", True),
        ("suffix", "path.suffix", False),
        ("suffix", "SuffixConfig()", True),
    ],
)
def test_names_of_drafters_are_found_however_joined(name, text, is_found):
    assert bool(kind_map.drafter_pattern(name).search(text)) == is_found


@pytest.mark.parametrize("name", VERIFIERS)
def test_few_files_name_a_verifier(name):
    found = kind_map.files_naming(name)
    assert len(found) <= MORE.get(name, MOST), found
    assert "specsim/core/verifiers.py" in found


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ('SpecConfig(verifier="gumbel")', True),
        ("# as rule `gumbel` does", True),
        ('CHAINS = ("rejection", "block", "gumbel")', True),
        ('drafts="gumbel"', False),
        ("from specsim.reference.acceptance import gumbel, residual", True),
        ("from specsim.correctness.exact.race import (\n    GUMBEL,\n)", True),
        ("from specsim.fast.verifiers import gumbel", True),
        ("from specsim.fast.verifiers.gumbel import accept", True),
        ("noise = standard gumbel noise", False),
        ('"gumbel-noise-shared"', False),
    ],
)
def test_names_are_found_in_quotes_and_imports(text, is_found):
    found = kind_map.pattern("gumbel", kind_map.modules_of("gumbel")).search(text)
    assert (found is not None) == is_found


def test_a_name_that_is_no_word_is_found_anywhere():
    own = kind_map.pattern("multi_round", ())
    assert own.search("# multi_round reads a uniform of each node")
    assert not own.search("_multi_round_kernel")


def test_the_command_prints_a_row_for_each_name(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["kind_map", "-v"])
    assert kind_map.main() == 0
    printed = capsys.readouterr().out
    assert [name for name in (*VERIFIERS, *KINDS) if name in printed] == [*VERIFIERS, *KINDS]
    assert "fast/verifiers/gumbel.py" in printed
