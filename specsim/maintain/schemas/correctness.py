"""Schemas of the outputs of commands that check: diff, certify, conformance, explain, faults, soak, sampling-test."""

from specsim.correctness.conformance.runner import CaseOutcome
from specsim.correctness.differential.result import CellResult, Divergence
from specsim.correctness.explain import AnswerComparison
from specsim.correctness.faults.fault import FaultFinding
from specsim.correctness.soak.trial import ProgramResult
from specsim.correctness.statistics.report import SamplingTest
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
from specsim.maintain.schemas.settings import COMMAND, DATE, DEVICE, SECONDS, VERSIONS

_COUNT = whole("A count.")
_FAILURES = array("Reasons for exit status 1, in words; empty if there are none.", text("A reason."))
_IMPL = text(
    "Implementation that ran: reference or fast; control for a version that is wrong on purpose; module for a rule of "
    "a user."
)


def diff() -> Schema:
    """Describe the output of diff."""
    totals = _cell()["properties"]
    summed = ("decisions", "within_rounding_error", "mismatches", "seconds", "compared", "not_compared", "fields")
    return record(
        "Output of specsim diff --json; it is rewritten after every cell.",
        {
            "grid": text("Name of the grid, or one cell."),
            "fingerprint": text("Digest of all cells of the grid; a run with another one cannot be resumed."),
            "num_cells": whole("Cells of the whole grid."),
            "impl": text("Implementation that was compared with the reference."),
            "device": DEVICE,
            "dtype": text("Data type of weights and KV."),
            "versions": VERSIONS,
            "date": DATE,
            "command": text("Command line of the whole grid; empty for one cell."),
            "incomplete_cells": array(
                "Cells in which rounding kept some phase from being compared to its end.", text("Name of a cell.")
            ),
            **{name: totals[name] for name in summed},
            "cells": whole("Cells that were run."),
            "coverage": totals["coverage"],
            "max_logprob_error": totals["max_logprob_error"],
            "failures": _FAILURES,
            "first_divergence": totals["first_divergence"],
            "results": array("Results of the cells.", _cell()),
        },
    )


def _cell() -> Schema:
    divergence = described(
        Divergence,
        "First difference that rounding does not explain; null for none.",
        cell="Name of the cell.",
        round="Number of the round.",
        phase="prefill, draft, verify or draft_extend.",
        request="Place of the request in the batch; null where a whole state is wrong.",
        node="First wrong entry of the field; null for none.",
        field="Name of the wrong field.",
        reference=anything("Value of the reference."),
        fast=anything("Value of the implementation that was compared."),
    )
    return described(
        CellResult,
        "The result of one cell, or sums over cells.",
        id="Name of the cell.",
        mismatches="Number of differences, counted for each request and phase.",
        within_rounding_error="Decisions that rounding may turn.",
        decisions="Decisions that were compared.",
        max_logprob_error="Largest error of a log-probability against float64.",
        compared=table("Requests compared to the end, by phase.", _COUNT),
        not_compared=table("Requests left out after a decision within rounding error, by phase.", _COUNT),
        coverage=table("Occurrences of each case that the grid must cover.", _COUNT),
        fields=table("Comparisons of each field.", _COUNT),
        seconds="Wall-clock time in seconds.",
        first_divergence=nullable(divergence),
    )


def certify() -> Schema:
    """Describe the output of certify."""
    figures = {
        "total_variation": "Total variation from the target's distribution of num_steps + 1 tokens",
        "accepted": "Expected accepted drafts per round",
        "optimum": "Largest expectation that a lossless rule can reach",
        "gap": "Optimum minus accepted; missing unless the verifier is lossless",
        "impossible": "Probability of outputs that the target never gives",
        "uniform_bits_bound": "Bound on the total variation added by uniform random numbers of 24 bits",
    }
    certificate = record(
        "One verifier on one case.",
        {
            "verifier": text("Acceptance rule."),
            "promise": text("lossless, lossy or wrong (a control)."),
            "impl": _IMPL,
            "case": text("Vocabulary and draft tree."),
            "regions": whole("Regions of the uniform random numbers that were enumerated."),
            "is_as_promised": flag("Whether the distribution is the promised one."),
            **{name: text(f"{meaning}, as an exact fraction.") for name, meaning in figures.items()},
            **{f"{name}_float": number(f"{meaning}, as a number.") for name, meaning in figures.items()},
            "counterexample": nullable(_counterexample()),
        },
        optional=("gap", "gap_float"),
    )
    return record(
        "Output of specsim certify --json.",
        {
            "command": COMMAND,
            "date": DATE,
            "versions": VERSIONS,
            "seconds": SECONDS,
            "is_ok": flag("Whether every verifier is as promised."),
            "failures": _FAILURES,
            "not_run": array("Cases that the fast implementation was not certified on.", text("A case.")),
            "not_certified": array(
                "Rules of a user whose distribution cannot be computed exactly, and why.", text("A rule.")
            ),
            "certificates": array("Certificates, those of controls included.", certificate),
        },
    )


