"""Training of an EAGLE-3 head on a text, short enough for a laptop, and its optimiser: Muon and AdamW.

C columns (tokens) of a window · B windows of a step
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers import LlamaForCausalLM

from specsim.core.errors import require, require_int, require_number
from specsim.training.building import HeadSizes, build_head, copy_last_layer
from specsim.training.heads import UnrolledEagle3Head
from specsim.training.unroll import ENGINE, STEP_WEIGHT, Conventions, read_features, unrolled_loss

WARM_UP_STEPS = 100
_TABLES = (
    "embed_tokens.weight",
    "lm_head.weight",
    "markov_w1.weight",
    "markov_w2.weight",
    "confidence_head.proj.weight",
)


def make_optimizers(module: nn.Module, peak: float) -> list[torch.optim.Optimizer]:
    """Choose Muon for the matrices in layers, AdamW for the rest: tables by token, heads and vectors."""
    inside = []
    rest = []
    for name, parameter in module.named_parameters():
        is_inside = parameter.ndim == 2 and not name.endswith(_TABLES)
        (inside if is_inside else rest).append(parameter)
    return [
        torch.optim.Muon(inside, lr=peak, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=peak, weight_decay=0.1, betas=(0.9, 0.95)),
    ]


def learning_rate(progress: float, num_steps: int, warm_up: int = WARM_UP_STEPS) -> float:
    """Compute the share of the peak learning rate at `progress` (0 to 1), after `num_steps` steps.

    It warms up, stays constant, and from one third on falls linearly to 0.
    """
    return min(1.0, (num_steps + 1) / warm_up, 1.5 * max(0.0, 1 - progress))


def take_step(
    loss_of_a_batch: Callable[[], torch.Tensor],
    module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    rate: float,
) -> torch.Tensor:
    """Minimise the loss of one batch by one step, and return this loss."""
    loss = loss_of_a_batch()
    loss.backward()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Sizes of a short training."""

    num_steps: int = 160
    num_windows: int = 4  # of a step
    window: int = 64  # tokens
    num_unrolled: int = 3  # drafts after a token that the head learns
    draft_vocab_size: int = 1024
    feature_layers: tuple[int, ...] = (1, 2, 3)  # target layers whose entering hidden states the head reads
    peak_rate: float = 4e-3  # largest learning rate
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_steps", "num_windows", "num_unrolled", "draft_vocab_size"):
            require_int(name, getattr(self, name))
        require_int("window", self.window, self.num_unrolled + 2)
        require_number("peak_rate", self.peak_rate, 0, 1, "a number from 0 to 1")


class Trained(NamedTuple):
    """A trained head, and the loss of every step."""

    head: UnrolledEagle3Head
    losses: tuple[float, ...]  # in nats, mean over drafts; later drafts weigh less


def train_head(
    target: LlamaForCausalLM,
    tokens: torch.Tensor,
    options: TrainingOptions | None = None,
    conventions: Conventions = ENGINE,
) -> Trained:
    """Train an EAGLE-3 head for a target on a text, starting from the target's last layer.

    tokens: ids of the text. The target runs on every window when it is drawn, so that no features are stored. Equal
    arguments give equal heads on one machine; another machine sums floats in another order. InputError for a text that
    is too short, or for layers that the target does not have.
    """
    options = options or TrainingOptions()
    require(len(tokens) > options.window, "tokens", len(tokens), f"more than the window's {options.window} tokens")
    layers = options.feature_layers
    highest = target.config.num_hidden_layers - 1
    is_ascending = list(layers) == sorted({layer for layer in layers if 0 <= layer <= highest})
    require(layers and is_ascending, "feature_layers", layers, f"ascending ids from 0 to {highest}")
    most = target.config.vocab_size
    require(options.draft_vocab_size <= most, "draft_vocab_size", options.draft_vocab_size, f"at most {most}")
    tokens = tokens.long().to(target.device)
    generator = torch.Generator().manual_seed(options.seed)
    head = _first_head(target, tokens, options)
    optimizers = make_optimizers(head, options.peak_rate)
    warm_up = min(WARM_UP_STEPS, max(1, options.num_steps // 10))
    weights = sum(STEP_WEIGHT**step for step in range(options.num_unrolled))

    def loss_of_a_batch() -> torch.Tensor:
        windows_BC = _draw_windows(tokens, options, generator)
        features = read_features(target, windows_BC, layers, conventions)
        return unrolled_loss(head, features, windows_BC, options.num_unrolled, 0.0, conventions) / weights

    losses = []
    for step in range(options.num_steps):
        rate = options.peak_rate * learning_rate(step / options.num_steps, step, warm_up)
        losses.append(float(take_step(loss_of_a_batch, head, optimizers, rate).detach()))
    return Trained(head.eval().requires_grad_(False), tuple(losses))


def _first_head(target: LlamaForCausalLM, tokens: torch.Tensor, options: TrainingOptions) -> UnrolledEagle3Head:
    """Build the head with which training begins; the global random state is left as it was."""
    sizes = HeadSizes(options.draft_vocab_size, target.config.intermediate_size, options.feature_layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        head = build_head("eagle3", target, tokens, sizes)
    assert isinstance(head, UnrolledEagle3Head)
    copy_last_layer(head, target)
    return head


def _draw_windows(tokens: torch.Tensor, options: TrainingOptions, generator: torch.Generator) -> torch.Tensor:
    """Draw windows [B, C] of consecutive tokens, anywhere in the text."""
    starts = torch.randint(len(tokens) - options.window, (options.num_windows, 1), generator=generator)
    return tokens[(starts + torch.arange(options.window)).to(tokens.device)]


def join_texts(texts: list[list[int]], separator: int) -> torch.Tensor:
    """Join texts, given by their token ids, to one; the separator begins every text and ends the last one."""
    return torch.tensor([token for text in texts for token in (separator, *text)] + [separator])
