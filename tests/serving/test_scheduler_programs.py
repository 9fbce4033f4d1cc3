"""Random programs against the scheduler: a request equals its solo run, whatever happens around it."""

from collections import Counter
from dataclasses import fields, replace

import pytest

from specsim.core.config import SamplingParams, ServingConfig, SpecConfig
from specsim.core.phases import DraftInput
from specsim.correctness.soak.coverage import required
from specsim.correctness.soak.programs import Program, Submission, draw
from specsim.correctness.soak.trial import check, options_of

REFERENCE = options_of("reference")
SEEDS = (1, 2)  # the programs of these have all required coverage
FAST_SEEDS = {"eager": 1, "step": 2, "phase": 1, "round": 2}
FAST_REQUIRED = ("turns", "aborted", "finished length", "preempted", "resumed", "steps with slots withheld")


def shortened(program: Program, num_tokens: int) -> Program:
    """Limit the program's new tokens of each request."""
    params = [
        replace(each.params, max_new_tokens=min(each.params.max_new_tokens, num_tokens)) for each in program.submissions
    ]
    submissions = [replace(each, params=own) for each, own in zip(program.submissions, params, strict=True)]
    return replace(program, submissions=tuple(submissions))


def run_programs(count: int, most: int, num_tokens: int, options=REFERENCE, seed: int = 0) -> Counter[str]:
    """Check this many programs of at most this many requests each, and count their coverage."""
    counts = Counter()
    for index in range(count):
        program = shortened(draw(seed, index, most), num_tokens)
        result = check(program, options)
        assert result.first_difference is None, f"{program}: {result.first_difference}"
        counts.update(result.counts)
    print("\n" + ", ".join(f"{name} {number}" for name, number in sorted(counts.items())))
    return counts


@pytest.mark.parametrize("seed", [SEEDS[0], *(pytest.param(seed, marks=pytest.mark.whole) for seed in SEEDS[1:])])
def test_programs_on_the_reference(seed):
    counts = run_programs(120, 8, 10, seed=seed)
    assert required(counts, (1, 2, 3, 4)) == ()


@pytest.mark.parametrize(
    "graph", ["phase", "round", *(pytest.param(each, marks=pytest.mark.whole) for each in ("eager", "step"))]
)
def test_programs_on_fast(graph, device):
    pytest.importorskip("triton")
    counts = run_programs(6, 6, 5, options_of("fast", device, graph), FAST_SEEDS[graph])
    assert required(counts, names=FAST_REQUIRED) == ()


def cut(program: Program, fails) -> Program:
    """Find the shortest beginning of a failing program that fails too.

    Requests refer only to earlier ones.
    """
    beginnings = (program.submissions[:count] for count in range(1, len(program.submissions) + 1))
    return next(each for each in (replace(program, submissions=kept) for kept in beginnings) if fails(each))


def slicing_filter(self, requests):
    return replace(self, **{each.name: first(getattr(self, each.name), len(requests)) for each in fields(self)})


def first(value, count: int):
    return value if value is None else value[:count]


CLASSES = (Program, Submission, SamplingParams, ServingConfig, SpecConfig)


def test_a_failing_program_is_cut_short_and_prints_as_code(monkeypatch):
    monkeypatch.setattr(DraftInput, "filter", slicing_filter)

    def fails(program: Program) -> bool:
        return check(program, REFERENCE).first_difference is not None

    drawn = (shortened(draw(0, index, 8), 4) for index in range(100))
    failing = [program for program, _ in zip(filter(fails, drawn), range(3), strict=False)]
    program = min((cut(each, fails) for each in failing), key=lambda each: len(each.submissions))
    print(program)
    assert len(program.submissions) <= 3
    again = eval(repr(program), {each.__name__: each for each in CLASSES})
    assert again == program
    assert fails(again)
    monkeypatch.undo()
    assert not fails(again)
