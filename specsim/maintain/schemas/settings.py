"""Schemas of what many outputs have: provenance, settings of speculation, acceptance figures."""

from typing import Any

from specsim.core.config import SpecConfig
from specsim.core.metrics import Acceptance
from specsim.core.verifiers import DEFAULT_VERIFIER
from specsim.maintain.schemas import document
from specsim.maintain.schemas.dataclass_fields import described
from specsim.maintain.schemas.document import Schema, array, flag, number, record, table, text, whole

_LOSSY = "below 1 it is not lossless"

COMMAND = text("Command line that gives the same result.")
DATE = text("Date and time of the run in UTC, ISO 8601, to the second.")
DEVICE = text("Device of the implementation: cpu or cuda.")
SECONDS = number("Wall-clock time of the run, in seconds.")
VERSIONS = record(
    "Versions of what ran.",
    {
        "python": text("Version of Python."),
        "specsim": text("Version of specsim."),
        "torch": text("Version of PyTorch."),
        "triton": text("Version of Triton; missing where it is not installed."),
        "gpu": text("Name of the GPU; on cuda only."),
        "code": table("Digest of each module that the fast implementation runs; on cuda only.", text("A digest.")),
    },
    optional=("triton", "gpu", "code"),
)
SYNTHETIC = record(
    "Source of the acceptance decisions.",
    {
        "synthetic": flag("Whether a schedule (--accept-rates) decided in place of the target."),
        "rates": array("Fraction of rounds that accept draft 1, 2, ...: [num_steps].", number("A fraction, 0 to 1.")),
        "schedule": document.choice("Spread of the rates over the rounds.", "minimum-variance", "independent"),
        "seed": whole("Seed of the schedule's draws."),
        "rule": text("Name of a user's acceptance rule that decided in place of the setting's verifier."),
    },
    optional=("rates", "schedule", "seed", "rule"),
)
CONFIG_TEXTS: dict[str, Any] = {
    "topk": "Draft tokens kept at each step (K); 1 is a chain.",
    "num_steps": "Draft steps, the depth of the tree (S); 0 is plain decoding.",
    "num_draft_tokens": "Nodes of the tree that the target verifies, root included (N).",
    "page_size": "Tokens in a KV page.",
    "draft_kv": "KV that a draft token attends to: that of its lane, or that of its ancestors.",
    "extend": "Tokens of a request that draft-extend runs: always num_steps + 1, or the accepted ones only.",
    "release": "Time at which unused KV slots are freed: the end of the request, or of each round.",
    "score": "Ranking of drafts: products of probabilities, or sums of log-probabilities.",
    "penalties": "Whether penalties count the tokens on a draft's own path (exact) or not (relaxed, not lossless).",
    "verifier": "Acceptance rule.",
    "threshold_single": f"Probability at which {DEFAULT_VERIFIER} accepts a draft; {_LOSSY}.",
    "threshold_acc": f"Accumulated probability at which {DEFAULT_VERIFIER} accepts a draft; {_LOSSY}.",
    "typical_epsilon": "Of rule typical: a draft passes above min(epsilon, delta · exp(-entropy)).",
    "typical_delta": "Of rule typical, as in typical_epsilon.",
    "max_len": "Largest number of tokens in a request, prompt included; null: the target's limit.",
}


def config(description: str) -> Schema:
    """Describe a setting of speculation."""
    return described(SpecConfig, description, **CONFIG_TEXTS)


def acceptance(description: str) -> Schema:
    """Describe acceptance figures."""
    return described(Acceptance, description, **ACCEPTANCE_TEXTS)


ACCEPTANCE_TEXTS: dict[str, Any] = {
    "rounds": "Number of rounds, counted for each request.",
    "accept_length": document.nullable(number("Mean tokens per round, bonus token included: 1 to num_steps + 1.")),
    "accept_rate": document.nullable(number("Accepted drafts over the depth of the proposed ones: 0 to 1.")),
    "node_rate": document.nullable(number("Accepted drafts over the num_draft_tokens - 1 proposed nodes: 0 to 1.")),
    "accepted_by_position": array(
        "Fraction of all rounds that accept at least 1, 2, ... drafts: [num_steps].",
        document.nullable(number("A fraction, 0 to 1.")),
    ),
}
