import itertools
import math
import random
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.grammar import stacked
from specsim.core.phases import Batch, Sampling, VerifyInput
from specsim.core.pool import KVBuffer, KVLayout, KVPool
from specsim.core.state import ALL_STEPS
from specsim.fast import verify as fast
from specsim.fast.vocabulary.penalties import Allowed, Logits
from specsim.reference import verify as reference
from specsim.reference.acceptance import Tree
from specsim.reference.tree import links, trees, visibility
from specsim.reference.verify import node_logits, walk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOWEST, HIGHEST = 2.0**-24, 1 - 2.0**-24  # the bounds of specsim.core.uniforms.named_uniforms
V = 4


def make_tree(parents: list[int], tokens: list[int], depth_limit: int = 99) -> Tree:
    return Tree(tokens, parents, *links(parents), depth_limit)


# Children 1 and 2 of the root, 3 and 0 below the first, 2 below the second.
FIVE = make_tree([-1, 0, 0, 1, 1, 2], [0, 1, 2, 3, 0, 2])


# Batches


def make_batch(params: list[SamplingParams], seq_lens=None, prompt_lens=None, vocab_size: int = V) -> Batch:
    size = len(params)
    ids = torch.arange(size)
    seq_lens = torch.tensor(seq_lens or [4] * size, dtype=torch.int64)
    prompt_lens = torch.tensor(prompt_lens or [2] * size, dtype=torch.int64)
    steps = torch.full((size,), ALL_STEPS, dtype=torch.int32)
    return Batch(ids, ids, seq_lens, prompt_lens, ids, Sampling.of(params, vocab_size), 0 * ids, steps)


# Two lanes of two steps: N = 6 nodes, rows of accept_index are S + 1 = 3 wide.
CONFIG = SpecConfig(topk=2, num_steps=2, num_draft_tokens=6, page_size=1, max_len=40)
LOGITS_NV = torch.tensor([[1.0, 2, 4, 1], [1, 2, 3, 2], [1, 1, 2, 4], [5, 1, 1, 1], [2, 2, 1, 3], [1, 1, 1, 5]]).log()
GREEDY, SAMPLED, HOT = SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=2.0, top_k=1)


def verdict_of(params: list[SamplingParams], uniforms_BD, final_uniforms, config: SpecConfig = CONFIG):
    adjusted_BNV = LOGITS_NV.double().expand(len(params), 6, V)
    uniforms_BD = torch.tensor(uniforms_BD, dtype=torch.float64).view(len(params), 3)
    final_uniforms_B = torch.tensor(final_uniforms, dtype=torch.float64)
    given = uniforms_BD, final_uniforms_B
    return walk(make_batch(params), verify_input_of(FIVE, len(params)), adjusted_BNV, given, config)


def mixed_verdict():
    """Make a verdict on four requests.

    Greedy to the second child and bonus 3; sampled one deep; sampled with nothing accepted; greedy through top-k.
    """
    uniforms_BD = [[HIGHEST] * 3, [0.2, 0.9, 0.5], [0.9, LOWEST, LOWEST], [HIGHEST] * 3]
    return verdict_of([GREEDY, SAMPLED, SAMPLED, HOT], uniforms_BD, [0.1, 0.5, 0.6, 0.9])


def test_verdict_of_a_mixed_batch_by_hand():
    """Request 1: p(1) = 2/8 accepts at the uniform .2.

    Children 3 and 0 below it have 2/8 + 1/8 < .9, and the final uniform .5 draws token 2 from the rest (2, 3)/8.

    Request 2: 2/8 + 4/8 < .9, and the uniform .6 draws token 3 from the rest (1, ·, ·, 1)/8.
    """
    verdict = mixed_verdict()
    assert verdict.accept_index.tolist() == [[0, 2, -1], [6, 7, -1], [12, -1, -1], [18, 20, -1]]
    predict = [[2, -1, 3, -1, -1, -1], [1, 2, -1, -1, -1, -1], [3, -1, -1, -1, -1, -1], [2, -1, 3, -1, -1, -1]]
    assert verdict.predict.view(4, 6).tolist() == predict
    assert verdict.num_accepted_drafts.tolist() == [1, 1, 0, 1]
    assert verdict.num_accepted_tokens.tolist() == [2, 2, 1, 2]


