"""Conversion of kept results to today's names; figures stay as they are.

python -m specsim.maintain.convert_results converts every file of fast/measurements once.
"""

import json
import re
from pathlib import Path
from typing import Any

from specsim.core.files import write_whole

KEPT = Path(__file__).resolve().parents[2] / "fast" / "measurements"
FILES = {"bench-peers.json": "bench-baselines.json", "laws-cuda.json": "sampling-test-cuda.json"}
# Old module names that kept results hold.
MODULES = {
    "specsim.bench.table": "specsim.maintain.bench_tables",
    "specsim.conformance.fast_column": "specsim.correctness.conformance.fast_adapter",
    "specsim.fast.draft_law": "specsim.fast.vocabulary.draft_distribution",
    "specsim.fast.draw": "specsim.fast.vocabulary.draw",
    "specsim.fast.excess": "specsim.fast.vocabulary.residual",
    "specsim.fast.metadata": "specsim.fast.model.metadata",
    "specsim.fast.penalties": "specsim.fast.vocabulary.penalties",
    "specsim.fast.rotary": "specsim.fast.model.rotary",
    "specsim.fast.topk": "specsim.fast.vocabulary.topk",
    "specsim.fast.uniforms": "specsim.fast.runtime.uniforms",
    "specsim.pool": "specsim.core.pool",
    "specsim.requests": "specsim.serving.requests",
    "specsim.residents": "specsim.serving.residents",
    "specsim.runner": "specsim.serving.runner",
    "specsim.scheduler": "specsim.serving.scheduler",
    "specsim.uniforms": "specsim.core.uniforms",
}
WORDS = {
    r"\bspecsim laws\b": "specsim sampling-test",
    r"--suite peers\b": "--suite baselines",
    r"coins\b": "uniforms",
    r"coin\b": "uniform",
    r"retract": "preempt",
}
WHOLE = {"company": "batched", "law": "distribution", "peers": "baselines"}  # values that are one such word


def converted(value: Any) -> Any:
    """A JSON value under today's names; numbers are left alone."""
    if isinstance(value, dict):
        return {_text(key): converted(each) for key, each in value.items()}
    if isinstance(value, list):
        return [converted(each) for each in value]
    return _text(value) if isinstance(value, str) else value


def _text(text: str) -> str:
    if text in WHOLE:
        return WHOLE[text]
    for old, new in MODULES.items():
        text = re.sub(rf"(?<![\w.]){re.escape(old)}\b", new, text)
    for old, new in WORDS.items():
        text = re.sub(old, new, text)
    return text


def main() -> None:
    """Convert every kept file and give it its new name."""
    for path in sorted(KEPT.glob("*.json")):
        value = converted(json.loads(path.read_text(encoding="utf-8")))
        path.unlink()
        text = json.dumps(value, indent=1) + "\n"
        write_whole(path.with_name(FILES.get(path.name, path.name)), text.encode())


if __name__ == "__main__":
    main()
