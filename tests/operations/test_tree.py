import itertools
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.core.config import SpecConfig
from specsim.core.phases import AutoregressiveInput, Candidates, VerifyInput
from specsim.core.settings import with_steps
from specsim.fast.tree import construction as fast
from specsim.fast.tree import malformed, nodes
from specsim.reference.drafting import expand, start_lanes
from specsim.reference.tree import MalformedTree, build, links, select, visibility

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Node = tuple[int, ...]


def build_rows(tokens, scores, parent_list, config: SpecConfig, seq_lens=None, bonus=None) -> VerifyInput:
    """Call build() on lists with one entry for each request.

    Node j of request b has slot 100 b + j.
    """
    size, width = len(tokens), config.num_candidates
    return build(
        Candidates(
            torch.tensor(tokens, dtype=torch.int64).view(size, width),
            torch.tensor(scores, dtype=torch.float32).view(size, width),
            torch.tensor(parent_list, dtype=torch.int64).view(size, -1),
        )
        if size
        else Candidates(
            torch.empty(0, width, dtype=torch.int64), torch.empty(0, width), torch.empty(0, 1, dtype=torch.int64)
        ),
        torch.tensor(bonus or [0] * size, dtype=torch.int32),
        torch.tensor(seq_lens or [5] * size, dtype=torch.int64),
        100 * torch.arange(size)[:, None] + torch.arange(config.num_draft_tokens),
        config,
    )


# K = 2, S = 3. Candidates 0 and 1 are below the root, 2 and 3 below 0, 4 and 5 below 1; the lanes of the last step are
# 2 and 4, with children 6, 7 and 8, 9. The six best are 0, 1, 2, 4, 6 and 3:
#
#     root ─┬─ 0 (n1) ─┬─ 2 (n3) ─── 6 (n6)
#           │          └─ 3 (n4)
#           └─ 1 (n2) ─── 4 (n5)
HAND = SpecConfig(topk=2, num_steps=3, num_draft_tokens=7, page_size=1)
HAND_TOKENS = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
HAND_SCORES = [0.6, 0.4, 0.3, 0.2, 0.25, 0.1, 0.22, 0.01, 0.05, 0.02]
HAND_PARENT_LIST = [-1, 0, 1, 2, 4]


def test_hand_made_tree():
    tree = build_rows([HAND_TOKENS], [HAND_SCORES], [HAND_PARENT_LIST], HAND, seq_lens=[5], bonus=[9])
    assert tree.draft_tokens.tolist() == [[9, 10, 11, 12, 13, 14, 16]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1, 2, 3]]
    assert tree.scores[0].tolist() == pytest.approx([1.0, 0.6, 0.4, 0.3, 0.2, 0.25, 0.22])
    assert tree.positions.tolist() == [5, 6, 6, 7, 7, 7, 8]
    assert tree.retrieve_index.tolist() == [[0, 1, 2, 3, 4, 5, 6]]
    assert tree.retrieve_next_token.tolist() == [[1, 3, 5, 6, -1, -1, -1]]
    assert tree.retrieve_next_sibling.tolist() == [[-1, 2, -1, 4, -1, -1, -1]]
    assert tree.cache_locations.tolist() == [0, 1, 2, 3, 4, 5, 6]
    seen = ["#", "##", "# #", "## #", "##  #", "# #  #", "## #  #"]
    assert ["".join("#" if sees else " " for sees in row).rstrip() for row in tree.mask[0].tolist()] == seen


def test_types_of_the_tree():
    tree = build_rows([HAND_TOKENS], [HAND_SCORES], [HAND_PARENT_LIST], HAND)
    integers = ("draft_tokens", "parents", "positions", "cache_locations")
    retrieve = ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling")
    assert {getattr(tree, name).dtype for name in (*integers, *retrieve)} == {torch.int64}
    assert (tree.mask.dtype, tree.scores.dtype) == (torch.bool, torch.float32)


