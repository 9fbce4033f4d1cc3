"""Is the law that verify is given the one that drafts were drawn from? The reference keeps the logits of every step."""

from typing import Any

import torch

from specsim.differential.pairs import make_pair
from specsim.differential.run import draft_ids
from specsim.faults.fault import Finding
from specsim.faults.judges.cells import cell
from specsim.generation import load_engine
from specsim.phases import Batch, PrefillInput

ALLOWED = 1e-6  # laws are kept in float32


@torch.inference_mode()
def judge(setting: dict[str, Any], device: str) -> list[Finding]:
    """The first draft phase of a cell with sampled drafts; setting: see specsim.faults.judges.cells."""
    case = cell(setting)
    pair = make_pair(case.pair, torch.float64)
    engine = load_engine(pair, case.config, "reference", torch.float64)
    lengths, config = [len(prompt) for prompt in case.prompts], engine.config
    pools = engine.make_pools(len(lengths), sum(map(config.reserved_columns, lengths)))
    rows = [pools.open() for _ in lengths]
    for row, length in zip(rows, lengths, strict=True):
        pools.reserve(row, length)
    batch = Batch.of(range(len(rows)), rows, lengths, case.sampling, pair.target.config.vocab_size)
    entered = engine.prefill(batch, PrefillInput.whole(case.prompts), pools).draft_input
    tree = engine.draft(batch, entered, pools)
    logits_BMV = [engine.drafter.logits(entered.hidden)[:, None], *tree.candidates.draft_logits]
    expected = _laws(torch.cat(logits_BMV, 1), batch, draft_ids(pair))
    wrong = ((tree.draft_prob - expected).abs() > ALLOWED).nonzero()
    if not len(wrong):
        return []
    at = tuple(wrong[0].tolist())
    place = f"request {at[0]}, node {at[1]}, token {at[2]}"
    return [Finding("draft_prob", place, expected[at].item(), tree.draft_prob[at].item())]


def _laws(logits_BMV: torch.Tensor, batch: Batch, ids_V: torch.Tensor) -> torch.Tensor:
    """softmax(logits / T) by target id; ids_V: the draft id of each, -1 for none."""
    prob = (logits_BMV.double() / batch.sampling.temperature[:, None, None]).softmax(-1)
    return torch.where(ids_V >= 0, prob[..., ids_V.clamp(min=0)], 0.0)
