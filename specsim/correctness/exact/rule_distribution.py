"""Exact distribution of an acceptance rule of a user, whose breakpoints follow from its own comparisons.

The rule is explored with exact numbers, and then called with the engines' floats at several points of every region: the
two have to agree.
"""

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm.auto import tqdm

from specsim.core.arguments import check_arguments
from specsim.core.errors import InputError
from specsim.core.provenance import now, versions
from specsim.core.rule import AcceptanceRule, Accepted, Tree, checked
from specsim.core.user_module import load_module, one_line, time_limit, user_code
from specsim.core.verifiers import LANES
from specsim.correctness.exact.cases import RULE_CASES, Draw, ExactCase, draws, text_prob
from specsim.correctness.exact.distribution import ExactDistribution, draft_axes
from specsim.correctness.exact.exact_number import NotExact
from specsim.correctness.exact.exact_tensor import ExactTensor
from specsim.correctness.exact.exploration import Box, Explored, explore
from specsim.correctness.exact.optimum import optimum
from specsim.correctness.exact.report import Certificate, Certificates, Counterexample
from specsim.correctness.exact.verifier import INSIDE, DraftedTree, grid_cost, regions

ROUNDING = Fraction(1, 2**40)  # smaller distances and regions may come from float64


class NotCertified(Exception):
    """The exact distribution of a rule is not known, for a reason in words."""


class Broken(Exception):
    """A rule raises or returns something impossible, for a Counterexample in `args`."""


class RuleOutcome(NamedTuple):
    """The result of a rule on a region of a drafted tree's uniforms."""

    draw: Draw
    box: Box
    accepted: Accepted

    @property
    def text(self) -> tuple[int, ...]:
        """The tokens that the round emits."""
        return (*self.draw.text(self.accepted.path[-1]), self.accepted.bonus)

    @property
    def prob(self) -> Fraction:
        """Probability of the tree and the region."""
        return self.draw.prob * self.box.volume


@dataclass(frozen=True, slots=True)
class RuleDistribution:
    """A rule's exact distribution on a case, with a counterexample where it is not the target's."""

    exact: ExactDistribution
    counterexample: Counterexample | None


def rule_distribution(rule: AcceptanceRule, case: ExactCase) -> RuleDistribution:
    """Enumerate a case.

    Raises Broken where the rule has no result, NotCertified where its result is not known exactly.
    """
    before = _random_states()
    try:
        outcomes = list(chain.from_iterable(_outcomes(rule, case, draw) for draw in draws(case)))
    except NotCertified as error:
        _require_no_draws(before)
        raise error from None
    _require_no_draws(before)
    emitted = defaultdict(Fraction)
    for outcome in outcomes:
        emitted[outcome.text] += outcome.prob
    exact = ExactDistribution.of_round(case, emitted, len(outcomes), _grid(case, outcomes))
    distance = exact.total_variation(case)
    if 0 < distance < ROUNDING:
        raise NotCertified(
            f"its distance {float(distance):.1e} is of the size of rounding errors; leave probabilities as they are "
            "given, instead of turning them into floats"
        )
    return RuleDistribution(exact, _counterexample(rule, case, exact, outcomes) if distance else None)


def _outcomes(rule: AcceptanceRule, case: ExactCase, draw: Draw) -> Iterator[RuleOutcome]:
    names = [f"uniforms[{index}]" for index in _uniforms(rule, case)]
    volume = Fraction(0)

    def call(numbers: list[Any]) -> Any:
        with time_limit():
            return rule.accept(*_exact_inputs(rule, draw), _passed(rule, numbers[:-1]), numbers[-1])

    for region in explore(call, [*names, "final_uniform"]):
        volume += region.box.volume
        yield RuleOutcome(draw, region.box, _accepted(rule, case, draw, region))
    if volume != 1:
        raise NotCertified("two calls with the same numbers make different comparisons")


def _uniforms(rule: AcceptanceRule, case: ExactCase) -> range:
    """List the indices of independent uniforms: every depth, or every node below the root."""
    return range(1, len(case.parents)) if rule.drafts in LANES else range(case.num_steps + 1)


def _passed(rule: AcceptanceRule, uniforms: list[Any]) -> list[Any]:
    """Make the list that a rule receives; the root's uniform is that of node 1."""
    return uniforms[:1] + uniforms if rule.drafts in LANES else list(uniforms)


def _exact_inputs(rule: AcceptanceRule, draw: Draw) -> tuple[Tree, Any, Any]:
    draft_prob = None if rule.drafts == "best" else ExactTensor.of(draw.draft_NV)
    return DraftedTree.of(draw).tree, ExactTensor.of(draw.target_NV), draft_prob


def _accepted(rule: AcceptanceRule, case: ExactCase, draw: Draw, region: Explored) -> Accepted:
    """Check the result on a region, and compare it with the results for floats."""
    if region.refused is not None or isinstance(region.result, NotExact):
        raise NotCertified(region.refused or str(region.result))
    middle = _with_floats(rule, draw, region.box, Fraction(1, 2))
    if isinstance(middle, str):
        raise Broken(Counterexample(case.name, draw, rule.drafts, region.box, middle))
    if isinstance(region.result, BaseException):
        raise NotCertified(f"with exact numbers it {_raised(region.result)}")
    try:
        accepted = checked(region.result, DraftedTree.of(draw).tree, len(draw.target_NV[0]))
    except InputError as error:
        raise NotCertified(f"with exact numbers it returns {error.value}, with floats {tuple(middle)}") from None
    is_wide = all(high - low >= ROUNDING for low, high in region.box.intervals)
    for part in INSIDE if is_wide else ():
        other = _with_floats(rule, draw, region.box, part)
        if other != accepted:
            returned = other if isinstance(other, str) else f"returns {tuple(other)}"
            raise NotCertified(f"with exact numbers it returns {tuple(accepted)}, and with floats it {returned}")
    return accepted


