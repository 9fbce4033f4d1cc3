"""Training of a drafter: windows of a text or of the target's continuations, and steps that a later run continues.

B windows · C columns (tokens) of a window · T tokens of a text · N continuations · A roots of a window
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import LlamaForCausalLM

from specsim.core.arguments import check_arguments
from specsim.core.errors import InputError, require, require_int
from specsim.core.kinds import KINDS
from specsim.core.limits import RequestCount, Seed, TokenCount, TokenId
from specsim.core.verifiers import resolve
from specsim.training.drafter import DrafterModule, Roots
from specsim.training.estimate import continue_prompts
from specsim.training.losses import drafting_loss
from specsim.training.options import TrainingOptions

CONTINUED_SHARE = 0.75  # of roots, in the part of a window that the target wrote
WARM_UP_STEPS = 100
SECONDS_A_CHECKPOINT = 60.0
CONTINUATIONS_A_BATCH = 8192
# Parameters that AdamW trains although they are matrices: tables by token, and heads.
_TABLES = (
    "embed_tokens.weight",
    "lm_head.weight",
    "markov_w1.weight",
    "markov_w2.weight",
    "confidence_head.proj.weight",
)


class TrainingText(NamedTuple):
    """Token ids to learn from: a text, and continuations of its windows by the target."""

    tokens_T: torch.Tensor  # i64
    greedy_NC: torch.Tensor | None = None  # continued at temperature 0
    sampled_NC: torch.Tensor | None = None  # at temperature 1
    prompt_len: int = 1  # tokens of a continuation that are the text's

    def on(self, device: torch.device) -> "TrainingText":
        """Move all ids to a device."""
        greedy_NC, sampled_NC = (ids if ids is None else ids.to(device) for ids in (self.greedy_NC, self.sampled_NC))
        return TrainingText(self.tokens_T.to(device).long(), greedy_NC, sampled_NC, self.prompt_len)


class Trained(NamedTuple):
    """A trained drafter, and the loss of every step."""

    drafter: Any  # a DrafterModule
    losses: tuple[float, ...]  # mean over depths, by their weights


@check_arguments
def join_texts(texts: Sequence[Sequence[TokenId]], separator: TokenId) -> torch.Tensor:
    """Join texts, given by their token ids, to one; the separator begins every text and ends the last one."""
    return torch.tensor([token for text in texts for token in (separator, *text)] + [separator])


@check_arguments
def continue_windows(
    target: LlamaForCausalLM,
    tokens_T: torch.Tensor,
    count: RequestCount,
    prompt_len: TokenCount,
    length: TokenCount,
    seed: Seed = 0,
) -> TrainingText:
    """Let the target continue `count` windows of the text to `length` tokens greedily, and as many by sampling."""
    require(len(tokens_T) > prompt_len, "tokens", len(tokens_T), f"more than the {prompt_len} of a prompt")
    require_int("length", length, prompt_len + 1)
    generator = torch.Generator().manual_seed(seed)
    parts: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    devices = [tokens_T.device] if tokens_T.is_cuda else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        for start in tqdm(range(0, count, CONTINUATIONS_A_BATCH), "continuations", disable=None):
            size = min(CONTINUATIONS_A_BATCH, count - start)
            for temperature, windows in parts.items():
                prompts_BC = _draw(tokens_T, size, prompt_len, generator)
                mask_BC = torch.ones_like(prompts_BC)
                windows.append(continue_prompts(target, prompts_BC, mask_BC, length - prompt_len, temperature))
    return TrainingText(tokens_T, torch.cat(parts[0]), torch.cat(parts[1]), prompt_len)


def _draw(tokens_T: torch.Tensor, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Draw windows [B, C] of consecutive tokens, anywhere in the text."""
    starts = torch.randint(len(tokens_T) - length, (count, 1), generator=generator)
    return tokens_T[(starts + torch.arange(length)).to(tokens_T.device)]


