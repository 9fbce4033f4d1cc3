"""The fast engine: the reference's round on static buffers, launched, or replayed from graphs."""

from collections.abc import Callable
from dataclasses import replace

import torch
import triton

from specsim.core.columns import own_committed, own_lanes, own_tree
from specsim.core.config import SpecConfig
from specsim.core.drafter import Drafter
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.grammar import Grammars, allowed_first, allowed_trees, check
from specsim.core.pair import DrafterCheckpoint, Pair
from specsim.core.phases import (
    Advance,
    Batch,
    DraftExtendInput,
    DraftInput,
    PrefillInput,
    PrefillOutput,
    RoundOutput,
    VerifyInput,
    VerifyOutput,
)
from specsim.core.pool import KVBuffer, KVPool
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.fast import drafters, kv, tree, verify
from specsim.fast.drafters.none import NoDrafter
from specsim.fast.extend import draft_extend_input
from specsim.fast.frame import Frame, load, load_extend_input, unload, unload_extend_input
from specsim.fast.model.metadata import prefill_metadata, tree_metadata
from specsim.fast.runtime.graph import capture
from specsim.fast.synthetic import Schedule
from specsim.fast.targets import FAMILIES
from specsim.fast.vocabulary.penalties import Allowed

ROUND = ("propose", "lay_out", "judge", "hand_over", "extend")  # its sections
MOST_CANDIDATES = 2**16  # what one program can rank