def _with_floats(rule: AcceptanceRule, draw: Draw, box: Box, part: Fraction) -> Accepted | str:
    """Call the rule as an engine would, at a point of the region; a text where it has no result."""
    drafted_tree = DraftedTree.of(draw)
    *uniforms, final = box.point(part)
    draft_prob = None if rule.drafts == "best" else drafted_tree.draft_prob_NV
    try:
        with time_limit():
            result = rule.accept(drafted_tree.tree, drafted_tree.prob_NV, draft_prob, _passed(rule, uniforms), final)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _raised(error) + _misread(rule, error, len(_passed(rule, uniforms)))
    try:
        return checked(result, DraftedTree.of(draw).tree, len(draw.target_NV[0]))
    except InputError as error:
        return f"returns {error.value}; allowed: {error.allowed}"


def _misread(rule: AcceptanceRule, error: BaseException, count: int) -> str:
    """Name the argument that a rule for other drafts reads differently; "" for another error."""
    if rule.drafts == "best" and isinstance(error, (TypeError, AttributeError)) and "None" in str(error):
        return "; the argument draft_prob_NV is None for drafts best"
    if isinstance(error, IndexError):
        unit = "node" if rule.drafts in LANES else "depth"
        return f"; the argument uniforms has {count} entries for drafts {rule.drafts}, by the {unit} of the parent"
    return ""


def _raised(error: BaseException) -> str:
    return f"raises {one_line(error)}"[:300]


def _grid(case: ExactCase, outcomes: Sequence[RuleOutcome]) -> Fraction:
    """Bound the errors of uniforms of 24 bits: every comparison of a tree's uniform counts wherever it is made."""
    edges: dict[Draw, list[set[Fraction]]] = {}
    for outcome in outcomes:
        draw_edges = edges.setdefault(outcome.draw, [set() for _ in outcome.box.intervals])
        for cuts, interval in zip(draw_edges, outcome.box.intervals, strict=True):
            cuts.update(interval)
    total = Fraction(0)
    for draw, draw_edges in edges.items():
        axes = [*map(regions, draw_edges), *(draft_axes(draw) if case.tokens is None else ())]
        total += draw.prob * sum(map(grid_cost, axes), Fraction(0))
    return total


def _counterexample(
    rule: AcceptanceRule, case: ExactCase, exact: ExactDistribution, outcomes: Sequence[RuleOutcome]
) -> Counterexample:
    """Choose the text that is too probable by most, and the most probable region that leads to it."""
    text = max(exact.text_probs, key=lambda candidate: exact.text_probs[candidate] - text_prob(case.target, candidate))
    leading = [outcome for outcome in outcomes if outcome.text == text[: len(outcome.text)]]
    chosen = max(leading, key=lambda outcome: outcome.prob)
    path, bonus = chosen.accepted
    result = (
        f"returns path {path} and bonus {bonus}; in sum the text {list(text)} has probability "
        f"{exact.text_probs[text]} instead of {text_prob(case.target, text)}"
    )
    return Counterexample(case.name, chosen.draw, rule.drafts, chosen.box, result)


def _random_states() -> tuple[object, str, bytes]:
    return random.getstate(), str(np.random.get_state()), bytes(torch.get_rng_state().tolist())


def _require_no_draws(before: object) -> None:
    if _random_states() != before:
        raise NotCertified("it draws random numbers of its own, which no certificate can follow")


@check_arguments
def load_rules(location: str) -> list[AcceptanceRule]:
    """Load the rules of a module or file, or one of them: my_rule.py, my_rule.py:rule, package.module:rule.

    Raises InputError where there is no such module or rule.
    """
    before, colon, name = location.rpartition(":")
    is_named = bool(colon) and name.isidentifier()
    module = load_module(before if is_named else location)
    with user_code("module", location, "a module whose objects can be read"):
        rules = {key: value for key, value in vars(module).items() if isinstance(value, AcceptanceRule)}
    if is_named:
        rules = {key: value for key, value in rules.items() if key == name}
    if not rules:
        rest = f"named {name}" if is_named else "at its top level"
        raise InputError("module", location, f"a module with an AcceptanceRule {rest}")
    return list({id(rule): rule for rule in rules.values()}.values())


@check_arguments
def certify_rules(rules: Sequence[AcceptanceRule], *, progress: bool = False) -> Certificates:
    """Prove that each rule is lossless on the cases of its drafts, or refute it with a counterexample."""
    date = now()
    start = time.perf_counter()
    most = cache(optimum)
    rows: list[Certificate] = []
    broken: list[str] = []
    not_certified: list[str] = []
    tasks = [(rule, case) for rule in rules for case in sorted(RULE_CASES[rule.drafts], key=_size)]
    ended: list[AcceptanceRule] = []
    for rule, case in tqdm(tasks, unit="certificate", disable=None if progress else True):
        if rule in ended:
            continue
        try:
            names = (rule.name, "lossless" if rule.lossless else "lossy", "module")
            result = rule_distribution(rule, case)
            rows.append(Certificate.of(names, case, result.exact, most(case), result.counterexample))
        except Broken as error:
            broken.append(f"{rule.name}: {error}")
            ended.append(rule)
        except NotCertified as error:
            not_certified.append(f"{rule.name}, as {error} (on {case.name})")
            ended.append(rule)
    seconds = time.perf_counter() - start
    return Certificates(tuple(rows), tuple(broken), (), seconds, date, versions("cpu"), tuple(not_certified))


def _size(case: ExactCase) -> tuple[int, int]:
    return len(case.parents), case.target.vocab_size
