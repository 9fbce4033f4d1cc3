"""Run of the checks in order, and its report as a table, JSON and JUnit."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from xml.etree import ElementTree

from rich.console import Console

from specsim.core.display import print_table
from specsim.core.errors import InputError, require, require_choice
from specsim.correctness.probe.properties import CHECKS, checked
from specsim.correctness.probe.sampling import SETTINGS
from specsim.correctness.probe.server import Refused, Server
from specsim.correctness.probe.session import ProbeSession, ProbeSettings, PropertyResult

PROPERTIES = (*CHECKS, *SETTINGS)


@dataclass(slots=True)
class ProbeReport:
    """Results so far, which grow while the checks run."""

    url: str  # address of the server, without user and password
    url_plain: str | None  # address of the server without speculation; None for none
    model: str | None = None  # name of the model
    noise: float | None = None  # largest difference of a log probability that rounding explained; None before the end
    is_complete: bool = False  # whether all properties were checked
    properties: list[PropertyResult] = field(default_factory=list)  # results in the order of the checks

    @property
    def is_ok(self) -> bool:
        """Whether no property fails."""
        return all(result.verdict != "fails" for result in self.properties)

    @property
    def is_shown(self) -> bool:
        """Whether a property could be checked at all."""
        return any(result.verdict != "cannot be shown" for result in self.properties)

    def show(self, console: Console) -> None:
        """Print the table."""
        rows = [(result.name, result.verdict, str(result.checked), result.says) for result in self.properties]
        print_table(console, ("property", "verdict", "checked", ""), rows)
        if self.noise is not None:
            console.print(f"\nLog probabilities of equal tokens differ by {self.noise:.2g} at most between runs.")

    def to_json(self) -> dict[str, Any]:
        """Make a value that json can write."""
        return asdict(self)

    def junit(self) -> bytes:
        """Write a test suite of JUnit's XML, with a test case for each property."""
        failures = sum(result.verdict == "fails" for result in self.properties)
        skipped = sum(result.verdict == "cannot be shown" for result in self.properties)
        counts = {"tests": len(self.properties), "failures": failures, "skipped": skipped}
        suite = ElementTree.Element("testsuite", {"name": "specsim probe", **{k: str(v) for k, v in counts.items()}})
        for result in self.properties:
            case = ElementTree.SubElement(suite, "testcase", {"classname": "probe", "name": result.name})
            kind = {"fails": "failure", "cannot be shown": "skipped"}.get(result.verdict)
            if kind is not None:
                ElementTree.SubElement(case, kind, {"message": "".join(map(_escaped, result.says))})
        return ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)


def _escaped(character: str) -> str:
    """Escape, as Python does, a character that XML may not have."""
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def probe(
    report: ProbeReport,
    server: Server,
    plain: Server | None,
    settings: ProbeSettings,
    only: Sequence[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> None:
    """Check the properties, all or only some, and add each result to the report as soon as it is known.

    progress: called with the name of each property before its check. InputError for a name that no property has, for a
    server that cannot be used, and if nothing could be checked.
    """
    names = PROPERTIES if only is None else only
    for name in names:
        require_choice("only", name, PROPERTIES)
    report.model = server.model
    try:
        session = ProbeSession(server, plain, settings)
    except Refused as refusal:
        allowed = f"a server that takes completions with log probabilities ({refusal})"
        raise InputError(server.name, server.address, allowed) from refusal
    for name in names:
        if progress is not None:
            progress(name)
        report.properties.append(checked(name, session))
        report.noise = session.measured_noise
    report.is_complete = True
    require(report.is_shown, server.name, server.address, "a server that can show at least one property")
