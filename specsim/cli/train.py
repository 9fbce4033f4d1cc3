"""specsim train: train a drafter for a target."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from specsim.cli.option_fields import common, option
from specsim.core.errors import require
from specsim.core.kinds import DEFAULT, TRAINABLE
from specsim.core.limits import MOST_LAYERS, Probability, Width

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from specsim.training import Trained, TrainingOptions

CHECKPOINT = "training.pt"
SMOKE_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of specsim train."""

    # Folder for the drafter. A run that was ended continues from the checkpoint in it.
    out: Annotated[Path, common("Output", values="FOLDER", file="folder")]
    # Kind of drafter.
    drafter: Annotated[str, common("Model", choices=TRAINABLE)] = DEFAULT
    # Target, a Llama of transformers: its folder or hub id.
    target: Annotated[str | None, common("Model", values="FOLDER", default="the shipped one", file="reads")] = None
    # Layers of a drafter that may have several.
    num_layers: Annotated[int, option("Model", at_least=1, at_most=MOST_LAYERS)] = 2
    # Width of its feed-forward layers.
    intermediate_size: Annotated[Width | None, option("Model", default="the target's")] = None
    # Most frequent tokens, for drafters of a smaller vocabulary.
    draft_vocab_size: Annotated[Width, option("Model")] = 1024
    # UTF-8 text, or .jsonl with a text a line; one of 16 texts, or of a single one the last sixteenth, is held out.
    data: Annotated[Path | None, common("Data", default="shipped excerpts", file="reads")] = None
    # Windows that the target continues before training, greedily and as many by sampling; the drafter then learns from
    # what the target writes. 0: from the text.
    continuations: Annotated[int, common("Data", at_least=0)] = 0
    # Tokens of a window.
    window: Annotated[int, common("Data", limits="at least num_drafts + 2")] = 64
    # Windows of a step.
    num_windows: Annotated[int, common("Training", at_least=1)] = 4
    # Tokens of a window after which blocks and mask rows draft.
    num_roots: Annotated[int, option("Training", at_least=1)] = 16
    # Steps.
    num_steps: Annotated[int, common("Training", at_least=1)] = 1000
    # Depth that the drafter learns; a drafter of modules has one for each.
    num_drafts: Annotated[int, common("Training", at_least=1)] = 3
    # Loss of a draft against the target's distribution; tv is 1 - acceptance, lk turns from kl to tv.
    loss: Annotated[Literal["cross-entropy", "kl", "tv", "log-acceptance", "lk"], common("Training")] = "cross-entropy"
    # Weights of depths: 0.9 to the power of the depth, equal, or by the drafter's own confidence (d-pace).
    position_weights: Annotated[Literal["decay", "equal", "d-pace"], common("Training")] = "decay"
    # Largest learning rate.
    peak_rate: Annotated[Probability, common("Training")] = 4e-3
    # Random seed.
    seed: Annotated[int, common("Training", at_least=0, at_most=2**31 - 1)] = 0
    # Take 8 steps, to see that all works.
    smoke: Annotated[bool, common("Training")] = False


def train(options: TrainOptions) -> None:
    """Train a drafter for a target, on a CPU or one GPU.

    The drafter learns the target's distributions, and its acceptance is estimated on texts that are held out. Measure
    it with specsim accept --target TARGET --draft FOLDER.

    Exit status: 0 when done, 2 for bad input.

    Examples:
      specsim train --out head --num-steps 300
      specsim train --drafter dflash --position-weights d-pace --out block
    """
    from specsim.training import TrainingOptions

    names = {field.name for field in fields(options)} & {field.name for field in fields(TrainingOptions)}
    values: dict[str, Any] = {name: getattr(options, name) for name in names}
    if options.smoke:
        values["num_steps"] = SMOKE_STEPS
    training = TrainingOptions(**values)
    out = options.out
    require(not (out / "config.json").exists(), "out", str(out), "a folder without a drafter")
    folder = _target_folder(options.target)
    model = _load(folder)
    training.feature_layers_of(model.config.num_hidden_layers)
    trained, prompts = _train(model, folder, options, training)
    trained.drafter.write(out)
    _show(model, trained, prompts, training, out)


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
    model: "LlamaForCausalLM", folder: Path, options: TrainOptions, training: "TrainingOptions"
) -> tuple["Trained", list[list[int]]]:
    """Read the texts and train; with the prompts that are held out."""
    from specsim.models.checkpoint.vocabulary import LazyTokenizer
    from specsim.models.shipped import load_prompts
    from specsim.training import TrainingText, continue_windows, train_drafter
    from specsim.training.text import split_texts

    data = options.data
    texts = [text["text"] for text in load_prompts(name="text")] if data is None else _texts(data)
    end: Any = model.config.eos_token_id
    separator = end[0] if isinstance(end, list) else end or 0
    split = split_texts(texts, LazyTokenizer(folder), separator)
    text = TrainingText(split.tokens_T)
    if count := options.continuations:
        text = continue_windows(model, split.tokens_T, count, options.window // 2, options.window, options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    return train_drafter(model, text, training, checkpoint=options.out / CHECKPOINT, progress=True), split.prompts


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
