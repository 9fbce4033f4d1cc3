"""SGLang's server test kits against `specsim serve`: tests pass, or fail as listed."""

import pytest

from tests.engines.kits_cases import KITS, Outcome, run


@pytest.fixture(scope="module")
def outcomes(engine_python) -> dict[str, Outcome]:
    return {outcome.kit.kit: outcome for outcome in run(engine_python)[1]}


@pytest.mark.parametrize("kit", KITS, ids=lambda kit: kit.kit)
def test_the_server_passes_a_kit(kit, outcomes):
    outcome = outcomes[kit.kit]
    assert outcome.results
    assert set(outcome.failed) == set(kit.failing), outcome.failed
