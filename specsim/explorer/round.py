"""One recorded round of a batch: its states, pictures and tables."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require_choice
from specsim.core.phases import Batch, DraftInput, Verdict, VerifyInput, VerifyOutput
from specsim.explorer.recorder import RecordedStates
from specsim.explorer.tables import candidate_columns, node_columns
from specsim.serving.trace import data_frame

if TYPE_CHECKING:
    import pandas

    from specsim.plots.sheet import Decode, Picture

PHASES = ("draft", "verify", "commit")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Round:
    """One speculative round of a batch. Requests are named by their ids; None is the first one of the batch."""

    index: int  # 0 is the first round after the prefill
    config: SpecConfig
    draft_kind: str  # way in which the drafter makes drafts, as Pair.drafts
    decode: "Decode"  # token ids to text
    states: RecordedStates

    @property
    def batch(self) -> Batch:
        """Requests of the round, with the lengths from before it."""
        return self.states.batch

    @property
    def draft_input(self) -> DraftInput:
        """State that the round began with."""
        return self.states.draft_input

    @property
    def verify_input(self) -> VerifyInput:
        """Trees that the draft phase built."""
        return self.states.verify_input

    @property
    def verify_output(self) -> VerifyOutput:
        """Verdict, target logits, and the input of draft-extend."""
        return self.states.verify_output

    @property
    def verdict(self) -> Verdict:
        """Accepted paths and bonus tokens."""
        return self.states.verify_output.verdict

    @property
    def next_draft_input(self) -> DraftInput:
        """State that draft-extend left for the next round."""
        return self.states.next_draft_input

    @property
    def request_ids(self) -> list[int]:
        """Ids of the requests, in the order of the batch."""
        return self.batch.request_ids.tolist()

    def accepted_tokens(self, request: int | None = None) -> list[int]:
        """List the new tokens of a request, accepted drafts first and the bonus token last."""
        return self.verdict.accepted_tokens()[self._row(request)]

    def tree(self, request: int | None = None) -> "Picture":
        """Draw the token tree with the accepted path and the bonus token."""
        from specsim import plots

        return plots.tree(self.verify_input, self.verdict, self.decode, self._row(request))

    def mask(self, request: int | None = None) -> "Picture":
        """Draw the attention mask: the nodes that each node of the tree sees."""
        from specsim import plots

        return plots.mask(self.verify_input, self._row(request), self.decode)

    def kv(self, phase: Literal["draft", "verify", "commit"] = "commit") -> "Picture":
        """Draw the KV slots of the batch, page by page.

        phase: `draft` shows the draft lanes, `verify` the tree's nodes, `commit` the accepted tokens.
        """
        from specsim import plots

        require_choice("phase", phase, PHASES)
        if phase == "draft":
            return plots.kv_pages(
                self.states.drafted_pools, self.batch, self.config, bonus_columns=self.states.bonus_columns
            )
        if phase == "verify":
            return plots.kv_pages(self.states.drafted_pools, self.batch, self.config, self.verify_input)
        return plots.kv_pages(
            self.states.committed_pools, self.batch, self.config, self.verify_input, self.verdict, committed=True
        )

    def kv_move(self, request: int | None = None) -> "Picture":
        """Draw the moves of KV that put the accepted path at the front."""
        from specsim import plots

        return plots.kv_move(self.verify_input, self.verdict, self.decode, self._row(request))

    def drafts(self, request: int | None = None) -> "pandas.DataFrame":
        """Make a table of the candidates that the drafter proposed, in the order in which it proposed them.

        Columns: step (from 1), parent (row of the parent candidate, -1 for the root), token_id, text, score (the
        drafter's probability of the path, or its logarithm under score `logprob`), node (in the tree; NA: not chosen).
        """
        return node_table(candidate_columns(self.states, self.config, self.decode, self._row(request)))

    def verify(self, request: int | None = None) -> "pandas.DataFrame":
        """Make a table of the tree's nodes as the target verified them, root first, without dead nodes.

        Columns: node, parent, depth, token_id, text, score (the drafter's, of the path), draft_prob and target_prob
        (probability of the token after its parent: the drafter's, and the target's under the request's penalties,
        temperature and filters; at temperature 0 before the argmax, at temperature 1), uniform (random number that the
        verifier compares with them; NA if greedy, or if it draws none for a node), accepted, next_token_id and
        next_text (the target's most likely token after the node).
        """
        return node_table(node_columns(self.states, self.config, self.decode, self._row(request)))

    def _row(self, request: int | None) -> int:
        ids = self.request_ids
        if request is None:
            return 0
        if request not in ids:
            raise InputError("request", request, f"one of round {self.index}: {', '.join(map(str, ids))}")
        return ids.index(request)

    def texts(self, request: int | None = None) -> tuple[str, str]:
        """Text of the accepted drafts, and of the bonus token."""
        *drafts, bonus = self.accepted_tokens(request)
        return self.decode(drafts), self.decode([bonus])

    def __repr__(self) -> str:
        lines = []
        for request in self.request_ids:
            accepted, bonus = self.texts(request)
            count = len(self.accepted_tokens(request)) - 1
            lines.append(f"  request {request}: {count} drafts accepted {accepted!r}, bonus token {bonus!r}")
        return "\n".join([f"Round {self.index}: trees of {self.config.num_draft_tokens} nodes", *lines])


def node_table(columns: dict[str, list[Any]]) -> "pandas.DataFrame":
    """Make a table of nodes or candidates, whose numbers may be missing (NA)."""
    return data_frame(columns, {"node": "Int64", **dict.fromkeys(("draft_prob", "target_prob", "uniform"), "Float64")})
