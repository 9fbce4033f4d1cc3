"""A drafter of tokens next to one with weights: its drafts take the other's place where it has some."""

from dataclasses import replace

import pytest
import torch

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.phases import Candidates, ExplicitCandidates
from specsim.core.token_drafter import NgramConfig, Proposal, SuffixConfig
from specsim.fast import tree as fast
from specsim.models.load import load
from specsim.models.synthetic_pair import synthetic_pair
from specsim.reference import tree as reference
from specsim.serving.generation import generate

CONFIG = SpecConfig(topk=2, num_steps=2, num_draft_tokens=4, page_size=1, max_len=64)
PAIR = synthetic_pair("eagle3")
PROMPT = [7, 8, 9, 10, 7, 8, 9, 10, 7, 8]
IMPLEMENTATIONS = pytest.mark.parametrize("impl", ["reference", "fast"])


def lane_candidates(size: int) -> Candidates:
    """Make candidates of two lanes: 2 below the root, then 2 below each."""
    scores = torch.tensor([0.5, 0.4, 0.3, 0.2, 0.35, 0.1]).repeat(size, 1)
    return Candidates(torch.arange(10, 16).repeat(size, 1), scores, torch.tensor([-1, 0, 1]).repeat(size, 1))


@pytest.mark.parametrize("build", [reference.build, fast.build], ids=["reference", "fast"])
def test_a_request_has_the_tree_of_what_was_looked_up(build, device):
    """Requests 0 and 2 have the tree of the lanes, request 1 that of a chain of one draft."""
    looked_up = ExplicitCandidates.empty(3, 6)
    looked_up.tokens[1, 0] = 40
    looked_up.scores[1, 0] = 0.9
    looked_up.num_alive[1] = 1
    roots = torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([5, 6, 7]), torch.arange(12).view(3, 4)
    roots = [part.to(device) for part in roots]
    drafted, chain = lane_candidates(3).to(device), looked_up.to(device)
    without = build(drafted, *roots, CONFIG).to("cpu")
    alone = build(chain, *roots, CONFIG).to("cpu")
    tree = build(drafted, *roots, CONFIG, None, chain).to("cpu")
    for name, value in without.tensors.items():
        both = [part.view(3, len(part) // 3, -1) for part in (value, getattr(alone, name), getattr(tree, name))]
        for request, source in enumerate((0, 1, 0)):
            assert torch.equal(both[2][request], both[source][request]), name
    assert [tree.pool_of(request) is tree.looked_up for request in range(3)] == [False, True, False]
    assert tree.proposed_depth.tolist() == [2, 1, 2]


class Copied:
    """A drafter that proposes the text from its start, up to a number of rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.ended: list[int] = []

    def propose(self, request_id, tokens, limits):
        self.rounds -= 1
        drafts = list(tokens[: limits.max_depth]) if self.rounds >= 0 else []
        return Proposal(drafts, range(-1, len(drafts) - 1), [1.0] * len(drafts))

    def finish(self, request_id, tokens, prompt_len):
        self.ended.append(request_id)


@IMPLEMENTATIONS
@pytest.mark.parametrize(("rounds", "counts"), [(3, True), (0, False)])
def test_drafts_that_are_looked_up_come_first(impl, rounds, counts):
    """Wrong drafts cost acceptance and change no token; the drafter hears of every end."""
    lookup = Copied(rounds)
    sampling = SamplingParams(max_new_tokens=12)
    run = {"config": SpecConfig(topk=1, num_steps=2), "sampling": sampling, "engine": EngineOptions(impl=impl)}
    head, both = (generate(pair, [PROMPT], **run) for pair in (PAIR, replace(PAIR, lookup=lookup)))
    assert head.outputs[0].token_ids == both.outputs[0].token_ids
    assert head.acceptance.accept_length > 1.5
    assert (both.acceptance.accept_length < head.acceptance.accept_length) == counts
    assert lookup.ended == [0]


@IMPLEMENTATIONS
def test_a_drafter_of_tokens_drafts_a_text_that_repeats(impl):
    """The drafter's weights are random; the text repeats by a bias, so that only the lookup is right."""
    pair = synthetic_pair("eagle3", noise=5.0)
    cycle = dict.fromkeys((7, 8), 50.0)
    sampling = SamplingParams(max_new_tokens=24, logit_bias=cycle)
    run = {"config": SpecConfig(topk=1, num_steps=3), "sampling": sampling, "engine": EngineOptions(impl=impl)}
    outputs = {
        name: generate(made, [PROMPT], **run)
        for name, made in (("head", pair), ("both", replace(pair, lookup=SuffixConfig(least_match=2))))
    }
    assert outputs["head"].outputs[0].token_ids == outputs["both"].outputs[0].token_ids
    assert outputs["both"].acceptance.accept_length > outputs["head"].acceptance.accept_length + 1


@pytest.mark.parametrize("name", ["eagle3+ngram", "suffix+suffix", "eagle3+", "mtp+eagle3"])
def test_only_a_drafter_on_the_host_looks_up(name):
    with pytest.raises(InputError) as error:
        load(drafter=name)
    assert error.value.name == "drafter"


def test_a_pair_refuses_a_lookup_that_cannot_go_with_it():
    for drafter, lookup in ((PAIR.drafter, NgramConfig()), (SuffixConfig(), SuffixConfig()), (None, SuffixConfig())):
        with pytest.raises(InputError) as error:
            replace(PAIR, drafter=drafter, lookup=lookup)
        assert error.value.name == "lookup"


def test_what_is_looked_up_is_not_sampled():
    config = SpecConfig(topk=1, num_steps=2, verifier="rejection")
    with pytest.raises(InputError) as error:
        generate(replace(PAIR, lookup=SuffixConfig()), [PROMPT], config, SamplingParams(max_new_tokens=4))
    assert error.value.name == "verifier"


def test_a_name_gives_a_drafter_and_a_lookup(tmp_path):
    file = tmp_path / "same.py"
    file.write_text(
        "class Same:\n"
        "    def propose(self, request_id, tokens, limits):\n"
        "        return [tokens[-1]], [-1], [1.0]\n"
        "    def finish(self, request_id, tokens, prompt_len):\n"
        "        pass\n"
    )
    assert load(drafter="eagle3+suffix").kind == "eagle3+suffix"
    assert load(drafter=f"dflash+{file}:Same").kind == "dflash+Same"
