from dataclasses import replace

import numpy as np
import pytest

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError
from specsim.simulator import CostModel, Efficiency, Hardware, drafter, hardware, model
from specsim.simulator.model import expected_experts

PLAIN, CHAIN, TREE = SpecConfig.plain(), SpecConfig(1, 3, 4), SpecConfig(4, 3, 8)
LLAMA, H100 = model("llama-3-8b"), hardware("H100-SXM")
COST = CostModel(H100, LLAMA, drafter("eagle3", LLAMA, 32000))
PERFECT = Efficiency(1, 1, 1, mxfp4_experts=1, gap=0, launch=0, host=0, host_request=0, collective=0)


def test_plain_decoding_reads_every_weight_and_its_kv_once():
    cost = CostModel(H100, LLAMA, efficiency=PERFECT)
    read = (LLAMA.bytes - 2 * LLAMA.embedding_weights) + 12 * LLAMA.vocab_size
    expected = (read + 1000.5 * LLAMA.kv_bytes_per_token) / 3.35e12
    assert cost.round(np.array([1000]), PLAIN) == pytest.approx(expected, rel=1e-12)


def test_a_long_prefill_is_bound_by_arithmetic():
    cost, tokens = CostModel(H100, LLAMA, efficiency=PERFECT), 8192
    inside = LLAMA.active_parameters - LLAMA.head_weights
    attention = 32 * 4 * 4096 * tokens * (tokens + 1) / 2
    head = (2 * LLAMA.head_weights + 12 * LLAMA.vocab_size) / 3.35e12
    expected = (2 * inside * tokens + attention) / 989.4e12 + head
    assert cost.prefill(np.array([tokens]), np.array([0])) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("config", [PLAIN, CHAIN, TREE])
@pytest.mark.parametrize("field", ["bandwidth", "peak_flops", "interconnect"])
def test_better_hardware_is_never_slower(config, field):
    better = getattr(H100, field)
    better = {dtype: 2 * rate for dtype, rate in better.items()} if field == "peak_flops" else 2 * better
    for size in (1, 7, 2000):
        contexts = np.full(size, 900)
        slow = replace(COST, tensor_parallel=2)
        fast = replace(slow, hardware=replace(H100, **{field: better}))
        assert fast.round(contexts, config) <= slow.round(contexts, config)
    assert fast.round(contexts, config) < slow.round(contexts, config)


@pytest.mark.parametrize("config", [PLAIN, CHAIN, TREE])
def test_a_round_grows_with_every_request_and_every_column(config):
    times = np.array([[COST.round(np.full(size, at), config) for at in (1, 2, 5000)] for size in (1, 2, 30, 500)])
    assert (np.diff(times, axis=0) > 0).all()
    assert (np.diff(times, axis=1) > 0).all()


def test_a_batch_is_padded_to_its_bucket():
    cost = replace(COST, buckets=(4, 8), efficiency=Efficiency(launch=1e-3))
    five, eight = (cost.round(np.full(size, 0), CHAIN) for size in (5, 8))
    attention = 3 * 8 * 1e-6  # what eight rather than five requests read of their own nodes is far below it
    assert five == pytest.approx(eight, abs=attention + 3 * cost.efficiency.host_request)
    assert cost.round(np.full(9, 0), CHAIN) > 0.2


def test_host_work_is_hidden_under_overlap_and_added_under_sync():
    slow = Efficiency(host=1.0, host_request=0.1)
    contexts = np.full(3, 100)
    device = COST.round(contexts, CHAIN)
    sync, overlap = (replace(COST, efficiency=slow, schedule=each) for each in ("sync", "overlap"))
    assert overlap.round(contexts, CHAIN) == pytest.approx(1.3)
    assert sync.round(contexts, CHAIN) == pytest.approx(1.3 + device)


