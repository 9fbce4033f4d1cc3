"""One run of the training: its settings, its stages, and the files that stages hand to one another."""

import fcntl
import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from specsim.maintain.training.minimise import Budget
from specsim.maintain.training.recipe import Recipe
from specsim.training.building import load_target


class Stage(StrEnum):
    """Stages in their order."""

    CORPUS = "corpus"
    TOKENIZER = "tokenizer"
    ENCODE = "encode"
    TARGET = "target"
    ROLLOUTS = "rollouts"
    EAGLE3 = "eagle3"
    EAGLE = "eagle"
    MTP = "mtp"
    FROZEN_KV = "frozen-kv"
    STANDALONE = "standalone"
    P_EAGLE = "p-eagle"
    DFLASH = "dflash"
    DSPARK = "dspark"
    CARD = "card"


@dataclass(frozen=True, slots=True)
class Run:
    """Settings that the stages share, and the files that they hand to one another."""

    recipe: Recipe
    out: Path  # receives the pair
    work: Path  # receives what is passed between stages
    manifest: Path | None
    is_smoke: bool
    device: torch.device
    slice_seconds: float | None  # training time of one model in this run at most

    def note(self, name: str, figures: object) -> None:
        """Add figures for the card; stages of several processes take turns."""
        path = self.out / "training.json"
        with (self.work / "training.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            noted = json.loads(path.read_text()) if path.exists() else {}
            write_json(path, {**noted, name: figures})

    def budget(self, stage: Stage) -> Budget:
        """Give a model its training time and the file from which the next run continues."""
        seconds = getattr(self.recipe, f"{stage.replace('-', '_')}_seconds")
        return Budget(seconds, self.slice_seconds, self.work / f"{stage}.pt")

    def tokens(self, part: str) -> torch.Tensor:
        """Load the token ids of a part (uint16 on disk) as int32."""
        return torch.from_numpy(np.load(self.work / f"{part}.npy").astype(np.int32)).to(self.device)

    def target(self, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
        return load_target(self.out / "target", self.device, dtype)


def write_json(path: Path, content: object) -> None:
    """Write a value as lines that a version control system can compare."""
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
