"""Launches of a round's sections over a frame's buffers, which a graph can capture."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from specsim.core.config import SpecConfig
from specsim.core.rank_group import RankGroup
from specsim.core.rule import AcceptanceRule
from specsim.fast import kv, tree, verify
from specsim.fast.drafters.steps import StepDrafter
from specsim.fast.extend import draft_extend_input
from specsim.fast.frame import Frame, TargetOutput
from specsim.fast.model.draft_metadata import tree_metadata
from specsim.fast.model.side_rows import move_side, write_side
from specsim.fast.runtime.sections import Section, Sections
from specsim.fast.synthetic import Schedule
from specsim.fast.targets.decoder import DecoderTarget
from specsim.fast.verifiers.shared import can_share, verify_shared


@dataclass(frozen=True, slots=True)
class Launches:
    """Models and settings of an engine's rounds, and what each section of a round launches with them."""

    config: SpecConfig
    target: DecoderTarget
    drafter: StepDrafter  # makes the states
    setting_drafter: StepDrafter  # proposes from them under this setting
    rule: AcceptanceRule | None  # on the host, in place of the setting's verifier
    schedule: Schedule | None  # of synthetic acceptance
    ranks: RankGroup | None  # None: a single GPU

    @property
    def on_host(self) -> tuple[bool, bool]:
        """Whether drafter and verifier run on the host."""
        return self.setting_drafter.runs_on_host, self.rule is not None

    @property
    def num_features(self) -> int:
        """Width of the target's features that the drafter reads."""
        return self.target.config.hidden_size * max(1, len(self.drafter.feature_layers))

    @property
    def may_read_slices(self) -> bool:
        """Whether a round can do with the logits of a few tokens where ranks share the vocabulary."""
        if self.ranks is None or self.rule is not None or self.schedule is not None:
            return False
        return can_share(self.ranks, self.target.config.vocab_size, self.config)

    def run(self, frame: Frame, sections: Sections) -> None:
        """Launch sections in order."""
        for section in sections:
            _LAUNCHES[section](self, frame)

    def _start(self, frame: Frame) -> None:
        draft_input = frame.draft_input.narrowed(self.config.topk, self.config.num_steps)
        self.setting_drafter.start(frame.batch, draft_input, frame.draft_buffers, frame.pools)

    def _step(self, frame: Frame) -> None:
        self.setting_drafter.step(frame.batch, frame.draft_buffers, frame.pools)

    def _draft(self, frame: Frame) -> None:
        self._start(frame)
        for _ in range(self.config.num_steps - 1):
            self._step(frame)

    def _build_tree(self, frame: Frame) -> None:
        batch = frame.batch
        if frame.pools.draft is not None:
            frame.pools.draft.take_snapshot()  # draft-extend writes over the lanes
        locations_BN = kv.tree_locations(batch, self.config, frame.pools)
        bonus_tokens = frame.draft_input.bonus_tokens
        candidates = frame.draft_buffers.candidates
        steps = batch.draft_steps
        tree.build(candidates, bonus_tokens, batch.seq_lens, locations_BN, self.config, steps, out=frame.verify_input)

    def _forward(self, frame: Frame) -> None:
        verify_input = frame.verify_input
        metadata = tree_metadata(frame.batch, verify_input, frame.pools)
        tokens = verify_input.draft_tokens.view(-1)
        output = self.target.forward(tokens, metadata, frame.pools.target, self.drafter.feature_layers)
        write_side(frame.pools, metadata.slots, output)
        logits = self.target.own_logits if frame.reads_slices else self.target.logits
        frame.target_output = TargetOutput(output.features, logits(output.hidden))

    def _verify(self, frame: Frame) -> None:
        batch = frame.batch
        pools = frame.pools
        verify_input = frame.verify_input
        logits = frame.target_output.logits
        if frame.reads_slices and self.ranks is not None:
            size = frame.shape.vocab_size
            verify_shared(self.ranks, batch, verify_input, logits, self.config, pools, size, frame.verdict)
            self._commit(frame)
            return
        verify.verify(
            batch,
            verify_input,
            logits,
            self.config,
            pools,
            acceptance=self.rule or self.schedule,
            allowed=frame.allowed,
            out=frame.verdict,
        )
        self._commit(frame)

    def _commit(self, frame: Frame) -> None:
        batch = frame.batch
        verify_input = frame.verify_input
        pools = frame.pools
        move_side(batch, verify_input.cache_locations, frame.verdict, pools)
        kv.commit(batch, verify_input.cache_locations, frame.verdict, pools, out=frame.outlet.progress)

    def _gather(self, frame: Frame) -> None:
        draft_extend_input(
            frame.batch,
            frame.verdict,
            frame.target_output.features,
            frame.pools.req_to_token,
            self.config.length_limit,
            self.config.extend,
            self.drafter.bonus_columns,
            out=frame.extend_input,
        )

    def _extend(self, frame: Frame) -> None:
        self.drafter.extend(frame.batch, frame.extend_input, frame.pools, out=frame.outlet.draft_input)


_LAUNCHES: Mapping[Section, Callable[[Launches, Frame], None]] = {
    Section.START: Launches._start,
    Section.STEP: Launches._step,
    Section.DRAFT: Launches._draft,
    Section.BUILD_TREE: Launches._build_tree,
    Section.FORWARD: Launches._forward,
    Section.VERIFY: Launches._verify,
    Section.GATHER: Launches._gather,
    Section.EXTEND: Launches._extend,
}
