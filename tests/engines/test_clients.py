"""Clients against `specsim serve`: their counts are the server's."""

import pytest

from tests.engines.clients_cases import CLIENTS, run


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_counts_agree_with_the_server(client, engine_python):
    outcome = run(engine_python, client)
    assert {"completed", "total_output_tokens"} <= set(outcome.reported)
    assert outcome.differing == [], (outcome.reported, outcome.served)
