"""Tables: a field for each column, and numbers that are named by column and line."""

import pytest

from specsim.core.errors import InputError
from specsim.core.table import read_table

HEADING = "name,count,\n"


def rows(text: str):
    return list(read_table(text, "hardware", "gpus.csv").rows)


def test_fields_are_read_by_column_and_empty_lines_skipped():
    table = read_table("A,b\n1,2\n\n 3 ,4.0\n", "hardware", "gpus.csv", str.lower)
    assert table.columns == ("a", "b")
    first, second = table.rows
    assert (first.number("a"), second.number("a"), second.integer("b")) == (1, 3, 4)
    assert second.location == "gpus.csv, line 4"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (HEADING + "x,3,\ny,1,5,\n", 3),  # a decimal comma
        (HEADING + "x,3\n", 2),
        (HEADING + "x,3,5\n", 2),  # in a column without a name
        (HEADING + 'x,"3"5,\n', None),
        (HEADING + 'x,"3,\ny,4,\n', None),
        ("name,name\nx,y\n", None),
        ('"name\n', None),
    ],
)
def test_a_row_of_other_fields_is_refused_with_its_line(text, line):
    place = "gpus.csv" if line is None else f"gpus.csv, line {line}"
    with pytest.raises(InputError, check=lambda error: error.name == "hardware" and place in str(error.value)):
        rows(text)


@pytest.mark.parametrize("text", ["", "many", "nan", "inf", "1e400", "-1", "1_000", '"1,5"', "4.9", "9" * 5000])
def test_a_field_that_is_no_integer_is_named(text):
    (row,) = rows(HEADING + f"x,{text},\n")
    with pytest.raises(InputError, check=lambda error: error.name == "count" and "gpus.csv, line 2" in str(error)):
        row.integer("count")
