"""specsim train: train a drafter for a target."""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from specsim.cli.file_options import reads, writes_folder
from specsim.cli.options import option
from specsim.core.errors import require, require_int
from specsim.core.kinds import DEFAULT, TRAINABLE

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from specsim.training import Trained, TrainingOptions

CHECKPOINT = "training.pt"
SMOKE_STEPS = 8


def train(
    out: Annotated[
        Path,
        option(
            "Output",
            "Folder for the drafter. A run that was ended continues from the checkpoint in it.",
            metavar="FOLDER",
            callback=writes_folder,
        ),
    ],
    drafter: Annotated[str, option("Model", "Kind of drafter.", metavar="|".join(TRAINABLE))] = DEFAULT,
    target: Annotated[
        str | None,
        option(
            "Model",
            "Target, a Llama of transformers: its folder or hub id.",
            metavar="FOLDER",
            show_default="the shipped one",
            callback=reads,
        ),
    ] = None,
    num_layers: Annotated[
        int, option("Model", "Layers of P-EAGLE, block, frozen-KV and standalone drafters. [at least 1]")
    ] = 2,
    intermediate_size: Annotated[
        int | None, option("Model", "Width of its feed-forward layers. [at least 1]", show_default="the target's")
    ] = None,
    draft_vocab_size: Annotated[int, option("Model", "Most frequent tokens that EAGLE-3 drafts. [at least 1]")] = 1024,
    data: Annotated[
        Path | None,
        option(
            "Data",
            "UTF-8 text, or .jsonl with a text a line; one of 16 texts, or of a single one the last sixteenth, is "
            "held out.",
            metavar="FILE",
            show_default="shipped excerpts",
            callback=reads,
        ),
    ] = None,
    continuations: Annotated[
        int,
        option(
            "Data",
            "Windows that the target continues before training, greedily and as many by sampling; the drafter then "
            "learns from what the target writes. 0: from the text. [at least 0]",
        ),
    ] = 0,
    window: Annotated[int, option("Data", "Tokens of a window. [at least num_drafts + 2]")] = 64,
    num_windows: Annotated[int, option("Training", "Windows of a step. [at least 1]")] = 4,
    num_roots: Annotated[
        int, option("Training", "Tokens of a window after which blocks and mask rows draft. [at least 1]")
    ] = 16,
    num_steps: Annotated[int, option("Training", "Steps. [at least 1]")] = 1000,
    num_drafts: Annotated[
        int, option("Training", "Depth that the drafter learns; MTP has a module for each. [at least 1]")
    ] = 3,
    loss: Annotated[
        str,
        option(
            "Training",
            "Loss of a draft against the target's distribution; tv is 1 - acceptance, lk turns from kl to tv.",
            metavar="cross-entropy|kl|tv|log-acceptance|lk",
        ),
    ] = "cross-entropy",
    position_weights: Annotated[
        str,
        option(
            "Training",
            "Weights of depths: 0.9 to the power of the depth, equal, or by the drafter's own confidence (d-pace).",
            metavar="decay|equal|d-pace",
        ),
    ] = "decay",
    peak_rate: Annotated[float, option("Training", "Largest learning rate. [0 to 1]")] = 4e-3,
    seed: Annotated[int, option("Training", "Random seed. [0 to 2^31 - 1]")] = 0,
    smoke: Annotated[bool, option("Training", f"Take {SMOKE_STEPS} steps, to see that all works.", "--smoke")] = False,
) -> None:
    """Train a drafter for a target, on a CPU or one GPU.

    The drafter learns the target's distributions, and its acceptance is estimated on texts that are held out. Measure
    it with specsim accept --target TARGET --draft FOLDER.

    Exit status: 0 when done, 2 for bad input.

    Examples:
      specsim train --out head --num-steps 300
      specsim train --drafter dflash --position-weights d-pace --out block
    """
    given = locals()
    require_int("seed", seed, 0, 2**31 - 1)
    require_int("continuations", continuations, 0)
    if intermediate_size is not None:
        require_int("intermediate_size", intermediate_size)
    from specsim.training import TrainingOptions

    names = [field.name for field in fields(TrainingOptions) if field.name in given]
    chosen: dict[str, Any] = {name: given[name] for name in names}
    if smoke:
        chosen["num_steps"] = SMOKE_STEPS
    options = TrainingOptions(**chosen)
    require(not (out / "config.json").exists(), "out", str(out), "a folder without a drafter")
    folder = _target_folder(target)
    model = _load(folder)
    options.feature_layers_of(model.config.num_hidden_layers)
    trained, prompts = _train(model, folder, data, continuations, options, out)
    trained.drafter.write(out)
    _show(model, trained, prompts, options, out)


