"""Certificates of acceptance rules of a user, and the modules that hold them."""

import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache

from tqdm.auto import tqdm

from specsim.core.errors import InputError
from specsim.core.provenance import now, versions
from specsim.core.rule import AcceptanceRule
from specsim.core.user_module import load_module
from specsim.correctness.exact.cases import RULE_CASES
from specsim.correctness.exact.model import ExactCase
from specsim.correctness.exact.optimum import optimum
from specsim.correctness.exact.report import Certificate, Certificates
from specsim.correctness.exact.rule_distribution import Broken, NotCertified, rule_distribution


def load_rules(location: str) -> list[AcceptanceRule]:
    """Load the rules of a module or file, or one of them: my_rule.py, my_rule.py:rule, package.module:rule.

    Raises InputError where there is no such module or rule.
    """
    before, colon, name = location.rpartition(":")
    is_named = bool(colon) and name.isidentifier()
    module = load_module(before if is_named else location)
    rules = {key: value for key, value in vars(module).items() if isinstance(value, AcceptanceRule)}
    if is_named:
        rules = {key: value for key, value in rules.items() if key == name}
    if not rules:
        rest = f"named {name}" if is_named else "at its top level"
        raise InputError("module", location, f"a module with an AcceptanceRule {rest}")
    return list({id(rule): rule for rule in rules.values()}.values())


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
            rows.append(_certificate(rule, case, most))
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


def _certificate(rule: AcceptanceRule, case: ExactCase, most: Callable[[ExactCase], Fraction]) -> Certificate:
    distribution = rule_distribution(rule, case)
    return Certificate(
        *(rule.name, "lossless" if rule.lossless else "lossy", "module", case.name),
        total_variation=distribution.exact.total_variation(case),
        accepted=distribution.exact.accepted,
        optimum=most(case),
        impossible=distribution.exact.impossible(case),
        uniform_bits_bound=distribution.exact.grid,
        regions=distribution.exact.regions,
        counterexample=distribution.counterexample,
    )
