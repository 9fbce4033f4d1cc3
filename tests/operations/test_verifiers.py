"""Verdicts of the fast verifiers equal the reference's.

test_verify.py compares more of target-only sampling.
"""

from dataclasses import replace

import pytest
import torch

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.grammar import stacked
from specsim.core.phases import Batch, Candidates, VerifyInput
from specsim.core.pool import KVBuffer, KVLayout, KVPool
from specsim.core.verifiers import VERIFIER_KINDS
from specsim.fast import verify as fast
from specsim.fast.vocabulary.penalties import Allowed
from specsim.reference import verify as reference
from specsim.reference.tree import build

LOWEST, HIGHEST = 2.0**-24, 1 - 2.0**-24  # the bounds of specsim.core.uniforms.named_uniforms


SETTINGS = {
    kind.name: SpecConfig(
        *((1, 3, 4) if kind.drafts == "sampled" else (3, 2, 7)), page_size=1, max_len=40, verifier=kind.name
    )
    for kind in VERIFIER_KINDS
}
SETTINGS["target_only"] = replace(SETTINGS["target_only"], threshold_single=0.6, threshold_acc=0.8)
PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9, seed=2**63 + 5),
    SamplingParams(),
    SamplingParams(temperature=1.5, top_k=4),
]


def noise_of(batch: Batch, config: SpecConfig, vocab_size: int) -> torch.Tensor:
    """Stack the noise of every request, f64 [B, S+1, V]."""
    return torch.stack([draws.noise_WV for draws in reference.round_draws(batch, config, vocab_size)])


def drafted(config: SpecConfig, batch: Batch, vocab_size: int) -> tuple[Candidates, torch.Tensor]:
    """Make drafts from distributions similar to the target's, and equal target logits [B, N, V] at all nodes."""
    size, k, count = batch.size, config.topk, config.num_candidates
    logits_BNV = 2 * torch.randn(size, 1, vocab_size) + 0.7 * torch.randn(size, config.num_draft_tokens, vocab_size)
    draft_logits_BMV = logits_BNV[:, : config.num_parents] + 0.4 * torch.randn(size, config.num_parents, vocab_size)
    if config.verifier == "gumbel":
        draft_logits_BMV += noise_of(batch, config, vocab_size)[:, :-1].float()
        tokens = draft_logits_BMV.argmax(-1)
    else:
        parents = (torch.arange(count) - k + 1).clamp(min=0, max=config.num_parents - 1)
        prob_BCV = draft_logits_BMV.softmax(-1)[:, parents]
        tokens = prob_BCV.flatten(0, 1).multinomial(1).view(size, count)
        if config.verifier == "target_only":  # siblings differ
            tokens = prob_BCV[:, ::k].topk(k).indices.flatten(1)
        if config.verifier_kind.drafts == "distinct":
            tokens[:, :k] = prob_BCV[:, 0].multinomial(k)
    scores = torch.rand(size, count)
    if not config.is_sampled:
        scores[:, k:] *= scores[:, :k].repeat_interleave(k, 1)
    draft_prob_BMV = torch.where(batch.sampling.temperature[:, None, None] > 0, draft_logits_BMV.softmax(-1), 0.0)
    parent_list = torch.arange(-1, config.num_parents - 1).expand(size, -1)
    return Candidates(tokens, scores, parent_list, (), draft_prob_BMV if config.has_draft_prob else None), logits_BNV


def rounds_of(config: SpecConfig, size: int, vocab_size: int, padded: int):
    """Make a batch with requests near the longest text, its trees, logits and pools.

    The last `padded` are padding.
    """
    lengths = [40 - 1 - 5 * place % 6 for place in range(size - padded)] + [0] * padded
    rows, params = [*range(size - padded), *[-1] * padded], [PARAMS[place % 4] for place in range(size)]
    batch = Batch.of(range(size), rows, lengths, params, vocab_size)
    candidates, logits_BNV = drafted(config, batch, vocab_size)
    bonus, locations = torch.zeros(size, dtype=torch.int32), torch.zeros(size, config.num_draft_tokens).long()
    tree = build(candidates, bonus, batch.seq_lens, locations, config)
    logits_BNV[size - padded :], tree.draft_tokens[size - padded :] = torch.nan, 2**40  # must not be read
    return batch, tree, logits_BNV.flatten(0, 1)


def pools_of(size: int, device: str = "cpu") -> KVPool:
    return KVPool(*(KVBuffer(KVLayout(1, 1, 1), 8, torch.float32, device) for _ in range(2)), 1, size, 64)


@pytest.fixture
def small_programs(monkeypatch) -> None:
    """Use programs of 256 tokens, so that this vocabulary takes several."""
    for name in ("gumbel", "typical"):
        monkeypatch.setattr(f"specsim.fast.verifiers.{name}.block_of", lambda count, on_gpu: 256)


