"""Rollouts: the target's own continuations of corpus windows, for the training of any drafter."""

from time import perf_counter

import torch
from tqdm import tqdm
from transformers import LlamaForCausalLM

from specsim.maintain.training.recipe import Recipe
from specsim.maintain.training.target import sample_windows
from specsim.training.estimate import continue_prompts


def make_rollouts(target: LlamaForCausalLM, tokens: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Continue random corpus windows; int64 [R, rollout_window], greedy batches and sampled ones in turn.

    There are `num_rollouts` of each, or those of the batches that began within `rollout_seconds`.
    """
    torch.manual_seed(1)
    batches = []
    start = perf_counter()
    num_tokens = recipe.rollout_window - recipe.rollout_prompt
    for _ in tqdm(range(0, recipe.num_rollouts, recipe.rollouts_a_batch), "rollouts, twice"):
        if perf_counter() - start > recipe.rollout_seconds:
            break
        for temperature in (0, 1):
            prompts_BC = sample_windows(tokens, recipe.rollouts_a_batch, recipe.rollout_prompt)
            batches.append(continue_prompts(target, prompts_BC, torch.ones_like(prompts_BC), num_tokens, temperature))
    return torch.cat(batches)