def draw_windows(text: TrainingText, options: TrainingOptions, generator: torch.Generator) -> torch.Tensor:
    """Draw windows [B, C] of continuations and of the text, or of the text alone where there are none."""
    count = options.num_windows
    text_BC = _draw(text.tokens_T, count, options.window, generator)
    if text.greedy_NC is None or text.sampled_NC is None:
        return text_BC
    index = torch.randint(len(text.greedy_NC), (count,), generator=generator).to(text_BC.device)
    is_greedy, is_text = (
        (torch.rand(count, 1, generator=generator) < share).to(text_BC.device)
        for share in (options.greedy_share, options.text_share)
    )
    chosen_BC = torch.where(is_greedy, text.greedy_NC[index], text.sampled_NC[index])[:, : options.window].long()
    return torch.where(is_text, text_BC, chosen_BC)


def draw_roots(
    num_windows: int, num_columns: int, prompt_len: int, options: TrainingOptions, generator: torch.Generator
) -> Roots:
    """Draw roots, most of them in the part that continues the prompt; each has 1 to `num_drafts` drafts."""
    end = num_columns - options.num_drafts + 1
    continued = round(options.num_roots * CONTINUED_SHARE) if 1 < prompt_len < end else options.num_roots
    parts = ((1, prompt_len, options.num_roots - continued), (min(prompt_len, end - 1), end, continued))
    columns = [torch.randint(low, high, (num_windows, size), generator=generator) for low, high, size in parts if size]
    shape = (num_windows, options.num_roots)
    return Roots(torch.cat(columns, 1), torch.randint(1, options.num_drafts + 1, shape, generator=generator))


@check_arguments
def train_drafter(
    target: LlamaForCausalLM,
    text: TrainingText | torch.Tensor,
    options: TrainingOptions | None = None,
    *,
    checkpoint: Path | None = None,
    progress: bool = False,
) -> Trained:
    """Train a drafter for a target on a text.

    text: token ids, or with continuations of `continue_windows`. The target runs on every window when it is drawn, so
    that no features are stored. Equal arguments give equal drafters on one machine; another machine sums floats in
    another order. checkpoint: a file from which a run that was ended continues, as if it had not been; it is removed at
    the end. InputError for a text that is too short, and for a checkpoint of another training.
    """
    options = options or TrainingOptions()
    text = text if isinstance(text, TrainingText) else TrainingText(text)
    require(text.tokens_T.ndim == 1, "text", f"{text.tokens_T.ndim} dimensions", "token ids of one text, a tensor [T]")
    device = target.device
    text = text.on(device)
    columns = len(text.tokens_T) if text.greedy_NC is None else text.greedy_NC.shape[1] + 1
    require(columns > options.window, "tokens", columns, f"more than the window's {options.window} tokens")
    drafter = build_drafter(target, text.tokens_T, options)
    optimizers = make_optimizers(drafter, options.peak_rate)
    losses = _resume(checkpoint, options, drafter, optimizers)
    warm_up = min(WARM_UP_STEPS, max(1, options.num_steps // 10))
    loss_of = torch.compile(drafting_loss, dynamic=False) if device.type == "cuda" else drafting_loss
    kept = monotonic()
    try:
        for step in tqdm(range(len(losses), options.num_steps), options.drafter, disable=None if progress else True):
            rate = options.peak_rate * learning_rate(step / options.num_steps, step, warm_up)
            loss = _loss_of_a_batch(loss_of, drafter, target, text, options, step)
            losses.append(float(take_step(loss, drafter, optimizers, rate).detach()))
            if monotonic() - kept > SECONDS_A_CHECKPOINT:
                _save(checkpoint, options, drafter, optimizers, losses)
                kept = monotonic()
    except KeyboardInterrupt:
        _save(checkpoint, options, drafter, optimizers, losses)
        raise
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    return Trained(drafter.eval().requires_grad_(False), tuple(losses))


def build_drafter(target: LlamaForCausalLM, tokens_T: torch.Tensor, options: TrainingOptions) -> DrafterModule:
    """Build the drafter with which training begins; the global random state is left as it was."""
    trainer = KINDS[options.drafter].trainer
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        drafter = resolve(trainer)(target, tokens_T, options).to(target.device)
    if drafter.max_drafts is not None:
        require_int("num_drafts", options.num_drafts, 1, drafter.max_drafts)
    return drafter


def _loss_of_a_batch(
    loss_of: Callable[..., torch.Tensor],
    drafter: DrafterModule,
    target: LlamaForCausalLM,
    text: TrainingText,
    options: TrainingOptions,
    step: int,
) -> torch.Tensor:
    """Draw the windows of a step, which depend on the seed and the step alone, and compute their loss."""
    generator = torch.Generator().manual_seed((options.seed << 32) + step)
    windows_BC = draw_windows(text, options, generator)
    prompt_len = 1 if text.greedy_NC is None else text.prompt_len
    num_windows, num_columns = windows_BC.shape
    roots = draw_roots(num_windows, num_columns, prompt_len, options, generator)
    roots = Roots(*(part.to(windows_BC.device) for part in roots))
    with torch.autocast(windows_BC.device.type, torch.bfloat16, enabled=windows_BC.is_cuda):
        reading = drafter.read(target, windows_BC)
        arguments = options.num_drafts, options.loss, options.position_weights
        return loss_of(drafter, reading, windows_BC, roots, *arguments)


def make_optimizers(module: nn.Module, peak: float) -> list[torch.optim.Optimizer]:
    """Choose Muon for the matrices in layers, AdamW for the rest: tables by token, heads and vectors."""
    matrices = []
    rest = []
    for name, parameter in module.named_parameters():
        is_inside = parameter.ndim == 2 and not name.endswith(_TABLES)
        (matrices if is_inside else rest).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=peak, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=peak, weight_decay=0.1, betas=(0.9, 0.95)),
    ]