@pytest.mark.parametrize("name", SETTINGS)
def test_fast_verdicts_are_the_references(name, device, small_programs, program_order):
    """Each implementation draws by name.

    There are greedy requests, limits, padding and grammars. The vocabulary has three groups of tokens.
    """
    config, size, vocab_size = SETTINGS[name], 18, 700
    batch, tree, logits_RV = rounds_of(config, size, vocab_size, 2)
    real, nodes = torch.arange(size - 2), (size - 2) * config.num_draft_tokens
    own = {each: value[:nodes] if len(value) > size else value[: size - 2] for each, value in tree.tensors.items()}
    own = VerifyInput(**own | {"candidates": None})
    masks = {place: torch.rand(config.num_draft_tokens, vocab_size) < 0.7 for place in range(2, 16, 5)}
    allowed, allowed_BNV = Allowed.empty(size, config.num_draft_tokens, vocab_size, device), stacked(masks, size - 2)
    allowed.load(masks)
    mine = batch.filter(real), own, logits_RV[:nodes], config, pools_of(size)
    expected = reference.verify(*mine, allowed=allowed_BNV)
    moved = (each.to(device) for each in (batch, replace(tree, candidates=None), logits_RV))
    found = fast.verify(*moved, config, pools_of(size, device), allowed=allowed).to("cpu")
    for each in ("predict", "accept_index", "num_accepted_drafts", "num_accepted_tokens"):
        value = getattr(expected, each)
        assert torch.equal(getattr(found, each)[: len(value)], value), each
    torch.testing.assert_close(found.logprobs[: size - 2], expected.logprobs, rtol=0, atol=1e-5)
    assert set(expected.num_accepted_drafts.tolist()) == set(range(config.num_steps + 1))
    assert (found.accept_index[size - 2 :] == -1).all()
    assert (found.predict[nodes:] == -1).all()
    assert not found.num_accepted_drafts[size - 2 :].any()


@pytest.mark.parametrize("name", ["target_only", "rejection", "block", "multi_round", "traversal", "recursive"])
def test_fast_uniforms_can_be_given(name, device):
    config = SETTINGS[name]
    batch, tree, logits_RV = rounds_of(config, 8, 7, 0)
    width = config.num_draft_tokens if config.verifier_kind.draws == "node" else config.num_steps + 1
    given = torch.rand(8, width, dtype=torch.float64).clamp(LOWEST, HIGHEST).float().double(), torch.rand(8).double()
    expected = reference.verify(batch, tree, logits_RV, config, pools_of(8), given)
    moved = (each.to(device) for each in (batch, replace(tree, candidates=None), logits_RV))
    found = fast.verify(*moved, config, pools_of(8, device), tuple(each.to(device) for each in given)).to("cpu")
    assert torch.equal(found.accept_index, expected.accept_index)
    assert torch.equal(found.predict, expected.predict)


@pytest.mark.parametrize("name", ["rejection", "block", "gumbel"])
def test_the_last_request_may_accept_its_whole_chain(name, device):
    """It is greedy with the target's own tokens as drafts, and no draft follows its last."""
    config = SETTINGS[name]
    batch, tree, logits_RV = rounds_of(config, 3, 7, 0)
    tree.draft_tokens[-1, 1:] = logits_RV[-config.num_draft_tokens : -1].argmax(-1)
    moved = (each.to(device) for each in (batch, replace(tree, candidates=None), logits_RV))
    found = fast.verify(*moved, config, pools_of(3, device))
    assert found.num_accepted_drafts[-1] == config.num_steps
    assert found.predict[-1] == logits_RV[-1].argmax()


CUT = SpecConfig(1, 2, 3, page_size=1, max_len=13)  # two drafts fit after 10 tokens, one after 11, none after 12


def flat_chains(config: SpecConfig, batch: Batch, text_BW: torch.Tensor) -> VerifyInput:
    """Make chains of a text's first two tokens, where q is flat on the first two tokens of four."""
    draft_prob_BMV = torch.tensor([0.5, 0.5, 0, 0]).repeat(3, 2, 1) if config.has_draft_prob else None
    parent_list = torch.arange(-1, 1).expand(3, -1)
    candidates = Candidates(text_BW[:, :2], torch.ones(3, 2), parent_list, (), draft_prob_BMV)
    bonus, locations = torch.zeros(3, dtype=torch.int32), torch.zeros(3, 3).long()
    return replace(build(candidates, bonus, batch.seq_lens, locations, config), candidates=None)


@pytest.mark.parametrize("implementation", [reference, fast], ids=["reference", "fast"])
@pytest.mark.parametrize("name", SETTINGS)
def test_after_a_cut_chain_the_bonus_is_from_the_target(name, implementation, device):
    """The final uniform 0.1 draws token 0 of four equally likely ones.

    A residual would start at token 1 or 2. The uniforms 0.2 accept every draft of token 0, and the Gumbel noise chooses
    a text.
    """
    config, device = replace(CUT, verifier=name), device if implementation is fast else "cpu"
    batch = Batch.of(range(3), range(3), [10, 11, 12], [SamplingParams(temperature=1.0)] * 3, vocab_size=4)
    is_noisy = name == "gumbel"
    text_BW = noise_of(batch, config, 4).argmax(-1) if is_noisy else torch.zeros(3, 3).long()
    given = torch.full((3, 3), 0.2, dtype=torch.float64), torch.full((3,), 0.1, dtype=torch.float64)
    moved = (each.to(device) for each in (batch, flat_chains(config, batch, text_BW), torch.zeros(9, 4)))
    found = implementation.verify(*moved, config, pools_of(3, device), tuple(each.to(device) for each in given))
    assert found.num_accepted_drafts.tolist() == [2, 1, 0]
    assert found.accepted_tokens() == [row[:count] for row, count in zip(text_BW.tolist(), (3, 2, 1), strict=True)]


@pytest.mark.parametrize("name", SETTINGS)
def test_no_request_has_no_verdict(name, device):
    config = SETTINGS[name]
    batch, tree, logits_RV = rounds_of(config, 4, 7, 0)
    none = torch.empty(0, dtype=torch.int64)
    empty = VerifyInput(**{each: value[:0] for each, value in tree.tensors.items()})
    moved = (each.to(device) for each in (batch.filter(none), empty, logits_RV[:0]))
    found = fast.verify(*moved, config, pools_of(4, device))
    assert found.accept_index.shape == (0, config.num_steps + 1)
