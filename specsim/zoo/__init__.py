"""The shipped pair: a small trained target, its two drafters and the prompts held out from their training."""

import json
from pathlib import Path

TINY = Path(__file__).parent / "tiny"


def load_prompts() -> list[dict[str, str]]:
    """Give the held-out prompts, each with its id, text, source and licence."""
    return [json.loads(line) for line in (TINY / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
