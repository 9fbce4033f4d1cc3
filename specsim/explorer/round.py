"""One recorded round of a batch: its states, pictures and tables."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require_choice
from specsim.core.phases import Batch, Candidates, DraftInput, ExplicitCandidates, Verdict, VerifyInput, VerifyOutput
from specsim.explorer.recorder import Recorded
from specsim.serving.frames import data_frame

if TYPE_CHECKING:
    import pandas

    from specsim.plots.sheet import Decode, Picture

PHASES = ("draft", "verify", "commit")
_PLAIN = ("target_only", "rejection", "block")  # verifiers with one uniform for each depth


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Round:
    """One speculative round of a batch. Requests are named by their ids; None is the first one of the batch."""

    index: int  # 0 is the first round after the prefill
    config: SpecConfig
    decode: "Decode"  # token ids to text
    states: Recorded

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
            return plots.kv_pages(self.states.drafted_pools, self.batch, self.config, lead=self.states.lead)
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
        row = self._row(request)
        candidates = self.verify_input.candidates
        if candidates is None:
            return node_table({name: [] for name in ("step", "parent", "token_id", "text", "score", "node")})
        parents, chosen = self._chosen(candidates, row)
        tokens = candidates.tokens[row, : len(parents)].tolist()
        steps: list[int] = []
        for parent in parents:
            steps.append(1 if parent < 0 else steps[parent] + 1)
        nodes = {candidate: node for node, candidate in enumerate(chosen, start=1)}
        return node_table(
            {
                "step": steps,
                "parent": parents,
                "token_id": tokens,
                "text": [self.decode([token]) for token in tokens],
                "score": candidates.scores[row, : len(parents)].tolist(),
                "node": [nodes.get(candidate) for candidate in range(len(tokens))],
            }
        )

    def _chosen(self, candidates: Candidates | ExplicitCandidates, row: int) -> tuple[list[int], list[int]]:
        """Find the parent of each candidate, -1 for the root, and the candidates that became nodes."""
        from specsim.reference.selection import select
        from specsim.reference.tree_explicit import select_explicit

        count = self.config.num_draft_tokens - 1
        if isinstance(candidates, ExplicitCandidates):
            alive = int(candidates.num_alive[row])
            own = candidates.parents[row, :alive].tolist()
            return own, select_explicit(own, candidates.scores[row, :alive].tolist(), count)
        topk = self.config.topk
        siblings = 1 if self.config.is_sampled else topk
        blocks = candidates.parent_list[row].tolist()
        numbers = range(candidates.tokens.shape[1])
        parents = [-1 if number < topk else blocks[1 + (number - topk) // siblings] for number in numbers]
        return parents, select(candidates.scores, count)[row].tolist()

    def verify(self, request: int | None = None) -> "pandas.DataFrame":
        """Make a table of the tree's nodes as the target verified them, root first, without dead nodes.

        Columns: node, parent, depth, token_id, text, score (the drafter's, of the path), draft_prob and target_prob
        (probability of the token after its parent: the drafter's, and the target's under the request's penalties,
        temperature and filters; at temperature 0 before the argmax, at temperature 1), uniform (random number that the
        verifier compares with them; NA if greedy, or if it draws none for a node), accepted, next_token_id and
        next_text (the target's most likely token after the node).
        """
        from specsim.plots.token_tree import live_parents
        from specsim.reference.sampling import argmax
        from specsim.reference.tree_links import depths_of

        row = self._row(request)
        num_nodes = self.verify_input.draft_tokens.shape[1]
        parents = live_parents(self.verify_input, row)
        tokens = self.verify_input.draft_tokens[row, : len(parents)].tolist()
        depths = depths_of(parents)
        probs_NV = self._target_probs(row)
        following = argmax(probs_NV[: len(parents)]).tolist()
        count = int(self.verdict.num_accepted_tokens[row])
        path = {node - row * num_nodes for node in self.verdict.accept_index[row, :count].tolist()}
        below_root = list(zip(parents, tokens, strict=True))[1:]
        scores = self.verify_input.scores[row, : len(parents)].double()
        ratios = scores / scores[parents] if self.config.score == "prob" else (scores - scores[parents]).exp()
        return node_table(
            {
                "node": list(range(len(parents))),
                "parent": parents,
                "depth": depths,
                "token_id": tokens,
                "text": [self.decode([token]) for token in tokens],
                "score": scores.tolist(),
                "draft_prob": [None, *ratios[1:].tolist()],
                "target_prob": [None, *(float(probs_NV[parent, token]) for parent, token in below_root)],
                "uniform": self._uniforms(row, depths),
                "accepted": [node in path for node in range(len(parents))],
                "next_token_id": following,
                "next_text": [self.decode([token]) for token in following],
            }
        )

    def _target_probs(self, row: int) -> torch.Tensor:
        """Target's distribution after each node, f64 [N, V]."""
        from specsim.reference.sampling import target_prob
        from specsim.reference.verify import node_logits

        own = slice(row, row + 1)
        batch = self.batch.filter(torch.tensor([row]))
        trees = self.verify_input
        tree = replace(
            trees,
            draft_tokens=trees.draft_tokens[own],
            parents=trees.parents[own],
            retrieve_next_token=trees.retrieve_next_token[own],
            retrieve_next_sibling=trees.retrieve_next_sibling[own],
        )
        num_nodes = trees.draft_tokens.shape[1]
        logits_NV = self.verify_output.target_logits[row * num_nodes : (row + 1) * num_nodes]
        allowed = self.states.allowed if self.states.allowed is None else self.states.allowed[own]
        (adjusted_NV,) = node_logits(batch, tree, logits_NV, self.config, self.states.committed_pools, allowed)
        if float(batch.sampling.temperature) == 0:
            return torch.softmax(adjusted_NV, dim=-1)
        return torch.stack([target_prob(adjusted_V, batch.sampling, 0) for adjusted_V in adjusted_NV])

    def _uniforms(self, row: int, depths: list[int]) -> list[float | None]:
        """Uniform of each node below the root, where the verifier draws one."""
        from specsim.reference.verify import round_uniforms

        is_drawn = float(self.batch.sampling.temperature[row]) > 0
        if not is_drawn or self.config.verifier not in (*_PLAIN, "multi_round"):
            return [None] * len(depths)
        uniforms = round_uniforms(self.batch, self.config)[0][row].tolist()
        if self.config.verifier == "multi_round":
            return [None, *uniforms[1:]]
        return [uniforms[depth - 1] if depth else None for depth in depths]

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
