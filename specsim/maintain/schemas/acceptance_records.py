"""Schemas of acceptance records, and of predictions from one."""

from specsim.acceptance.record_prediction import ExpectedLength
from specsim.maintain.schemas.dataclass_fields import described
from specsim.maintain.schemas.document import Schema, array, flag, nullable, number, record, text, whole
from specsim.maintain.schemas.settings import CONFIG_TEXTS, config
from specsim.simulator.acceptance_record import Counts, Interval


def acceptance_record() -> Schema:
    """Describe an acceptance record, the output of accept --target."""
    rate = nullable(number("A fraction, 0 to 1; null where no round reached it."))
    position = record(
        "A draft position.",
        {
            "position": whole("Number of the draft, from 1."),
            "unconditional": number("Fraction of all rounds that accept this draft."),
            "conditional": rate,
            "accepted": nullable(whole("Rounds that accepted it; null without counts.")),
            "reached": nullable(whole("Rounds that proposed it behind accepted drafts; null without counts.")),
        },
    )
    setting = record(
        "Setting of speculation; null where it is unknown.",
        {name: nullable(whole(str(CONFIG_TEXTS[name]))) for name in ("topk", "num_steps", "num_draft_tokens")},
    )
    count = whole("A number of rounds.")
    counts = described(
        Counts,
        "Counts of one request, or of all together.",
        by_position=array("Rounds that accepted at least 1, 2, ... drafts; empty where the tool gives none.", count),
        reached=array("Rounds that proposed draft 1, 2, ... behind accepted ones; empty if all did.", count),
    )
    interval = described(
        Interval,
        "Confidence interval of the accept length.",
        low="Lower end.",
        high="Upper end.",
        confidence="Confidence, 0 to 1.",
        method="Method, in a few words.",
    )
    return record(
        "Acceptance record: output of specsim accept --target --json, which plan, simulate, sweep, predict and "
        "lint-report read.",
        {
            "source": text("Command or file of the measurement."),
            "tool": text("Program that counted."),
            "convention": text("Counting rule of the tool, in a sentence."),
            "pair": text("Target and drafter; empty if unknown."),
            "prompts": text("Digest of the prompts and of the number of new tokens; empty if unknown."),
            "temperature": nullable(number("Sampling temperature; null if unknown.")),
            "setting": setting,
            "rounds": nullable(whole("Number of rounds, counted for each request; null without counts.")),
            "accept_length": number("Mean tokens per round, bonus token included."),
            "reported_length": nullable(
                number("Accept length that the tool states; null if it has another definition.")
            ),
            "reported_rounding": number("Half of the last printed place of the reported length."),
            "proposed_drafts": nullable(whole("Drafts that were proposed, over all rounds; null if unknown.")),
            "interval": nullable(interval),
            "positions": array("Rates by position; empty if unknown.", position),
            "is_by_request": flag("Whether each of the counts is that of a request."),
            "counts": array("Counts of the requests, or one for all; empty without counts.", counts),
            "shares": array(
                "Probability of acceptance by depth and rank; empty if unknown.",
                array("Probabilities at one depth.", number("A probability.")),
            ),
        },
    )


def predict_record() -> Schema:
    """Describe the output of predict --acceptance."""
    interval = acceptance_record()["properties"]["interval"]
    expected = described(
        ExpectedLength,
        "One setting.",
        config=config("Setting of speculation."),
        accept_length="Accept length, in tokens per round, bonus token included.",
        interval=interval | {"description": "Interval of a chain that is longer than the record's; null for others."},
        is_measured="Whether it is the record's own setting.",
    )
    return record(
        "Output of specsim predict --acceptance --json.",
        {
            "record": acceptance_record(),
            "assumed": array("Assumptions about what the record does not say.", text("A clause.")),
            "rows": array("Accept lengths by setting.", expected),
        },
    )
