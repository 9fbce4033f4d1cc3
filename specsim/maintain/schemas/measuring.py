"""Schemas of the outputs of commands that measure: accept, bench, predict."""

from specsim.acceptance.prediction import LengthPrediction
from specsim.acceptance.settings import StudySetting
from specsim.acceptance.study import Measurement, Study, TargetCheck
from specsim.bench.roofline import Part, Peaks
from specsim.bench.row import Target, Timing
from specsim.maintain.schemas.dataclass_fields import described
from specsim.maintain.schemas.document import (
    Schema,
    anything,
    array,
    flag,
    nullable,
    number,
    record,
    table,
    text,
    whole,
)
from specsim.maintain.schemas.settings import COMMAND, DATE, SECONDS, VERSIONS, acceptance, config

_PROMPTS = "Number of prompts."
_NEW_TOKENS = "New tokens of each prompt."


def accept() -> Schema:
    """Describe the output of accept."""
    setting = described(
        StudySetting,
        "Setting that was measured.",
        drafter="Drafter: the name of a shipped one, or MODULE:NAME.",
        config=config("Setting of speculation."),
        temperature="Sampling temperature; 0 is greedy.",
        prompt_set="Prompts: held-out ones, or edits, which end within a copy of an excerpt.",
    )
    measurement = described(
        Measurement,
        "Acceptance under one setting.",
        setting=setting,
        everything=acceptance("Acceptance over all prompts of the set."),
        fresh=acceptance("Acceptance over those whose greedy continuation does not loop."),
        num_equal="Outputs that equal those of plain decoding; null above temperature 0.",
    )
    check = described(
        TargetCheck,
        "A figure and its target.",
        claim="The figure, in words.",
        measured="Measured value.",
        target="Target, in words.",
        reached="Whether the target is reached.",
    )
    return described(
        Study,
        "Output of specsim accept --json.",
        num_prompts="Number of held-out prompts.",
        num_fresh="Held-out prompts whose greedy continuation does not loop.",
        max_new_tokens=_NEW_TOKENS,
        measurements=array("Acceptance by setting.", measurement),
        checks=array("Figures and their targets.", check),
        num_edits="Number of edits; 0 if no setting runs on them.",
        num_fresh_edits="Edits whose greedy continuation does not loop.",
    )


def predict() -> Schema:
    """Describe the output of predict."""
    row = described(
        LengthPrediction,
        "One setting.",
        config=config("Setting of speculation."),
        predicted="Predicted accept length, in tokens per round, bonus token included.",
        measured="Measured accept length.",
        rounds="Rounds of the measured run.",
    )
    row["properties"]["error"] = number("Predicted over measured, minus 1.")
    row["required"].append("error")
    return record(
        "Output of specsim predict --json; plan, simulate and sweep read it by --acceptance.",
        {
            "recorded": config("Setting of the recorded run."),
            "num_prompts": whole(_PROMPTS),
            "max_new_tokens": whole(_NEW_TOKENS),
            "rows": array("Predictions and measurements by setting.", row),
            "shares": array(
                "Probability of acceptance by depth and rank: [recorded.num_steps, recorded.topk].",
                array("Probabilities at one depth.", number("A probability.")),
            ),
            "seconds": array("Seconds of the recording, the predictions and the runs.", number("Seconds."), 3),
            "mean_error": number("Mean of the absolute errors."),
            "target_error": number("Largest mean error that gives exit status 0."),
        },
    )


def bench() -> Schema:
    """Describe the output of bench."""
    bound = record(
        "Roofline bound: what no implementation can avoid; null for none.",
        {
            "bytes": whole("Bytes to move."),
            "operations": whole("Arithmetic operations; a product and a sum are two."),
            "parts": array(
                "Bytes by tensor.",
                described(
                    Part,
                    "A tensor.",
                    tensor="Name of the tensor; * stands for the number of a layer.",
                    bytes="Bytes of all of them.",
                    count="Number of such tensors.",
                ),
            ),
        },
    )
    check = record(
        "An equality check.",
        {
            "compared": text("Subject of the check."),
            "error": nullable(number("Largest error found.")),
            "limit": number("Largest error that passes."),
            "passed": flag("Whether it passed."),
            "difference": text("Difference in words; only where it failed."),
        },
        optional=("difference",),
    )
    timing = described(
        Timing,
        "Time of one implementation.",
        median_us="Median time, in microseconds.",
        spread=nullable(number("Interquartile range, in percent of the median.")),
        samples="Number of measurements.",
    )
    target = described(
        Target,
        "A figure and the most that it should be.",
        name="Name of the figure.",
        value=nullable(number("Measured value.")),
        limit="Largest value that reaches the target.",
    )
    target["properties"]["reached"] = flag("Whether the target is reached.")
    target["required"].append("reached")
    row = record(
        "One operation under one setting.",
        {
            "name": text("Name of the operation."),
            "group": text("Group of the suite."),
            "setting": table("Setting by name.", anything("A value.")),
            "checks": table("Equality checks by implementation; ours is that of specsim.fast.", check),
            "timings": table("Times by implementation; only where the check passed.", timing),
            "roofline_bound": nullable(bound),
            "roofline_bound_us": nullable(number("Time of the bound at the measured peaks, in microseconds.")),
            "time_over_bound": nullable(number("Our median time over that of the bound.")),
            "targets": array("Targets.", target),
            "notes": array("Notes.", text("A note.")),
            "figures": table("Figures in addition to times, by name; {} where the check failed.", number("A figure.")),
        },
    )
    return record(
        "Output of specsim bench --json; it is rewritten after every row.",
        {
            "suite": text("Name of the suite."),
            "shape": text("Shape of the model."),
            "command": COMMAND,
            "date": DATE,
            "versions": VERSIONS,
            "measured_peaks": nullable(
                described(
                    Peaks,
                    "Peaks that were measured in this run; null without a GPU.",
                    read="Memory reads, in bytes per second.",
                    copy="Memory copies, in bytes per second, read and written.",
                    dense="Dense bfloat16 products, in operations per second.",
                )
            ),
            "seconds": SECONDS,
            "finished": array("Groups that are complete.", text("Name of a group.")),
            "unfinished": whole("Rows at the end that are of no complete group."),
            "is_complete": flag("Whether all rows of the suite are there."),
            "is_quick": flag("Whether the run had --quick."),
            "passed": flag("Whether every equality check passed."),
            "rows": array("Rows in the order of the run.", row),
        },
    )
