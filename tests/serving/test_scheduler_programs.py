"""Random programs against the scheduler: whatever happens around a request, it equals its solo run."""

import random
from collections import Counter
from dataclasses import fields, replace

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, find, given
from hypothesis import strategies as st

from specsim.core.phases import DraftInput
from specsim.correctness.soak.coverage import required
from specsim.correctness.soak.programs import Program, Submission, draw_from
from specsim.correctness.soak.trial import check, options_of
from specsim.serving.residents import Residents

REFERENCE = options_of("reference")
FAST_REQUIRED = ("turns", "aborted", "finished length", "preempted", "resumed", "steps with slots withheld")
# Seeds under which the programs cover all required situations.
SEEDS = (1, 6)
FAST_SEEDS = {"eager": 0, "step": 1, "phase": 2, "round": 3}


@st.composite
def programs(draw, most: int, num_tokens: int) -> Program:
    """The soak's programs, of at most that many requests and new tokens each; hypothesis draws, and so can shrink."""
    rng = draw(st.randoms(use_true_random=False))
    uniform = rng.random
    rng.random = lambda: 1 - uniform()  # hypothesis prefers 0, and the generator asks whether a draw is below a share
    program = draw_from(rng, draw(st.integers(1, most)))
    return replace(program, submissions=tuple(shortened(each, num_tokens) for each in program.submissions))


def shortened(submission: Submission, num_tokens: int) -> Submission:
    params = replace(submission.params, max_new_tokens=min(submission.params.max_new_tokens, num_tokens))
    return replace(submission, params=params)


def limits(count: int, **changes) -> hypothesis.settings:
    """Settings of a run of that many programs."""
    return hypothesis.settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
        **changes,
    )


def run_programs(count: int, programs, options=REFERENCE, seed: int = 0) -> Counter[str]:
    """Check that many programs, the same in every run under the tests' own profile; count the situations."""
    counts = Counter()

    @limits(count)
    @given(program=programs)
    def run(program: Program) -> None:
        result = check(program, options)
        assert result.first_difference is None, result.first_difference
        counts.update(result.counts)
        counts["programs"] += 1

    if hypothesis.settings().derandomize:  # by a number: a change of this function is no change of the programs
        run = hypothesis.seed(seed)(run)
    run()
    print("\n" + ", ".join(f"{name} {number}" for name, number in sorted(counts.items())))
    return counts


@pytest.mark.parametrize("seed", [SEEDS[0], *(pytest.param(seed, marks=pytest.mark.whole) for seed in SEEDS[1:])])
def test_programs_on_the_reference(seed):
    counts = run_programs(120, programs(8, 10), seed=seed)
    missing = required(counts, (1, 2, 3, 4))
    assert counts["programs"] >= 120
    assert not missing or not hypothesis.settings().derandomize, missing


@pytest.mark.parametrize(
    "graph", ["phase", "round", *(pytest.param(each, marks=pytest.mark.whole) for each in ("eager", "step"))]
)
def test_programs_on_fast(graph, device):
    pytest.importorskip("triton")
    counts = run_programs(6, programs(6, 5), options_of("fast", device, graph), FAST_SEEDS[graph])
    missing = required(counts, names=FAST_REQUIRED)
    assert counts["programs"] >= 6
    assert not missing or not hypothesis.settings().derandomize, missing


def slicing_filter(self, requests):
    return replace(self, **{each.name: first(getattr(self, each.name), len(requests)) for each in fields(self)})


def first(value, count: int):
    return value if value is None else value[:count]


def share_and_record_nothing(self, request):
    row = self._pools.open()
    if self._tree is not None:
        self._pools.share(row, self._tree.match(request.known_ids, request.prefill_len - 1))
    return row


FAULTS = {
    "a filter that slices": (DraftInput, "filter", slicing_filter),
    "shared pages whose tokens are not recorded": (Residents, "_open", share_and_record_nothing),
}


@pytest.mark.parametrize(("owner", "name", "wrong"), FAULTS.values(), ids=FAULTS)
def test_a_failing_program_shrinks_and_prints_as_code(owner, name, wrong, monkeypatch):
    monkeypatch.setattr(owner, name, wrong)

    def fails(program: Program) -> bool:
        return check(program, REFERENCE).first_difference is not None

    program = find(programs(3, 3), fails, settings=limits(400), random=random.Random(0))
    print(program)
    assert len(program.submissions) <= 3
    again = eval(repr(program), globals().copy())
    assert again == program
    assert fails(again)
    monkeypatch.undo()
    assert not fails(again)