def test_bonus_is_found_through_accept_index():
    verdict = mixed_verdict()
    last = verdict.accept_index[torch.arange(4), verdict.num_accepted_drafts.long()]
    assert verdict.predict[last.long()].tolist() == [3, 2, 3, 3]


def test_logprobs_are_of_the_tokens_after_each_accepted_node():
    """T is 1 where greedy and T where sampled, before top-k.

    Padding has 0.
    """
    root, two = math.log(4 / 8), math.log(4 / 8)
    hot_root = math.log(2 / (1 + math.sqrt(2) + 2 + 1))
    hot_two = math.log(2 / (1 + 1 + math.sqrt(2) + 2))
    expected = [[root, two, 0], [math.log(2 / 8), math.log(3 / 8), 0], [math.log(1 / 8), 0, 0], [hot_root, hot_two, 0]]
    torch.testing.assert_close(mixed_verdict().logprobs, torch.tensor(expected), rtol=1e-6, atol=0)


def test_types_and_widths_of_a_verdict():
    verdict = mixed_verdict()
    assert verdict.accept_index.shape == verdict.logprobs.shape == (4, 3)
    assert verdict.predict.shape == (24,)
    counters = (verdict.num_accepted_drafts, verdict.num_accepted_tokens)
    assert {tensor.dtype for tensor in (verdict.predict, verdict.accept_index, *counters)} == {torch.int32}
    assert verdict.logprobs.dtype == torch.float32
    assert counters[0].data_ptr() != counters[1].data_ptr()


def test_a_full_path_fills_its_row():
    verdict = verdict_of([SAMPLED], [[0.2, 0.2, 0.5]], [0.9])
    assert verdict.accept_index.tolist() == [[0, 1, 3]]
    assert verdict.predict.tolist() == [1, 3, -1, 3, -1, -1]
    assert (verdict.num_accepted_drafts.tolist(), verdict.num_accepted_tokens.tolist()) == ([2], [3])


def test_a_request_has_the_same_verdict_solo_and_batched():
    params, final = [GREEDY, SAMPLED, HOT, SAMPLED], [0.3, 0.2, 0.7, 0.9]
    uniforms_BD = [[0.1, 0.8, 0.4], [0.3, 0.3, 0.6], [0.9, 0.2, 0.5], [0.2, 0.1, 0.1]]
    together = verdict_of(params, uniforms_BD, final)
    for request in range(4):
        alone = verdict_of([params[request]], [uniforms_BD[request]], [final[request]])
        assert torch.equal(together.predict.view(4, 6)[request], alone.predict)
        assert torch.equal(together.logprobs[request], alone.logprobs[0])
        local = together.accept_index[request] - 6 * request
        assert torch.equal(torch.where(together.accept_index[request] < 0, -1, local), alone.accept_index[0])


def test_thresholds_come_from_the_setting_except_for_greedy():
    lossy = replace(CONFIG, threshold_single=0.2)
    by_sum = replace(CONFIG, threshold_acc=0.3)
    uniforms_BD, final = [[0.8, 0.95, 0.5]] * 2, [0.1] * 2
    accepted = [
        verdict_of([SAMPLED, GREEDY], uniforms_BD, final, config).accept_index.tolist()
        for config in (CONFIG, lossy, by_sum)
    ]
    assert accepted == [[[0, -1, -1], [6, 8, -1]], [[0, 1, 3], [6, 8, -1]], [[0, 1, 4], [6, 8, -1]]]


def test_an_idle_batch_has_a_verdict_of_no_rows():
    none = make_batch([])
    nothing = verify_input_of(FIVE, 0)
    verdict = walk(none, nothing, torch.empty(0, 6, V).double(), (torch.empty(0, 3), torch.empty(0)), CONFIG)
    assert verdict.accept_index.shape == verdict.logprobs.shape == (0, 3)
    assert verdict.predict.shape == verdict.num_accepted_drafts.shape == verdict.num_accepted_tokens.shape == (0,)
    assert {verdict.predict.dtype, verdict.accept_index.dtype, verdict.num_accepted_tokens.dtype} == {torch.int32}
    assert node_logits(none, nothing, torch.empty(0, V), CONFIG, make_pools([])).shape == (0, 6, V)


