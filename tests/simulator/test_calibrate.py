from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import linregress
from scipy.stats import t as student

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError
from specsim.simulator import CostModel, Efficiency, drafter, hardware, model
from specsim.simulator.model import expected_experts
from specsim.simulator.reproduce.reproduction import Free, Observed, Timed, calibrate, fit, rows
from specsim.simulator.reproduce.vllm_20780 import recover
from specsim.simulator.theory import expected_tokens, operations, speedup

LLAMA = model("llama-3-8b")
TRUE = Efficiency(bandwidth=0.62, compute=0.44, host=3e-3)
COST = CostModel(hardware("H100-SXM"), LLAMA, drafter("eagle3", LLAMA, 32000), TRUE, schedule="sync")
CELLS = [(1, 0, 700), (16, 0, 30000), (64, 3, 700), (200, 3, 700), (8, 0, 700), (128, 3, 700)]


def timed(cost, noise=0.0, held_out=(8, 128)):
    rng, cells = np.random.default_rng(1), []
    for size, steps, length in CELLS:
        contexts = np.full(size, length)
        config = SpecConfig(1, steps, steps + 1) if steps else SpecConfig.plain()
        seconds = cost.round(contexts, config) * np.exp(noise * rng.standard_normal())
        predict = lambda model, contexts=contexts, config=config: model.round(contexts, config)  # noqa: E731
        cells.append(Timed(f"{size} requests, {steps} drafts", seconds, predict, size in held_out))
    return cells


def test_true_parameters_are_found_from_a_distant_start():
    start = CostModel(COST.hardware, LLAMA, COST.drafter, Efficiency(host=1e-4), schedule="sync")
    fitted, calibration = calibrate(start, timed(COST), ("bandwidth", "compute", "host"))
    assert [each.value for each in calibration.parameters] == pytest.approx([0.62, 0.44, 3e-3], rel=1e-4)
    assert calibration.errors(held_out=True).max() < 1e-4
    assert fitted.efficiency.bandwidth == calibration.values["bandwidth"]
    assert [cell.held_out for cell in calibration.cells] == [False] * 4 + [True] * 2


def test_an_undetermined_parameter_keeps_its_bounds():
    _, calibration = calibrate(COST, timed(COST, 0.01), ("bandwidth", "collective"))
    unknown = calibration.parameters[1]
    assert (unknown.low, unknown.high) == pytest.approx((1e-9, 10))


def test_a_weak_parameter_has_a_wide_interval():
    scale = np.linspace(1, 3, 5)
    noisy = {str(at): Observed(2 * figure * 1.3 ** (-1) ** at) for at, figure in enumerate(scale)}
    free = {"x": Free(0.0, 0.1, 10.0), "y": Free(1.0, 1e-3, 1e3)}
    x, y = fit(lambda values: values["x"] * scale * values["y"] ** (1e-6 * scale), noisy, free).parameters
    assert x.value == pytest.approx(2, rel=0.3)
    assert (y.low, y.high) == (1e-3, 1e3)


def test_a_held_out_cell_does_not_move_the_fit():
    cells = timed(COST)
    wrong = [*cells[:4], *(Timed(cell.label, 9.0, cell.predict, True) for cell in cells[4:])]
    values = [calibrate(COST, each, ("bandwidth", "host"))[1].values for each in (cells, wrong)]
    assert values[0] == values[1]


def test_intervals_are_those_of_linear_regression():
    """Figures are a x^b: both intervals follow from a regression of logarithms, as scipy computes it."""
    x = np.linspace(1, 3, 6)
    figures = 2 * x**1.5 * np.exp(0.2 * np.random.default_rng(3).standard_normal(6))
    observed = {str(number): Observed(figure) for number, figure in enumerate(figures)}
    free = {"a": Free(1.0, 1e-3, 1e3), "b": Free(1.0, 1e-3, 1e3)}
    fitted = fit(lambda values: values["a"] * x ** values["b"], observed, free).parameters
    line = linregress(np.log(x), np.log(figures))
    half = student.ppf(0.975, len(x) - 2)
    halves = {"a": half * line.intercept_stderr, "b": half * line.stderr / line.slope}
    assert [parameter.value for parameter in fitted] == pytest.approx([np.exp(line.intercept), line.slope], rel=1e-4)
    for parameter in fitted:
        factor = np.exp(halves[parameter.name])
        expected = parameter.value / factor, parameter.value * factor
        assert (parameter.low, parameter.high) == pytest.approx(expected, rel=1e-3)


