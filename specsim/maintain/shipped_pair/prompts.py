"""Tokenizer of the pair, prompts of held-out files, and edits of prompts: no choice looks at a model.

The tokenizer is a byte-level byte-pair encoding, with one token between files. An edit is a held-out excerpt, then its
beginning again with an identifier renamed; its continuation repeats most of the excerpt, as an answer that edits a
given file does.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from keyword import kwlist
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from specsim.maintain.shipped_pair.corpus import Document
from specsim.models.shipped import load_prompts

END = "<|endoftext|>"
DOCUMENTS_A_CALL = 512


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn the merges; `END` has id 0 and is both the first and the last token of a file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write the two files that transformers' AutoTokenizer reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    """Encode whole documents as one array of ids (uint16), with `END` before each and after the last."""
    end = [tokenizer.token_to_id(END)]
    parts = []
    for start in tqdm(range(0, len(texts), DOCUMENTS_A_CALL), "encode"):
        encodings = tokenizer.encode_batch_fast(texts[start : start + DOCUMENTS_A_CALL])
        parts += [np.array(end + encoding.ids, np.uint16) for encoding in encodings]
    return np.concatenate([*parts, np.array(end, np.uint16)])


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
    counts: Counter[str] = Counter()
    prompts = []
    for document in documents:
        text = _whole_lines(document, tokenizer)
        if text is None or counts[document.distribution] == a_distribution or len(prompts) == count:
            continue
        counts[document.distribution] += 1
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


IDENTIFIER = re.compile(r"\b(?!__)[A-Za-z_]\w{2,}\b(?=\(|\[| = |=|\.\w)")
NOT_RENAMED = frozenset([*kwlist, "self", "cls"])
HEADING = "# The same code, with {old} renamed to {new}:"


def make_edits(prompts: list[dict[str, str]]) -> list[dict[str, str]]:
    """Make an edit of each prompt that has an identifier to rename in what is to be written.

    The identifier is the most frequent word that is called, indexed, assigned or has an attribute somewhere; ties: the
    first one. The repeated beginning has the fewest whole lines that are a quarter of the excerpt and contain the
    identifier. At least half of the characters have to follow, and the identifier has to be in them.
    """
    texts = [_edit(prompt["text"]) for prompt in prompts]
    return [{**prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True) if text is not None]


def write_edits(folder: Path) -> None:
    """Write edits.jsonl next to the prompts of a pair."""
    lines = [json.dumps(edit, ensure_ascii=False) + "\n" for edit in make_edits(load_prompts(folder))]
    (folder / "edits.jsonl").write_text("".join(lines), encoding="utf-8")


def _edit(text: str) -> str | None:
    names = set(IDENTIFIER.findall(text)) - NOT_RENAMED
    words = Counter(word for word in re.findall(r"\w+", text) if word in names)  # in the order of the text
    if not words:
        return None
    old = max(words, key=lambda word: words[word])
    new = f"new_{old.lstrip('_')}"
    lines = text.splitlines()
    renamed = [re.sub(rf"\b{old}\b", new, line) for line in lines]
    changed = [index for index, (line, other) in enumerate(zip(lines, renamed, strict=True)) if line != other]
    num_repeated = max(changed[0] + 1, -(-len(lines) // 4))
    rest = "\n".join(lines[num_repeated:])
    if changed[-1] < num_repeated or 2 * len(rest) < len(text):
        return None
    return "\n".join([*lines, "", "", HEADING.format(old=old, new=new), *renamed[:num_repeated]]).rstrip()
