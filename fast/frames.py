"""Frames of an engine by bucket, and the graphs that are captured over them."""

from collections.abc import Callable, Iterator

import torch

from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.phases import Batch, DraftInput, Sampling
from specsim.core.pool import KVPool
from specsim.fast.frame import Frame, Recording
from specsim.fast.launches import Launches
from specsim.fast.runtime.graph import capture
from specsim.fast.runtime.launch import next_power_of_2
from specsim.fast.runtime.padding import RoundShape
from specsim.fast.runtime.sections import Section, Sections, recorded, runs
from specsim.fast.verifiers.shared import needs_all


class Frames:
    """A frame for each bucket of requests, over one pool at a time, and the runs of sections in it.

    options: resolved for the setting.
    """

    def __init__(self, launches: Launches, options: EngineOptions, has_grammars: bool) -> None:
        self.launches = launches
        self._options = options
        self._has_grammars = has_grammars
        self._may_read_slices = launches.may_read_slices and not has_grammars
        self._device = torch.device(options.device or "cpu")
        self._by_bucket: dict[int, Frame] = {}
        self._sampled_last: tuple[Sampling, bool] | None = None  # parameters, and whether rounds read slices for them

    def __iter__(self) -> Iterator[Frame]:
        return iter(self._by_bucket.values())

    def load(self, batch: Batch, pools: KVPool, draft_input: DraftInput | None = None) -> Frame:
        """Load the batch, and a draft input, into the frame of its bucket over these pools."""
        bucket = self._options.bucket or next_power_of_2(max(batch.size, 1))
        if batch.size > bucket:
            raise InputError("bucket", bucket, f"at least the number of requests of a batch, {batch.size}")
        if any(frame.pools is not pools for frame in self):
            self._by_bucket.clear()  # graphs of other pools would keep them alive
        frame = self._by_bucket.get(bucket)
        if frame is None:
            frame = self._by_bucket[bucket] = self._make(bucket, pools)
            self._capture(frame)
        self.launches.target.check()
        frame.inlet.load(batch, draft_input)
        frame.reads_slices = self._reads_slices(batch)
        return frame

    def run(self, frame: Frame, sections: Sections) -> None:
        """Run sections in order, from their graph where this mode has captured them together."""
        recording = frame.recordings.get((sections, frame.reads_slices))
        if recording is None:
            self.launches.run(frame, sections)
        else:
            recording.graph.replay()
            frame.target_output = recording.target_output
        if self._device.type == "cpu":  # on a GPU the host would wait for it
            frame.buffers.check()

    def run_phase(self, frame: Frame, sections: Sections, own: Callable[[], None]) -> None:
        """Run a phase's sections, between which `own` moves pages under release `round`."""
        previous = None
        for run in runs(sections, self.launches.config, *self.launches.on_host):
            if previous not in (None, Section.FORWARD):
                own()
            self.run(frame, run)
            previous = run[-1]

    def _make(self, bucket: int, pools: KVPool) -> Frame:
        launches = self.launches
        shape = RoundShape(
            bucket,
            launches.config,
            vocab_size=launches.target.config.vocab_size,
            num_features=launches.num_features,
            dtype=self._options.dtype,
            has_grammars=self._has_grammars,
        )
        return Frame.of(shape, pools, launches.drafter.zeros(bucket), launches.setting_drafter.buffers(bucket))

    def _capture(self, frame: Frame) -> None:
        """Capture this mode's graphs, while the frame has padded requests only."""
        launches = self.launches
        if launches.ranks is not None:
            launches.ranks.enter("capture")
        for frame.reads_slices in (False, True) if self._may_read_slices else (False,):
            for sections in recorded(self._options.graph or "eager", launches.config, *launches.on_host):
                graph = capture(lambda sections=sections: launches.run(frame, sections), self._device)
                frame.recordings[sections, frame.reads_slices] = Recording(graph, frame.target_output)

    def _reads_slices(self, batch: Batch) -> bool:
        """Check whether this batch's rounds do; the host reads sampling parameters where they are new."""
        if not self._may_read_slices:
            return False
        if self._sampled_last is None or self._sampled_last[0] is not batch.sampling:
            all_of = needs_all(batch, self.launches.target.config.vocab_size)
            self._sampled_last = (batch.sampling, not all_of)
        return self._sampled_last[1]
