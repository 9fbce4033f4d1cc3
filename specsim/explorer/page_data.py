"""Types of the data that the page of the explorer draws, for its makers and for specsim schema."""

from typing import Any, Literal, NotRequired, TypedDict

from specsim.core.config import SpecConfig


class DrawnRequest(TypedDict):
    """One request of an exploration."""

    id: int  # id of the request
    prompt: str  # text of the prompt
    prompt_len: int  # tokens of the prompt
    output: list[int]  # tokens of the output
    pieces: list[str]  # text that each token of the output adds
    temperature: float  # sampling temperature; 0 is greedy
    finish_reason: str  # stop, length, or empty where the run ended before the request


class MismatchJson(TypedDict):
    """First difference of two implementations; null except for diff."""

    cell: str  # name of the cell
    round: int  # number of the round, from 1; 0 is the prefill
    phase: str  # prefill, draft, verify or draft_extend
    step: str  # step of the page at which it opens
    request: int | None  # place of the request in the batch; null where a whole state is wrong
    entry: int | None  # first wrong entry of the field; null for none
    node: int | None  # the entry where it is a node of the tree; null elsewhere
    field: str  # name of the wrong field
    reference: str  # value of the reference
    other: str  # value of the implementation that was compared
    impl: str  # name of that implementation
    note: str  # reason for which its round is not drawn; empty where it is


class CandidateColumns(TypedDict):
    """Candidates for the tree, in the order in which they were proposed."""

    steps: list[int]  # depth of each, from 1
    parents: list[int]  # candidate above each, -1 for the root
    tokens: list[int]  # token of each
    scores: list[float | None]  # score of each path: the drafter's probability of it, or its logarithm
    probs: list[float | None]  # drafter's probability of each after its parent; empty where scores are none
    nodes: list[int]  # node that each became, -1 for none


class NodeColumns(TypedDict):
    """Nodes of the tree, root first, without dead ones."""

    parents: list[int]  # parent of each, -1 for the root
    depths: list[int]  # depth of each
    tokens: list[int]  # token of each
    scores: list[float | None]  # score of each path: the drafter's probability of it, or its logarithm
    draft_probs: list[float | None]  # drafter's probability of each after its parent; null where it is not known
    target_probs: list[float | None]  # target's probability of each after its parent; null where it is not known
    uniforms: list[float | None]  # uniform that the verifier reads for each; null for none
    slots: list[int]  # slot that verify writes, -1 for none


class RequestKv(TypedDict):
    """KV of one request in one round."""

    first_page: int  # place of the page that holds the first new column
    drafted_pages: list[int]  # pages of the request in order, from first_page on, after the draft
    committed_pages: list[int]  # pages of the request in order, from first_page on, after the commit
    lanes: list[list[int]]  # columns of each lane
    tails: list[list[int]]  # columns of each lane's tail
    moves: list[tuple[int, int, int]]  # accepted nodes: [node, slot that verify wrote, slot after the commit]


class DepthDrafts(TypedDict):
    """Drafts of one depth."""

    tokens: list[int]  # token of each
    scores: list[float | None]  # score of each path


class ExtendRows(TypedDict):
    """Rows of draft-extend, padding included."""

    tokens: list[int]  # token that each row reads
    positions: list[int]  # position of each row
    slots: list[int]  # slot that each row writes, -1 for none
    count: int  # rows that are no padding, one for each accepted node
    next: list[DepthDrafts]  # drafts that are left to the next round, by depth


class RequestRound(TypedDict):
    """One request in one round."""

    request: int  # place in requests
    length: int  # tokens with committed KV before the round; the first node has this column
    draft_kind: Literal["lanes", "modules", "block", "masks", "lookup", "none"]  # way in which the drafts were made
    candidates: CandidateColumns
    lanes: list[list[int]]  # candidates whose lanes the drafter ran, best first, by step
    nodes: NodeColumns
    dead: int  # nodes of the tree that hold no draft
    sees: list[list[int]]  # attention mask: the nodes that each node sees
    # likeliest tokens after each node: [token id, target's probability, drafter's or null, child node or -1]
    after: list[list[tuple[Any, Any, Any, Any]]]
    decided_by: str  # greedy, the setting's verifier, or what decided in its place
    # drafts that the verifier looked at, in order: [node, whether it passes, comparison in words]
    decisions: list[tuple[Any, Any, Any]]
    path: list[int]  # accepted nodes, root first
    bonus: int  # token after the accepted path
    bonus_origin: str  # origin of the bonus token, in words
    kv: RequestKv
    extend: ExtendRows


class BatchRound(TypedDict):
    """One round of the batch."""

    index: int  # number of the round, from 0 after the prefill
    requests: list[RequestRound]  # requests that take part


class ExplorationKeys(TypedDict):
    """Data of the page that generate, run and diff write with --html; numbers have four significant digits."""

    config: SpecConfig
    verifier: str  # acceptance rule, or the rule of a user or the schedule that decided in its place
    requests: list[DrawnRequest]  # requests of the run
    mismatch: MismatchJson | None
    tokens: dict[str, str]  # text of each token that a round names, by id
    rounds: list[BatchRound]  # rounds in order; the first ones where all would be too large
    other: NotRequired[list[BatchRound]]  # the same rounds of the implementation that was compared; of diff only