def test_chunks_taken_along_share_the_reading_of_weights():
    contexts, new, behind = np.full(4, 500), np.array([64]), np.array([0])
    both = COST.mixed(new, behind, contexts, CHAIN)
    assert max(COST.round(contexts, CHAIN), COST.prefill(new, behind)) < both
    assert both < COST.round(contexts, CHAIN) + COST.prefill(new, behind)
    assert COST.mixed(new[:0], behind[:0], contexts, CHAIN) == COST.round(contexts, CHAIN)


def test_a_cached_cost_equals_a_fresh_one():
    contexts = [np.full(size, 500) for size in (0, 2, 4)]
    chunks = [([64], [0]), ([64], [4000]), ([32, 32], [0, 0]), ([32, 32], [0, 4000])]
    asked = [(np.array(new), np.array(behind), each) for new, behind in chunks for each in contexts]
    old, fresh = replace(COST), [replace(COST).mixed(*each, CHAIN) for each in asked]
    assert [old.mixed(*each, CHAIN) for each in asked] == fresh
    assert [old.mixed(*each, CHAIN) for each in reversed(asked)] == fresh[::-1]
    assert len(set(fresh)) == len(fresh)


def test_a_window_bounds_what_a_layer_reads():
    windowed = model({**CONFIG, "sliding_window": 128})
    slow = replace(PERFECT, bandwidth=1e-3)
    near, far = (CostModel(H100, windowed, efficiency=slow).round(np.array([length]), PLAIN) for length in (200, 20000))
    assert near == far
    assert CostModel(H100, model(CONFIG), efficiency=slow).round(np.array([20000]), PLAIN) > far


CONFIG = {
    "model_type": "mistral",
    "hidden_size": 64,
    "vocab_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
}


@pytest.mark.parametrize("config", [PLAIN, CHAIN, SpecConfig(1, 8, 9)])
def test_a_round_reads_a_window_as_far_as_it_is_filled(config):
    """On average a row attends to half of the other nodes, as far as the window exceeds the context."""
    nodes, window, bandwidth = config.num_draft_tokens, 128, 1e3
    windowed = model({**CONFIG, "sliding_window": window})
    cost = CostModel(replace(H100, bandwidth=bandwidth), windowed, efficiency=PERFECT)
    chunk = np.array([16]), np.array([8])
    empty, mixed = cost.round(np.zeros(2), config), cost.mixed(*chunk, np.zeros(2), config)
    for contexts in ([0, 1], [window - 1, 3], [window - 2, window], [window + 1, 5000]):
        columns = sum(min(context + nodes / 2, window) - nodes / 2 for context in contexts)
        expected = columns * windowed.kv_bytes_per_token / bandwidth
        assert cost.round(np.array(contexts), config) - empty == pytest.approx(expected, rel=1e-9)
        assert cost.mixed(*chunk, np.array(contexts), config) - mixed == pytest.approx(expected, rel=1e-9)


def test_tensor_parallel_divides_weights_and_pays_for_exchanges():
    contexts = np.full(1, 1000)
    one, two = (
        CostModel(H100, LLAMA, efficiency=replace(PERFECT, collective=c), tensor_parallel=t).round(contexts, PLAIN)
        for c, t in ((0, 1), (1e-5, 2))
    )
    sent = 65 * (1e-5 + 4096 * 2 / 450e9)
    assert two == pytest.approx(one / 2 + sent, rel=1e-9)


@pytest.mark.parametrize("kind", ["eagle3", "mtp", None])
def test_exchanges_are_what_a_round_lacks_without_them(kind):
    config = PLAIN if kind is None else SpecConfig(topk=4, num_steps=3, num_draft_tokens=8)
    head = kind and drafter(kind, LLAMA)
    shared = CostModel(H100, LLAMA, head, efficiency=replace(PERFECT, collective=1e-5), tensor_parallel=2)
    free = replace(shared, hardware=replace(H100, interconnect=1e30), efficiency=PERFECT)
    contexts = np.full(3, 1000)
    without = free.round(contexts, config)
    assert shared.exchanges(3, config) == pytest.approx(shared.round(contexts, config) - without, rel=1e-9)
    assert replace(shared, tensor_parallel=1).exchanges(3, config) == 0


