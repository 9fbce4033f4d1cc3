"""Sections of a round: functions over a frame's buffers, which graphs capture, and the frames that they run in."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol

import torch

from specsim.core import columns
from specsim.core.config import SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.grammar import Grammars, allowed_trees
from specsim.core.phases import Batch, DraftInput, Sampling
from specsim.core.pool import KVPool
from specsim.core.proposals import ProposalDrafter
from specsim.core.rank_group import RankGroup
from specsim.core.rule import AcceptanceRule
from specsim.fast import kv, tree
from specsim.fast import verify as verification
from specsim.fast.drafters.steps import StepDrafter
from specsim.fast.frame import Frame, Recording, RoundShape, TargetOutput
from specsim.fast.kv import draft_extend_input, move_side, write_side
from specsim.fast.model.metadata import tree_metadata
from specsim.fast.runtime.buffers import load
from specsim.fast.runtime.graph import capture
from specsim.fast.runtime.launch import next_power_of_2
from specsim.fast.synthetic import SyntheticSchedule
from specsim.fast.targets.decoder import DecoderTarget
from specsim.fast.verifiers.shared import can_share, needs_all, verify_shared


@dataclass(frozen=True, slots=True)
class RoundModels:
    """Models and settings of an engine's rounds."""

    config: SpecConfig
    target: DecoderTarget
    drafter: StepDrafter  # makes the states
    setting_drafter: StepDrafter  # proposes from them under this setting
    columns_ahead: int  # that the drafter needs after the committed ones
    grammars: Grammars
    rule: AcceptanceRule | None  # on the host, in place of the setting's verifier
    schedule: SyntheticSchedule | None  # of synthetic acceptance
    ranks: RankGroup | None  # None: a single GPU
    lookup: ProposalDrafter | None = None  # next to the drafter

    @property
    def num_features(self) -> int:
        """Width of the target's features that the drafter reads."""
        return self.target.config.hidden_size * max(1, len(self.drafter.feature_layers))

    @property
    def may_read_slices(self) -> bool:
        """Whether a round can do with the logits of a few tokens where ranks share the vocabulary."""
        if self.ranks is None or self.rule is not None or self.schedule is not None or self.grammars:
            return False
        return can_share(self.ranks, self.target.config.vocab_size, self.config)


class Section(Protocol):
    """A part of a round."""

    __name__: str

    def __call__(self, models: RoundModels, frame: Frame, /) -> None: ...


def start(models: RoundModels, frame: Frame) -> None:
    """Copy the prefix's tail into the draft lanes, and begin them with the root's children."""
    draft_input = frame.draft_input.narrowed(models.config.topk, models.config.num_steps)
    models.setting_drafter.start(frame.batch, draft_input, frame.draft_buffers, frame.pools)


def step(models: RoundModels, frame: Frame) -> None:
    """Run one draft step."""
    models.setting_drafter.step(frame.batch, frame.draft_buffers, frame.pools)


def look_up(models: RoundModels, frame: Frame) -> None:
    """Look up drafts, on the host before the graphs."""
    if models.lookup is not None and frame.verify_input.looked_up is not None:
        load(frame.verify_input.looked_up, models.lookup.look_up(frame.batch, frame.pools))


def reserve_tree(models: RoundModels, frame: Frame) -> None:
    """Exchange the lanes' pages for the tree's on the host, under release `round`."""
    batch = frame.loaded_batch
    rows = batch.req_pool_indices.tolist()
    columns.reserve_tree(frame.pools, rows, batch.seq_lens.tolist(), models.config, models.columns_ahead)


def build_tree(models: RoundModels, frame: Frame) -> None:
    """Choose the best candidates and lay them out as trees."""
    batch = frame.batch
    frame.pools.take_snapshot()
    locations_BN = kv.tree_locations(batch, models.config, frame.pools)
    bonus_tokens = frame.draft_input.bonus_tokens
    candidates = frame.draft_buffers.candidates
    roots = bonus_tokens, batch.seq_lens, locations_BN
    looked_up = frame.verify_input.looked_up
    tree.build(candidates, *roots, models.config, batch.draft_steps, looked_up, out=frame.verify_input)


def load_allowed(models: RoundModels, frame: Frame) -> None:
    """Write the tokens that grammars allow after every node, on the host."""
    if frame.allowed is not None:
        frame.allowed.load(allowed_trees(frame.loaded_batch, frame.verify_input, frame.pools, models.grammars))


