"""Selection and layout of trees, from small ones to 64 nodes."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from specsim.bench.checks import equal
from specsim.bench.contest import Contender, contest
from specsim.bench.roofline import Peaks, RooflineBound
from specsim.bench.round_checks import tensors_of
from specsim.bench.row import OURS, Check, Row
from specsim.bench.scene import tree_of
from specsim.core.config import SpecConfig
from specsim.core.phases import AutoregressiveInput, Candidates, VerifyInput

TREES = (SpecConfig(4, 3, 8), SpecConfig(4, 3, 16), SpecConfig(8, 3, 32), SpecConfig(8, 6, 64))
REQUESTS = (1, 32)
SEQ_LEN = 1024


def tree_rows(peaks: Peaks, device: str = "cuda") -> Iterator[Row]:
    """Time each size of tree at each number of requests."""
    for config, requests in product(TREES, REQUESTS):
        yield _tree_row(config, requests, peaks, device)


def random_candidates(requests: int, config: SpecConfig, vocab_size: int, generator: torch.Generator) -> Candidates:
    """Make the candidates of a drafter that ranks tokens at random."""
    from specsim.reference.drafting import expand, start_lanes
    from specsim.reference.sampling import topk

    def drafts(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        prob = torch.rand(*shape, vocab_size, generator=generator).softmax(-1)
        return topk(prob * 8, config.topk)

    hidden_BKH = torch.zeros(requests, config.topk, 1)
    draft_input = AutoregressiveInput(torch.zeros(requests).int(), *drafts(requests), hidden_BKH[:, 0])
    lanes = start_lanes(draft_input, config)
    for _ in range(config.num_steps - 1):
        lanes = expand(lanes, *drafts(requests, config.topk), hidden_BKH, config)
    return lanes.candidates


def same_tree(expected: VerifyInput, found: VerifyInput) -> Check:
    """Compare a tree with the reference's, without its candidates."""
    names = {name: each for name, each in tensors_of(expected).items() if "candidates" not in name}
    return equal("the reference's tree", tensors_of(found), names)


def _tree_row(config: SpecConfig, requests: int, peaks: Peaks, device: str) -> Row:
    from specsim.fast import tree
    from specsim.reference import tree as reference

    candidates = random_candidates(requests, config, 64, torch.Generator().manual_seed(0))
    bonus_tokens = torch.zeros(requests, dtype=torch.int32)
    seq_lens = torch.full((requests,), SEQ_LEN)
    locations = torch.arange(requests * config.num_draft_tokens).view(requests, -1)
    expected = reference.build(candidates, bonus_tokens, seq_lens, locations, config)
    given = (bonus_tokens.to(device), seq_lens.to(device), locations.to(device))
    on_device = candidates.to(device)
    steps = torch.full((requests,), config.num_steps, dtype=torch.int32, device=device)
    out = tree.build(on_device, *given, config, steps)

    def build(_: int) -> VerifyInput:
        return tree.build(on_device, *given, config, steps, out=out)

    ours = Contender(OURS, build, partial(same_tree, expected))
    return contest(
        "selection and tree", {"requests": requests, "tree": tree_of(config)}, [ours], RooflineBound(()), peaks
    )
