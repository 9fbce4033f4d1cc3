"""Schema of an exploration: the recorded rounds that the explorer's page draws."""

from specsim.maintain.schemas.document import (
    Schema,
    anything,
    array,
    choice,
    nullable,
    number,
    record,
    table,
    text,
    whole,
)
from specsim.maintain.schemas.settings import config

_SCORE = nullable(number("Score of the path: the drafter's probability of it, or its logarithm under score logprob."))
_PROB = nullable(number("A probability; null where it is not known."))
_TOKEN = whole("A token id.")
_SLOT = whole("A slot of the pools, -1 for none.")
_PAGES = array("Pages of the request in order, from first_page on.", whole("A page."))
_COLUMNS = array("Columns of each lane.", array("Columns.", whole("A column.")))


def exploration() -> Schema:
    """Describe the document of recorded rounds."""
    rounds = array("Rounds in order; the first ones where all would be too large.", _round())
    return record(
        "Data of the page that generate, run and diff write with --html, and of specsim.explore. Numbers have four "
        "significant digits.",
        {
            "pair": text("Name of the pair."),
            "drafter": text("Kind of the drafter."),
            "impl": text("Implementation that ran: reference or fast."),
            "num_rounds": whole("Rounds of the run, with those that are left out here."),
            "config": config("Setting of the run."),
            "verifier": text("Acceptance rule, or the rule of a user or the schedule that decided in its place."),
            "requests": array("Requests of the run.", _request()),
            "mismatch": nullable(_mismatch()),
            "tokens": table("Text of each token that a round names, by id.", text("Text of the token by itself.")),
            "rounds": rounds,
            "other": array("The same rounds of the implementation that was compared; of diff only.", _round()),
        },
        optional=("other",),
    )


def _request() -> Schema:
    return record(
        "One request.",
        {
            "id": whole("Id of the request."),
            "prompt": text("Text of the prompt."),
            "prompt_len": whole("Tokens of the prompt."),
            "output": array("Tokens of the output.", _TOKEN),
            "pieces": array("Text that each token of the output adds.", text("A text.")),
            "temperature": number("Sampling temperature; 0 is greedy."),
            "finish_reason": text("stop, length, or empty where the run ended before the request."),
        },
    )


def _mismatch() -> Schema:
    return record(
        "First difference of two implementations; null except for diff.",
        {
            "cell": text("Name of the cell."),
            "round": whole("Number of the round, from 1; 0 is the prefill."),
            "phase": text("Phase: prefill, draft, verify or draft_extend."),
            "step": text("Step of the page at which it opens."),
            "request": nullable(whole("Place of the request in the batch; null where a whole state is wrong.")),
            "entry": nullable(whole("First wrong entry of the field; null for none.")),
            "node": nullable(whole("The entry where it is a node of the tree; null elsewhere.")),
            "field": text("Name of the wrong field."),
            "reference": text("Value of the reference."),
            "other": text("Value of the implementation that was compared."),
            "impl": text("Name of that implementation."),
            "note": text("Reason for which its round is not drawn; empty where it is."),
        },
    )


def _round() -> Schema:
    return record(
        "One round of the batch.",
        {
            "index": whole("Number of the round, from 0 after the prefill; of diff from 1."),
            "requests": array("Requests that take part.", _request_round()),
        },
    )


def _request_round() -> Schema:
    row = array("[token id, target's probability, drafter's or null, child node or -1].", anything("A value."), 4)
    decision = array("[node, whether it passes, comparison in words].", anything("A value."), 3)
    return record(
        "One request in one round.",
        {
            "request": whole("Place in requests."),
            "length": whole("Tokens with committed KV before the round; the first node has this column."),
            "draft_kind": choice(
                "Way in which the drafts were made.", "lanes", "modules", "block", "masks", "lookup", "none"
            ),
            "candidates": _candidates(),
            "lanes": array(
                "Candidates whose lanes the drafter ran, best first, by step.", array("Lanes.", whole("A candidate."))
            ),
            "nodes": _nodes(),
            "dead": whole("Nodes of the tree that hold no draft."),
            "sees": array("Attention mask: the nodes that each node sees.", array("Nodes.", whole("A node."))),
            "after": array("Tokens after each node, likeliest first.", array("Tokens.", row)),
            "decided_by": text("greedy, the setting's verifier, or what decided in its place."),
            "decisions": array("Drafts that the verifier looked at, in order.", decision),
            "path": array("Accepted nodes, root first.", whole("A node.")),
            "bonus": whole("Token after the accepted path."),
            "bonus_origin": text("Origin of the bonus token, in words."),
            "kv": _kv(),
            "extend": _extend(),
        },
    )


def _candidates() -> Schema:
    return record(
        "Candidates for the tree, in the order in which they were proposed.",
        {
            "steps": array("Depth of each, from 1.", whole("A depth.")),
            "parents": array("Candidate above each, -1 for the root.", whole("A candidate.")),
            "tokens": array("Tokens.", _TOKEN),
            "scores": array("Scores.", _SCORE),
            "probs": array("Drafter's probability of each after its parent; empty where scores are none.", _PROB),
            "nodes": array("Node that each became, -1 for none.", whole("A node.")),
        },
    )


def _nodes() -> Schema:
    return record(
        "Nodes of the tree, root first, without dead ones.",
        {
            "parents": array("Parent of each, -1 for the root.", whole("A node.")),
            "depths": array("Depth of each.", whole("A depth.")),
            "tokens": array("Tokens.", _TOKEN),
            "scores": array("Scores.", _SCORE),
            "draft_probs": array("Drafter's probability of each after its parent.", _PROB),
            "target_probs": array("Target's probability of each after its parent.", _PROB),
            "uniforms": array("Uniform that the verifier reads for each; null for none.", _PROB),
            "slots": array("Slot that verify writes.", _SLOT),
        },
    )


def _kv() -> Schema:
    move = array("[node, slot that verify wrote, slot after the commit].", whole("A number."), 3)
    return record(
        "KV of the request.",
        {
            "first_page": whole("Place of the page that holds the first new column."),
            "drafted_pages": _PAGES,
            "committed_pages": _PAGES,
            "lanes": _COLUMNS,
            "tails": _COLUMNS,
            "moves": array("Accepted nodes, root first.", move),
        },
    )


def _extend() -> Schema:
    drafts = record("Drafts of one depth.", {"tokens": array("Tokens.", _TOKEN), "scores": array("Scores.", _SCORE)})
    return record(
        "Rows of draft-extend, padding included.",
        {
            "tokens": array("Token that each row reads.", _TOKEN),
            "positions": array("Position of each row.", whole("A position.")),
            "slots": array("Slot that each row writes.", _SLOT),
            "count": whole("Rows that are no padding, one for each accepted node."),
            "next": array("Drafts that are left to the next round, by depth.", drafts),
        },
    )
