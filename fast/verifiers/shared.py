"""Verification with a vocabulary that ranks share: every rank fetches the groups of tokens that its walks read."""

import torch

from specsim.core.config import SpecConfig
from specsim.core.kinds import resolve
from specsim.core.phases import Batch, Verdict, VerifyInput
from specsim.core.pool import KVPool
from specsim.core.rank_group import RankGroup
from specsim.core.verifiers import DEFAULT_VERIFIER
from specsim.fast.sampling import summarised_distributions
from specsim.fast.verifiers.finish import bonus_groups, finish
from specsim.fast.verifiers.path import PathTables
from specsim.fast.verifiers.round import Round
from specsim.fast.vocabulary.draw import Requests
from specsim.fast.vocabulary.penalties import adjust_logits
from specsim.fast.vocabulary.shared_rows import SharedRows, best_groups
from specsim.fast.vocabulary.summaries import GROUP


def can_share(ranks: RankGroup, vocab_size: int, config: SpecConfig) -> bool:
    """Check whether the verifier is the one that reads few tokens of a row, and slices begin with a group."""
    return config.verifier == DEFAULT_VERIFIER and ranks.part.chunk(vocab_size) % GROUP == 0


def needs_all(batch: Batch, vocab_size: int) -> bool:
    """Check on the host whether a request has a filter, penalty or bias, which may depend on every token."""
    sampling = batch.sampling
    changes = (
        (sampling.top_k > 0) & (sampling.top_k < vocab_size),
        sampling.top_p < 1,
        sampling.min_p > 0,
        sampling.repetition_penalty != 1,
        sampling.presence_penalty != 0,
        sampling.frequency_penalty != 0,
        sampling.is_biased,
    )
    return bool(torch.stack(changes).any())


def verify_shared(
    ranks: RankGroup,
    batch: Batch,
    verify_input: VerifyInput,
    own_RC: torch.Tensor,
    config: SpecConfig,
    pools: KVPool,
    vocab_size: int,
    out: Verdict,
) -> None:
    """Verify every tree with this rank's slice of the target's logits, with the result of `verify` of whole rows.

    Fetched are each row's best group, the groups of every node's token at its parent, and those of the bonus tokens.
    Requests have no filters, penalties or biases.
    """
    rows = SharedRows.of(ranks, own_RC, vocab_size)
    logits = adjust_logits(batch, rows.table, pools, None, 0)
    summaries = rows.summaries(batch, logits.changed)
    rows.fetch(*_wanted(verify_input, summaries[0]))
    made = summarised_distributions(batch, logits, summaries)
    rejected_B = torch.empty(batch.size, dtype=torch.int64, device=own_RC.device)
    requests = Requests.of(batch)
    paths = PathTables.of(out)
    resolve(config.verifier_kind.fast)(Round(requests, verify_input, made, config, None, None, paths, rejected_B))
    rows.fetch(*bonus_groups(batch, verify_input, made, config, out, rejected_B))
    finish(batch, verify_input, made, None, None, config, out, rejected_B)


def _wanted(verify_input: VerifyInput, maxima_RG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """List (rows, groups): the best group of every row, and the group of every node's token at the node's parent."""
    parents_BN = verify_input.parents
    size, num_nodes = parents_BN.shape
    first_B1 = torch.arange(size, device=parents_BN.device)[:, None] * num_nodes
    of_nodes = (parents_BN + first_B1).clamp_min(0).flatten()
    groups_BN = torch.where(parents_BN >= 0, verify_input.draft_tokens // GROUP, -1)
    every = torch.arange(len(maxima_RG), device=parents_BN.device)
    return torch.cat([every, of_nodes]), torch.cat([best_groups(maxima_RG), groups_BN.flatten()])
