"""Data frames of results. pandas is loaded when the first one is made."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specsim.core.errors import InputError

if TYPE_CHECKING:
    import pandas


def data_frame(columns: Mapping[str, Sequence[Any]], types: Mapping[str, str]) -> "pandas.DataFrame":
    """Make a frame column by column, so that integers in a column with gaps never become floats.

    types: pandas dtypes by column name; the others are inferred. Raises InputError without pandas.
    """
    try:
        import pandas
    except ImportError as error:
        raise needs_pandas("a data frame", error) from error
    return pandas.DataFrame(
        {name: pandas.array(list(values), dtype=types.get(name)) for name, values in columns.items()}
    )


def needs_pandas(made: str, error: ImportError) -> InputError:
    """Say how to install what a table needs."""
    return InputError("table", made, f"JSON, unless pandas is installed by: pip install 'specsim[data]' ({error})")
