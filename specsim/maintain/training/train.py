"""Train the pair: `python -m specsim.maintain.training.train`, by stages that hand files to one another."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import torch
import typer
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from specsim.maintain.training import distil, drafter, parallel, rollouts, target
from specsim.maintain.training import estimate as acceptance
from specsim.maintain.training.block import build_dflash, build_dspark
from specsim.maintain.training.card import write_card
from specsim.maintain.training.corpus import (
    Source,
    build_corpus,
    find_sources,
    first_bytes,
    read_documents,
    standard_library,
    write_documents,
)
from specsim.maintain.training.edits import write_edits
from specsim.maintain.training.manifest import compare_selection, follow_manifest, make_manifest
from specsim.maintain.training.minimise import Budget
from specsim.maintain.training.p_eagle import build_p_eagle
from specsim.maintain.training.prompts import choose_prompts
from specsim.maintain.training.recipe import SHIPPED, SMOKE
from specsim.maintain.training.run import Run, Stage, write_json
from specsim.maintain.training.tokenizer import encode_documents, save_tokenizer, train_tokenizer
from specsim.models.shipped import load_prompts
from specsim.training.estimate import NUM_DRAFTS, head_drafts

_UNROLLED = ("target", "eagle3", "eagle", "mtp", "frozen_kv", "standalone")
PARALLEL = {"p-eagle": build_p_eagle, "dflash": build_dflash, "dspark": build_dspark}
TIMES = [f"{model.replace('-', '_')}_seconds" for model in (*_UNROLLED, *PARALLEL)]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _write_lines(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _few_sources() -> list[Source]:
    library = standard_library()
    return [replace(library, paths=library.paths[::8])]


def select_corpus(run: Run) -> None:
    """Write the corpus, its manifest, and its differences from the manifest to follow, which are printed."""
    wanted = None
    differences = []
    sources = _few_sources() if run.is_smoke else find_sources()
    if run.manifest:
        wanted = json.loads(run.manifest.read_text(encoding="utf-8"))
        sources, differences = follow_manifest(sources, wanted)
    corpus = build_corpus(sources, run.recipe.heldout_one_in, run.recipe.corpus_bytes)
    manifest = make_manifest(corpus, run.recipe.heldout_one_in)
    differences += compare_selection(manifest, wanted) if wanted else []
    for difference in differences:
        typer.echo(f"not as in the manifest: {difference}")
    write_documents(corpus.train, run.work / "train.jsonl")
    write_documents(corpus.heldout, run.work / "heldout.jsonl")
    write_json(run.work / "selection.json", {"sha256": manifest["train"]["sha256"], "differences": differences})
    write_json(run.out / "manifest.json", manifest)


def learn_tokenizer(run: Run) -> None:
    """Write the tokenizer, the prompts and their edits, and excerpts to train small heads on."""
    parts = {part: read_documents(run.work / f"{part}.jsonl") for part in ("train", "heldout")}
    texts = [document.text for document in parts["train"][:: run.recipe.tokenizer_one_in]]
    tokenizer = train_tokenizer(texts, run.recipe.vocab_size)
    save_tokenizer(tokenizer, run.out / "target", target.MAX_LENGTH)
    recipe = run.recipe
    prompts = choose_prompts(parts["heldout"], tokenizer, recipe.num_prompts, recipe.prompts_a_distribution)
    _write_lines(run.out / "prompts.jsonl", prompts)
    excerpts = choose_prompts(parts["train"], tokenizer, recipe.num_texts, recipe.texts_a_distribution)
    _write_lines(run.out / "text.jsonl", excerpts)
    write_edits(run.out)


def encode_corpus(run: Run) -> None:
    """Encode the corpus, or the first files of its training part, with the pair's tokenizer."""
    tokenizer = Tokenizer.from_file(str(run.out / "target" / "tokenizer.json"))
    encoded = {}
    for part, limit in (("train", run.recipe.encoded_bytes), ("heldout", None)):
        documents = first_bytes(read_documents(run.work / f"{part}.jsonl"), limit)
        texts = [document.text for document in documents]
        tokens = encode_documents(tokenizer, texts)
        np.save(run.work / f"{part}.npy", tokens)
        encoded[part] = {"files": len(texts), "tokens": len(tokens)}
    selection = json.loads((run.work / "selection.json").read_text(encoding="utf-8"))
    write_json(run.work / "corpus.json", {**encoded["train"], **selection})


def train_target(run: Run) -> None:
    """Write the target and measure its losses as it is written, in bfloat16."""
    figures = target.train_target(run.tokens("train"), run.recipe, run.budget(Stage.TARGET), run.out / "target")
    for part in ("train", "heldout"):
        loss = target.validation_loss(run.target(), run.tokens(part), run.recipe.target_window)
        figures[f"{part}_loss"] = loss
        typer.echo(f"{part} loss {loss:.3f}")
    run.note(Stage.TARGET, figures)
    run.note("device", torch.cuda.get_device_name() if run.device.type == "cuda" else "a CPU")


def write_rollouts(run: Run) -> None:
    """Write continuations by the target."""
    written = rollouts.make_rollouts(run.target(torch.bfloat16), run.tokens("train"), run.recipe)
    np.save(run.work / "rollouts.npy", written.cpu().numpy().astype(np.uint16))


