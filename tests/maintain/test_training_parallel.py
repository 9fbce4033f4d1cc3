"""Drafters of all depths at once draft in training as at inference, from the files that training writes."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.pair import Pair
from specsim.maintain.training.minimise import Budget
from specsim.maintain.training.parallel import (
    ParallelLearner,
    Roots,
    Slot,
    draw_rollouts,
    draw_roots,
    parallel_drafts,
    parallel_loss,
    train_parallel,
)
from specsim.maintain.training.recipe import SMOKE
from specsim.maintain.training.target import target_config
from specsim.maintain.training.train import PARALLEL
from specsim.models.load import load
from specsim.reference.oracle_block import draft_block
from specsim.reference.oracle_draft import DraftNode
from specsim.reference.oracle_forward import in_dtype
from specsim.reference.oracle_p_eagle import draft_p_eagle
from specsim.reference.oracle_request import Draws, OracleRequest
from specsim.training.estimate import agreement
from specsim.training.heads import Features
from specsim.training.train import make_optimizers, take_step
from specsim.training.unroll import read_features

ROOTS = (1, 2, 7, 12)
DEPTH = SMOKE.parallel_drafts
NO_DRAWS = Draws(lambda *_: 0.0, lambda _: torch.zeros(0))
BLOCK_DRAFT = partial(draft_block, depth=DEPTH)
ORACLES = {"p-eagle": partial(draft_p_eagle, depth=DEPTH), "dflash": BLOCK_DRAFT, "dspark": BLOCK_DRAFT}


@pytest.fixture
def target() -> LlamaForCausalLM:
    torch.manual_seed(5)
    model = LlamaForCausalLM(target_config(SMOKE)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


@pytest.fixture
def tokens(target) -> torch.Tensor:
    return torch.randint(SMOKE.vocab_size, (13,))


@dataclass(frozen=True, slots=True)
class Written:
    """A learner, and the pair that is loaded from what it wrote."""

    learner: ParallelLearner
    pair: Pair

    def request(self, num_drafts: int, **changes: float) -> OracleRequest:
        """A request of the oracle, in float64, with other fields of the block."""
        models = [in_dtype(each, torch.float64) for each in (self.pair.target, self.pair.drafter)]
        if changes:
            config = models[1].config
            models[1].config = replace(config, block=replace(config.block, **changes))
        config = SpecConfig(1, num_drafts, page_size=4)
        return OracleRequest(*models, config, SamplingParams(), NO_DRAWS, 1, 100, None)


def written(name: str, target: LlamaForCausalLM, folder: Path) -> Written:
    """Write an untrained learner whose every tensor is random, and its target."""
    learner = PARALLEL[name](target, SMOKE).eval()
    for parameter in learner.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    learner.write(folder / name)
    target.save_pretrained(folder / "target")
    return Written(learner, load(folder / "target", folder / name, drafter=name))


def oracle_drafts(name: str, request: OracleRequest, tokens: list[int]) -> tuple[list[int], torch.Tensor]:
    """Drafts of a chain after the tokens, with the probability of each."""
    nodes = ORACLES[name](request, tokens, DraftNode((), None, 0, 1.0, None, None, ()))
    scores = torch.tensor([1.0, *(node.score for node in nodes)])
    return [node.token for node in nodes], scores[1:] / scores[:-1]


@torch.no_grad()
def slots_after(made: Written, target: LlamaForCausalLM, tokens: list[int], root: int, num_drafts: int) -> list[Slot]:
    """Draft after one root, with the given number of drafts."""
    tokens_BC = torch.tensor([tokens])
    features = read_features(target, tokens_BC, made.learner.feature_layers)
    return made.learner.slots(features, tokens_BC, Roots(torch.tensor([[root]]), torch.tensor([[num_drafts]])), DEPTH)


@pytest.mark.parametrize("num_drafts", [1, DEPTH - 1, DEPTH])
@pytest.mark.parametrize("name", PARALLEL)
def test_slots_are_the_drafts_of_the_written_files(name, num_drafts, target, tokens, tmp_path):
    """The oracle drafts from the files, after each root; the learner reads the same drafts as true tokens."""
    made = written(name, target, tmp_path)
    for root in ROOTS:
        before = tokens[: root + 1].tolist()
        drafts, probs = oracle_drafts(name, made.request(num_drafts), before)
        assert len(drafts) == num_drafts
        after = [*before, *drafts, *[3] * (DEPTH + 1 - num_drafts)]
        slots = slots_after(made, target, after, root, num_drafts)
        for depth, (token, prob) in enumerate(zip(drafts, probs, strict=True)):
            slot = slots[depth]
            at = root - 1 if name == "p-eagle" and depth == 0 else 0  # its first slot has a draft for every row
            assert slot.columns_BA[0, at] == root + depth
            assert slot.counts_BA[0, at]
            own_V = slot.logits_BAV[0, at].softmax(-1)
            assert own_V.argmax() == token
            torch.testing.assert_close(own_V[token], prob, atol=1e-5, rtol=1e-3)
        assert not any(slot.counts_BA[0, 0] for slot in slots[max(num_drafts, 1) :])


def test_confidence_is_that_of_the_written_files(target, tokens, tmp_path):
    """A threshold just below a draft's confidence keeps the draft, one just above ends the block there."""
    made = written("dspark", target, tmp_path)
    root = 7
    before = tokens[: root + 1].tolist()
    drafts, _ = oracle_drafts("dspark", made.request(DEPTH), before)
    slots = slots_after(made, target, [*before, *drafts, 3], root, DEPTH)
    confidence = torch.stack([slot.confidence_BA[0, 0] for slot in slots]).sigmoid()
    least = int(confidence.argmin())
    for change, kept in ((-1e-4, DEPTH), (1e-4, least)):
        request = made.request(DEPTH, threshold=float(confidence[least]) + change)
        assert len(oracle_drafts("dspark", request, before)[0]) == kept