def _counterexample() -> Schema:
    prob = array(
        "Distribution after every node, as exact fractions.", array("Fractions by token.", text("A fraction."))
    )
    interval = array("Both ends of the interval, as exact fractions.", text("A fraction."), 2)
    return record(
        "Input on which a rule of a user has another distribution than the target's; null without one.",
        {
            "tokens": array("Tokens of the draft tree; the root's is not read: [num_draft_tokens].", whole("A token.")),
            "parents": array("Parent of each node, -1 for the root: [num_draft_tokens].", whole("A node.")),
            "target_prob": prob,
            "draft_prob": nullable(prob),
            "uniforms": array("Region of each uniform random number of acceptance.", interval),
            "final_uniform": interval,
            "result": text("Result of the rule in that region, in words."),
        },
    )


def conformance() -> Schema:
    """Describe the output of conformance."""
    outcome = described(
        CaseOutcome,
        "One case.",
        operation="Name of the operation.",
        case="Name of the case.",
        status="equal; refused: an exception that is allowed; different; raised: another exception; ended: the "
        "process hung or died.",
        detail="Difference or message; empty for none.",
    )
    outcome["properties"]["passed"] = flag("Whether the status is equal or refused.")
    outcome["required"].append("passed")
    return record(
        "Output of specsim conformance --json.",
        {
            "command": COMMAND,
            "date": DATE,
            "versions": VERSIONS,
            "module": text("Module whose functions were checked."),
            "device": DEVICE,
            "functions": table("Function by operation.", text("Name of the function.")),
            "outcomes": array("Outcomes of all cases.", outcome),
        },
    )


def explain() -> Schema:
    """Describe the output of explain."""
    token = {"type": ["integer", "string", "null"], "description": "Token id or text; null where the answer has ended."}
    finding = described(
        AnswerComparison,
        "One request.",
        request="Place of the request in the files, from 0.",
        verdict="equal; numerics: rounding explains the difference; fault: it does not; undecided.",
        says="Reason for the verdict.",
        place="Place of the first token that differs; null for none.",
        tokens=nullable(array("Tokens of both answers at that place.", token, 2)),
        margins=nullable(
            array(
                "Log-probability of the engine's own token minus that of the other token, for each engine.",
                nullable(number("A margin; null where it is not reported.")),
                2,
            )
        ),
        at_least=nullable(array("Lower bounds of the margins.", nullable(number("A bound.")), 2)),
        is_drawn="Whether an engine sampled: its file says so, or reports a likelier token than its own.",
        drift=nullable(number("Largest difference of log-probabilities of the equal tokens before that place.")),
        drift_place="Place of the drift; null for none.",
        exact=nullable(number("Distance of the two tokens' logits in float64; null without --target.")),
    )
    return record(
        "Output of specsim explain --json.",
        {
            "a": text("File of one engine's answers."),
            "b": text("File of the other engine's answers."),
            "dtype": text("Data type of both engines."),
            "findings": array("Findings in the order of the requests.", finding),
        },
    )


