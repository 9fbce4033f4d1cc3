"""Train the shipped pair: `python -m specsim.maintain.shipped_pair.train`, by stages that hand files to one another."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import nn
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specsim.core.kinds import TRAINABLE
from specsim.core.metrics import acceptance, is_loop
from specsim.maintain.shipped_pair.card import write_card
from specsim.maintain.shipped_pair.corpus import (
    build_corpus,
    compare_selection,
    find_sources,
    first_bytes,
    follow_manifest,
    make_manifest,
    read_documents,
    standard_library,
    write_documents,
)
from specsim.maintain.shipped_pair.prompts import (
    choose_prompts,
    encode_documents,
    save_tokenizer,
    train_tokenizer,
    write_edits,
)
from specsim.maintain.shipped_pair.recipe import SHIPPED, SMOKE, Recipe
from specsim.models.shipped import load_prompts
from specsim.training import DrafterModule, TrainingText, continue_texts, continue_windows, load_target, train_drafter
from specsim.training.estimate import NUM_DRAFTS, agreement, chain_rounds, greedy_drafts
from specsim.training.train import learning_rate, make_optimizers, take_step

TARGET_RATE = 4e-3
VALIDATION_WINDOWS = 256
MAX_LENGTH = 2048
STAGES = ("corpus", "tokenizer", "encode", "target", "continuations", *TRAINABLE)


@dataclass(frozen=True, slots=True)
class PairTraining:
    """Settings that the stages share, and the files that they hand to one another."""

    recipe: Recipe
    out: Path  # receives the pair
    work: Path  # receives what is passed between stages
    manifest: Path | None
    device: torch.device

    def run(self, stage: str) -> None:
        """Run a stage: a step of the pair, or the training of a drafter."""
        steps = {
            "corpus": self.corpus,
            "tokenizer": self.tokenizer,
            "encode": self.encode,
            "target": self.target,
            "continuations": self.continuations,
        }
        if stage in steps:
            steps[stage]()
        else:
            self.drafter(stage)

    def corpus(self) -> None:
        """Write the corpus, its manifest, and its differences from the manifest to follow, which are printed."""
        library = standard_library()
        sources = find_sources() if self.recipe is SHIPPED else [replace(library, paths=library.paths[::8])]
        wanted, differences = None, []
        if self.manifest:
            wanted = json.loads(self.manifest.read_text(encoding="utf-8"))
            sources, differences = follow_manifest(sources, wanted)
        corpus = build_corpus(sources, self.recipe.heldout_one_in, self.recipe.corpus_bytes)
        manifest = make_manifest(corpus, self.recipe.heldout_one_in)
        differences += compare_selection(manifest, wanted) if wanted else []
        for difference in differences:
            click.echo(f"not as in the manifest: {difference}")
        write_documents(corpus.train, self.work / "train.jsonl")
        write_documents(corpus.heldout, self.work / "heldout.jsonl")
        write_json(self.work / "selection.json", {"sha256": manifest["train"]["sha256"], "differences": differences})
        write_json(self.out / "manifest.json", manifest)

    def tokenizer(self) -> None:
        """Write the tokenizer, the prompts and their edits, and excerpts to train small heads on."""
        recipe = self.recipe
        train, heldout = (read_documents(self.work / f"{part}.jsonl") for part in ("train", "heldout"))
        tokenizer = train_tokenizer(
            [document.text for document in train[:: recipe.tokenizer_one_in]], recipe.vocab_size
        )
        save_tokenizer(tokenizer, self.out / "target", MAX_LENGTH)
        prompts = choose_prompts(heldout, tokenizer, recipe.num_prompts, recipe.prompts_a_distribution)
        excerpts = choose_prompts(train, tokenizer, recipe.num_texts, recipe.texts_a_distribution)
        for name, rows in (("prompts", prompts), ("text", excerpts)):
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (self.out / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        write_edits(self.out)

    def encode(self) -> None:
        """Encode the corpus, or the first files of its training part, with the pair's tokenizer."""
        tokenizer = self._tokenizer()
        for part, limit in (("heldout", None), ("train", self.recipe.encoded_bytes)):
            documents = first_bytes(read_documents(self.work / f"{part}.jsonl"), limit)
            texts = [document.text for document in documents]
            tokens = encode_documents(tokenizer, texts)
            np.save(self.work / f"{part}.npy", tokens)
        selection = json.loads((self.work / "selection.json").read_text(encoding="utf-8"))
        write_json(self.work / "corpus.json", {"files": len(texts), "tokens": len(tokens), **selection})

    def target(self) -> None:
        """Write the target in bfloat16, and measure its losses as it is written."""
        tokens, recipe = self._tokens("train"), self.recipe
        start = perf_counter()
        model = train_target(tokens, recipe)
        nn.Module.to(model, torch.bfloat16)
        model.save_pretrained(self.out / "target")
        figures = {
            "parameters": model.num_parameters(),
            "steps": recipe.target_steps,
            "seconds": perf_counter() - start,
            "tokens_seen": recipe.target_steps * recipe.target_batch * recipe.target_window,
            "tokens": len(tokens),
        }
        written = self._load_target()
        for part in ("train", "heldout"):
            figures[f"{part}_loss"] = validation_loss(written, self._tokens(part), recipe.target_window)
        self._note("target", figures)
        self._note("device", torch.cuda.get_device_name() if self.device.type == "cuda" else "a CPU")

    def continuations(self) -> None:
        """Write continuations of the corpus by the target."""
        recipe = self.recipe
        model = self._load_target(torch.bfloat16)
        length = recipe.continued_len
        text = continue_windows(model, self._tokens("train"), recipe.num_continuations, recipe.prompt_len, length, 1)
        for name, tokens in (("greedy", text.greedy_NC), ("sampled", text.sampled_NC)):
            assert tokens is not None
            np.save(self.work / f"{name}.npy", tokens.cpu().numpy().astype(np.uint16))

    def drafter(self, name: str) -> None:
        """Write one drafter, and estimate its acceptance."""
        options = self.recipe.drafters[name]
        tokens, model = self._tokens("train"), self._load_target()
        text = TrainingText(tokens, self._tokens("greedy"), self._tokens("sampled"), self.recipe.prompt_len)
        start = perf_counter()
        trained = train_drafter(model, text, options, checkpoint=self.work / f"{name}.pt", progress=True)
        trained.drafter.write(self.out / name)
        figures: dict[str, Any] = {
            "parameters": trained.drafter.num_parameters,
            "steps": options.num_steps,
            "seconds": perf_counter() - start,
        }
        if trained.drafter.vocabulary is not None:
            figures["coverage"] = torch.isin(tokens, trained.drafter.vocabulary).float().mean().item()
        figures["rollouts"] = 2 * self.recipe.num_continuations
        figures["corpus"] = json.loads((self.work / "corpus.json").read_text(encoding="utf-8"))
        texts = [prompt["text"] for prompt in load_prompts(self.out)]
        figures["acceptance"] = estimate(trained.drafter, model, self._tokenizer(), texts)
        self._note(name, figures)

    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.out / "target" / "tokenizer.json"))

    def _tokens(self, part: str) -> torch.Tensor:
        """Load the token ids of a part (uint16 on disk) as int32."""
        return torch.from_numpy(np.load(self.work / f"{part}.npy").astype(np.int32)).to(self.device)

    def _load_target(self, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
        return load_target(self.out / "target", self.device, dtype)

    def _note(self, name: str, figures: object) -> None:
        """Add figures for the card."""
        path = self.out / "training.json"
        noted = json.loads(path.read_text()) if path.exists() else {}
        write_json(path, {**noted, name: figures})


def write_json(path: Path, content: object) -> None:
    """Write a value as lines that a version control system can compare."""
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def target_config(recipe: Recipe) -> LlamaConfig:
    """Build the configuration of a recipe's target."""
    return LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )


def language_loss(model: PreTrainedModel, windows_BC: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token, in nats."""
    with torch.autocast(windows_BC.device.type, torch.bfloat16, enabled=windows_BC.is_cuda):
        logits_BCV = model(input_ids=windows_BC[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits_BCV.flatten(0, 1).float(), windows_BC[:, 1:].flatten())


def train_target(tokens: torch.Tensor, recipe: Recipe) -> LlamaForCausalLM:
    """Train a target on windows of consecutive tokens, anywhere in the corpus."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(target_config(recipe))
    nn.Module.to(model, tokens.device)  # the same as model.to, which transformers hides from type checkers
    loss_of = torch.compile(language_loss) if tokens.is_cuda else language_loss
    optimizers = make_optimizers(model, TARGET_RATE)
    length = recipe.target_window + 1
    for step in tqdm(range(recipe.target_steps), "target"):
        starts = torch.randint(len(tokens) - length, (recipe.target_batch, 1), device=tokens.device)
        windows_BC = tokens[starts + torch.arange(length, device=tokens.device)].long()
        rate = TARGET_RATE * learning_rate(step / recipe.target_steps, step)
        take_step(loss_of(model, windows_BC), model, optimizers, rate)
    return model


@torch.no_grad()
def validation_loss(model: PreTrainedModel, tokens: torch.Tensor, length: int) -> float:
    """Mean loss in nats a token over up to `VALIDATION_WINDOWS` evenly spaced windows."""
    length = min(length, len(tokens) - 1)
    starts = torch.linspace(0, len(tokens) - length - 1, VALIDATION_WINDOWS).long()[:: 1 if tokens.is_cuda else 16]
    losses = [language_loss(model, tokens[start : start + length + 1].long()[None]) for start in starts.tolist()]
    return torch.stack(losses).mean().item()


def estimate(
    drafter: DrafterModule, target: LlamaForCausalLM, tokenizer: Tokenizer, texts: Sequence[str]
) -> list[dict[str, Any]]:
    """Summarise chains of 3 and 4 drafts at temperature 0 and 1, with and without looping prompts.

    A drafter of fewer steps has no chain of 4.
    """
    torch.manual_seed(3)
    ids = [tokenizer.encode(text).ids for text in texts]
    num_drafts = min(NUM_DRAFTS, drafter.max_drafts or NUM_DRAFTS)
    rows = []
    for temperature in (0, 1):
        continuations = continue_texts(target, ids, temperature)
        agreements = [
            agreement(greedy_drafts(drafter, target, text.tokens_C, num_drafts), text.tokens_C)
            for text in continuations
        ]
        straight = [index for index, text in enumerate(continuations) if not is_loop(text.new_tokens)]
        groups = {f"all {len(texts)}": range(len(texts)), f"{len(straight)} that do not loop": straight}
        for chain, (group, indices) in product([size for size in (3, 4) if size <= num_drafts], groups.items()):
            rounds = [
                accepted
                for index in indices
                for accepted in chain_rounds(agreements[index], continuations[index].prompt_len, chain)
            ]
            figures = acceptance(rounds, chain, chain + 1)
            rows.append({"temperature": temperature, "prompts": group, **asdict(figures)})
    return rows


@click.command()
@click.option("--stage", multiple=True, help=f"Stages: {', '.join(STAGES)}, card. Default: all.")
@click.option("--out", type=Path, default=Path("build/training/tiny"), help="Folder that receives the pair.")
@click.option("--work", type=Path, default=Path("build/training/work"), help="Folder of what stages hand on.")
@click.option("--manifest", type=click.Path(exists=True, path_type=Path), help="Distributions that are selected.")
@click.option("--corpus-bytes", type=int, help="Bytes of the corpus to encode. Default: all.")
@click.option("--smoke", is_flag=True, help="A toy pair from CPython's library, for a CPU.")
def train(
    stage: tuple[str, ...], out: Path, work: Path, manifest: Path | None, corpus_bytes: int | None, smoke: bool
) -> None:
    """Train the pair, or some of its stages; an interrupted drafter goes on where it stopped."""
    recipe = SMOKE if smoke else SHIPPED
    if corpus_bytes is not None:
        recipe = replace(recipe, encoded_bytes=corpus_bytes)
    device = torch.device("cuda" if torch.cuda.is_available() and not smoke else "cpu")
    training = PairTraining(recipe, out, work, manifest, device)
    for folder in (out, work):
        folder.mkdir(parents=True, exist_ok=True)
    for name in stage or (*STAGES, "card"):
        start = perf_counter()
        if name == "card":
            (out / "MODEL_CARD.md").write_text(write_card(recipe, out), encoding="utf-8")
        else:
            training.run(name)
        click.echo(f"{name}: {perf_counter() - start:.1f} s")


if __name__ == "__main__":
    train()