def test_plain_decoding_draws_from_the_whole_distribution():
    config, roots = SpecConfig.plain(max_len=40), verify_input_of(make_tree([-1], [2]), 2)
    adjusted_BNV = LOGITS_NV[:1].double().expand(2, 1, V)
    given = torch.full((2, 1), 0.5), torch.tensor([0.9, 0.2])
    verdict = walk(make_batch([GREEDY, SAMPLED]), roots, adjusted_BNV, given, config)
    assert verdict.predict.tolist() == [2, 1]
    assert verdict.accept_index.tolist() == [[0], [1]]
    assert verdict.num_accepted_tokens.tolist() == [1, 1]


# Trees and logits of a batch


def verify_input_of(tree: Tree, size: int) -> VerifyInput:
    tables = [
        torch.tensor(row).expand(size, -1).clone()
        for row in (tree.tokens, tree.parents, tree.next_token, tree.next_sibling)
    ]
    tokens, parents, next_token, next_sibling = tables
    num_nodes = len(tree.tokens)
    depths = [0] * num_nodes
    for node, parent in enumerate(tree.parents[1:], 1):
        depths[node] = depths[parent] + 1
    return VerifyInput(
        draft_tokens=tokens, parents=parents, scores=torch.ones(size, num_nodes),
        positions=torch.zeros(size * num_nodes, dtype=torch.int64), mask=visibility(tree.parents).expand(size, -1, -1),
        retrieve_index=torch.arange(size * num_nodes).view(size, num_nodes), retrieve_next_token=next_token,
        retrieve_next_sibling=next_sibling, cache_locations=torch.zeros(size * num_nodes, dtype=torch.int64),
        proposed_depth=torch.full((size,), max(depths), dtype=torch.int32),
    )  # fmt: skip


def test_trees_have_the_depth_of_the_length_limit():
    """A node of depth d has position L + d, which must be below max_len."""
    batch = make_batch([GREEDY] * 3, seq_lens=[4, 7, 9])
    made = trees(batch, verify_input_of(FIVE, 3), max_len=9)
    assert [tree.depth_limit for tree in made] == [4, 1, -1]
    assert {(tuple(tree.tokens), tuple(tree.parents)) for tree in made} == {(tuple(FIVE.tokens), tuple(FIVE.parents))}
    assert [list(tree.children(0)) for tree in made] == [[1, 2]] * 3


def make_pools(token_rows: list[list[int]]) -> KVPool:
    """Make the tokens of each request, with its bonus, as the engine keeps them."""
    pools = KVPool(KVBuffer(KVLayout(1, 1, 1), 8, torch.float32), None, 1, max(1, len(token_rows)), 8)
    for row, tokens in zip(pools.token_ids, token_rows, strict=False):
        row[: len(tokens)] = torch.tensor(tokens)
    return pools


# Prompt 0 1, output 2 2 and the bonus 3; the tree repeats 2 and 3 below it.
BONUS_THREE = make_tree([-1, 0, 1, 0], [3, 2, 3, 1])
FREQUENT = SamplingParams(frequency_penalty=1.0)


@pytest.mark.parametrize(
    ("penalties", "counts"),
    [
        ("exact", [[0, 0, 2, 1], [0, 0, 3, 1], [0, 0, 3, 2], [0, 1, 2, 1]]),
        ("relaxed", [[0, 0, 2, 1], [0, 0, 2, 1], [0, 0, 2, 1], [0, 0, 2, 1]]),
    ],
)
def test_penalties_count_output_bonus_and_in_exact_mode_path(penalties, counts):
    config = SpecConfig(topk=2, num_steps=2, num_draft_tokens=4, page_size=1, penalties=penalties, max_len=40)
    pools = make_pools([[0, 1, 2, 2, 3]])
    adjusted = node_logits(make_batch([FREQUENT]), verify_input_of(BONUS_THREE, 1), torch.zeros(4, V), config, pools)
    assert (-adjusted).tolist() == [counts]
    assert adjusted.dtype == torch.float64


@pytest.mark.parametrize(
    ("row", "counts"), [(1, [0, 0, 2, 1]), (0, [0, 2, 0, 1])], ids=["prompt 0 0 1", "all of the prompt's"]
)
def test_every_request_is_penalised_by_its_own_tokens(row, counts):
    """The second request is one token longer, has a prompt of three, and a pool row different from its index."""
    config = SpecConfig(topk=2, num_steps=2, num_draft_tokens=4, page_size=1, max_len=40)
    pools = make_pools([[1, 1, 1, 1, 1, 1], [0, 0, 1, 2, 2, 3], [0, 1, 2, 2, 3]])
    batch = make_batch([FREQUENT, FREQUENT], seq_lens=[4, 5], prompt_lens=[2, 3])
    batch = replace(batch, req_pool_indices=torch.tensor([2, row]))
    adjusted = node_logits(batch, verify_input_of(BONUS_THREE, 2), torch.zeros(8, V), config, pools)
    assert (-adjusted[:, 0]).tolist() == [[0, 0, 2, 1], counts]


