"""Numbers out of this world, texts that only Python takes for numbers, and endless files are refused at once."""

from inspect import signature

import pytest

from specsim.cli.main import COMMANDS
from specsim.cli.option_fields import OptionField, option_fields
from specsim.core import files
from specsim.core.config import SamplingParams
from specsim.core.errors import InputError

LARGE = (str(2**31), str(10**18), str(10**23), "9" * 5000)
BAD = {
    "an integer": ("1_0", " 3", "3 ", "+", "", "1.0", "1e3", "\N{FULLWIDTH DIGIT ONE}", "0x10"),
    "a number": ("1_0", " 3", "inf", "-inf", "nan", "+", ".", "1e", "1.2.3", "", "\N{FULLWIDTH DIGIT ONE}"),
}


def numbers(kind: type) -> list[OptionField]:
    """List the options of this kind, of all commands."""
    functions = [function for group in COMMANDS.values() for function in group]
    options = [parameter.annotation for function in functions for parameter in signature(function).parameters.values()]
    return [field for kinds in options for field in option_fields(kinds).values() if field.kind is kind]


@pytest.mark.parametrize("kind", [int, float])
def test_every_number_has_an_end_and_one_way_to_write_it(kind):
    words = {int: "an integer", float: "a number"}[kind]
    fields = numbers(kind)
    assert len(fields) > 30
    for field in fields:
        for text in BAD[words]:
            with pytest.raises(InputError, match=f"{field.name} is .*; allowed: {words}"):
                field.parse(text)
        is_seed = (field.option.range.at_most or 0) > 2**31
        for text in ("1e-320", "1e-40", "1e999") if kind is float else LARGE[2:] if is_seed else LARGE:
            with pytest.raises(InputError, match=field.name):
                field.parse(text)


@pytest.mark.parametrize("temperature", [float("inf"), float("nan"), -1.0])
def test_a_temperature_that_is_no_number_is_refused(temperature):
    with pytest.raises(InputError, match="temperature"):
        SamplingParams(temperature=temperature)


def test_a_file_without_an_end_is_not_read_whole(monkeypatch, tmp_path, call):
    monkeypatch.setattr(files, "MOST_STREAM", 1000)
    monkeypatch.setattr(files, "MOST_BYTES", 1000)
    (large := tmp_path / "large.json").write_text("0" * 1001)
    (largest := tmp_path / "largest.txt").write_text("x" * 1000)
    assert files.read_text(largest, "file", "a text") == "x" * 1000
    for path in ("/dev/zero", str(large)):
        for words in (("lint-report", path), ("calibrate", path), ("explain", "--a", path, "--b", path)):
            status, _, said = call(*words)
            assert status == 2
            assert "of at most 1,000 bytes" in said