def train_head(run: Run, stage: Stage) -> None:
    """Write one EAGLE head and estimate its acceptance."""
    model = run.target()
    head, figures = drafter.train_head(
        stage, model, run.tokens("train"), run.tokens("rollouts"), run.recipe, run.budget(stage), run.out / stage
    )
    _note_drafter(run, stage, figures, model, partial(head_drafts, head, model))


def train_student(run: Run, stage: Stage) -> None:
    """Write one drafter that is distilled from the target, and estimate its acceptance."""
    model = run.target()
    rollouts = run.tokens("rollouts")
    budget = run.budget(stage)
    student, figures = distil.train_student(
        stage, model, run.tokens("train"), rollouts, run.recipe, budget, run.out / stage
    )
    figures |= _learned_from(run, budget, len(rollouts))
    num_drafts = run.recipe.num_mtp_modules if stage == Stage.MTP else NUM_DRAFTS
    _note_drafter(run, stage, figures, model, partial(acceptance.student_drafts, student, model, num_drafts))


def train_parallel(run: Run, stage: Stage) -> None:
    """Write one drafter that drafts all depths at once, and estimate its acceptance."""
    model = run.target()
    rollouts = run.tokens("rollouts")
    budget = run.budget(stage)
    learner, figures = parallel.train_parallel(
        stage, PARALLEL[stage], model, rollouts, run.recipe, budget, run.out / stage
    )
    figures |= _learned_from(run, budget, len(rollouts))
    _note_drafter(run, stage, figures, model, partial(parallel.parallel_drafts, learner, model, NUM_DRAFTS))


def _learned_from(run: Run, budget: Budget, num_rollouts: int) -> dict[str, Any]:
    """Describe the text that a drafter was distilled on, and the time that it was given."""
    corpus = json.loads((run.work / "corpus.json").read_text(encoding="utf-8"))
    return {"of_seconds": budget.seconds, "rollouts": num_rollouts, "corpus": corpus}


def _note_drafter(
    run: Run,
    stage: Stage,
    figures: dict[str, Any],
    model: LlamaForCausalLM,
    drafts_of: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    tokenizer = Tokenizer.from_file(str(run.out / "target" / "tokenizer.json"))
    texts = [prompt["text"] for prompt in load_prompts(run.out)]
    rows = acceptance.estimate(drafts_of, model, tokenizer, texts)
    for row in rows:
        typer.echo(f"{stage} {row}")
    run.note(stage, {**figures, "acceptance": rows})


def fill_card(run: Run) -> None:
    """Write the model card; `acceptance.json`, if it is there, is what `specsim accept --json` wrote."""
    (run.out / "MODEL_CARD.md").write_text(write_card(run.recipe, run.out), encoding="utf-8")


STAGES: dict[Stage, Callable[[Run], None]] = {
    Stage.CORPUS: select_corpus,
    Stage.TOKENIZER: learn_tokenizer,
    Stage.ENCODE: encode_corpus,
    Stage.TARGET: train_target,
    Stage.ROLLOUTS: write_rollouts,
    Stage.EAGLE3: partial(train_head, stage=Stage.EAGLE3),
    Stage.EAGLE: partial(train_head, stage=Stage.EAGLE),
    Stage.MTP: partial(train_student, stage=Stage.MTP),
    Stage.FROZEN_KV: partial(train_student, stage=Stage.FROZEN_KV),
    Stage.STANDALONE: partial(train_student, stage=Stage.STANDALONE),
    Stage.P_EAGLE: partial(train_parallel, stage=Stage.P_EAGLE),
    Stage.DFLASH: partial(train_parallel, stage=Stage.DFLASH),
    Stage.DSPARK: partial(train_parallel, stage=Stage.DSPARK),
    Stage.CARD: fill_card,
}


@app.command()
def train(
    stage: Annotated[list[Stage] | None, typer.Option(help="Stages to run; all of them if none is named.")] = None,
    out: Annotated[Path, typer.Option(help="Folder that receives the pair.")] = Path("build/training/tiny"),
    work: Annotated[Path, typer.Option(help="Folder of what stages hand on.")] = Path("build/training/work"),
    manifest: Annotated[
        Path | None, typer.Option(help="Select the distributions of this manifest.", exists=True)
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Training time of each model, in all.", show_default="the recipe's")
    ] = None,
    slice_seconds: Annotated[
        float | None, typer.Option("--slice", help="Training time of each model in this run; the next one continues.")
    ] = None,
    corpus_bytes: Annotated[
        int | None, typer.Option(help="Bytes of the corpus to encode.", show_default="all of it")
    ] = None,
    smoke: Annotated[bool, typer.Option(help="A toy pair from CPython's library, for a CPU.")] = False,
) -> None:
    """Train the pair, or some of its stages."""
    recipe = SMOKE if smoke else SHIPPED
    if corpus_bytes is not None:
        recipe = replace(recipe, encoded_bytes=corpus_bytes)
    if seconds is not None:
        recipe = replace(recipe, **dict.fromkeys(TIMES, seconds))
    device = torch.device("cuda" if torch.cuda.is_available() and not smoke else "cpu")
    run = Run(recipe, out, work, manifest, smoke, device, slice_seconds)
    for folder in (out, work):
        folder.mkdir(parents=True, exist_ok=True)
    for each in stage or Stage:
        start = perf_counter()
        STAGES[each](run)
        typer.echo(f"{each}: {perf_counter() - start:.1f} s")


if __name__ == "__main__":
    app()