def test_every_node_has_its_own_grammar_mask():
    config = SpecConfig(topk=2, num_steps=2, num_draft_tokens=4, page_size=1, max_len=40)
    allowed_BNV = torch.rand(1, 4, V) < 0.5
    logits_BNV = torch.randn(1, 4, V)
    pools = make_pools([[0, 1, 2, 2, 3]])
    tree, batch = verify_input_of(BONUS_THREE, 1), make_batch([GREEDY])
    adjusted = node_logits(batch, tree, logits_BNV[0], config, pools, allowed_BNV)
    assert torch.equal(adjusted, torch.where(allowed_BNV, logits_BNV.double(), -torch.inf))


# The fast implementation, whose whole verdicts are compared with the reference's on the same f32 logits.


def random_tree(draw: random.Random, config: SpecConfig, vocab_size: int) -> Tree:
    """Draw N nodes of depth up to S, where siblings have distinct tokens, in any order."""
    parents, tokens, depths = [-1], [draw.randrange(vocab_size)], [0]
    while len(parents) < config.num_draft_tokens:
        node = draw.randrange(len(parents))
        token = draw.randrange(vocab_size)
        siblings = [other for other, parent in zip(tokens, parents, strict=True) if parent == node]
        if depths[node] < config.num_steps and token not in siblings:
            parents, tokens, depths = [*parents, node], [*tokens, token], [*depths, depths[node] + 1]
    return make_tree(parents, tokens)


def inputs_of(grown: list[Tree]) -> VerifyInput:
    each = [verify_input_of(tree, 1) for tree in grown]
    joined = {field.name: [getattr(one, field.name) for one in each] for field in fields(VerifyInput)}
    return VerifyInput(**{name: None if parts[0] is None else torch.cat(parts) for name, parts in joined.items()})