@pytest.mark.parametrize(("score", "root"), [("prob", 1.0), ("logprob", 0.0)])
def test_the_root_scores_as_the_empty_path(score, root):
    config = SpecConfig(topk=2, num_steps=1, num_draft_tokens=3, score=score)
    assert build_rows([[3, 4]], [[-1.0, -2.0]], [[-1]], config).scores.tolist() == [[root, -1.0, -2.0]]


def test_nodes_at_or_beyond_the_length_limit_lose_their_slot():
    config = SpecConfig(topk=2, num_steps=3, num_draft_tokens=7, page_size=1, max_len=7)
    rows = [[HAND_TOKENS] * 2, [HAND_SCORES] * 2, [HAND_PARENT_LIST] * 2]
    tree = build_rows(*rows, config, seq_lens=[5, 6])
    assert tree.cache_locations.tolist() == [0, 1, 2, -1, -1, -1, -1, 100, -1, -1, -1, -1, -1, -1]
    assert tree.positions.tolist() == [5, 6, 6, 7, 7, 7, 8, 6, 7, 7, 8, 8, 8, 9]


def test_plain_decoding_has_only_a_root():
    tree = build_rows([[], []], [[], []], [[-1], [-1]], SpecConfig.plain(), seq_lens=[3, 8], bonus=[6, 7])
    assert tree.draft_tokens.tolist() == [[6], [7]]
    assert tree.positions.tolist() == [3, 8]
    assert tree.mask.tolist() == [[[True]], [[True]]]
    assert tree.retrieve_index.tolist() == [[0], [1]]
    assert tree.retrieve_next_token.tolist() == tree.retrieve_next_sibling.tolist() == [[-1], [-1]]


@pytest.mark.parametrize("config", [HAND, SpecConfig.plain()])
def test_no_request_gives_tensors_of_no_rows(config):
    num_nodes = config.num_draft_tokens
    tree = build_rows([], [], [], config)
    assert tree.mask.shape == (0, num_nodes, num_nodes)
    assert tree.positions.shape == tree.cache_locations.shape == (0,)
    tables = (tree.draft_tokens, tree.parents, tree.scores)
    tables += (tree.retrieve_index, tree.retrieve_next_token, tree.retrieve_next_sibling)
    assert {tuple(table.shape) for table in tables} == {(0, num_nodes)}
    full = build_rows([HAND_TOKENS], [HAND_SCORES], [HAND_PARENT_LIST], HAND)
    for name in sorted(set(VerifyInput.__slots__) - {"candidates", "draft_prob", "looked_up"}):
        assert getattr(tree, name).dtype == getattr(full, name).dtype, name


