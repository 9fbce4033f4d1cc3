"""Names and versions of the JSON outputs: commands write them, and maintain.schemas describes them.

A version grows when a key is renamed or removed or changes its meaning. New keys do not change it.
"""

VERSIONS = {
    "accept": 1,
    "acceptance": 1,  # acceptance record: of accept --target
    "bench": 1,
    "calibrate": 1,
    "calibrate-published": 1,  # of calibrate --published
    "certify": 1,
    "conformance": 1,
    "diff": 1,
    "explain": 1,
    "exploration": 1,  # of --html
    "faults": 1,
    "generate": 1,
    "lint-report": 1,
    "plan": 2,
    "predict": 1,
    "predict-record": 1,  # of predict --acceptance
    "profile": 1,  # of calibrate --out
    "run": 1,
    "run-compare": 1,  # of run --compare
    "sampling-test": 1,
    "simulate": 2,
    "simulate-table": 1,  # of simulate --table
    "soak": 1,
    "sweep": 1,
}


def schema_name(output: str) -> str:
    """Give the value of the key `schema` in an output, such as specsim/generate/1."""
    return f"specsim/{output}/{VERSIONS[output]}"
