"""Recorded drafts, replayed under a smaller setting: narrower, shorter or smaller trees.

The trace holds all candidates of a drafter under one large setting, with their scores, for every position of some texts
that the target wrote greedily. A smaller setting expands some of the same lanes, keeps some of the same candidates, and
accepts those that equal the text.
"""

from dataclasses import dataclass

import numpy as np

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require
from specsim.simulator.acceptance import RecordedAcceptance


@dataclass(frozen=True, slots=True)
class RecordedCandidates:
    """All candidates drafted from R positions, request after request.

    By level: K children of the root, then K children for each of K lanes.
    """

    tokens: np.ndarray  # int [R, K + (S-1)K²]
    scores: np.ndarray  # f32 [R, K + (S-1)K²]
    parent_list: np.ndarray  # int [R, K(S-1)+1], flat index of the parent of each block of K siblings, -1 for the root
    texts: tuple[np.ndarray, ...]  # every request's output; n + S tokens for n positions, p drafts what follows token p
    topk: int  # K of the recorded setting
    num_steps: int  # S of the recorded setting

    def __post_init__(self) -> None:
        topk = self.topk
        steps = self.num_steps
        width = topk + (steps - 1) * topk**2
        blocks = max(1, topk * (steps - 1) + 1)
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
        """Count the drafts that a round under this setting accepts from every position: int64 [R]."""
        nodes = self._select(config, self._expand(config))
        return np.max(np.where(nodes & self._on_path(), self._depths(), 0), axis=1)

    def acceptance(self, config: SpecConfig) -> RecordedAcceptance:
        """Compute the setting's acceptance by request and position."""
        ends = np.cumsum(self._lengths)[:-1]
        return RecordedAcceptance(tuple(np.split(self.accepted(config), ends)), config.num_steps, by="position")

    def shares(self) -> np.ndarray:
        """Compute how often the target's path continues with the r-th best child, by depth, f64 [S, K].

        It is the share of the nodes on the target's path at that depth; the root has depth 0.
        """
        on_path = self._on_path()
        expanded = self._blocks()
        shares = np.zeros((self.num_steps, self.topk))
        block = np.zeros(self.num_positions, dtype=np.int64)
        for depth in range(self.num_steps):
            there = np.flatnonzero(block >= 0)
            children = block[there, None] * self.topk + np.arange(self.topk)
            hits = on_path[there[:, None], children]
            shares[depth] = hits.mean(axis=0) if len(there) else 0.0
            hit = hits.any(axis=1)
            block = np.full_like(block, -1)
            block[there[hit]] = expanded[there[hit], children[hits]]
        return shares

    def _on_path(self) -> np.ndarray:
        """Mark candidates that, with all their ancestors, equal the text: bool [R, M]."""
        topk = self.topk
        is_text = self.tokens == self._following()[:, self._depths() - 1]
        for level in range(1, self.num_steps):
            start = topk + (level - 1) * topk**2
            parents = np.repeat(self.parent_list[:, 1 + (level - 1) * topk : 1 + level * topk], topk, axis=1)
            is_text[:, start : start + topk**2] &= np.take_along_axis(is_text, parents, axis=1)
        return is_text

    def _depths(self) -> np.ndarray:
        """Compute the depth of every candidate, 1 for the root's children: int64 [M]."""
        deeper = np.repeat(np.arange(2, self.num_steps + 1), self.topk**2)
        return np.concatenate([np.full(self.topk, 1), deeper]).astype(np.int64)

    def _following(self) -> np.ndarray:
        """Look up the S tokens that a round from each position may accept: [R, S]."""
        windows = [np.lib.stride_tricks.sliding_window_view(text[1:], self.num_steps) for text in self.texts]
        return np.concatenate(windows)

    def _blocks(self) -> np.ndarray:
        """Find the block of children of every candidate, -1 where it was not expanded: int64 [R, M]."""
        block_of = np.full(self.tokens.shape, -1, dtype=np.int64)
        blocks = np.broadcast_to(np.arange(1, self.parent_list.shape[1]), self.parent_list[:, 1:].shape)
        np.put_along_axis(block_of, self.parent_list[:, 1:], blocks, axis=1)
        return block_of

    def _expand(self, config: SpecConfig) -> list[np.ndarray]:
        """Find the candidates of a smaller setting by level, as flat indices of recorded ones.

        int64 [R, k], then [R, k²] each; -1 where nothing was recorded, because other lanes were expanded.
        """
        for name, most in (("topk", self.topk), ("num_steps", self.num_steps)):
            require(1 <= getattr(config, name) <= most, name, getattr(config, name), f"1 to {most}, the recorded one")
        block_of = self._blocks()
        ranks = np.arange(config.topk)
        lanes = np.broadcast_to(ranks, (self.num_positions, config.topk))
        levels = [lanes]
        for _ in range(config.num_steps - 1):
            blocks = np.where(lanes >= 0, np.take_along_axis(block_of, lanes, axis=1), -1)
            children = np.where(blocks[:, :, None] >= 0, blocks[:, :, None] * self.topk + ranks, -1)
            levels.append(children.reshape(self.num_positions, -1))
            lanes = np.take_along_axis(levels[-1], self._best(levels[-1], config.topk), axis=1)
        return levels

    def _best(self, flat: np.ndarray, count: int) -> np.ndarray:
        """Find the places of the best scores, best first, ties to the lower place."""
        scores = np.where(flat >= 0, np.take_along_axis(self.scores, flat, axis=1), -np.inf)
        return np.argsort(-scores, axis=1, kind="stable")[:, :count]

    def _select(self, config: SpecConfig, levels: list[np.ndarray]) -> np.ndarray:
        """Mark the recorded candidates in the smaller setting's tree: bool [R, M]."""
        flat = np.concatenate(levels, axis=1)
        chosen = np.take_along_axis(flat, self._best(flat, config.num_draft_tokens - 1), axis=1)
        selected = np.zeros((self.num_positions, self.tokens.shape[1] + 1), dtype=bool)
        np.put_along_axis(selected, chosen, True, axis=1)
        return selected[:, :-1]  # the last column stands for candidates that were not recorded
