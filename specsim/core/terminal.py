"""Text on a terminal that files or options may contain: control characters escaped, sentences of limited length."""

import re
import sys

MOST = 2000  # characters of a sentence
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")  # without tab and line break


def printable(text: str) -> str:
    """Escape, as Python does, characters that move the cursor, change the terminal or reverse the text."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shortened(text: str, most: int) -> str:
    """Leave out the middle of a text of more than `most` characters, between words where there are some."""
    if len(text) <= most:
        return text
    head, tail = text[: most // 2], text[-(most // 2) :]
    head = head[: head.rfind(" ") + 1] or head
    tail = tail[tail.find(" ") :] if " " in tail else tail
    return f"{head}... ({len(text) - len(head) - len(tail):,} more characters) ...{tail}"


def tell(message: object) -> None:
    """Print a message as one sentence on standard error."""
    text = printable(str(message)).replace("\n", "\\n").replace("\t", "\\t")
    print(f"specsim: {shortened(text, MOST)}", file=sys.stderr)
