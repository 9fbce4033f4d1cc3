"""Trees of candidates with explicit parents, which may be fewer than the nodes of a tree."""

from dataclasses import replace

import pytest
import torch

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.errors import InputError
from specsim.core.phases import Batch, Candidates, DraftInput, ExplicitCandidates, PrefillInput, VerifyInput
from specsim.core.pool import KVBuffer, KVLayout, KVPool
from specsim.core.proposals import ProposalDrafter
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.core.token_drafter import Proposal
from specsim.fast import tree as fast
from specsim.fast import verify as fast_verify
from specsim.fast.synthetic import SyntheticSchedule
from specsim.fast.tree.explicit import MOST_EXPLICIT
from specsim.reference import verify as reference_verify
from specsim.reference.tree import MalformedTree, build

CONFIG = SpecConfig(topk=3, num_steps=3, num_draft_tokens=6, page_size=1, max_len=64)
PRESENT = [name for name in VerifyInput.__dataclass_fields__ if name not in ("candidates", "draft_prob", "looked_up")]


def explicit(rows: list[list[tuple[int, int, float]]], width: int) -> ExplicitCandidates:
    """Make candidates (token, parent, score) of each request; what is beyond the alive ones is garbage."""
    made = ExplicitCandidates.empty(len(rows), width)
    made.tokens.fill_(2**40)
    made.parents.fill_(2**40)
    made.scores.fill_(torch.nan)
    for request, row in enumerate(rows):
        made.num_alive[request] = len(row)
        for place, (token, parent, score) in enumerate(row):
            made.tokens[request, place] = token
            made.parents[request, place] = parent
            made.scores[request, place] = score
    return made


def roots(size: int, config: SpecConfig = CONFIG, length: int = 5) -> tuple[torch.Tensor, ...]:
    """Make bonus tokens 90, 91, ..., lengths and slots 100 b + j."""
    slots = 100 * torch.arange(size)[:, None] + torch.arange(config.num_draft_tokens)
    return 90 + torch.arange(size, dtype=torch.int32), torch.full((size,), length), slots


def built(implementation, candidates, config=CONFIG, device="cpu", length=5, steps=None) -> VerifyInput:
    given = [each.to(device) for each in roots(len(candidates.tokens), config, length)]
    limits = None if steps is None else torch.tensor(steps, dtype=torch.int32, device=device)
    return implementation(candidates.to(device), *given, config, limits).to("cpu")


BOTH = pytest.mark.parametrize("implementation", [build, fast.build], ids=["reference", "fast"])


@BOTH
def test_a_tree_has_the_best_candidates_and_dead_nodes(implementation, device):
    """Candidate 3 counts only 0.2, its parent's score, so that of six candidates it is left out."""
    rows = [
        [(10, -1, 0.9), (11, -1, 0.2), (12, 0, 0.8), (13, 1, 0.99), (14, 2, 0.3), (15, 0, 0.25)],
        [(20, -1, 0.5), (21, 0, 0.5)],
        [],
    ]
    tree = built(implementation, explicit(rows, 8), device=device if implementation is fast.build else "cpu")
    assert tree.draft_tokens.tolist() == [[90, 10, 11, 12, 14, 15], [91, 20, 21, 0, 0, 0], [92, 0, 0, 0, 0, 0]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 3, 1], [-1, 0, 1, -1, -1, -1], [-1] * 6]
    assert tree.positions.view(3, 6).tolist() == [[5, 6, 6, 7, 8, 7], [5, 6, 7, 0, 0, 0], [5, 0, 0, 0, 0, 0]]
    assert tree.retrieve_next_token.tolist() == [[1, 3, -1, 4, -1, -1], [1, 2, -1, -1, -1, -1], [-1] * 6]
    assert tree.retrieve_next_sibling.tolist() == [[-1, 2, -1, 5, -1, -1], [-1] * 6, [-1] * 6]
    slots = [[0, 1, 2, 3, 4, 5], [100, 101, 102, -1, -1, -1], [200, -1, -1, -1, -1, -1]]
    assert tree.cache_locations.view(3, 6).tolist() == slots
    assert tree.proposed_depth.tolist() == [3, 2, 0]
    assert tree.mask.sum(-1).tolist() == [[1, 2, 2, 3, 4, 3], [1, 2, 3, 0, 0, 0], [1, 0, 0, 0, 0, 0]]


@BOTH
def test_a_tree_of_own_steps_has_the_best_candidates_within(implementation, device):
    rows = [[(10, -1, 0.9), (11, -1, 0.2), (12, 0, 0.8), (13, 1, 0.99), (14, 2, 0.3), (15, 0, 0.25)]] * 4
    on = device if implementation is fast.build else "cpu"
    tree = built(implementation, explicit(rows, 8), replace(CONFIG, num_draft_tokens=5), on, steps=[0, 1, 2, 9])
    assert tree.draft_tokens.tolist() == [
        [90, 0, 0, 0, 0],
        [91, 10, 11, 0, 0],
        [92, 10, 11, 12, 15],
        [93, 10, 12, 14, 15],
    ]
    assert tree.parents.tolist() == [[-1] * 5, [-1, 0, 0, -1, -1], [-1, 0, 0, 1, 1], [-1, 0, 1, 2, 1]]
    assert tree.proposed_depth.tolist() == [0, 1, 2, 3]