def test_more_parameters_than_cells_and_unknown_ones_are_refused():
    with pytest.raises(InputError, check=lambda error: error.name == "free" and "at most 4" in error.allowed):
        calibrate(COST, timed(COST), ("bandwidth", "compute", "host", "gap", "launch"))
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("free", "speed")):
        calibrate(COST, timed(COST), ("speed",))
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("seconds of x", -1)):
        Timed("x", -1.0, lambda _: 1.0)


def test_draft_and_fixed_cost_are_recovered():
    """400 draws with 1 % noise: the 95 % intervals miss 1.8 % to 9 % of the time (p < 1e-3 either side)."""
    rng, drafts, lengths = np.random.default_rng(5), np.arange(1, 8), np.linspace(1.8, 3.4, 7)
    missed = np.zeros(2)
    for _ in range(400):
        rounds = (8e-3 + 0.7e-3 * drafts) * (1 + 0.01 * rng.standard_normal(7))
        found = recover(drafts, lengths, rounds / lengths)
        missed += [not each.low <= truth <= each.high for each, truth in ((found.fixed, 8e-3), (found.draft, 0.7e-3))]
    assert ((missed >= 7) & (missed <= 36)).all()
    exact = recover(drafts, lengths, (8e-3 + 0.7e-3 * drafts) / lengths)
    assert exact.worst < 1e-12
    assert exact.speedup(3, 2.5, 7e-3) == pytest.approx(2.5 * 7 / (8 + 2.1))


def test_two_points_leave_no_interval():
    assert recover([1, 2], [1.5, 1.8], [5e-3, 5e-3]).draft.high == np.inf
    for drafts, lengths, times, wrong in (
        ([2, 2], [1.5, 1.5], [1, 1], ("num_drafts", [2, 2])),
        ([1, 2], [2.5, 1.5], [1, 1], ("accept_length", 2.5)),
        ([1, 2], [1.5, 1.5], [1, 0], ("tpot", 0)),
    ):
        with pytest.raises(InputError, check=lambda error, wrong=wrong: (error.name, error.value) == wrong):
            recover(drafts, lengths, times)


def least_bandwidth(model, rows, seconds) -> float:
    """Bytes/s that a GPU reads, if a forward's growth between two numbers of rows were all reading of experts.

    Routing is uniform; routing that favours some experts touches fewer of them and needs less.
    """
    nbytes = 0.0
    for group in model.layers:
        if group.experts:
            fewer, more = (expected_experts(group.experts, group.experts_per_token, size) for size in rows)
            nbytes += group.count * (more - fewer) * group.expert_weights * model.expert_format.bytes
    return nbytes / (seconds[1] - seconds[0])


def test_experts_that_more_rows_use_reveal_the_bandwidth():
    """A cost bound by reading grows only by these experts, without KV and logits."""
    moe = model("glm-4.7-flash")
    perfect = Efficiency(1, 1, 1, mxfp4_experts=1, gap=0, launch=0, host=0, host_request=0, collective=0)
    cost = CostModel(hardware("B200"), replace(moe, vocab_size=1, skew=0.0), efficiency=perfect)
    seconds = tuple(cost.round(np.zeros(size, int), SpecConfig(1, 3, 4)) for size in (1, 16))
    assert least_bandwidth(moe, (4, 64), seconds) == pytest.approx(8e12, rel=0.01)


def test_the_gpu_of_vllm_41162_reads_faster_than_an_h200():
    table = {(row["model"], row["temperature"], row["concurrency"], row["side"], row["metric"]): float(row["value"])
             for row in rows("vllm_41162")}  # fmt: skip
    for temperature in ("0.0", "1.0"):
        gaps = (table["GLM 4.7 Flash", temperature, size, "after", "Median ITL (ms)"] / 1e3 for size in ("1", "16"))
        assert least_bandwidth(model("glm-4.7-flash"), (4, 64), tuple(gaps)) > 1.5 * hardware("H200").bandwidth


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_expected_tokens_is_the_mean_over_all_outcomes(alpha, gamma):
    outcomes = [(count + 1, alpha**count * (1 - alpha)) for count in range(gamma)] + [(gamma + 1, alpha**gamma)]
    assert expected_tokens(alpha, gamma) == pytest.approx(sum(tokens * share for tokens, share in outcomes))
    assert speedup(alpha, gamma, 0.1) == pytest.approx(expected_tokens(alpha, gamma) / (1 + 0.1 * gamma))
    assert operations(alpha, gamma) == pytest.approx((gamma + 1) / expected_tokens(alpha, gamma))
