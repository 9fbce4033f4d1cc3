"""Document of an exploration: of every drafter and verifier, equal to the trace, and within its size."""

import json

import pytest
from jsonschema import Draft202012Validator

import specsim
from specsim import SamplingParams, SpecConfig
from specsim.cli.schema import document as schema_document
from specsim.explorer import document as documents
from specsim.explorer.decisions import decisions
from specsim.explorer.document import document, encoded
from specsim.models.synthetic_pair import synthetic_pair

from .kinds import CHAIN, FAST, KINDS, recorded

CASES = [(name, "reference") for name in KINDS] + [(name, "fast") for name in FAST]
SCHEMA = Draft202012Validator(schema_document("exploration"))


def few(values):
    return [None if value is None or value != value else float(f"{value:.4g}") for value in values]


@pytest.mark.every_value
@pytest.mark.parametrize(("name", "impl"), CASES)
def test_every_kind_has_the_figures_of_its_trace(name, impl):
    if impl == "fast":
        pytest.importorskip("triton")
    rounds = recorded(name, impl)
    value = document(rounds)
    SCHEMA.validate(json.loads(encoded(value)))
    assert value["impl"] == impl
    assert len(value["rounds"]) == value["num_rounds"] == len(rounds)
    for each, own in zip(rounds, value["rounds"], strict=True):
        assert [rounds.request_ids[found["request"]] for found in own["requests"]] == each.request_ids
        for request, found in zip(each.request_ids, own["requests"], strict=True):
            check_request(rounds, each, request, found)


def check_request(rounds, each, request, found):
    row = each.request_ids.index(request)
    nodes = each.verify(request)
    drafts = each.drafts(request)
    assert found["nodes"]["tokens"] == list(nodes.token_id)
    assert found["nodes"]["parents"] == list(nodes.parent)
    assert found["nodes"]["target_probs"] == few([None, *nodes.target_prob[1:]])
    assert found["nodes"]["uniforms"] == few(
        [None if value is None else value for value in nodes.uniform.astype(object).where(nodes.uniform.notna(), None)]
    )
    assert found["candidates"]["tokens"] == list(drafts.token_id)
    assert found["candidates"]["scores"] == few(drafts.score)
    chosen = [candidate for candidate, node in enumerate(found["candidates"]["nodes"]) if node >= 0]
    assert chosen == list(drafts.index[drafts.node.notna()])
    assert found["path"] == list(nodes.node[nodes.accepted])
    accepted = [found["nodes"]["tokens"][node] for node in found["path"][1:]] + [found["bonus"]]
    assert accepted == each.accepted_tokens(request)
    count = len(nodes)
    mask = each.verify_input.mask[row, :count, :count]
    assert found["sees"] == [line.nonzero().flatten().tolist() for line in mask]
    assert found["dead"] == each.config.num_draft_tokens - count
    table = each.states.committed_pools.req_to_token[each.batch.req_pool_indices[row]].tolist()
    columns = range(found["length"], found["length"] + len(found["path"]))
    assert [after for _, _, after in found["kv"]["moves"]] == [table[column] for column in columns]
    assert [before for _, before, _ in found["kv"]["moves"]] == [
        found["nodes"]["slots"][node] for node in found["path"]
    ]
    assert found["extend"]["tokens"][: found["extend"]["count"]] == accepted
    for node, rows in enumerate(found["after"]):
        assert rows[0][0] == nodes.next_token_id[node] or rows[0][1] == rows[1][1]
        children = {child: (token, target) for token, target, _, child in rows if child >= 0}
        assert children == {
            child: (nodes.token_id[child], found["nodes"]["target_probs"][child])
            for child in nodes.node
            if nodes.parent[child] == node
        }