class Perfect(ParallelLearner):
    """Drafts with the target's own distributions."""

    feature_layers = (1,)

    def __init__(self, confidence: float | None = None) -> None:
        super().__init__()
        self.confidence = confidence

    def slots(self, features, tokens_BC, roots, depth):
        windows = torch.arange(len(tokens_BC))[:, None]
        made = []
        for index in range(depth):
            columns_BA = roots.columns_BA + index
            logit_BA = None if self.confidence is None else torch.full(columns_BA.shape, self.confidence)
            logits_BAV = features.logits_BCV[windows, columns_BA]
            made.append(Slot(logits_BAV, columns_BA, roots.num_drafts_BA > index, logit_BA))
        return made


def loss_of(learner: ParallelLearner, target: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    windows_BC = tokens[None]
    features: Features = read_features(target, windows_BC, list(learner.feature_layers))
    roots = Roots(torch.tensor([[1, 4, 6]]), torch.tensor([[DEPTH, 1, 2]]))
    with torch.no_grad():
        return parallel_loss(learner, features, windows_BC, roots, DEPTH)


@pytest.mark.parametrize("name", PARALLEL)
def test_loss_is_least_for_the_targets_distribution(name, target, tokens):
    assert loss_of(Perfect(), target, tokens) < loss_of(PARALLEL[name](target, SMOKE), target, tokens)


def test_confidence_learns_whether_the_first_choices_agree(target, tokens):
    """All of these do, so that the more confident learner has the smaller loss."""
    assert loss_of(Perfect(3.0), target, tokens) < loss_of(Perfect(-3.0), target, tokens)


def test_perfect_drafts_agree_everywhere(target):
    tokens_C = torch.randint(SMOKE.vocab_size, (3,))
    for _ in range(12):
        following = target(tokens_C[None]).logits[0, -1].argmax()
        tokens_C = torch.cat([tokens_C, following[None]])
    agrees = agreement(parallel_drafts(Perfect(), target, 3, tokens_C), tokens_C)
    assert agrees.shape[1] == 3
    assert agrees[2:].all()


def test_roots_are_inside_and_mostly_in_the_continuation():
    torch.manual_seed(0)
    roots = draw_roots(torch.zeros(50, 33), prompt_len=16, count=8, depth=DEPTH)
    assert roots.columns_BA.shape == roots.num_drafts_BA.shape == (50, 8)
    assert (roots.columns_BA.min(), roots.columns_BA.max() + DEPTH) == (1, 33)
    assert ((roots.columns_BA >= 16).sum(1) == 6).all()
    assert set(roots.num_drafts_BA.flatten().tolist()) == set(range(1, DEPTH + 1))


def test_three_of_four_rollouts_are_greedy():
    """Batches of two are greedy and sampled in turn; each row says which it is."""
    torch.manual_seed(0)
    is_sampled = torch.tensor([0, 0, 1, 1] * 3)
    rollouts = torch.stack([torch.arange(12), is_sampled], 1)
    drawn = draw_rollouts(rollouts, 4000, batch=2)
    assert torch.equal(drawn[:, 1], is_sampled[drawn[:, 0]])
    assert len(drawn[:, 0].unique()) == 12
    assert 0.22 < float(drawn[:, 1].float().mean()) < 0.28  # 4.3 standard deviations of 0.25


def test_tables_and_heads_are_not_trained_as_matrices(target):
    learner = PARALLEL["dspark"](target, SMOKE)
    names = {id(parameter): name for name, parameter in learner.named_parameters()}
    matrices, rest = (
        {names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]}
        for optimizer in make_optimizers(learner, 1e-3)
    )
    assert {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight"} <= rest
    assert {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= matrices
    assert not any("embed_tokens" in name or "lm_head" in name for name in matrices | rest)


@pytest.mark.parametrize("name", PARALLEL)
def test_steps_lower_the_loss_of_the_same_roots(name, target, tokens):
    torch.manual_seed(2)
    learner = PARALLEL[name](target, SMOKE)
    features = read_features(target, tokens[None], learner.feature_layers)
    roots = Roots(torch.tensor([[1, 4, 6]]), torch.full((1, 3), DEPTH))
    optimizers = make_optimizers(learner, 1e-2)

    def loss_of_a_batch() -> torch.Tensor:
        return parallel_loss(learner, features, tokens[None], roots, DEPTH)

    losses = [take_step(loss_of_a_batch, learner, optimizers, 1e-2).item() for _ in range(6)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", PARALLEL)
def test_a_stage_goes_on_where_it_stopped(name, target, tmp_path):
    """The second slice adds steps to those of the first, and both write the folder."""
    rollouts = torch.randint(SMOKE.vocab_size, (SMOKE.num_rollouts, SMOKE.rollout_window))
    recipe = replace(SMOKE, parallel_batch=2)
    budget = Budget(1.0, 0.5, tmp_path / "checkpoint.pt")
    _, first = train_parallel(name, PARALLEL[name], target, rollouts, recipe, budget, tmp_path / name)
    learner, second = train_parallel(name, PARALLEL[name], target, rollouts, recipe, budget, tmp_path / name)
    assert second["steps"] > first["steps"] > 0
    assert second["parameters"] == sum(parameter.numel() for parameter in learner.parameters())
    stored = load_file(tmp_path / name / "model.safetensors")
    assert stored.keys() == learner.tensors().keys()
    assert all(torch.equal(stored[key].float(), value.float()) for key, value in learner.tensors().items())
