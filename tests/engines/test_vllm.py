"""The shipped drafters in a real vLLM: each case ends as listed, and greedy text is always equal."""

import pytest

from tests.engines.vllm_cases import CASES, Outcome, run


@pytest.fixture(scope="module")
def outcomes(engine_python) -> dict[str, Outcome]:
    return {outcome.case.name: outcome for outcome in run(engine_python)[1]}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_drafter_decides_as_in_vllm(case, outcomes):
    outcome = outcomes[case.name]
    assert outcome.status == case.status, f"{outcome.ours} here, {outcome.theirs} there"
    if outcome.status != "refused":
        assert outcome.theirs.token_ids == outcome.ours.token_ids