class Engine:
    """Rounds of one pair under one setting, over buffers of `bucket` requests (None: the next power of two).

    pair, config, acceptance, grammars: as the reference's. A graph of the whole round needs release `finish`, since
    pages cannot change hands inside it, and no grammars, which the host asks between draft and verify; a phase that is
    called alone is launched then.
    """

    def __init__(
        self,
        pair: Pair,
        config: SpecConfig,
        options: EngineOptions,
        acceptance: SyntheticAcceptance | None = None,
        grammars: Grammars | None = None,
    ):
        target = pair.target.config
        self.config = config.within(target.max_position_embeddings)
        if config.num_candidates > MOST_CANDIDATES:
            allowed = (
                f"settings of at most {MOST_CANDIDATES} candidates, topk + (num_steps - 1) topk², with impl 'fast'"
            )
            raise InputError("topk", config.topk, allowed)
        self.options = options.resolve(config, bool(grammars))
        self.dtype = options.dtype
        self.device = torch.device(self.options.device)
        self._frames: dict[int, Frame] = {}
        self.grammars = grammars or {}
        check(self.grammars, config, target.vocab_size)
        self.acceptance = acceptance and acceptance.fit(config.num_steps)
        self._schedule = acceptance and Schedule.of(acceptance, self.device)
        family = FAMILIES[target.family]
        self.target = family(
            target, pair.target.tensors, self.dtype, self.device, batch_invariant=options.batch_invariant
        )
        self.drafter = self._drafter(pair.drafter)
        self._sections: dict[str, Callable[[Frame], None]] = {
            "start": self._start,
            "step": self._step,
            "propose": self._propose,
            "lay_out": self._lay_out,
            "judge": self._judge,
            "hand_over": self._hand_over,
            "extend": self._extend,
        }

    def _drafter(self, checkpoint: DrafterCheckpoint | None) -> Drafter:
        if self.config.is_plain:
            return NoDrafter(self.config, self.dtype, self.device)
        if checkpoint is None:
            raise InputError("num_steps", self.config.num_steps, "0 (SpecConfig.plain()) for a pair without a drafter")
        return drafters.make(
            checkpoint, self.target, self.config, self.dtype, self.device, batch_invariant=self.options.batch_invariant
        )

    def make_pools(self, num_requests: int, num_slots: int) -> KVPool:
        """Empty pools for up to `num_requests` requests and `num_slots` slots (rounded down to whole pages)."""
        num_slots -= num_slots % self.config.page_size
        draft = self.drafter.kv_layout and KVBuffer(self.drafter.kv_layout, num_slots, self.dtype, self.device)
        target = KVBuffer(self.target.config.kv_layout, num_slots, self.dtype, self.device)
        width = self.config.reserved_columns(self.config.max_len)
        return KVPool(target, draft, self.config.page_size, num_requests, width)

    @torch.inference_mode()
    def prefill(self, batch: Batch, prefill: PrefillInput, pools: KVPool) -> PrefillOutput:
        """Run a chunk of every prompt; batch.seq_lens counts it. Columns up to seq_lens must be owned."""
        pools.record(batch.req_pool_indices[prefill.requests], prefill.columns, prefill.input_ids)
        metadata, features = prefill_metadata(batch, prefill, pools), self.drafter.feature_layers
        hidden_RH, features_RF = self.target.forward(prefill.input_ids, metadata, pools.target, features)
        logits_BV = self.target.logits(hidden_RH[prefill.last_rows])
        allowed = self._allowed_first(batch, pools, logits_BV.shape[-1])
        next_tokens, logprobs = verify.first_tokens(batch, prefill.next_tokens, logits_BV, pools, allowed)
        pools.record(batch.req_pool_indices, batch.seq_lens, next_tokens)
        draft_input = self.drafter.seed(batch, prefill, next_tokens, features_RF, pools)
        return PrefillOutput(next_tokens, logprobs, draft_input)

    def _allowed_first(self, batch: Batch, pools: KVPool, vocab_size: int) -> Allowed | None:
        if not self.grammars:
            return None
        allowed = Allowed.empty(batch.size, 1, vocab_size, self.device)
        allowed.load(allowed_first(batch, pools, self.grammars))
        return allowed

    @torch.inference_mode()
    def round(self, batch: Batch, draft_input: DraftInput, pools: KVPool, reserved: bool = False) -> RoundOutput:
        """One speculative round; the batch after it has seq_lens + num_accepted_tokens.

        reserved: the caller owns the columns of this round already, so that no length is read on the host for them;
        under release `round` lanes are borrowed all the same.
        """
        frame = self._play(batch, draft_input, pools, reserved)
        verify_input = unload(frame.verify_input, batch.size, frame.bucket)
        next_input = unload(frame.next_draft_input, batch.size, frame.bucket)
        return RoundOutput(verify_input, self._verify_output(frame, batch.size), next_input)

    @torch.inference_mode()
    def advance(self, batch: Batch, draft_input: DraftInput, pools: KVPool, reserved: bool = False) -> Advance:
        """A round, of which only what a serving loop needs is copied out.

        With reserved columns under release `finish` the host waits for nothing: rounds can be enqueued one behind the
        other, each with what the one before gave. States are values: what is changed in place in a tensor that was
        given before goes unnoticed.
        """
        return self._play(batch, draft_input, pools, reserved).advance(batch)

    @torch.inference_mode()
    def draft(self, batch: Batch, draft_input: DraftInput, pools: KVPool, reserved: bool = False) -> VerifyInput:
        """Propose candidates and lay the best of them out as trees over columns L..L+N-1."""
        self._own_lanes(batch, pools, reserved)
        frame = self._frame(batch, pools, draft_input)
        self._play_draft(frame, batch)
        return unload(frame.verify_input, batch.size, frame.bucket)

    @torch.inference_mode()
    def verify(self, batch: Batch, verify_input: VerifyInput, pools: KVPool) -> VerifyOutput:
        """Run the target over the trees, walk them, commit the accepted path."""
        frame = self._frame(batch, pools)
        load(frame.verify_input, replace(verify_input, candidates=None))
        self._play_verify(frame, batch)
        return self._verify_output(frame, batch.size)

    @torch.inference_mode()
    def draft_extend(self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool) -> DraftInput:
        """Rewrite the drafter's KV of the accepted rows from the target's features: a fresh DraftInput."""
        frame = self._frame(batch, pools)
        load_extend_input(frame.extend_input, draft_extend_input, self.config.num_steps + 1)
        self._run(frame, "extend")
        return unload(frame.next_draft_input, batch.size, frame.bucket)

    def _play(self, batch: Batch, draft_input: DraftInput, pools: KVPool, reserved: bool) -> Frame:
        """A whole round; the frame holds what it left."""
        self._own_lanes(batch, pools, reserved)
        frame = self._frame(batch, pools, draft_input)
        if self.options.graph == "round":
            self._run(frame, *ROUND)
        else:
            self._play_draft(frame, batch)
            self._play_verify(frame, batch)
            self._run(frame, "extend")
        return frame

    def _own_lanes(self, batch: Batch, pools: KVPool, reserved: bool) -> None:
        if not reserved or self.config.release == "round":
            own_lanes(pools, *_rows_and_lens(batch), self.config)

    def _play_draft(self, frame: Frame, batch: Batch) -> None:
        def own() -> None:
            own_tree(frame.pools, *_rows_and_lens(batch), self.config)

        if self.options.graph != "step":
            return self._run_around(frame, "propose", own, "lay_out")
        self._run(frame, "start")
        for _ in range(self.config.num_steps - 1):
            self._run(frame, "step")
        if self.config.release == "round":
            own()
        self._run(frame, "lay_out")

    def _play_verify(self, frame: Frame, batch: Batch) -> None:
        def own() -> None:
            committed = batch.after(frame.verdict.num_accepted_tokens[: batch.size])
            own_committed(frame.pools, *_rows_and_lens(committed), self.config)

        if frame.allowed is not None:
            frame.allowed.load(allowed_trees(batch, frame.verify_input, frame.pools, self.grammars))
        self._run_around(frame, "judge", own, "hand_over")

    def _verify_output(self, frame: Frame, size: int) -> VerifyOutput:
        verdict = unload(frame.verdict, size, frame.bucket)
        return VerifyOutput(
            verdict,
            target_logits=frame.forward["target_logits"][: size * self.config.num_draft_tokens].clone(),
            draft_extend_input=unload_extend_input(
                frame.extend_input, size, self.config.num_steps + 1, self.config.extend
            ),
        )

    def _frame(self, batch: Batch, pools: KVPool, draft_input: DraftInput | None = None) -> Frame:
        """The buffers of the batch's bucket over these pools, the batch and what else is given loaded."""
        bucket = self.options.bucket or triton.next_power_of_2(max(batch.size, 1))
        if batch.size > bucket:
            raise InputError("bucket", bucket, f"at least the number of requests of a batch, {batch.size}")
        if any(frame.pools is not pools for frame in self._frames.values()):
            self._frames.clear()  # graphs of other pools would keep them alive
        frame = self._frames.get(bucket)
        if frame is None:
            target, drafter = self.target.config, self.drafter
            num_features = target.hidden_size * max(1, len(drafter.feature_layers))
            frame = self._frames[bucket] = Frame.of(
                bucket,
                pools,
                self.config,
                target.vocab_size,
                drafter.hidden_size,
                num_features,
                self.dtype,
                has_grammars=bool(self.grammars),
            )
            self._capture(frame)
        frame.inlet.load(batch, draft_input)
        return frame

    def _pieces(self) -> list[tuple[str, ...]]:
        """The sections that this mode records together; a graph of nothing, such as plain decoding's draft loop, is not
        recorded: CUDA warns of it.
        """
        in_pieces = self.config.release == "round"
        propose, judge = (
            [(first,), (then,)] if in_pieces else [(first, then)]
            for first, then in (("propose", "lay_out"), ("judge", "hand_over"))
        )
        pieces = {
            "eager": [],
            "step": [("start",), ("step",), ("lay_out",), *judge, ("extend",)],
            "phase": [*propose, *judge, ("extend",)],
            "round": [ROUND],
        }[self.options.graph]
        nothing = {("start",), ("step",), ("propose",)} if self.config.is_plain else set()
        return [names for names in pieces if names not in nothing]

    def _capture(self, frame: Frame) -> None:
        """Record this mode's graphs, while the frame holds padded requests only."""
        for names in self._pieces():
            frame.graphs[names] = capture(lambda names=names: self._launch(frame, names), self.device)
            frame.recorded[names] = dict(frame.forward)

    def _launch(self, frame: Frame, names: tuple[str, ...]) -> None:
        for name in names:
            self._sections[name](frame)

    def _run(self, frame: Frame, *names: str) -> None:
        """Sections of the round, one after the other: from their graph where this mode has recorded them together."""
        if names in frame.graphs:
            frame.graphs[names].replay()
            frame.forward.update(frame.recorded[names])
        else:
            self._launch(frame, names)
        if self.device.type == "cpu":  # on a GPU the host would wait for it
            frame.buffers.check()

    def _run_around(self, frame: Frame, before: str, own: Callable[[], None], after: str) -> None:
        """Two sections between which pages change hands under release `round`."""
        if self.config.release == "finish":
            return self._run(frame, before, after)
        self._run(frame, before)
        own()
        self._run(frame, after)

    def _propose(self, frame: Frame) -> None:
        self._start(frame)
        for _ in range(self.config.num_steps - 1):
            self._step(frame)

    def _start(self, frame: Frame) -> None:
        self.drafter.start(frame.batch, frame.draft_input, frame.lanes, frame.pools)

    def _step(self, frame: Frame) -> None:
        self.drafter.step(frame.batch, frame.lanes, frame.pools)

    def _lay_out(self, frame: Frame) -> None:
        batch, bonus_tokens = frame.batch, frame.draft_input.bonus_tokens
        locations_BN = kv.tree_locations(batch, self.config, frame.pools)
        tree.build(
            frame.lanes.candidates, bonus_tokens, batch.seq_lens, locations_BN, self.config, out=frame.verify_input
        )

    def _judge(self, frame: Frame) -> None:
        batch, pools, verify_input = frame.batch, frame.pools, frame.verify_input
        metadata = tree_metadata(batch, verify_input, pools)
        hidden_RH, features_RF = self.target.forward(
            verify_input.draft_tokens.view(-1), metadata, pools.target, self.drafter.feature_layers
        )
        logits_RV = self.target.logits(hidden_RH)
        frame.forward.update(features=features_RF, target_logits=logits_RV)
        verify.verify(
            batch,
            verify_input,
            logits_RV,
            self.config,
            pools,
            acceptance=self._schedule,
            allowed=frame.allowed,
            out=frame.verdict,
        )
        kv.commit(batch, verify_input.cache_locations, frame.verdict, pools, out=frame.progress)

    def _hand_over(self, frame: Frame) -> None:
        features_RF, table, max_len = frame.forward["features"], frame.pools.req_to_token, self.config.max_len
        draft_extend_input(
            frame.batch, frame.verdict, features_RF, table, max_len, self.config.extend, out=frame.extend_input
        )

    def _extend(self, frame: Frame) -> None:
        self.drafter.extend(frame.batch, frame.extend_input, frame.pools, out=frame.next_draft_input)


def _rows_and_lens(batch: Batch) -> tuple[list[int], list[int]]:
    return batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