def random_rows(generator: torch.Generator, size: int, most: int, depth: int) -> list[list[tuple[int, int, float]]]:
    """Draw forests with few different scores, so that many tie."""
    rows = []
    for _ in range(size):
        row, depths = [], []
        for index in range(int(torch.randint(0, most + 1, (), generator=generator))):
            parent = int(torch.randint(-1, index, (), generator=generator)) if index else -1
            parent = parent if parent < 0 or depths[parent] < depth else -1
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
            row.append((index + 1, parent, int(torch.randint(0, 4, (), generator=generator)) / 4))
        rows.append(row)
    return rows


@pytest.mark.parametrize(("num_nodes", "width"), [(2, 1), (6, 9), (9, 8), (8, 33), (40, 70)])
@pytest.mark.parametrize(("length", "steps"), [(5, None), (62, None), (5, (0, 1, 2, 3, 4, 5, 2))])
def test_both_implementations_build_the_same_trees(num_nodes, width, length, steps, device, program_order):
    config = SpecConfig(topk=9, num_steps=4, num_draft_tokens=num_nodes, page_size=1, max_len=64)
    rows = random_rows(torch.Generator().manual_seed(num_nodes), 7, width, 4)
    expected = built(build, explicit(rows, width), config, length=length, steps=steps)
    found = built(fast.build, explicit(rows, width), config, device, length, steps)
    for name in PRESENT:
        assert torch.equal(getattr(expected, name), getattr(found, name)), name


@BOTH
def test_lanes_as_explicit_candidates_give_the_same_tree(implementation, device):
    """The candidates of EAGLE-2's lanes are a special case: K siblings below each parent."""
    config = SpecConfig(topk=2, num_steps=3, num_draft_tokens=7, page_size=1, max_len=64)
    tokens = torch.arange(10, 20)[None]
    scores = torch.tensor([[0.6, 0.4, 0.3, 0.2, 0.25, 0.1, 0.22, 0.01, 0.05, 0.02]])
    lanes = Candidates(tokens, scores, torch.tensor([[-1, 0, 1, 2, 4]]))
    parents = torch.tensor([[-1, -1, 0, 0, 1, 1, 2, 2, 4, 4]])
    listed = ExplicitCandidates(tokens, parents, scores, torch.tensor([10], dtype=torch.int32))
    device = device if implementation is fast.build else "cpu"
    first, second = (built(implementation, each, config, device) for each in (lanes, listed))
    for name in PRESENT:
        assert torch.equal(getattr(first, name), getattr(second, name)), name


def test_a_later_parent_is_reported_with_the_request():
    with pytest.raises(MalformedTree, match="request 1, candidate 0: parent 1"):
        built(build, explicit([[], [(1, 1, 1.0), (2, -1, 1.0)]], 2))


def test_the_fast_tree_ranks_a_limited_number():
    width = MOST_EXPLICIT + 1
    with pytest.raises(InputError, match=f"candidates is {width}"):
        built(fast.build, ExplicitCandidates.empty(1, width))


VERIFIED = [
    (SpecConfig(3, 3, 6, page_size=1, max_len=64), 0.0),
    (SpecConfig(3, 3, 6, page_size=1, max_len=64), 1.0),
    (SpecConfig(3, 3, 6, page_size=1, max_len=64, verifier="typical"), 1.0),
    (SpecConfig(3, 3, 6, page_size=1, max_len=64, penalties="relaxed"), 1.0),
]


@pytest.mark.parametrize(("config", "temperature"), VERIFIED)
def test_a_dead_node_is_never_accepted(config, temperature, device):
    """The target likes token 0 everywhere, which is the token of dead nodes."""
    rows = [[], [(3, -1, 1.0)], [(3, -1, 0.5), (4, 0, 0.5)], [(0, -1, 1.0), (0, 0, 1.0)]]
    params = SamplingParams(temperature=temperature, repetition_penalty=1.1, frequency_penalty=0.1)
    batch = Batch.of(range(4), range(4), [5] * 4, [params] * 4, 8)
    tree = built(build, explicit(rows, 5), config)
    tree.draft_tokens[:, 0] = 2
    logits_RV = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
    logits_RV[:, 0] += 9
    pools = [KVPool(KVBuffer(KVLayout(1, 1, 1), 8, torch.float32, where), None, 1, 4, 64) for where in ("cpu", device)]
    for each in pools:
        each.token_ids.fill_(5)
    expected = reference_verify.verify(batch, tree, logits_RV, config, pools[0])
    moved = batch.to(device), replace(tree, candidates=None).to(device), logits_RV.to(device), config, pools[1]
    found = fast_verify.verify(*moved).to("cpu")
    for name in ("predict", "accept_index", "num_accepted_drafts", "num_accepted_tokens"):
        assert torch.equal(getattr(expected, name), getattr(found, name)), name
    assert (expected.num_accepted_drafts <= tree.proposed_depth).all()
    assert expected.num_accepted_drafts[3] == 2


