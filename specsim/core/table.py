"""Tables in CSV, for the simulator's readers: a field for each column, and numbers named by line and column."""

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import StringIO

from specsim.core.errors import InputError, require
from specsim.core.limits import MOST_COUNT, parse_number, read_integer, read_number


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of a table."""

    location: str  # file and line
    fields: Mapping[str, str]  # by column

    def number(self, column: str, least: float = 0.0, most: float = math.inf) -> float:
        """Read a finite number; InputError names line and column."""
        return read_number(parse_number(self.fields[column]), column, self.location, least, most)

    def integer(self, column: str, least: int = 0, most: int = MOST_COUNT) -> int:
        """Read an integer."""
        return read_integer(parse_number(self.fields[column]), column, self.location, least, most)


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a heading; its rows are checked as they are read."""

    columns: tuple[str, ...]
    rows: Iterator[TableRow]


def read_table(text: str, name: str, source: str, heading: Callable[[str], str] = str) -> Table:
    """Read a table, whose lines without a field are left out.

    InputError has that name, for a row of another length too. heading: converts the columns' names. A column without a
    name, which spreadsheets add, has to be empty.
    """
    reader = csv.reader(StringIO(text, newline=""), strict=True)
    try:
        columns = tuple(map(heading, next(reader, ())))
    except csv.Error as error:
        raise InputError(name, source, f"a table as CSV ({error})") from error
    twice = [column for column, count in Counter(columns).items() if column and count > 1]
    require(not twice, name, source, f"a table with one column {' and one '.join(twice[:2])}")
    return Table(columns, _rows(reader, columns, name, source))


def _rows(reader: Iterator[list[str]], columns: tuple[str, ...], name: str, source: str) -> Iterator[TableRow]:
    last = 0
    try:
        for fields in reader:
            last = reader.line_num  # pyright: ignore[reportAttributeAccessIssue] - of csv's reader
            if not fields:
                continue
            location = f"{source}, line {last}"
            count = f"a row of {len(columns)} fields, one for each column, not {len(fields)}"
            if len(fields) != len(columns):
                raise InputError(name, location, f"{count} (a comma within a number starts another field)")
            nameless = [text for column, text in zip(columns, fields, strict=True) if not column and text.strip()]
            require(not nameless, name, location, f"no field in a column without a name, not {nameless[:1]}")
            yield TableRow(location, dict(zip(columns, fields, strict=True)))
    except csv.Error as error:
        raise InputError(name, f"{source}, after line {last}", f"a table as CSV ({error})") from error