def _target_folder(target: str | None) -> Path:
    from specsim.models.checkpoint.loading import locate
    from specsim.models.shipped import TINY

    return TINY / "target" if target is None else locate("target", target)


def _load(folder: Path) -> "LlamaForCausalLM":
    """Load the target; InputError for another family than Llama."""
    import torch

    from specsim.models.checkpoint.model_config import read_target_config
    from specsim.training import load_target

    family = read_target_config(folder).family
    require(family == "llama", "target", str(folder), f"a model of the Llama family, and not of {family}")
    return load_target(folder, "cuda" if torch.cuda.is_available() else "cpu")


def _train(
    model: "LlamaForCausalLM",
    folder: Path,
    data: Path | None,
    continuations: int,
    options: "TrainingOptions",
    out: Path,
) -> tuple["Trained", list[list[int]]]:
    """Read the texts and train; with the prompts that are held out."""
    from specsim.models.checkpoint.vocabulary import LazyTokenizer
    from specsim.models.shipped import load_prompts
    from specsim.training import TrainingText, continue_windows, train_drafter
    from specsim.training.text import split_texts

    texts = [text["text"] for text in load_prompts(name="text")] if data is None else _texts(data)
    end: Any = model.config.eos_token_id
    separator = end[0] if isinstance(end, list) else end or 0
    split = split_texts(texts, LazyTokenizer(folder), separator)
    text = TrainingText(split.tokens_T)
    if continuations:
        text = continue_windows(model, split.tokens_T, continuations, options.window // 2, options.window, options.seed)
    out.mkdir(parents=True, exist_ok=True)
    return train_drafter(model, text, options, checkpoint=out / CHECKPOINT, progress=True), split.prompts


def _texts(path: Path) -> list[str]:
    """Read a UTF-8 file: a .jsonl with a text, prompt or conversation a line, or one text."""
    from specsim.acceptance.measured_pair import read_prompts
    from specsim.core.files import read_text

    if path.suffix.lower() != ".jsonl":
        return [read_text(path, "data", "a UTF-8 text file, or a .jsonl of texts")]
    texts = [prompt for prompt in read_prompts(path) if isinstance(prompt, str)]
    require(texts, "data", str(path), "a .jsonl of texts; token ids have no text")
    return texts


def _show(
    model: "LlamaForCausalLM", trained: "Trained", prompts: list[list[int]], options: "TrainingOptions", out: Path
) -> None:
    """Print the figures of a training."""
    from specsim.core.display import print_table, stdout_console
    from specsim.core.errors import printable
    from specsim.training import continue_texts, estimate_acceptance
    from specsim.training.estimate import NUM_DRAFTS

    rows = [
        ("drafter", f"{options.drafter}, {trained.drafter.num_parameters:,} parameters"),
        ("steps", f"{len(trained.losses):,}"),
        ("loss of the first and the last ten steps", f"{_mean(trained.losses[:10])} {_mean(trained.losses[-10:])}"),
    ]
    if prompts:
        num_drafts = min(options.num_drafts, NUM_DRAFTS)
        figures = estimate_acceptance(trained.drafter, model, continue_texts(model, prompts), num_drafts)
        text = f"{figures.accept_length:.3f} (chain of {num_drafts}, temperature 0, {len(prompts)} held-out texts)"
        rows.append(("accept length, bonus included", text))
    console = stdout_console()
    print_table(console, (), [*rows, ("written to", printable(str(out)))])


def _mean(losses: tuple[float, ...]) -> str:
    return f"{sum(losses) / len(losses):.3f}"
