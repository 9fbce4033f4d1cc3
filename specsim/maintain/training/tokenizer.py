"""Byte-level byte-pair encoding, with one token between files."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

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