def learning_rate(progress: float, num_steps: int, warm_up: int = WARM_UP_STEPS) -> float:
    """Compute the share of the peak learning rate at `progress` (0 to 1), after `num_steps` steps.

    It warms up, stays constant, and from one third on falls linearly to 0.
    """
    return min(1.0, (num_steps + 1) / warm_up, 1.5 * max(0.0, 1 - progress))


def take_step(
    loss: torch.Tensor, module: nn.Module, optimizers: list[torch.optim.Optimizer], rate: float
) -> torch.Tensor:
    """Minimise a loss by one step, and return it."""
    loss.backward()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss


def _settings(options: TrainingOptions) -> dict[str, Any]:
    return {name: value for name, value in asdict(options).items() if name != "conventions"}


def _save(
    path: Path | None,
    options: TrainingOptions,
    drafter: DrafterModule,
    optimizers: list[torch.optim.Optimizer],
    losses: list[float],
) -> None:
    """Write a checkpoint whole or not at all."""
    if path is None:
        return
    partial = path.with_suffix(".partial")
    states = [optimizer.state_dict() for optimizer in optimizers]
    content = {"options": _settings(options), "drafter": drafter.state_dict(), "optimizers": states, "losses": losses}
    torch.save(content, partial)
    partial.replace(path)


def _resume(
    path: Path | None,
    options: TrainingOptions,
    drafter: DrafterModule,
    optimizers: list[torch.optim.Optimizer],
) -> list[float]:
    """Load a checkpoint, and return the losses of its steps; none where there is no file."""
    if path is None or not path.exists():
        return []
    try:
        content = torch.load(path, map_location=next(drafter.parameters()).device, weights_only=True)
        is_same = content["options"] == _settings(options)
    except (OSError, RuntimeError, KeyError, TypeError, EOFError, ValueError, UnpicklingError) as error:
        raise InputError("checkpoint", path, "a checkpoint of this training; delete it to start over") from error
    require(is_same, "checkpoint", path, "of a training with these options; delete it to start over")
    drafter.load_state_dict(content["drafter"])
    for optimizer, state in zip(optimizers, content["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    return list(content["losses"])