def test_a_schedule_accepts_no_more_than_was_proposed(device):
    rows = [[], [(3, -1, 1.0)], [(3, -1, 0.5), (4, 0, 0.5)]]
    batch = Batch.of(range(3), range(3), [5] * 3, [SamplingParams()] * 3, 8)
    tree, logits_RV = built(build, explicit(rows, 5)), torch.randn(18, 8)
    tree.draft_tokens[:, 0] = 2
    acceptance = SyntheticAcceptance((1.0, 1.0, 1.0))
    pools = [KVPool(KVBuffer(KVLayout(1, 1, 1), 8, torch.float32, where), None, 1, 3, 64) for where in ("cpu", device)]
    expected = reference_verify.verify(batch, tree, logits_RV, CONFIG, pools[0], acceptance=acceptance)
    moved = batch.to(device), replace(tree, candidates=None).to(device), logits_RV.to(device), CONFIG, pools[1]
    schedule = SyntheticSchedule.of(acceptance, torch.device(device))
    found = fast_verify.verify(*moved, acceptance=schedule).to("cpu")
    assert expected.num_accepted_drafts.tolist() == found.num_accepted_drafts.tolist() == [0, 1, 2]


NO_INPUT = DraftInput(torch.zeros(1, dtype=torch.int32))  # which a token drafter does not read


class Fixed:
    """A token drafter that always proposes the same."""

    def __init__(self, proposal: Proposal) -> None:
        self.proposal = proposal
        self.seen = []

    def propose(self, request_id, tokens, limits):
        self.seen.append((request_id, list(tokens)))
        return self.proposal

    def finish(self, request_id, tokens, prompt_len):
        self.seen.append((request_id, list(tokens)))


WRONG = {
    "a list of tokens": ([1, 2], "a Proposal of tokens, parents and scores"),
    "two parts": (([1], [-1]), "a Proposal of tokens, parents and scores"),
    "another number of parents": (Proposal([1, 2], [-1], [1.0, 1.0]), "as many parents and scores"),
    "an unknown token": (Proposal([48], [-1], [1.0]), "0 to 47"),
    "a later parent": (Proposal([1], [0], [1.0]), "an earlier candidate"),
    "a score that is no number": (Proposal([1], [-1], [float("nan")]), "finite"),
    "equal siblings": (Proposal([1, 1], [-1, -1], [1.0, 0.5]), "distinct"),
    "too deep": (Proposal([1, 2, 3, 4], [-1, 0, 1, 2], [1.0] * 4), "at most num_steps, 3"),
    "too many siblings": (Proposal([1, 2, 3, 4], [-1] * 4, [1.0] * 4), "at most topk, 3"),
    "too many candidates": (Proposal(range(22), [-1] * 22, [1.0] * 22), "at most 21"),
}


@pytest.mark.parametrize(("proposal", "message"), WRONG.values(), ids=WRONG)
def test_a_proposal_that_is_no_tree_is_refused(proposal, message):
    pools = KVPool(KVBuffer(KVLayout(1, 1, 1), 8, torch.float32), None, 1, 1, 64)
    batch = Batch.of([7], [0], [3], [SamplingParams()], 48)
    with pytest.raises(InputError, match=message):
        ProposalDrafter(Fixed(proposal), CONFIG, 48).propose(batch, NO_INPUT, pools)


def test_a_drafter_sees_every_token_up_to_the_root():
    """Later rounds read the new columns only; a request that starts again is read whole."""
    drafter = Fixed(Proposal([], [], []))
    proposals = ProposalDrafter(drafter, CONFIG, 48)
    pools = KVPool(KVBuffer(KVLayout(1, 1, 1), 8, torch.float32), None, 1, 2, 64)
    pools.token_ids[0, :20] = torch.arange(20, dtype=pools.token_ids.dtype)
    batch = Batch.of([7, 3], [0, -1], [3, 0], [SamplingParams()] * 2, 48)  # the second one is padding
    for length in (3, 4, 4, 8, 12):
        proposals.propose(replace(batch, seq_lens=torch.tensor([length, 0])), NO_INPUT, pools)
    pools.token_ids[0, 0] = 40
    proposals.propose(replace(batch, seq_lens=torch.tensor([13, 0])), NO_INPUT, pools)
    prompt = PrefillInput.of_prompts([[1]])
    proposals.seed(Batch.of([7], [0], [1], [SamplingParams()], 48), prompt, torch.tensor([2]), torch.zeros(1, 1), pools)
    proposals.propose(replace(batch, seq_lens=torch.tensor([13, 0])), NO_INPUT, pools)
    counted = [(7, list(range(count))) for count in (4, 5, 5, 9, 13, 14)]
    assert drafter.seen == [*counted, (7, [40, *range(1, 14)])]