def likely_logits(draw: random.Random, grown: list[Tree], vocab_size: int, more: float) -> torch.Tensor:
    """Draw normal logits [B·N, V] of deviation 2, with `more` for the children of every node."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    logits_BNV = 2 * torch.randn(len(grown), len(grown[0].tokens), vocab_size, generator=generator)
    for logits_NV, tree in zip(logits_BNV, grown, strict=True):
        for node, parent in enumerate(tree.parents[1:], 1):
            logits_NV[parent, tree.tokens[node]] += more
    return logits_BNV.flatten(0, 1)


def requests_of(draw: random.Random, params: list[SamplingParams], vocab_size: int) -> tuple[Batch, KVPool]:
    """Make requests of random lengths, in reverse rows of the pool, whose other columns hold no token."""
    params = [replace(each, seed=draw.randrange(2**64)) for each in params]
    lengths = [draw.randrange(2, 12) for _ in params]
    prompts = [draw.randrange(1, length + 1) for length in lengths]
    rows = list(range(len(params)))[::-1]
    batch = replace(Batch.of(rows, rows, prompts, params, vocab_size), seq_lens=torch.tensor(lengths))
    pools = KVPool(KVBuffer(KVLayout(1, 1, 1), 8, torch.float32), None, 1, len(params), 40)
    for row, length in batch.rows_and_lens:
        pools.token_ids[row, : length + 1] = torch.tensor([draw.randrange(vocab_size) for _ in range(length + 1)])
    return batch, pools


def pools_on(pools: KVPool, device: str) -> KVPool:
    """Copy the tokens of these pools."""
    width = pools.token_ids.shape[1]
    moved = KVPool(KVBuffer(KVLayout(1, 1, 1), 8, torch.float32, device), None, 1, len(pools.token_ids), width)
    moved.token_ids.copy_(pools.token_ids)
    return moved


def masks_of(grown: list[Tree], vocab_size: int) -> dict[int, torch.Tensor]:
    """Draw bool [N, V] for every other request: half of the tokens may follow a node, always including the first."""
    rows = {place: torch.rand(len(grown[place].tokens), vocab_size) < 0.5 for place in range(1, len(grown), 2)}
    return {place: allowed_NV | (torch.arange(vocab_size) == 0) for place, allowed_NV in rows.items()}


def fast_verify(batch, verify_input, logits_RV, config, pools, device, uniforms=None, masks=None):
    """Compute the verdict, and copy it to the CPU."""
    uniforms = uniforms and tuple(each.to(device) for each in uniforms)
    allowed = Allowed.empty(*verify_input.draft_tokens.shape, logits_RV.shape[1], device)
    allowed.load(masks or {})
    moved = batch.to(device), verify_input.to(device), logits_RV.to(device), config, pools_on(pools, device)
    verdict = fast.verify(*moved, uniforms, allowed=allowed if masks else None)
    return type(verdict)(**{field.name: getattr(verdict, field.name).cpu() for field in fields(verdict)})


COUNTED = ("predict", "accept_index", "num_accepted_drafts", "num_accepted_tokens")


def assert_same(verdict, expected):
    """Compare integers exactly, logprobs within the roundings of an exponent, which grow with it, and a logarithm."""
    for name in COUNTED:
        assert getattr(verdict, name).dtype == torch.int32
        assert torch.equal(getattr(verdict, name), getattr(expected, name)), name
    assert verdict.logprobs.dtype == torch.float32
    assert ((verdict.logprobs - expected.logprobs).abs() <= 2.0**-21 * (8 + expected.logprobs.abs())).all()


BINARY = math.log2(math.e)  # this temperature makes the weights of integer logits powers of two: nothing is rounded
EXACT = [
    SamplingParams(temperature=BINARY),
    SamplingParams(temperature=BINARY, top_k=5),
    SamplingParams(temperature=BINARY, top_p=0.7),
    SamplingParams(temperature=BINARY, min_p=0.125),
    SamplingParams(temperature=BINARY, top_k=7, top_p=0.9, min_p=0.0625),
    SamplingParams(),
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (0.3, 0.7)])
def test_fast_verdicts_of_binary_weights_equal_the_references(seed, thresholds, device, program_order):
    """Uniforms and cuts may tie.

    Each implementation draws the uniforms by name.
    """
    draw, config = random.Random(seed), SpecConfig(topk=3, num_steps=3, num_draft_tokens=9, page_size=1, max_len=40)
    config = replace(config, threshold_single=thresholds[0], threshold_acc=thresholds[1])
    grown = [random_tree(draw, config, 13) for _ in EXACT]
    logits_RV = likely_logits(draw, grown, 13, 3.0).round()
    batch, pools = requests_of(draw, EXACT, 13)
    verify_input = inputs_of(grown)
    expected = reference.verify(batch, verify_input, logits_RV, config, pools)
    assert_same(fast_verify(batch, verify_input, logits_RV, config, pools, device), expected)
    assert expected.num_accepted_drafts.sum() > 0


SHAPES = [(1, 1, 2), (1, 4, 5), (2, 2, 4), (4, 3, 13), (3, 5, 4), (8, 2, 31)]
ANY = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    SamplingParams(temperature=1.0, logit_bias={1: 3.0, 2: -2.0}),
    SamplingParams(temperature=0.8, top_k=6, repetition_penalty=1.2),
    SamplingParams(temperature=1.2, top_p=0.85, frequency_penalty=-0.4),
    SamplingParams(temperature=1.5, top_k=9, top_p=0.9, min_p=0.04, presence_penalty=0.6),
]


@given(
    st.integers(0, 10**6),
    st.sampled_from(SHAPES),
    st.sampled_from(["exact", "relaxed"]),
    st.sampled_from([(1.0, 1.0), (0.4, 1.0), (1.0, 0.6), (0.0, 0.0)]),
)
@settings(max_examples=10, phases=[Phase.generate])
def test_fast_verdicts_are_the_references(seed, shape, penalties, thresholds):
    """Every decision of ten batches agrees, where half of the requests have a grammar.

    Roundings change one of them with a probability of about 10⁻⁶.
    """
    topk, num_steps, num_nodes = shape
    config = SpecConfig(topk, num_steps, num_nodes, 1, penalties=penalties, max_len=14)
    config = replace(config, threshold_single=thresholds[0], threshold_acc=thresholds[1])
    draw = random.Random(seed)
    grown = [random_tree(draw, config, 37) for _ in ANY]
    logits_RV = likely_logits(draw, grown, 37, 4.0)
    batch, pools = requests_of(draw, ANY, 37)
    verify_input, masks = inputs_of(grown), masks_of(grown, 37) if thresholds[0] else {}
    allowed_BNV = stacked(masks, len(ANY))
    expected = reference.verify(batch, verify_input, logits_RV, config, pools, allowed=allowed_BNV)
    assert_same(fast_verify(batch, verify_input, logits_RV, config, pools, DEVICE, masks=masks), expected)


def test_fast_verdicts_end_with_the_verifiers_bonus_tokens(device, program_order):
    """The bonus tokens of gumbel on chains are a request's own in any batch."""
    draw, config = random.Random(2), SpecConfig(1, 3, 4, page_size=1, max_len=40, verifier="gumbel")
    grown = [make_tree([-1, 0, 1, 2], [draw.randrange(5) for _ in range(4)]) for _ in ANY]
    logits_RV, verify_input = likely_logits(draw, grown, 5, 2.0), inputs_of(grown)
    batch, pools = requests_of(draw, ANY, 5)
    expected = reference.verify(batch, verify_input, logits_RV, config, pools)
    assert_same(fast_verify(batch, verify_input, logits_RV, config, pools, device), expected)
    assert len(set(expected.num_accepted_drafts.tolist())) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fast_verdicts_of_a_vocabulary_of_several_tiles(dtype, device, program_order):
    config = SpecConfig(topk=2, num_steps=2, num_draft_tokens=4, page_size=1, max_len=40)
    draw, params = random.Random(5), ANY[1:]
    grown = [random_tree(draw, config, 5003) for _ in params]
    logits_RV = likely_logits(draw, grown, 5003, 9.0).to(dtype)
    batch, pools = requests_of(draw, params, 5003)
    verify_input = inputs_of(grown)
    expected = reference.verify(batch, verify_input, logits_RV, config, pools)
    assert_same(fast_verify(batch, verify_input, logits_RV, config, pools, device), expected)