def forward(models: RoundModels, frame: Frame) -> None:
    """Run the target over the trees."""
    verify_input = frame.verify_input
    metadata = tree_metadata(frame.batch, verify_input, frame.pools)
    tokens = verify_input.draft_tokens.view(-1)
    output = models.target.forward(tokens, metadata, frame.pools.target, models.drafter.feature_layers)
    write_side(frame.pools, metadata.slots, output)
    logits = models.target.rank_logits if frame.reads_slices else models.target.logits
    frame.target_output = TargetOutput(output.features, logits(output.hidden))


def verify(models: RoundModels, frame: Frame) -> None:
    """Verify the drafts, and commit the accepted path."""
    batch = frame.batch
    config = models.config
    pools = frame.pools
    verify_input = frame.verify_input
    logits = frame.target_output.logits
    if frame.reads_slices and models.ranks is not None:
        size = frame.shape.vocab_size
        verify_shared(models.ranks, batch, verify_input, logits, config, pools, size, frame.verdict)
    else:
        acceptance = models.rule or models.schedule
        verification.verify(
            batch, verify_input, logits, config, pools, None, acceptance, frame.allowed, out=frame.verdict
        )
    move_side(batch, verify_input.cache_locations, frame.verdict, pools)
    kv.commit(batch, verify_input.cache_locations, frame.verdict, pools, out=frame.output.progress)


def release_rejected(models: RoundModels, frame: Frame) -> None:
    """Release the pages of rejected nodes on the host, under release `round`."""
    batch = frame.loaded_batch
    after = batch.after(frame.verdict.num_accepted_tokens[: batch.size])
    rows = after.req_pool_indices.tolist()
    columns.release_uncommitted(frame.pools, rows, after.seq_lens.tolist(), models.config, models.columns_ahead)


def gather(models: RoundModels, frame: Frame) -> None:
    """Gather the accepted rows, as draft-extend reads them."""
    draft_extend_input(
        frame.batch,
        frame.verdict,
        frame.target_output.features,
        frame.pools.req_to_token,
        models.config.length_limit,
        models.config.extend,
        models.drafter.bonus_columns,
        out=frame.extend_input,
    )


def extend(models: RoundModels, frame: Frame) -> None:
    """Run the drafter over the accepted rows."""
    models.drafter.extend(frame.batch, frame.extend_input, frame.pools, out=frame.output.draft_input)


Sections = tuple[Section, ...]
ON_HOST = frozenset[Section]({look_up, reserve_tree, load_allowed, release_rejected})


class RoundPhase(NamedTuple):
    """Sections that run one after the other, in runs that are captured or are a section on the host."""

    name: str  # which ranks are told
    runs: tuple[Sections, ...]

    @classmethod
    def of(cls, name: str, sections: Sections, alone: Collection[Section]) -> "RoundPhase":
        """Split sections before and after those that are runs by themselves."""
        runs = []
        for is_alone, group in groupby(sections, lambda section: section in alone):
            run = tuple(group)
            runs += [(section,) for section in run] if is_alone else [run]
        return cls(name, tuple(runs))


@dataclass(frozen=True, slots=True)
class RoundPhases:
    """Phases of a round, by graph mode."""

    draft: RoundPhase
    verify: RoundPhase
    extend: RoundPhase
    round: tuple[RoundPhase, ...]
    captured: tuple[Sections, ...]  # runs of which each is one graph

    @classmethod
    def of(
        cls,
        graph: str,
        config: SpecConfig,
        drafts_on_host: bool = False,
        rule: bool = False,
        grammars: bool = False,
        looks_up: bool = False,
    ) -> "RoundPhases":
        """Order the sections of a setting.

        Plain decoding has no draft step, as CUDA warns of an empty graph. Under release `round` the host moves pages.
        rule, grammars, looks_up: whether the host verifies, limits the tokens, and looks up drafts.
        """
        moves = config.release == "round"
        drafting = () if config.is_plain else (start, *(step,) * (config.num_steps - 1))
        draft = (*(look_up,) * looks_up, *drafting, *(reserve_tree,) * moves, build_tree)
        checked = (*(load_allowed,) * grammars, forward, verify, *(release_rejected,) * moves, gather)
        on_host = ON_HOST | ({start, step} if drafts_on_host else set()) | ({verify} if rule else set())
        alone = on_host | ({start, step, build_tree} if graph == "step" else set())
        phases = (
            RoundPhase.of("draft", draft, alone),
            RoundPhase.of("verify", checked, alone),
            RoundPhase.of("draft_extend", (extend,), alone),
        )
        in_round = (RoundPhase.of("round", (*draft, *checked, extend), alone),) if graph == "round" else phases
        runs = dict.fromkeys(run for phase in in_round for run in phase.runs)
        captured = () if graph == "eager" else tuple(run for run in runs if not on_host.issuperset(run))
        return cls(*phases, in_round, captured)