@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("rule", "schedule")])
def test_decisions_lead_down_the_accepted_path(name):
    rounds = recorded(name)
    tried = 0
    for each in rounds:
        for row, request in enumerate(each.request_ids):
            made = decisions(each.states, each.config, row)
            depths = each.verify(request).depth
            passed = [decision.node for decision in made if decision.passes]
            path = each.verdict.accepted_path(row)
            tried += len(made)
            if each.config.verifier in ("block", "typical", "traversal") and each.batch.sampling.temperature[row] > 0:
                assert path[-1] in [0, *passed]  # of several nodes of one depth the most probable
                assert depths[path[-1]] == max(depths[node] for node in [0, *passed])
            else:
                assert path[1:] == passed
    assert tried or name == "no drafter"


def test_what_decides_in_place_of_the_verifier_is_named():
    assert {found["decided_by"] for each in document(recorded("rule"))["rounds"] for found in each["requests"]} == {
        "rule root only"
    }
    value = document(recorded("schedule"))
    assert value["verifier"].startswith("schedule ")
    assert all(found["decisions"] == [] for each in value["rounds"] for found in each["requests"])


def test_kinds_of_drafts_are_told_apart():
    found = {
        name: {own["draft_kind"] for each in document(recorded(name))["rounds"] for own in each["requests"]}
        for name in KINDS
    }
    assert found["eagle3"] == found["standalone"] == found["frozen-kv"] == {"lanes"}
    assert found["mtp"] == {"modules"}
    assert found["dflash"] == found["dspark"] == {"block"}
    assert found["p-eagle"] == {"masks"}
    assert found["ngram"] == found["suffix"] == {"lookup"}
    assert found["no drafter"] == {"none"}


def test_dead_nodes_are_counted():
    dead = {own["dead"] for each in document(recorded("ngram"))["rounds"] for own in each["requests"]}
    assert 6 in dead
    assert len(dead) > 1


def test_draft_lanes_begin_after_the_bonus_column():
    """Each lane of a standalone model stands one column further on, and a frozen-KV drafter writes none."""
    for name, bonus_columns in (("eagle3", 0), ("standalone", 1)):
        for own in document(recorded(name))["rounds"][0]["requests"]:
            assert own["kv"]["lanes"][0][0] == own["length"] + bonus_columns
            assert [len(lane) for lane in own["kv"]["lanes"]] == [2, 2, 2]
    assert all(
        own["kv"]["lanes"] == []
        for name in ("frozen-kv", "mtp", "p-eagle", "dflash", "ngram")
        for own in document(recorded(name))["rounds"][0]["requests"]
    )


def test_drafts_of_extend_are_those_of_the_next_round():
    value = document(recorded("eagle3"))
    before, after = value["rounds"][:2]
    own = after["requests"][0]["candidates"]
    assert before["requests"][0]["extend"]["next"] == [{"tokens": own["tokens"][:3], "scores": own["scores"][:3]}]


def test_a_document_stops_before_its_size_limit(monkeypatch):
    rounds = recorded("eagle3")
    whole = document(rounds)
    limit = len(encoded(whole)) // 2
    monkeypatch.setattr(documents, "MOST_BYTES", limit)
    part = document(rounds)
    assert 0 < len(part["rounds"]) < len(whole["rounds"])
    assert len(encoded(part)) <= limit
    assert part["num_rounds"] == len(rounds)


def test_sixty_four_rounds_stay_below_two_megabytes():
    wide = SpecConfig(topk=4, num_steps=4, num_draft_tokens=32)
    for config, most in ((CHAIN, 300_000), (wide, 1_000_000)):
        rounds = specsim.trace(
            synthetic_pair("eagle3"), [PROMPT], config, SamplingParams(max_new_tokens=40), most_rounds=8
        )
        assert len(encoded(document(rounds))) / 8 * 64 < most


PROMPT = [5, 17, 3, 40, 8]


def test_a_trace_may_keep_the_first_rounds_only():
    params = SamplingParams(max_new_tokens=20)
    whole = specsim.trace(synthetic_pair("eagle3"), [PROMPT], CHAIN, params)
    part = specsim.trace(synthetic_pair("eagle3"), [PROMPT], CHAIN, params, most_rounds=2)
    assert part.generation.outputs == whole.generation.outputs
    assert len(part) == 2
    assert document(part)["num_rounds"] == len(whole) > 2
