"""Random programs against the scheduler: a request equals its solo run, whatever happens around it."""

from collections import Counter
from dataclasses import fields, replace

import pytest

from specsim.core.config import SamplingParams, ServingConfig, SpecConfig
from specsim.core.phases import DraftInput
from specsim.correctness.soak.coverage import drafted_name, required
from specsim.correctness.soak.programs import KINDS, Program, Submission, draw, possible_graph
from specsim.correctness.soak.trial import check, options_of

REFERENCE = options_of("reference")
SEEDS = (1, 2)  # the programs of these have all required coverage
FAST_SEEDS = {"eager": 1, "step": 2, "phase": 1, "round": 2}  # of six programs
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


@pytest.mark.parametrize(
    ("seed", "count"), [(SEEDS[0], 30), *(pytest.param(seed, 120, marks=pytest.mark.whole) for seed in SEEDS)]
)
def test_programs_on_the_reference(seed, count):
    counts = run_programs(count, 8, 10, seed=seed)
    assert required(counts, (1, 2, 3, 4)) == ()


@pytest.mark.parametrize(
    ("graph", "seed", "count"),
    [("round", 1, 3), *(pytest.param(*item, 6, marks=pytest.mark.whole) for item in FAST_SEEDS.items())],
)
def test_programs_on_fast(graph, seed, count, device):
    pytest.importorskip("triton")
    counts = run_programs(count, 6, 5, options_of("fast", device, graph), seed)
    assert required(counts, names=FAST_REQUIRED) == ()


def sessions_on_ranks(kind: str, graph: str = "eager") -> Program:
    """Make a session of three turns on one rank and a late request for the other, on large pages."""
    config = SpecConfig(topk=2, num_steps=2, num_draft_tokens=5, page_size=16)
    turn = Submission(step=0, prompt_ids=(7, 3), params=SamplingParams(max_new_tokens=9), keep=True)
    warm = SamplingParams(max_new_tokens=8, temperature=1.0, seed=4)
    submissions = (
        replace(turn, prompt_ids=tuple(range(2, 15))),
        replace(turn, continues=0),
        replace(turn, continues=1, params=warm, keep=False),
        replace(turn, prompt_ids=(9, 8, 7, 9, 8, 7), arrival=8, step=8, keep=False),
    )
    return Program(
        name="",
        pair=f"{kind}-llama",
        config=config,
        serving=ServingConfig(max_running=2, num_slots=384),
        num_ranks=2,
        graph=possible_graph(graph, kind, config),
        submissions=submissions,
        limits=(),
        aborts=(),
        closes_at=None,
    )


def check_sessions(program: Program, options) -> None:
    result = check(program, options)
    assert result.first_difference is None
    assert result.counts["turns on kept KV"] == 2
    assert result.counts["steps with an idle rank"] > 0
    assert result.counts[drafted_name(program.kind)] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_every_drafter_has_sessions_idle_ranks_and_pages(kind):
    check_sessions(sessions_on_ranks(kind), REFERENCE)


@pytest.mark.parametrize("graph", ["phase", "round"])
@pytest.mark.parametrize("kind", [each for each in KINDS if not each.startswith("eagle")])
@pytest.mark.whole
def test_fast_sessions_of_every_drafter_equal_solo_runs(kind, graph, device):
    pytest.importorskip("triton")
    check_sessions(sessions_on_ranks(kind, graph), options_of("fast", device))


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

    drawn = (shortened(draw(3, index, 8), 4) for index in range(100))
    failing = [program for program, _ in zip(filter(fails, drawn), range(3), strict=False)]
    program = min((cut(each, fails) for each in failing), key=lambda each: len(each.submissions))
    print(program)
    assert len(program.submissions) <= 3
    again = eval(repr(program), {each.__name__: each for each in CLASSES})
    assert again == program
    assert fails(again)
    monkeypatch.undo()
    assert not fails(again)
