"""The shipped pair: a small trained target, its drafters, held-out prompts, a text to train on, and requests."""

import json
from pathlib import Path

from specsim.core.arguments import check_arguments
from specsim.core.errors import require_choice

TINY = Path(__file__).parent / "tiny"
REQUESTS = Path(__file__).parent / "requests.jsonl"


@check_arguments
def load_prompts(folder: Path | None = None, name: str = "prompts") -> list[dict[str, str]]:
    """Read held-out prompts (edits: most of an excerpt again) or a text to train on: id, text, source and licence."""
    require_choice("name", name, ("prompts", "edits", "text"))
    lines = ((folder or TINY) / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