class Frames:
    """A frame for each bucket of requests, over one pool at a time, and the runs of sections in it.

    options: resolved for the setting.
    """

    def __init__(self, models: RoundModels, options: EngineOptions) -> None:
        self.models = models
        drafts_on_host = models.setting_drafter.runs_on_host
        has_rule = models.rule is not None
        graph = options.graph or "eager"
        hosts = drafts_on_host, has_rule, bool(models.grammars), models.lookup is not None
        self.phases = RoundPhases.of(graph, models.config, *hosts)
        self._options = options
        self._may_read_slices = models.may_read_slices
        self._device = torch.device(options.device or "cpu")
        self._by_bucket: dict[int, Frame] = {}
        self._last_sampling: tuple[Sampling, bool] | None = None  # parameters, and whether rounds read slices for them

    def __iter__(self) -> Iterator[Frame]:
        return iter(self._by_bucket.values())

    def load(self, batch: Batch, pools: KVPool, draft_input: DraftInput | None = None) -> Frame:
        """Load the batch, and a draft input, into the frame of its bucket over these pools."""
        size = batch.size
        bucket = self._options.bucket or next_power_of_2(max(size, 1))
        if size > bucket:
            raise InputError("bucket", bucket, f"at least the number of requests of a batch, {size}")
        if any(frame.pools is not pools for frame in self):
            self._by_bucket.clear()  # graphs of other pools would keep them alive
        frame = self._by_bucket.get(bucket)
        if frame is None:
            frame = self._by_bucket[bucket] = self._make(bucket, pools)
            self._capture(frame)
        self.models.target.check()
        frame.load(batch, draft_input)
        frame.reads_slices = self._reads_slices(batch)
        return frame

    def run(self, frame: Frame, *phases: RoundPhase) -> None:
        """Run phases in order, from graphs where this mode has captured them."""
        models = self.models
        for phase in phases:
            if models.ranks is not None:
                models.ranks.enter(phase.name)
            for sections in phase.runs:
                recording = frame.recordings.get((sections, frame.reads_slices))
                if recording is not None:
                    recording.graph.replay()
                    frame.target_output = recording.target_output
                    continue
                for section in sections:
                    section(models, frame)
            if self._device.type == "cpu":  # on a GPU the host would wait for it
                frame.buffers.check()

    def _make(self, bucket: int, pools: KVPool) -> Frame:
        models = self.models
        shape = RoundShape(
            bucket,
            models.config,
            vocab_size=models.target.config.vocab_size,
            num_features=models.num_features,
            dtype=self._options.dtype,
            has_grammars=bool(models.grammars),
        )
        return Frame.of(
            shape,
            pools,
            models.drafter.zeros(bucket),
            models.setting_drafter.buffers(bucket),
            models.lookup is not None,
        )

    def _capture(self, frame: Frame) -> None:
        """Capture this mode's graphs, while the frame has padded requests only."""
        models = self.models
        if models.ranks is not None:
            models.ranks.enter("capture")

        def launch(sections: Sections) -> None:
            for section in sections:
                section(models, frame)

        for frame.reads_slices in (False, True) if self._may_read_slices else (False,):
            for sections in self.phases.captured:
                graph = capture(lambda sections=sections: launch(sections), self._device)
                frame.recordings[sections, frame.reads_slices] = Recording(graph, frame.target_output)

    def _reads_slices(self, batch: Batch) -> bool:
        """Check whether this batch's rounds do; the host reads sampling parameters where they are new."""
        if not self._may_read_slices:
            return False
        if self._last_sampling is None or self._last_sampling[0] is not batch.sampling:
            reads_all = needs_all(batch, self.models.target.config.vocab_size)
            self._last_sampling = (batch.sampling, not reads_all)
        return self._last_sampling[1]
