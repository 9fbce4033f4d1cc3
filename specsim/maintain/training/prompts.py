"""Held-out prompts, chosen by a rule that does not look at any model."""

from collections import Counter

from tokenizers import Tokenizer

from specsim.maintain.training.corpus import Document

TOKENS = range(96, 193)
RULE = (
    "They were chosen from the held-out files in ascending SHA-256, at most {a_distribution} of a distribution. A "
    "prompt starts at a line of its file's first half (the SHA-256's first 32 bits modulo the half's lines), takes as "
    "many whole lines as fit in 192 tokens and needs 96; the file has to go on for as many lines."
)


def choose_prompts(
    documents: list[Document], tokenizer: Tokenizer, count: int, a_distribution: int
) -> list[dict[str, str]]:
    """Choose `count` prompts by `RULE`; documents come in ascending SHA-256."""
    taken: Counter[str] = Counter()
    prompts = []
    for document in documents:
        text = _whole_lines(document, tokenizer)
        if text is None or taken[document.distribution] == a_distribution or len(prompts) == count:
            continue
        taken[document.distribution] += 1
        prompts.append(
            {
                "id": f"{len(prompts):02d}",
                "text": text,
                "source": document.source,
                "licence": document.licence,
                "file_sha256": document.sha256,
            }
        )
    return prompts


def _whole_lines(document: Document, tokenizer: Tokenizer) -> str | None:
    lines = document.text.splitlines(keepends=True)
    first = int(document.sha256[:8], 16) % (len(lines) // 2 or 1)
    text = ""
    last = first
    while last < len(lines) and len(tokenizer.encode(text + lines[last]).ids) < TOKENS.stop:
        text += lines[last]
        last += 1
    text = text.rstrip()
    is_long_enough = len(tokenizer.encode(text).ids) in TOKENS and 2 * last - first <= len(lines)
    return text if is_long_enough else None