def test_weights_that_do_not_fit_are_refused():
    assert COST.round(np.zeros(0, int), TREE) == 0
    with pytest.raises(InputError, match="tensor_parallel is 1; allowed: GPUs that hold llama-2-70b and some KV"):
        CostModel(H100, model("llama-2-70b")).kv_slots()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: hardware("TPU"), "hardware"),
        (lambda: Hardware("x", {}, 1, 1, 1), "peak_flops"),
        (lambda: replace(H100, bandwidth=-1.0), "bandwidth"),
        (lambda: replace(H100, memory=float("nan")), "memory"),
        (lambda: CostModel(H100, LLAMA, dtype="int3"), "dtype"),
        (lambda: CostModel(H100, LLAMA, schedule="async"), "schedule"),
        (lambda: CostModel(H100, LLAMA, buckets=(4, 2)), "buckets"),
        (lambda: CostModel(H100, LLAMA, tensor_parallel=0), "tensor_parallel"),
        (lambda: Efficiency(bandwidth=1.2), "bandwidth"),
        (lambda: Efficiency(host=-1.0), "host"),
        (lambda: Efficiency(host=10**400), "host"),
        (lambda: drafter("medusa", LLAMA), "drafter"),
    ],
)
def test_impossible_costs_are_refused_by_name(make, name):
    with pytest.raises(InputError, check=lambda error: error.name == name):
        make()


@pytest.mark.parametrize("wrong", [[-5], [100, -1], [float("nan")], [float("inf")], [[1]], ["many"], [None], 7])
def test_lengths_that_are_none_are_refused_by_name(wrong):
    chunk = np.array([8])
    for name, call in (
        ("contexts", lambda: COST.round(wrong, CHAIN)),
        ("contexts", lambda: COST.mixed(chunk, chunk, wrong, CHAIN)),
        ("new_tokens", lambda: COST.prefill(wrong, chunk)),
        ("behind", lambda: COST.prefill(chunk, wrong)),
    ):
        with pytest.raises(InputError, check=lambda error, name=name: error.name == name):
            call()
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("behind", [1, 2])):
        COST.prefill(chunk, [1, 2])


@pytest.mark.parametrize("config", [PLAIN, TREE])
def test_at_full_bandwidth_a_round_is_at_its_roofline_bound(config):
    """Both are within 1 %: the bound has no logits and no columns of the round, the cost model no norms."""
    from specsim.bench.roofline import round_bound
    from specsim.core.eagle import Eagle3Config
    from specsim.models.shapes import shape

    target = shape("llama-3-8b").config
    head = Eagle3Config(replace(target, layers=target.layers[:1]), 32000, target.hidden_size, (2, 16, 29))
    bound = round_bound(target, None if config.is_plain else head, config, 2, 3000)
    cost = CostModel(replace(H100, peak_flops={"bfloat16": 1e30}), LLAMA, drafter("eagle3", LLAMA, 32000), PERFECT)
    assert cost.round(np.full(2, 3000), config) == pytest.approx(bound.bytes / H100.bandwidth, rel=0.01)


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_experts_touched_are_the_mean_over_uniform_routings(rows):
    """Draw 4 of 32 experts per row 4000 times; the tolerance is 6 standard errors of at most 3/sqrt(4000)."""
    rng = np.random.default_rng(0)
    chosen = (rng.random((rows, 32)).argpartition(4, axis=1)[:, :4] for _ in range(4000))
    touched = [len(np.unique(each)) for each in chosen]
    assert expected_experts(32, 4, rows) == pytest.approx(np.mean(touched), abs=6 * 3 / 4000**0.5)


