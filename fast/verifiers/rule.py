"""A user's acceptance rule, which the host runs on a copy of every node's distribution."""

from typing import no_type_check

import torch
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, Verdict, VerifyInput
from specsim.core.rule import AcceptanceRule, Accepted, Tree
from specsim.core.uniforms import round_uniforms
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel
from specsim.fast.vocabulary.distribution import Distributions, prob_of

BLOCK = 1024


@kernel
@no_type_check
def _probabilities_kernel(distributions, out_ptr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Write the probabilities of one block of tokens at one row."""
    row = tl.program_id(0).to(tl.int64)
    await_input(PDL)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = tokens < distributions.vocab_size
    probs = prob_of(distributions, row, tl.where(inside, tokens, 0))
    tl.store(out_ptr + row * distributions.vocab_size + tokens, probs, mask=inside)


def probabilities(distributions: Distributions) -> torch.Tensor:
    """Compute every row's distribution as a table, f32 [R, V]."""
    raw = distributions.logits.raw
    num_rows, vocab_size = raw.shape
    out_RV = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=raw.device)
    block = block_of(vocab_size, BLOCK)
    _probabilities_kernel[(num_rows, ceil_div(vocab_size, block))](
        distributions=distributions.tables, out_ptr=out_RV, BLOCK=block
    )
    return out_RV


def accept(
    batch: Batch,
    verify_input: VerifyInput,
    distributions: Distributions,
    uniforms: tuple[torch.Tensor, torch.Tensor] | None,
    config: SpecConfig,
    rule: AcceptanceRule,
    out: Verdict,
) -> torch.Tensor:
    """Write accept_index and num_accepted_drafts, and return the bonus tokens i32 [B].

    The host waits for the distributions. At temperature 0 they have one token each, which is followed without the rule.
    """
    device = verify_input.draft_tokens.device
    prob_BNV = _finite(probabilities(distributions).cpu().double()).unflatten(0, verify_input.draft_tokens.shape)
    on_host = batch.to("cpu")
    names = on_host.seeds, on_host.request_ids, on_host.seq_lens
    uniforms_BW, final_B = (table.cpu().tolist() for table in uniforms or round_uniforms(*names, config))
    draft_prob = verify_input.draft_prob
    draft_prob_BMV = None if draft_prob is None else draft_prob.cpu().double()
    accept_index = torch.full(out.accept_index.shape, -1, dtype=torch.int32)
    num_drafts = torch.zeros(batch.size, dtype=torch.int32)
    bonus_B = torch.zeros(batch.size, dtype=torch.int32)
    lengths = on_host.seq_lens.tolist()
    for request, tree in enumerate(_trees(lengths, verify_input, config)):
        if lengths[request] == 0:  # padding
            continue
        prob_NV = prob_BNV[request]
        if on_host.sampling.temperature[request] == 0:
            path, bonus = _follow(tree, prob_NV.argmax(-1).tolist())
        else:
            draft_prob_NV = None if draft_prob_BMV is None else _of_nodes(draft_prob_BMV[request], len(prob_NV))
            path, bonus = rule.walk(tree, prob_NV, draft_prob_NV, uniforms_BW[request], final_B[request])
        accept_index[request, : len(path)] = torch.tensor(path) + request * len(prob_NV)
        num_drafts[request] = len(path) - 1
        bonus_B[request] = bonus
    out.accept_index.copy_(accept_index)
    out.num_accepted_drafts.copy_(num_drafts)
    return bonus_B.to(device)


def _finite(prob_RV: torch.Tensor) -> torch.Tensor:
    """Replace a row of NaN by one with all mass at token 0, which a rule can read."""
    first_V = torch.zeros(prob_RV.shape[1], dtype=prob_RV.dtype)
    first_V[0] = 1.0
    return torch.where(prob_RV.isfinite().all(-1, keepdim=True), prob_RV, first_V)


def _trees(lengths: list[int], verify_input: VerifyInput, config: SpecConfig) -> list[Tree]:
    links = verify_input.retrieve_next_token, verify_input.retrieve_next_sibling
    tables = (verify_input.draft_tokens, verify_input.parents, *links)
    limits = [config.length_limit - 1 - length for length in lengths]
    return [Tree(*columns) for columns in zip(*(table.tolist() for table in tables), limits, strict=True)]


def _follow(tree: Tree, best: list[int]) -> Accepted:
    """Follow the child with the best token of each node."""
    path = [0]
    while True:
        token = best[path[-1]]
        child = next((child for child in tree.acceptable_children(path) if tree.tokens[child] == token), None)
        if child is None:
            return Accepted(path, token)
        path.append(child)


def _of_nodes(draft_prob_MV: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """Give the nodes without children, which are the last ones, rows of 0."""
    return torch.nn.functional.pad(draft_prob_MV, (0, 0, 0, num_nodes - len(draft_prob_MV)))