def faults() -> Schema:
    """Describe the output of faults."""
    finding = described(
        FaultFinding,
        "Finding that identifies the fault; null for none.",
        field="Name of the wrong field.",
        place="Place of the first wrong value.",
        expected=anything("Right value."),
        found=anything("Wrong value."),
    )
    result = record(
        "One fault.",
        {
            "name": text("Name of the fault."),
            "detected": flag("Whether the check detects it, and finds nothing without it."),
            "detected_by": nullable(text("Field that identifies it; null for none.")),
            "first_divergence": nullable(finding),
            "detected_as_named": flag("Whether a field that its entry names detects it."),
            "check": text("Name of the check."),
            "setting": table("Setting of the check.", anything("A value.")),
            "fields": array("Fields that the check found wrong.", text("A field.")),
            "fields_without_fault": array("Fields that it found wrong without the fault.", text("A field.")),
            "source": text("Report or repair of the fault, such as owner#number."),
            "operation": text("Operation of the round."),
            "cause": text("Cause, in a sentence."),
            "symptom": text("Symptom, in a sentence."),
            "code": text("Changed code: fast, reference, or shared by both."),
            "seconds": SECONDS,
        },
    )
    return record(
        "Output of specsim faults --json.",
        {
            "command": COMMAND,
            "device": DEVICE,
            "versions": VERSIONS,
            "date": DATE,
            "faults": whole("Number of faults."),
            "detected": whole("Faults that are detected."),
            "detected_as_named": whole("Faults that are detected by a field that their entries name."),
            "seconds": SECONDS,
            "results": array("Results in the order of the catalogue.", result),
        },
    )


def soak() -> Schema:
    """Describe the output of soak."""
    failure = record(
        "A workload that went wrong.",
        {
            "program": text("Name of the workload."),
            "difference": text("First difference."),
            "command": text("Command line that runs it again."),
        },
    )
    program = described(
        ProgramResult,
        "One workload.",
        name="Name of the workload: seed, index and number of requests.",
        num_steps="Depth of its trees.",
        counts=table("Occurrences of each event.", _COUNT),
        mismatches="Requests that differ from their solo runs beyond rounding; an error counts as one.",
        within_rounding_error="Requests that differ where a decision is within rounding error.",
        max_logprob_error="Largest error of a log-probability.",
        first_difference="First difference; null for none.",
    )
    return record(
        "Output of specsim soak --json.",
        {
            "command": COMMAND,
            "device": DEVICE,
            "versions": VERSIONS,
            "date": DATE,
            "is_ok": flag(
                "Whether requests were compared, all are equal to their solo runs, and no required event is missing."
            ),
            "figures": table("Figures of the printed table by name; times in seconds.", number("A figure.")),
            "missing": nullable(array("Required events that never occurred; null for a short run.", text("An event."))),
            "failures": array("Workloads that went wrong.", failure),
            "programs": array("All workloads.", program),
        },
    )


def sampling_test() -> Schema:
    """Describe the output of sampling-test."""
    chi_square = record(
        "Pearson's chi-square statistic.",
        {
            "statistic": nullable(number("The statistic.")),
            "degrees_of_freedom": whole("Degrees of freedom."),
            "p_value": nullable(number("p-value in the limit of many tokens.")),
        },
    )
    test = described(
        SamplingTest,
        "One test.",
        name="Acceptance rule, or name of the control.",
        impl=_IMPL,
        sampling="Sampling parameters.",
        tokens="Tokens that were tested.",
        round_starts="Tokens that begin a round after another.",
        accept_length="Mean tokens per round, bonus token included.",
        ln_e_value=nullable(number("Natural logarithm of the e-value; null where a token has no probability.")),
        chi_square=chi_square,
        bound="p-value below which the distribution is rejected.",
        detectable_distance=nullable(
            number("Least total variation that is detected with probability 0.99; null for none.")
        ),
        is_control="Whether it is a control: an engine that is wrong on purpose.",
    )
    test["properties"] |= {
        "p_value": number("Upper bound of the p-value, for any number of tokens."),
        "is_rejected": flag("Whether the distribution is rejected."),
    }
    test["required"] += ["p_value", "is_rejected"]
    return record(
        "Output of specsim sampling-test --json.",
        {
            "command": COMMAND,
            "date": DATE,
            "versions": VERSIONS,
            "seconds": SECONDS,
            "seed": whole("Random seed of all requests."),
            "false_alarm": number("Bound on the probability that a correct engine fails any test."),
            "is_ok": flag("Whether nothing correct is rejected, every control is, and a test would detect errors."),
            "failures": _FAILURES,
            "tests": array("Tests, those of controls included.", test),
        },
    )
