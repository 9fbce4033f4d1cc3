"""Padded requests: rows of a static buffer that belong to no request, and states of only such rows."""

from dataclasses import dataclass

import torch

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.phases import Batch, DraftExtendInput, Verdict, VerifyInput
from specsim.core.state import ALL_STEPS

# Content of a padded request's rows by field, where it is not zero.
PADDING = {
    "req_pool_indices": -1,
    "cache_locations": -1,
    "draft_steps": ALL_STEPS,
    "parents": -1,
    "retrieve_next_token": -1,
    "retrieve_next_sibling": -1,
}


@dataclass(frozen=True, slots=True)
class RoundShape:
    """The sizes of a round's states."""

    bucket: int  # requests that the buffers hold
    config: SpecConfig
    vocab_size: int  # of the target
    num_features: int  # width of the target's features, F
    dtype: torch.dtype  # of hidden states
    has_grammars: bool = False

    @property
    def width(self) -> int:
        """Number of a request's rows in draft-extend and width of an accepted path, S + 1."""
        return self.config.num_steps + 1


def padded_batch(shape: RoundShape) -> Batch:
    """Make a batch of padded requests, with biases so that there is a buffer for them."""
    size = shape.bucket
    params = [SamplingParams(logit_bias={0: 0.0})] * size
    return Batch.of([0] * size, [-1] * size, [0] * size, params, shape.vocab_size)


def padded_verify_input(shape: RoundShape) -> VerifyInput:
    """Make the trees of padded requests."""
    num_nodes = shape.config.num_draft_tokens
    none_BN = torch.full((shape.bucket, num_nodes), -1)
    return VerifyInput(
        draft_tokens=torch.zeros_like(none_BN),
        parents=none_BN,
        scores=torch.zeros(shape.bucket, num_nodes),
        positions=torch.zeros_like(none_BN).flatten(),
        mask=torch.zeros(shape.bucket, num_nodes, num_nodes, dtype=torch.bool),
        retrieve_index=torch.zeros_like(none_BN),
        retrieve_next_token=none_BN,
        retrieve_next_sibling=none_BN,
        cache_locations=none_BN.flatten(),
        proposed_depth=torch.zeros(shape.bucket, dtype=torch.int32),
    )


def padded_verdict(shape: RoundShape) -> Verdict:
    """Make the verdict of padded requests, which accepts only a bonus token."""
    none_BW = torch.full((shape.bucket, shape.width), -1, dtype=torch.int32)
    return Verdict(
        predict=torch.full((shape.bucket * shape.config.num_draft_tokens,), -1, dtype=torch.int32),
        accept_index=none_BW,
        num_accepted_drafts=torch.zeros(shape.bucket, dtype=torch.int32),
        num_accepted_tokens=torch.ones(shape.bucket, dtype=torch.int32),
        logprobs=torch.zeros(none_BW.shape),
    )


def padded_extend_input(shape: RoundShape) -> DraftExtendInput:
    """Make the draft-extend rows of padded requests, S+1 each, that write nothing."""
    num_rows = shape.bucket * shape.width
    ids_R = torch.zeros(num_rows, dtype=torch.int64)
    zeros_B = torch.zeros(shape.bucket, dtype=torch.int32)
    return DraftExtendInput(
        row_starts=shape.width * torch.arange(shape.bucket + 1),
        hidden=torch.zeros(num_rows, shape.num_features, dtype=shape.dtype),
        input_ids=ids_R,
        positions=ids_R,
        cache_locations=ids_R - 1,
        num_accepted_drafts=zeros_B,
        num_accepted_tokens=zeros_B + 1,
        bonus_tokens=zeros_B,
        seq_lens=zeros_B.long(),
        req_pool_indices=zeros_B.long() - 1,
    )