@pytest.mark.parametrize("threshold", [1.0, 0.0])
def test_fast_verdict_of_given_uniforms_and_their_ends(threshold, device, program_order):
    """Greedy ignores the thresholds.

    Sampling accepts every first child at 0.
    """
    params = [GREEDY, SAMPLED, SAMPLED, HOT]
    batch, verify_input, pools = make_batch(params), verify_input_of(FIVE, 4), make_pools([[0, 1, 2, 3]] * 4)
    config = replace(CONFIG, threshold_single=threshold, threshold_acc=threshold, max_len=8)
    ends = itertools.product([LOWEST, HIGHEST], repeat=2)
    for accept, final in [*(([uniform] * 3, final) for uniform, final in ends), ([0.2, 0.9, 0.5], 0.55)]:
        uniforms_BW = torch.tensor(accept, dtype=torch.float64).expand(4, 3).contiguous()
        given = uniforms_BW, torch.full((4,), final, dtype=torch.float64)
        expected = reference.verify(batch, verify_input, LOGITS_NV.repeat(4, 1), config, pools, given)
        verdict = fast_verify(batch, verify_input, LOGITS_NV.repeat(4, 1), config, pools, device, given)
        assert_same(verdict, expected)


def test_fast_walk_breaks_ties_by_the_lower_token(device):
    """Tokens 1 and 2 tie: greedy takes 1, which no child has.

    The uniform rejects the child of 2, and draws 1.
    """
    tree, config = make_tree([-1, 0, 0, 0], [3, 2, 0, 3]), SpecConfig(3, 1, 4, 1, max_len=8)
    logits_RV = torch.tensor([-torch.inf, 0.0, 0.0, -torch.inf]).repeat(8, 1)
    given = torch.full((2, 2), HIGHEST, dtype=torch.float64), torch.full((2,), LOWEST, dtype=torch.float64)
    batch, pools = make_batch([GREEDY, SAMPLED]), make_pools([[0, 1, 2, 3]] * 2)
    verdict = fast_verify(batch, verify_input_of(tree, 2), logits_RV, config, pools, device, given)
    assert verdict.predict.tolist() == [1, -1, -1, -1] * 2
    assert_same(verdict, reference.verify(batch, verify_input_of(tree, 2), logits_RV, config, pools, given))


def walk_by_hand(batch: Batch, tree: Tree, logits_RV: torch.Tensor, config: SpecConfig, given, device: str):
    verify_input, on_device = verify_input_of(tree, batch.size).to(device), batch.to(device)
    changed, adjusted = torch.zeros(batch.size, dtype=torch.int32, device=device), torch.empty_like(logits_RV)
    logits = Logits(logits_RV.to(device), changed, adjusted.to(device))
    return fast.walk(on_device, verify_input, logits, tuple(each.to(device) for each in given), config)