@st.composite
def pools_of_candidates(draw):
    """Draw K, S, N, the candidates as paths of flat indices, their scores (multiples of 2⁻¹²), and the parent list."""
    topk, num_steps = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    size = topk + (num_steps - 1) * topk**2
    chances = st.sampled_from([1.0, 0.5, 0.25])
    paths: list[Node] = [(flat,) for flat in range(topk)]
    scores, parent_list, level = [draw(chances) for _ in range(topk)], [-1], list(range(topk))
    for _ in range(num_steps - 1):
        lanes = sorted(level, key=lambda flat: -scores[flat])[:topk]
        parent_list += lanes
        level = list(range(len(paths), len(paths) + topk * topk))
        for flat in level:
            lane = lanes[(flat - level[0]) // topk]
            paths.append((*paths[lane], flat))
            scores.append(scores[lane] * draw(chances))
    num_draft_tokens = num_steps + 1 if topk == 1 else draw(st.integers(2, size + 1))
    return SpecConfig(topk, num_steps, num_draft_tokens, page_size=1), paths, scores, parent_list


@given(pools_of_candidates(), st.integers(1, 50))
def test_build_is_the_construction_from_paths(case, seq_len):
    config, paths, scores, parent_list = case
    tokens = [7 * flat % 101 for flat in range(len(paths))]
    tree = build_rows([tokens], [scores], [parent_list], config, [seq_len], [55])
    ranked = sorted(range(len(paths)), key=lambda flat: -scores[flat])
    chosen = sorted(ranked[: config.num_draft_tokens - 1])
    nodes: list[Node] = [(), *(paths[flat] for flat in chosen)]
    children = [[j for j, other in enumerate(nodes) if other and other[:-1] == node] for node in nodes]
    siblings = {j: after for own in children for j, after in itertools.pairwise(own)}
    assert tree.draft_tokens.tolist() == [[55, *(tokens[flat] for flat in chosen)]]
    assert tree.scores.tolist() == [[1.0, *(scores[flat] for flat in chosen)]]
    assert tree.parents.tolist() == [[-1, *(nodes.index(node[:-1]) for node in nodes[1:])]]
    assert tree.positions.tolist() == [seq_len + len(node) for node in nodes]
    assert tree.mask[0].tolist() == [[node[: len(other)] == other for other in nodes] for node in nodes]
    assert tree.retrieve_next_token.tolist() == [[own[0] if own else -1 for own in children]]
    assert tree.retrieve_next_sibling.tolist() == [[siblings.get(j, -1) for j in range(len(nodes))]]


@given(pools_of_candidates())
def test_requests_are_built_each_for_itself(case):
    """The second request's scores are the first's in reverse within each block, so its tree is different."""
    config, _, scores, parent_list = case
    tokens = list(range(len(scores)))
    both = build_rows([tokens, tokens], [scores, scores], [parent_list] * 2, config, [3, 9], [1, 2])
    for request, (seq_len, bonus) in enumerate([(3, 1), (9, 2)]):
        alone = build_rows([tokens], [scores], [parent_list], config, [seq_len], [bonus])
        for name in ("draft_tokens", "parents", "scores", "mask", "retrieve_next_token", "retrieve_next_sibling"):
            assert torch.equal(getattr(both, name)[request], getattr(alone, name)[0]), name
        assert torch.equal(both.positions.view(2, -1)[request], alone.positions)
        assert torch.equal(both.retrieve_index[request], request * config.num_draft_tokens + alone.retrieve_index[0])


def test_build_names_the_malformed_request():
    broken = [-1, 0, 8, 2, 4]
    with pytest.raises(MalformedTree, match=r"request 1, node 5\b"):
        build_rows([HAND_TOKENS] * 2, [HAND_SCORES] * 2, [HAND_PARENT_LIST, broken], HAND)


GPU_BLOCKS = dict.fromkeys((fast, nodes, malformed), 1024)


@pytest.fixture(params=["small trees in one program", "no tree is small"])
def smallness(request, monkeypatch) -> None:
    """Choose between the kernels that build a tree."""
    if request.param == "no tree is small":
        monkeypatch.setattr(fast, "_SMALL_NODES", 0)


def drafted(size: int, config: SpecConfig, tied: bool = False) -> Candidates:
    """Make candidates of random probabilities, as after a draft loop."""
    k = config.topk
    hidden = torch.zeros(size, k, 1)

    def drafts(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        prob = torch.randint(0, 5, shape) / 4 if tied else torch.rand(shape)
        return prob if config.score == "prob" else prob.log(), torch.randint(0, 10**6, shape)

    lanes = start_lanes(AutoregressiveInput(torch.zeros(size), *drafts(size, k), hidden[:, 0]), config)
    for _ in range(config.num_steps - 1):
        lanes = expand(lanes, *drafts(size, k, 1 if config.is_sampled else k), hidden, config)
    return lanes.candidates


def both_trees(
    candidates: Candidates, config: SpecConfig, device: str, steps: torch.Tensor | None = None
) -> tuple[VerifyInput, VerifyInput]:
    """Build the trees of both implementations, for requests of random lengths that end at max_len, on the CPU."""
    size, num_nodes = len(candidates.tokens), config.num_draft_tokens
    bonus = torch.randint(0, 10**6, (size,), dtype=torch.int32)
    seq_lens = torch.randint(1, config.max_len or 1000, (size,))
    locations = torch.randint(-1, 10**6, (size, num_nodes))
    expected = build(candidates, bonus, seq_lens, locations, config, steps)
    inputs = candidates.to(device), bonus.to(device), seq_lens.to(device), locations.to(device)
    on_device = None if steps is None else steps.to(device)
    return fast.build(*inputs, config, on_device).to("cpu"), expected


def check_equal(tree: VerifyInput, expected: VerifyInput) -> None:
    for name in VerifyInput.__slots__:
        one, other = getattr(tree, name), getattr(expected, name)
        if isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype, name
            assert torch.equal(one, other), name


SETTINGS = [(1, 1, 2), (1, 5, 6), (2, 1, 3), (2, 3, 2), (3, 4, 31), (4, 3, 17), (10, 8, 60), (16, 5, 64), (9, 3, 130)]


@pytest.mark.parametrize(("tied", "score", "max_len"), [(True, "prob", 6), (False, "logprob", None)])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_fast_trees_are_the_references(setting, tied, score, max_len, device, gpu_blocks, smallness, program_order):
    config = SpecConfig(*setting, score=score, max_len=max_len)
    check_equal(*both_trees(drafted(3, config, tied), config, device))


@pytest.mark.parametrize("verifier", ["target_only", "multi_round"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_fast_trees_of_own_steps_are_the_references(setting, verifier, device, gpu_blocks, smallness, program_order):
    topk, num_steps, num_nodes = setting
    num_nodes = 1 + topk * num_steps if verifier == "multi_round" else num_nodes
    config = SpecConfig(topk, num_steps, num_nodes, verifier=verifier)
    made = drafted(5, config, tied=True)
    steps = torch.tensor([0, 1, num_steps - 1, num_steps, 2**31 - 1], dtype=torch.int32)
    check_equal(*both_trees(made, config, device, steps))


def cut(candidates: Candidates, config: SpecConfig, steps: int) -> tuple[Candidates, SpecConfig]:
    """Make the candidates and the setting of fewer steps, by the rule of switches between settings."""
    few = with_steps(config, steps)
    count = few.num_candidates
    num_blocks = max(1, few.topk * (steps - 1) + 1)
    kept = candidates.tokens[:, :count], candidates.scores[:, :count], candidates.parent_list[:, :num_blocks]
    return Candidates(*(each.contiguous() for each in kept)), few


@pytest.mark.parametrize("verifier", ["target_only", "multi_round", "rejection"])
@pytest.mark.parametrize("score", ["prob", "logprob"])
def test_a_tree_of_own_steps_is_that_of_a_setting_of_those(verifier, score):
    topk = 1 if verifier == "rejection" else 3
    nodes = {"target_only": 12, "multi_round": 13, "rejection": 5}[verifier]
    config = SpecConfig(topk, 4, nodes, verifier=verifier, score=score)
    made = drafted(1, config)
    bonus, lens = torch.tensor([7], dtype=torch.int32), torch.tensor([9])
    slots = torch.arange(nodes)[None] + 40
    for steps in range(5):
        tree = build(made, bonus, lens, slots, config, torch.tensor([steps], dtype=torch.int32))
        few_candidates, few = cut(made, config, steps) if steps else (made, with_steps(config, 0))
        if not steps:
            empty = torch.empty(1, 0)
            few_candidates = Candidates(empty.long(), empty, made.parent_list[:, :1])
        alone = build(few_candidates, bonus, lens, slots[:, : few.num_draft_tokens], few)
        live = few.num_draft_tokens
        for name in ("draft_tokens", "parents", "scores", "retrieve_next_token", "retrieve_next_sibling"):
            assert torch.equal(getattr(tree, name)[:, :live], getattr(alone, name)), (name, steps)
        assert torch.equal(tree.positions[:live], alone.positions)
        assert torch.equal(tree.cache_locations[:live], alone.cache_locations)
        assert torch.equal(tree.mask[:, :live, :live], alone.mask)
        assert tree.proposed_depth.tolist() == alone.proposed_depth.tolist() == [steps]
        check_dead(tree, live)


def check_dead(tree: VerifyInput, live: int) -> None:
    """Check that the nodes of one request from `live` on are dead."""
    for name in ("parents", "retrieve_next_token", "retrieve_next_sibling"):
        assert (getattr(tree, name)[:, live:] == -1).all(), name
    assert (tree.cache_locations[live:] == -1).all()
    assert not tree.mask[:, live:].any()
    assert not tree.mask[:, :, live:].any()
    assert not tree.draft_tokens[:, live:].any()
    assert not tree.positions[live:].any()


def test_a_fast_tree_larger_than_a_tile_is_the_references(device):
    """Its mask has 1025² entries, more than one program can hold."""
    config = SpecConfig(topk=32, num_steps=2, num_draft_tokens=1025)
    check_equal(*both_trees(drafted(1, config), config, device))


@given(st.integers(1, 16), st.integers(1, 5), st.integers(1, 3), st.booleans(), st.data())
@settings(max_examples=25)
def test_fast_trees_are_the_references_at_any_setting(topk, num_steps, size, tied, data):
    most = topk + (num_steps - 1) * topk**2 + 1
    num_draft_tokens = num_steps + 1 if topk == 1 else data.draw(st.integers(2, min(most, 64)))
    config = SpecConfig(topk, num_steps, num_draft_tokens, max_len=9)
    tree, expected = both_trees(drafted(size, config, tied), config, DEVICE)
    check_equal(tree, expected)


@pytest.mark.parametrize("num_steps", [1, 2, 7])
@pytest.mark.parametrize("score", ["prob", "logprob"])
def test_a_chain_is_laid_out_as_a_tree_of_one_lane_would_be(num_steps, score, device, monkeypatch):
    config = SpecConfig(1, num_steps, num_steps + 1, score=score, max_len=9)
    candidates = drafted(3, config)
    bonus, seq_lens, locations = torch.tensor([5, 6, 7]), torch.tensor([1, 6, 8]), torch.arange(3 * num_steps + 3)
    inputs = candidates.to(device), bonus.int().to(device), seq_lens.to(device), locations.view(3, -1).to(device)
    chain = fast.build(*inputs, config)
    monkeypatch.setattr(fast, "_build_lanes", fast._build_tree)
    check_equal(chain, fast.build(*inputs, config))


@pytest.mark.parametrize(("k", "num_steps"), [(1, 3), (2, 1), (3, 4), (5, 2)])
def test_lanes_of_sampled_drafts_are_a_static_tree(k, num_steps, device, program_order):
    """Every lane is its own path below the root, whatever the scores."""
    config = SpecConfig(k, num_steps, 1 + k * num_steps, max_len=1000, verifier="multi_round")
    shape = 3, config.num_candidates
    parent_list = torch.arange(-1, config.num_parents - 1).expand(3, -1).contiguous()
    draft_prob = torch.rand(3, config.num_parents, 4)
    candidates = Candidates(torch.randint(0, 99, shape), torch.rand(shape), parent_list, (), draft_prob)
    tree, expected = both_trees(candidates, config, device)
    check_equal(tree, expected)
    assert torch.equal(expected.draft_prob, draft_prob)
    lanes = [[0, *range(1 + lane, 1 + k * num_steps, k)] for lane in range(k)]
    for lane in lanes:
        assert [expected.parents[0, node].item() for node in lane] == [-1, *lane[:-1]]
        assert expected.mask[0, lane[-1]].nonzero().flatten().tolist() == lane


@pytest.mark.parametrize("config", [HAND, SpecConfig.plain(), SpecConfig(1, 3, 4)])
def test_fast_trees_of_no_request_and_of_roots_alone(config, device):
    for size in (0, 2):
        candidates = Candidates(
            torch.zeros(size, config.num_candidates, dtype=torch.int64),
            torch.zeros(size, config.num_candidates),
            torch.tensor(HAND_PARENT_LIST if config is HAND else [*range(-1, max(config.num_steps - 1, 0))])
            .expand(size, -1)
            .contiguous(),
        )
        check_equal(*both_trees(candidates, config, device))


def test_a_tree_is_written_into_given_buffers(device):
    candidates = drafted(2, HAND).to(device)
    bonus, lens = torch.zeros(2, dtype=torch.int32, device=device), torch.ones(2, dtype=torch.int64, device=device)
    locations = torch.zeros(2, 7, dtype=torch.int64, device=device)
    first = fast.build(candidates, bonus, lens, locations, HAND)
    again = fast.build(drafted(2, HAND).to(device), bonus, lens + 3, locations + 1, HAND, out=first)
    for name in VerifyInput.__slots__:
        if name != "candidates":
            assert getattr(again, name) is getattr(first, name)
    assert first.positions[0] == 4
    assert again.candidates is not candidates


def check_bounded(tree: VerifyInput, request: int, num_nodes: int) -> None:
    """Check that a tree is well-formed, whatever it was built from."""
    nodes = torch.arange(num_nodes)
    parents, mask = tree.parents[request], tree.mask[request]
    assert parents[0] == -1
    assert ((parents[1:] >= 0) & (parents[1:] < nodes[1:])).all()
    assert torch.equal(mask, visibility(parents.tolist()))
    first, sibling = links(parents.tolist())
    assert tree.retrieve_next_token[request].tolist() == first
    assert tree.retrieve_next_sibling[request].tolist() == sibling


@pytest.mark.parametrize("setting", [(1, 3, 4), (3, 3, 9), (16, 5, 64)])
def test_padded_requests_of_any_content_change_no_real_one(setting, device, gpu_blocks, smallness, program_order):
    config = SpecConfig(*setting, max_len=50)
    num_nodes, real = config.num_draft_tokens, torch.arange(2)
    candidates = drafted(4, config)
    candidates.scores[2], candidates.scores[3, ::2] = torch.nan, -torch.inf
    candidates.parent_list[2], candidates.parent_list[3] = 2**62, -(2**62)
    candidates.tokens[2:] = -(2**63)
    bonus, seq_lens = torch.tensor([5, 6, 7, 8], dtype=torch.int32), torch.tensor([7, 9, 0, 0])
    locations = torch.arange(4 * num_nodes).view(4, -1)
    locations[2:] = -1
    tree = fast.build(candidates.to(device), bonus.to(device), seq_lens.to(device), locations.to(device), config).to(
        "cpu"
    )
    chosen = Candidates(candidates.tokens[:2], candidates.scores[:2], candidates.parent_list[:2])
    expected = build(chosen, bonus[real], seq_lens[real], locations[real], config)
    for name in sorted(set(VerifyInput.__slots__) - {"candidates", "draft_prob", "looked_up"}):
        own, other = getattr(tree, name), getattr(expected, name)
        assert torch.equal(own[: len(other)], other), name
    assert (tree.cache_locations[2 * num_nodes :] == -1).all()
    for request in (2, 3):
        check_bounded(tree, request, num_nodes)


@given(st.sampled_from([(2, 3, 7), (3, 3, 9), (3, 3, 22)]), st.data())
@settings(max_examples=40)
def test_any_parent_list_builds_a_bounded_tree(setting, data):
    """The tree equals the reference's where that builds one.

    Where it raises, `check` reports the same.
    """
    config = SpecConfig(*setting)
    candidates = drafted(1, config)
    width = candidates.parent_list.shape[1]
    ids = st.one_of(st.integers(-2, config.num_candidates + 2), st.sampled_from([2**62, -(2**63)]))
    parent_list = data.draw(st.lists(ids, min_size=width, max_size=width))
    candidates.parent_list[0] = torch.tensor(parent_list)
    index = select(candidates.scores, config.num_draft_tokens - 1).to(DEVICE)
    found = ""
    try:
        check_equal(*both_trees(candidates, config, DEVICE))
    except MalformedTree as error:
        found = str(error)
    with pytest.raises(malformed.MalformedTree) if found else nullcontext() as raised:
        malformed.check(candidates.to(DEVICE), index, config)
    assert found == (str(raised.value) if raised else "")
    none = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    locations = none.new_zeros(1, config.num_draft_tokens)
    tree = fast.build(candidates.to(DEVICE), none.int(), none, locations, config).to("cpu")
    check_bounded(tree, 0, config.num_draft_tokens)
