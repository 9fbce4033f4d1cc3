"""Acceptance records of files, whatever tool wrote them."""

from pathlib import Path

from specsim.acceptance import aiperf_records, benchmark_reports, own_results, sglang_metrics, vllm_metrics
from specsim.acceptance.content import Content
from specsim.core.display import short_setting
from specsim.core.errors import InputError
from specsim.core.files import read_text
from specsim.simulator.acceptance_record import AcceptanceRecord

_READERS = (own_results, aiperf_records, vllm_metrics, sglang_metrics, benchmark_reports)
FORMATS = "; ".join(reader.FORMAT for reader in _READERS)
SHOWN = 8  # records that an error lists


def read_records(path: Path | str, name: str = "acceptance") -> list[AcceptanceRecord]:
    """Read every record of a file; InputError, with the known formats, for a file that holds none."""
    content = Content.of_text(read_text(Path(path), name, "a UTF-8 file that can be read"), str(path))
    for reader in _READERS:
        try:
            records = reader.read(content)
        except InputError as error:
            raise error.within(content.source) from error
        if records:
            return records
    raise InputError(name, str(path), f"a file with acceptance of drafts: {FORMATS}")


def read_record(location: Path | str, name: str = "acceptance") -> AcceptanceRecord:
    """Read the one record of a file, or number N of several as FILE#N; InputError otherwise."""
    path, _, number = str(location).rpartition("#")
    if not path or not number.isdecimal():
        path, number = str(location), ""
    records = read_records(path, name)
    if number:
        if 1 <= int(number) <= len(records):
            return records[int(number) - 1]
        raise InputError(name, str(location), f"one of {len(records)} records, {path}#1 to {path}#{len(records)}")
    if len(records) == 1:
        return records[0]
    listed = [f"{path}#{index} ({_name(record)})" for index, record in enumerate(records[:SHOWN], start=1)]
    more = ", ..." if len(records) > SHOWN else ""
    raise InputError(name, path, f"one record; the file has {len(records)}: {', '.join(listed)}{more}")


def _name(record: AcceptanceRecord) -> str:
    """Name a record by its pair, setting and temperature, as far as they are known."""
    parts = [record.pair, "" if record.config is None else short_setting(record.config)]
    if record.temperature is not None:
        parts.append(f"T={record.temperature:g}")
    return " ".join(part for part in parts if part) or record.tool