@pytest.mark.parametrize("max_len", [5, 6, 7, 40])
def test_fast_walk_stops_at_the_length_limit(max_len, device):
    """Lengths are 4 to 6, on both sides of the limit.

    No node at or beyond it is accepted, and no sibling rejected.
    """
    params = [GREEDY, SAMPLED, GREEDY, SAMPLED, SAMPLED]
    batch = make_batch(params, seq_lens=[4, 4, 5, 5, 6])
    config, pools = replace(CONFIG, max_len=max_len), make_pools([[0, 1, 2, 3, 0, 1, 2]] * 5)
    given = torch.full((5, 3), 0.1, dtype=torch.float64), torch.full((5,), 0.3, dtype=torch.float64)
    logits_RV = LOGITS_NV.repeat(5, 1)
    expected = reference.verify(batch, verify_input_of(FIVE, 5), logits_RV, config, pools, given)
    assert_same(fast_verify(batch, verify_input_of(FIVE, 5), logits_RV, config, pools, device, given), expected)


def test_padded_requests_have_no_path_and_change_no_other(device, program_order):
    """Padding is in front, in the middle and at the end, greedy and sampled, with NaN logits.

    The other requests have the same verdict as without it.
    """
    draw, config = random.Random(3), SpecConfig(topk=2, num_steps=2, num_draft_tokens=5, page_size=1, max_len=40)
    grown = [random_tree(draw, config, 37) for _ in ANY]
    logits_RV, verify_input = likely_logits(draw, grown, 37, 4.0), inputs_of(grown)
    batch, pools = requests_of(draw, ANY, 37)
    alone = fast_verify(batch, verify_input, logits_RV, config, pools, device)

    places = torch.tensor([0, 0, 1, 2, 2, 3, 4, 5, 5])
    real = torch.tensor([False, True, True, True, False, True, True, True, False])
    spread = batch.filter(places)
    rows, lengths = torch.where(real, spread.req_pool_indices, -1), torch.where(real, spread.seq_lens, 0)
    spread = replace(spread, req_pool_indices=rows, seq_lens=lengths)
    logits_BNV = logits_RV.unflatten(0, (6, 5))[places].masked_fill(~real[:, None, None], torch.nan)
    among = fast_verify(
        spread, inputs_of([grown[at] for at in places]), logits_BNV.flatten(0, 1), config, pools, device
    )

    assert torch.equal(among.predict.view(9, 5)[real], alone.predict.view(6, 5))
    assert torch.equal(among.logprobs[real], alone.logprobs)
    assert torch.equal(among.num_accepted_tokens[real], alone.num_accepted_tokens)
    own = among.accept_index - 5 * torch.arange(9, dtype=torch.int32)[:, None]
    expected = alone.accept_index - 5 * torch.arange(6, dtype=torch.int32)[:, None]
    assert torch.equal(
        own.masked_fill(among.accept_index < 0, -1)[real], expected.masked_fill(alone.accept_index < 0, -1)
    )
    assert (among.predict.view(9, 5)[~real] == -1).all()
    assert (among.accept_index[~real] == -1).all()
    assert among.num_accepted_drafts[~real].tolist() == [0] * 3
    assert among.num_accepted_tokens[~real].tolist() == [1] * 3
    assert among.logprobs[~real].tolist() == [[0.0] * 3] * 3


@pytest.mark.parametrize("link", ["next_token", "next_sibling", "tokens"])
@pytest.mark.parametrize("value", ["own", 0, 99, 2**40])
def test_malformed_links_end_a_walk_within_the_tree(link, value, device):
    """Links form circles and lead beyond the tree, and tokens beyond the vocabulary, yet a walk ends with some path."""
    spoiled = [node if value == "own" else value for node in range(6)]
    tree = replace(FIVE, **{link: spoiled})
    given = torch.full((2, 3), 0.3, dtype=torch.float64), torch.full((2,), HIGHEST, dtype=torch.float64)
    verdict = walk_by_hand(
        make_batch([GREEDY, SAMPLED]), tree, LOGITS_NV.repeat(2, 1), replace(CONFIG, max_len=9), given, device
    )
    drafts = verdict.num_accepted_drafts.tolist()
    assert all(0 <= count <= 2 for count in drafts)
    for request, (path, count) in enumerate(zip(verdict.accept_index.tolist(), drafts, strict=True)):
        assert all(6 * request <= node < 6 * request + 6 for node in path[: count + 1])
        assert path[count + 1 :] == [-1] * (2 - count)