@pytest.mark.parametrize(("rows", "skew"), [(4, 1.0), (64, 1.0), (16, 0.3)])
def test_experts_touched_are_the_mean_over_uneven_draws(rows, skew):
    """Draw the shares of 20,000 experts; the tolerance is 6 standard errors of at most 64/(2 sqrt(20000))."""
    rng = np.random.default_rng(1)
    shares = rng.beta(1 / skew, (16 - 1) / skew, 20000)
    touched = 64 * (rng.random((20000, rows)) < shares[:, None]).any(axis=1).mean()
    assert expected_experts(64, 4, rows, skew) == pytest.approx(touched, abs=6 * 64 / 2 / 20000**0.5)


def test_an_uneven_choice_touches_fewer_experts():
    rows = np.array([1.0, 4, 64, 1024])
    even = expected_experts(32, 4, rows)
    assert expected_experts(32, 4, rows, 1e-7) == pytest.approx(even, rel=1e-5)
    assert expected_experts(32, 4, rows, 1.0)[0] == pytest.approx(4)  # one token chooses four in any case
    assert (np.diff([expected_experts(32, 4, 64.0, skew) for skew in (0.0, 0.1, 1.0, 10.0)]) < 0).all()
    assert expected_experts(8, 8, 3, 1.0) == 8


def test_an_uneven_choice_matters_more_to_many_rows_than_to_few():
    touched = {skew: expected_experts(64, 4, np.array([4.0, 64]), skew).round().tolist() for skew in (0.0, 1.0)}
    assert touched == {0.0: [15, 63], 1.0: [13, 52]}


def test_slow_experts_slow_their_products_down_and_nothing_else():
    def seconds(name, **shares):
        return CostModel(H100, model(name), efficiency=replace(PERFECT, **shares)).round(np.array([100]), PLAIN)

    halves = {"experts": 0.5}, {"mxfp4_experts": 0.5}
    assert all(seconds("llama-3-8b", **half) == seconds("llama-3-8b") for half in halves)
    assert seconds("gpt-oss-20b", experts=0.5) == seconds("gpt-oss-20b")
    assert seconds("glm-4.7-flash", mxfp4_experts=0.5) == seconds("glm-4.7-flash")
    read = 24 * 4 * 3 * 2880**2 * 17 / 32 / H100.bandwidth
    assert seconds("gpt-oss-20b", mxfp4_experts=0.5) - seconds("gpt-oss-20b") == pytest.approx(read, rel=1e-6)
    read = 46 * 4 * 3 * 2048 * 1536 * 2 / H100.bandwidth
    assert seconds("glm-4.7-flash", experts=0.5) - seconds("glm-4.7-flash") == pytest.approx(read, rel=1e-6)


def test_few_rows_read_few_experts_and_many_all_of_them():
    moe = model("gpt-oss-20b")
    cost = CostModel(H100, moe, efficiency=PERFECT)
    one = cost.round(np.array([0]), PLAIN) * 3.35e12
    active = moe.active_parameters - moe.head_weights - 24 * 4 * 3 * 2880**2
    assert one == pytest.approx(2 * (active + moe.head_weights) + 24 * 4 * 3 * 2880**2 * 17 / 32, rel=0.01)
    many = cost.round(np.zeros(256, int), PLAIN) * 3.35e12
    assert many > 12e9


def test_drafts_outside_graphs_launch_every_kernel_of_their_head():
    """EAGLE-3 also maps its vocabulary, so that the host needs longer for it, though it reads fewer bytes."""
    launches = {}
    for kind, vocab in (("eagle", None), ("eagle3", 32000)):
        cost = CostModel(H100, LLAMA, drafter(kind, LLAMA, vocab), Efficiency(launch=1e-3), draft_graph=False)
        launches[kind] = cost.phases(np.array([100]), SpecConfig(1, 2, 3)).draft / 1e-3
    assert launches == {"eagle": pytest.approx(14), "eagle3": pytest.approx(19)}
