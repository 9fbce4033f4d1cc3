"""Recorded drafts, replayed under a smaller setting: what would a narrower, shorter or smaller tree have accepted?

The trace holds, for every position of some texts that the target wrote greedily, all candidates that a drafter
considered there under one large setting, with their scores. A smaller setting expands some of the same lanes, keeps
some of the same candidates, and accepts those that are the text.
"""

from dataclasses import dataclass

import numpy as np

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError
from specsim.simulator.acceptance import Recorded


@dataclass(frozen=True, slots=True)
class Candidates:
    """All candidates of drafts from R positions, of requests one after the other.

    tokens (int) and scores (float32) [R, K + (S-1)K²]: by level, K of the root, then K children for each of K lanes.
    parent_list: int [R, K(S-1)+1], for each block of K siblings the flat index of their parent, -1 for the root.
    texts: the output of every request; its position p drafts what follows token p, so n positions need n + S tokens.
    topk, num_steps: of the setting that was recorded.
    """

    tokens: np.ndarray
    scores: np.ndarray
    parent_list: np.ndarray
    texts: tuple[np.ndarray, ...]
    topk: int
    num_steps: int

    def __post_init__(self):
        topk, steps = self.topk, self.num_steps
        width, blocks = topk + (steps - 1) * topk**2, max(1, topk * (steps - 1) + 1)
        for name, most in (("tokens", width), ("scores", width), ("parent_list", blocks)):
            shape = getattr(self, name).shape
            if shape != (self.num_positions, most):
                raise InputError(name, shape, f"one row a position, {(self.num_positions, most)}")

    @property
    def num_positions(self) -> int:
        return sum(self._lengths)

    @property
    def _lengths(self) -> list[int]:
        return [len(text) - self.num_steps for text in self.texts]

    def accepted(self, config: SpecConfig) -> np.ndarray:
        """Drafts that a round under this setting accepts, from every position: int64 [R]."""
        nodes = self._select(config, self._expand(config))
        return np.max(np.where(nodes & self._on_path(), self._depths(), 0), axis=1)

    def law(self, config: SpecConfig) -> Recorded:
        """The setting's acceptance by request and position."""
        ends = np.cumsum(self._lengths)[:-1]
        return Recorded(tuple(np.split(self.accepted(config), ends)), config.num_steps, by="position")

    def shares(self) -> np.ndarray:
        """Of the nodes on the target's path at each depth d, the root at 0, the share whose r-th best child is its
        continuation: float64 [S, K].
        """
        on_path, expanded = self._on_path(), self._blocks()
        rows, steps, topk = np.arange(self.num_positions), self.num_steps, self.topk
        shares, block = np.zeros((steps, topk)), np.zeros(self.num_positions, dtype=np.int64)
        for depth in range(steps):
            there = np.flatnonzero(block >= 0)
            children = block[there, None] * topk + np.arange(topk)
            hits = on_path[there[:, None], children]
            shares[depth] = hits.mean(axis=0) if len(there) else 0.0
            following = np.full_like(block, -1)
            hit = hits.any(axis=1)
            following[there[hit]] = expanded[rows[there[hit]], children[hits]]
            block = following
        return shares

    def _on_path(self) -> np.ndarray:
        """Whether a candidate and all above it are the text: bool [R, M]."""
        levels, topk = self._depths(), self.topk
        is_text = self.tokens == self._following()[:, levels - 1]
        for level in range(1, self.num_steps):
            start = topk + (level - 1) * topk**2
            parents = np.repeat(self.parent_list[:, 1 + (level - 1) * topk : 1 + level * topk], topk, axis=1)
            is_text[:, start : start + topk**2] &= np.take_along_axis(is_text, parents, axis=1)
        return is_text

    def _depths(self) -> np.ndarray:
        """int64 [M]: 1 for the root's children."""
        return np.concatenate(
            [np.full(self.topk, 1), np.repeat(np.arange(2, self.num_steps + 1), self.topk**2)]
        ).astype(np.int64)

    def _following(self) -> np.ndarray:
        """The S tokens that a round from each position may accept: [R, S]."""
        windows = [np.lib.stride_tricks.sliding_window_view(text[1:], self.num_steps) for text in self.texts]
        return np.concatenate(windows)

    def _blocks(self) -> np.ndarray:
        """The block of children of every candidate, -1 for one that was not expanded: int64 [R, M]."""
        block_of = np.full(self.tokens.shape, -1, dtype=np.int64)
        blocks = np.broadcast_to(np.arange(1, self.parent_list.shape[1]), self.parent_list[:, 1:].shape)
        np.put_along_axis(block_of, self.parent_list[:, 1:], blocks, axis=1)
        return block_of

    def _expand(self, config: SpecConfig) -> list[np.ndarray]:
        """The candidates of a smaller setting by level, as flat indices of the recorded ones, -1 where nothing was
        recorded: the recorded lanes were others. int64 [R, k], then [R, k²] each.
        """
        for name, most in (("topk", self.topk), ("num_steps", self.num_steps)):
            if not 1 <= getattr(config, name) <= most:
                raise InputError(name, getattr(config, name), f"1 to {most}, the recorded one")
        block_of, ranks = self._blocks(), np.arange(config.topk)
        lanes = np.broadcast_to(ranks, (self.num_positions, config.topk))
        levels = [lanes]
        for _ in range(config.num_steps - 1):
            blocks = np.where(lanes >= 0, np.take_along_axis(block_of, lanes, axis=1), -1)
            children = np.where(blocks[:, :, None] >= 0, blocks[:, :, None] * self.topk + ranks, -1)
            levels.append(children.reshape(self.num_positions, -1))
            lanes = np.take_along_axis(levels[-1], self._best(levels[-1], config.topk), axis=1)
        return levels

    def _best(self, flat: np.ndarray, count: int) -> np.ndarray:
        """Places of the best scores, best first, ties to the lower place."""
        scores = np.where(flat >= 0, np.take_along_axis(self.scores, flat, axis=1), -np.inf)
        return np.argsort(-scores, axis=1, kind="stable")[:, :count]

    def _select(self, config: SpecConfig, levels: list[np.ndarray]) -> np.ndarray:
        """Which recorded candidates are in the smaller setting's tree: bool [R, M]."""
        flat = np.concatenate(levels, axis=1)
        chosen = np.take_along_axis(flat, self._best(flat, config.num_draft_tokens - 1), axis=1)
        selected = np.zeros((self.num_positions, self.tokens.shape[1] + 1), dtype=bool)
        np.put_along_axis(selected, chosen, True, axis=1)
        return selected[:, :-1]  # the last column took what was not recorded
