"""The shipped pair: a small trained target, its drafters, held-out prompts, a text to train on, and requests."""

import json
from pathlib import Path

TINY = Path(__file__).parent / "tiny"
REQUESTS = Path(__file__).parent / "requests.jsonl"


def load_prompts(folder: Path | None = None, name: str = "prompts") -> list[dict[str, str]]:
    """Read held-out prompts of the shipped pair or of another folder: id, text, source and licence.

    name: prompts, or edits, which repeat most of an excerpt with an identifier renamed, or text: excerpts of files that
    are not held out, to train a small head on.
    """
    lines = ((folder or TINY) / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
