"""Schemas of the outputs of calibrate."""

from specsim.maintain.schemas.dataclass_fields import described
from specsim.maintain.schemas.document import Schema, array, choice, flag, nullable, number, record, table, text, whole
from specsim.simulator.calibration.benchmark_file import Source
from specsim.simulator.calibration.posterior import CONFIDENCE
from specsim.simulator.calibration.profile import ChainAcceptance
from specsim.simulator.calibration.published_report import Regret
from specsim.simulator.calibration.server_fit import FittedCell

_SCHEDULE = choice("The host's part: sync or overlap.", "sync", "overlap")
_GRAPHS = choice("Forwards in CUDA graphs.", "all", "target", "none")


def profile() -> Schema:
    """Describe a profile's file."""
    parameter = record(
        "A parameter.",
        {
            "value": number("Fitted value, in the unit."),
            "low": number(f"Lower end of the {CONFIDENCE:.0%} interval."),
            "high": number(f"Upper end of the {CONFIDENCE:.0%} interval."),
            "unit": text("Unit."),
            "is_determined": flag("Whether the cells determine it; it stays near an assumed value otherwise."),
        },
    )
    source = described(
        Source,
        "A file.",
        path="Name of the file.",
        tool="Tool that wrote it.",
        sha256="SHA-256 of its content.",
        cells="Cells read from it.",
    )
    made = {
        "tool": text("Program and version that fitted."),
        "date": text("Date of the fit, UTC."),
        "model": text("Name of the model."),
        "hardware": text("Name of the GPU."),
        "tensor_parallel": whole("GPUs that share the model."),
        "files": array("Files of the cells.", source),
        "cells": whole("Number of cells."),
        "determined": array("Determined parameters.", text("A parameter.")),
        "tables": array("Published tables of a shipped profile.", text("A table.")),
        "shares_of": nullable(text("Engine whose tables give the shares of peaks; null: the profile's own.")),
        "notes": array("What the tables do not say and is assumed.", text("A note.")),
        "doubts": array("Reasons to doubt the fit.", text("A sentence.")),
    }
    acceptance = described(
        ChainAcceptance,
        "Acceptance of the cells' chains; null without chains.",
        model="Name of the target.",
        drafter="Architecture of the drafter.",
        rates="Share of rounds that accept at least 1, 2, ... drafts.",
        low="Lower end of the 90 % interval of the accept length of as many steps.",
        high="Upper end of the interval.",
        is_fitted="Whether throughputs were fitted; accept lengths of the cells otherwise.",
    )
    optional = [name for name in made if name not in ("tool", "model", "hardware", "cells")]
    return record(
        "A calibrated server.",
        {
            "name": text("Name of the profile."),
            "schedule": _SCHEDULE,
            "graphs": _GRAPHS,
            "plain_schedule": nullable(_SCHEDULE),
            "confidence": number("Confidence of the intervals."),
            "parameters": table("Parameters by name.", parameter),
            "covariance": array("Covariance of the parameters' logarithms.", array("A row.", number("A covariance."))),
            "discrepancy": number("Relative error of the model itself."),
            "acceptance": nullable(acceptance),
            "provenance": record("Origin of the profile.", made, optional),
        },
    )


def calibrate() -> Schema:
    """Describe the output of calibrate."""
    cell = described(
        FittedCell,
        "A fitted figure.",
        label="Setting and load.",
        quantity="Figure: tokens_per_s, decode_tokens_per_s, tpot_s or ttft_s.",
        measured="Measured value.",
        fitted="Value under the fitted parameters.",
    )
    cell["properties"]["error"] = number("Fitted over measured, minus 1.")
    cell["required"].append("error")
    own = profile()
    own["properties"] = {"schema": text("Name and version of the profile's format.")} | own["properties"]
    inner = own | {"required": ["schema", *own["required"]]}
    outside = {"batch": whole("Batch size that was left out."), "worst_error": number("Largest relative error.")}
    tried = {"schedule": _SCHEDULE, "graphs": _GRAPHS, "objective": number("Objective of its fit; lower is better.")}
    return record(
        "Output of specsim calibrate --json.",
        {
            "profile": inner,
            "cells": array("Fitted figures.", cell),
            "left_out": array("Errors of each batch size under a fit to the others.", record("A batch.", outside)),
            "left_out_mean_error": nullable(number("Mean of these errors; null with a single batch size.")),
            "structures": array("Structures that were tried.", record("A structure.", tried)),
            "doubts": array("Reasons to doubt the calibration.", text("A sentence.")),
        },
    )


def calibrate_published() -> Schema:
    """Describe the output of calibrate --published."""
    figure = {
        "figure": text("Setting and figure."),
        "measured": number("Published value."),
        "predicted": number("Predicted value."),
        "half_width": number("Half-width of the 90 % band; 0.1 is 10 %."),
    }
    held_out = {
        "table": text("Name of the table."),
        "fitted_cells": array("Cells that the calibration saw.", text("A cell.")),
        "mean_error": number("Mean relative error of held-out figures."),
        "worst_error": number("Largest relative error."),
        "is_within_target": nullable(flag("Whether both are within their targets; null without one.")),
        "is_doubted": flag("Whether the calibration doubts its cells."),
        "uncalibrated_mean_error": number("Mean error with assumed parameters, without any calibration."),
        "uncalibrated_worst_error": number("Largest error with assumed parameters."),
        "formula_mean_error": number("Mean error of the closed formula."),
        "formula_worst_error": number("Largest error of the closed formula."),
        "coverage": number("Share of held-out figures within their bands."),
        "figures": array("Held-out figures.", record("A figure.", figure)),
    }
    left = held_out | {
        "engine": text("Profile of the table's engine."),
        "others": array("Tables that were fitted.", text("A table.")),
    }
    regret = described(
        Regret,
        "A choice at one batch size.",
        table="Name of the table.",
        batch="Batch size.",
        best="Setting that was measured to be best.",
        chosen="Setting that the calibrated simulator chose.",
        simulated="Throughput lost by the simulator's choice, relative.",
        formula="Throughput lost by the closed formula's choice.",
    )
    bands = {
        "confidence": number("Nominal share of the bands."),
        "coverage": number("Share of all held-out figures within their bands."),
        "median_half_width": number("Median half-width of the bands."),
    }
    loss = {"mean": number("Mean regret."), "worst": number("Largest regret.")}
    return record(
        "Output of specsim calibrate --published --json.",
        {
            "six_cells": array("Tables calibrated on six cells.", record("A table.", held_out)),
            "left_out_tables": array("Tables predicted from others.", record("A table.", left)),
            "bands": record("Bands of all held-out figures.", bands),
            "speedup_bands": record("Bands of measured speed-ups.", bands),
            "choices": array("Choices by table and batch size.", regret),
            "regrets": table("Regret by method.", record("Regret over all choices.", loss)),
        },
    )