def test_fast_verdict_is_written_to_the_buffers_given(device):
    config, params = replace(CONFIG, max_len=8), [GREEDY, SAMPLED]
    batch, verify_input, pools = make_batch(params), verify_input_of(FIVE, 2), make_pools([[0, 1, 2, 3]] * 2)
    first = fast_verify(batch, verify_input, LOGITS_NV.repeat(2, 1), config, pools, device)
    arguments = (batch.to(device), verify_input.to(device), LOGITS_NV.repeat(2, 1).to(device), config)
    out = first.__class__(
        **{field.name: torch.empty_like(getattr(first, field.name), device=device) for field in fields(first)}
    )
    assert fast.verify(*arguments, pools_on(pools, device), out=out) is out
    assert all(torch.equal(getattr(out, field.name).cpu(), getattr(first, field.name)) for field in fields(first))
    values = {field.name: getattr(verify_input, field.name) for field in fields(verify_input)}
    empty = VerifyInput(**{name: None if value is None else value[:0] for name, value in values.items()})
    none = make_batch([]), empty, torch.empty(0, V), config, pools
    assert_same(fast_verify(*none, device), reference.verify(*none))


@pytest.mark.parametrize("penalties", ["exact", "relaxed"])
def test_fast_node_logits_are_the_references(penalties, device, program_order):
    """Budget: a rounding for each of the four operations on values at most as large as their operands."""
    config = SpecConfig(topk=3, num_steps=3, num_draft_tokens=11, page_size=1, penalties=penalties, max_len=40)
    draw = random.Random(1)
    grown = [random_tree(draw, config, 19) for _ in ANY]
    logits_RV, verify_input = likely_logits(draw, grown, 19, 2.0), inputs_of(grown)
    batch, pools = requests_of(draw, ANY, 19)
    logits_BNV = logits_RV.unflatten(0, (6, 11))
    exact = node_logits(batch, verify_input, logits_BNV.flatten(0, 1), config, pools)
    on_device = batch.to(device), verify_input.to(device), logits_RV.to(device)
    logits = fast.node_logits(*on_device, config, pools_on(pools, device))
    assert logits.changed.tolist() == [0, 1, 1, 1, 1, 1]
    adjusted = logits.adjusted.cpu().unflatten(0, (6, 11))
    assert torch.equal(exact[0].float(), logits_BNV[0])
    assert ((adjusted - exact).abs() <= 4 * 2.0**-24 * (1.3 * logits_BNV.abs() + 8))[1:].all()


def test_fast_first_tokens_are_the_references(device, program_order):
    """Known tokens are kept.

    Chunks end in their prompts, at their ends and, when resumed, beyond; one is padded.
    """
    draw, params = random.Random(8), [*ANY, SAMPLED, SAMPLED]
    batch, pools = requests_of(draw, params, 37)
    batch = replace(batch, prompt_lens=batch.seq_lens + torch.tensor([0, 0, 0, 0, 0, -1, 3, -1]))
    logits_BV, known = 3 * torch.randn(8, 37), torch.tensor([-1, 11, -1, -1, -1, 5, 36, -1])
    tokens, logprobs = reference.first_tokens(batch, known, logits_BV, pools)
    padded = batch.filter(torch.tensor([*range(8), 0]))
    rows, lengths = padded.req_pool_indices.clone(), padded.seq_lens.clone()
    rows[8], lengths[8] = -1, 0
    padded = replace(padded, req_pool_indices=rows, seq_lens=lengths).to(device)
    logits_RV = torch.cat([logits_BV, torch.full((1, 37), torch.nan)]).to(device)
    known = torch.cat([known, torch.tensor([4])]).to(device)
    fast_tokens, fast_logprobs = fast.first_tokens(padded, known, logits_RV, pools_on(pools, device))
    assert (fast_tokens.dtype, fast_logprobs.dtype) == (torch.int32, torch.float32)
    assert fast_tokens.tolist() == [*tokens.tolist(), -1]
    assert ((fast_logprobs[:8].cpu() - logprobs).abs() <= 2.0**-21 * (8 + logprobs.abs())).all()
    assert fast_logprobs[8] == 0
