"""The fast engine: the reference's round on static buffers, launched or replayed from graphs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Self, TypeVar

import torch

from specsim.core.columns import reserve_lanes
from specsim.core.config import SpecConfig
from specsim.core.display import engine_text
from specsim.core.drafter import Drafter, Placement, columns_ahead
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.grammar import Grammars, allowed_first, check
from specsim.core.kv_buffer import FeatureRing, SideOutputs
from specsim.core.pair import AnyDrafter, Pair, runs_on_host
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
from specsim.core.proposals import make_lookup
from specsim.core.rank_group import RankGroup
from specsim.core.rank_part import kv_layout_of
from specsim.core.rule import AcceptanceRule
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.core.target import ForwardOutput, Target
from specsim.fast import verify
from specsim.fast.drafters import NoDrafter, check_parallel, make_drafter
from specsim.fast.drafters.steps import StepDrafter
from specsim.fast.frame import Frame
from specsim.fast.kv import write_side
from specsim.fast.model.metadata import AttentionMetadata, prefill_metadata
from specsim.fast.model.prompt_graphs import PromptGraphs, can_record
from specsim.fast.model.rank_sums import linked
from specsim.fast.persistent.forward import uses_persistent
from specsim.fast.runtime.buffers import load, load_extend_input, unload, unload_extend_input
from specsim.fast.runtime.launch import check_kv_dtypes
from specsim.fast.runtime.peer_memory import join_slices
from specsim.fast.sections import Frames, RoundModels
from specsim.fast.synthetic import SyntheticSchedule
from specsim.fast.targets import FAMILIES
from specsim.fast.targets.decoder import DecoderTarget
from specsim.fast.vocabulary.penalties import Allowed

T = TypeVar("T")
MOST_CANDIDATES = 2**16  # that one program can rank


class Engine:
    """Rounds of one pair under one setting, over buffers of `bucket` requests (None: the next power of two).

    A graph of the whole round needs release `finish`, as pages cannot move inside a graph, and nothing that runs on the
    host: grammars between draft and verify, a rule between the target's forward and the commit. A single phase is then
    launched without a graph. like: an engine whose models run and whose draft states pass between the rounds of both.
    """

    def __init__(
        self,
        pair: Pair,
        config: SpecConfig,
        options: EngineOptions,
        acceptance: SyntheticAcceptance | None = None,
        grammars: Grammars | None = None,
        rule: AcceptanceRule | None = None,
        like: Self | None = None,
    ) -> None:
        target = pair.target.config
        self.config = config.within(target.max_position_embeddings)
        if config.num_candidates > MOST_CANDIDATES:
            allowed = (
                f"settings of at most {MOST_CANDIDATES} candidates, topk + (num_steps - 1) topk², with impl 'fast'"
            )
            raise InputError("topk", config.topk, allowed)
        self.rule = rule
        drafts_on_host = runs_on_host(pair.drafter, config) if like is None else like.drafts_on_host(config)
        self.options = options.resolve(config, bool(grammars), drafts_on_host, rule is not None)
        check_kv_dtypes(kv_dtype=options.kv_dtype, draft_kv_dtype=options.draft_kv_dtype)
        self.dtype = options.dtype
        self.device = torch.device(self.options.device or "cpu")
        self.grammars: Grammars = grammars or {}
        check(self.grammars, config, target.vocab_size)
        self.acceptance = acceptance and acceptance.fit(config.num_steps)
        self._schedule = acceptance and SyntheticSchedule.of(acceptance, self.device)
        self._ranks = linked(RankGroup.joined(options.tensor_parallel), self.device) if like is None else like._ranks
        check_parallel(pair.drafter, options.tensor_parallel, options.draft_parallel)
        self._target = self._make_target(pair) if like is None else like._target
        self.target: Target = self._target
        self._drafter = self._make_drafter(pair.drafter) if like is None else like._drafter
        self.drafter: Drafter = self._drafter
        setting_drafter = self._drafter
        if like is not None:
            setting_drafter = NoDrafter(self.device) if config.is_plain else setting_drafter.with_config(self.config)
            self._lookup = None if config.is_plain or not like._lookup else like._lookup.with_config(self.config)
        else:
            self._lookup = make_lookup(pair, self._make_drafter, self.config)
        records = self.device.type == "cuda" and self.options.graph != "eager" and self._ranks is None
        self._prompts = PromptGraphs(self._forward_rows) if records and can_record(target) else None
        self.options.check_draft_kv(config, self.drafter.kv_layout)
        models = RoundModels(
            self.config,
            self._target,
            self._drafter,
            setting_drafter,
            columns_ahead(self.drafter),
            self.grammars,
            rule,
            self._schedule,
            self._ranks,
            self._lookup,
        )
        self._frames = Frames(models, self.options)

    def _make_target(self, pair: Pair) -> DecoderTarget:
        make = FAMILIES[pair.target.config.family]
        ranks = self._ranks
        tensors = pair.target.tensors if ranks is None else pair.target.tensors_of(ranks.part)
        on = self.dtype, self.device
        target = make(pair.target.config, tensors, *on, batch_invariant=self.options.batch_invariant, ranks=ranks)
        if uses_persistent(pair.target.config, self.options, self.config):
            target.make_persistent(where_it_fits=self.options.forward == "auto")
        return target

    def _make_drafter(self, drafter: AnyDrafter | None) -> StepDrafter:
        sharing = self._ranks if self.options.draft_parallel == "sharded" else None
        on = Placement(self.dtype, self.device, self.options.batch_invariant, sharing)
        return make_drafter(drafter, self._target, self.config, on)

    def drafts_on_host(self, config: SpecConfig) -> bool:
        """Check whether this engine's drafter drafts on the host under a setting."""
        return self._drafter.runs_on_host and not config.is_plain

    def __repr__(self) -> str:
        return engine_text(self)

    def make_pools(self, num_requests: int, num_slots: int) -> KVPool:
        """Make empty pools for up to `num_requests` requests and `num_slots` slots (rounded down to whole pages)."""
        num_slots -= num_slots % self.config.page_size
        of_target, of_drafter = self.options.kv_format, self.options.draft_kv_format
        part = self._ranks and self._ranks.part
        target = KVBuffer(kv_layout_of(self.target.config, part), num_slots, self.dtype, self.device, of_target)
        layout = self.drafter.kv_layout
        draft = None if layout is None else KVBuffer(layout, num_slots, self.dtype, self.device, of_drafter)
        width = self.config.reserved_columns(self.config.length_limit)
        recent = FeatureRing.make(
            num_requests,
            self.drafter.lookahead,
            self.config.num_steps,
            self._frames.models.num_features,
            dtype=self.dtype,
            device=self.device,
        )
        side = SideOutputs(self.target.config.side_outputs, num_slots, self.device)
        return KVPool(target, draft, self.config.page_size, num_requests, width, recent, side)

    @torch.inference_mode()
    def prefill(self, batch: Batch, prefill: PrefillInput, pools: KVPool) -> PrefillOutput:
        """Run a chunk of every prompt, which batch.seq_lens counts.

        Columns up to seq_lens, and those that the drafter needs ahead, must be owned.
        """
        if self._ranks is not None:
            self._ranks.enter("prefill")
        pools.record(batch.req_pool_indices[prefill.requests], prefill.columns, prefill.input_ids)
        metadata = prefill_metadata(batch, prefill, pools)
        output = self._read_prompts(batch, prefill, metadata, pools)
        write_side(pools, metadata.slots, output)
        logits_BV = self.target.logits(output.hidden[prefill.last_rows])
        allowed = self._allowed_first(batch, pools, logits_BV.shape[-1])
        next_tokens, logprobs = verify.first_tokens(batch, prefill.next_tokens, logits_BV, pools, allowed)
        pools.record(batch.req_pool_indices, batch.seq_lens, next_tokens)
        if self._lookup is not None:
            self._lookup.forget(batch)
        draft_input = self.drafter.seed(batch, prefill, next_tokens, output.features, pools)
        return self._agreed("prefill", PrefillOutput(next_tokens, logprobs, draft_input))

    def _read_prompts(
        self, batch: Batch, prefill: PrefillInput, metadata: AttentionMetadata, pools: KVPool
    ) -> ForwardOutput:
        """Run the target over chunks of prompts, where they are short in a graph."""
        output = self._prompts and self._prompts.run(batch, prefill, metadata.slots, pools)
        return output or self._forward_rows(prefill.input_ids, metadata, pools)

    def _forward_rows(self, ids_R: torch.Tensor, metadata: AttentionMetadata, pools: KVPool) -> ForwardOutput:
        return self.target.forward(ids_R, metadata, pools.target, self.drafter.feature_layers)

    def _allowed_first(self, batch: Batch, pools: KVPool, vocab_size: int) -> Allowed | None:
        if not self.grammars:
            return None
        allowed = Allowed.empty(batch.size, 1, vocab_size, self.device)
        allowed.load(allowed_first(batch, pools, self.grammars))
        return allowed

    @torch.inference_mode()
    def hidden_states(self, batch: Batch, prefill: PrefillInput, pools: KVPool) -> torch.Tensor:
        """Run a chunk of every prompt, and return the hidden states between the target's n layers, [R, (n + 1)·H].

        They are what enters each layer, then what the head reads, to find the layer of an error. Only the target's KV
        is written.
        """
        layers = tuple(range(self.target.config.num_layers))
        metadata = prefill_metadata(batch, prefill, pools)
        output = self.target.forward(prefill.input_ids, metadata, pools.target, layers)
        return torch.cat([output.features, output.hidden], dim=-1)

    @torch.inference_mode()
    def round(self, batch: Batch, draft_input: DraftInput, pools: KVPool, reserved: bool = False) -> RoundOutput:
        """Run one speculative round, after which the batch has seq_lens + num_accepted_tokens.

        reserved: the round's columns are already owned.
        """
        frame = self._load(batch, draft_input, pools, reserved)
        self._frames.run(frame, *self._frames.phases.round)
        output = RoundOutput(
            unload(frame.verify_input, batch.size, frame.bucket),
            self._verify_output(frame, batch.size),
            unload(frame.output.draft_input, batch.size, frame.bucket),
        )
        return self._agreed("round", output)

    @torch.inference_mode()
    def advance(self, batch: Batch, draft_input: DraftInput, pools: KVPool, reserved: bool = False) -> Advance:
        """Run a round and copy out only what a serving loop needs.

        With reserved columns under release `finish` the host never waits, so rounds can be enqueued, each on the result
        of the one before. States are values: in-place changes to a tensor that was passed before are not noticed.
        """
        frame = self._load(batch, draft_input, pools, reserved)
        self._frames.run(frame, *self._frames.phases.round)
        return self._agreed("round", frame.advance(batch))

    @torch.inference_mode()
    def draft(self, batch: Batch, draft_input: DraftInput, pools: KVPool, reserved: bool = False) -> VerifyInput:
        """Propose candidates and build trees of the best of them at columns L..L+N-1."""
        frame = self._load(batch, draft_input, pools, reserved)
        self._frames.run(frame, self._frames.phases.draft)
        return self._agreed("draft", unload(frame.verify_input, batch.size, frame.bucket))

    @torch.inference_mode()
    def verify(self, batch: Batch, verify_input: VerifyInput, pools: KVPool) -> VerifyOutput:
        """Run the target over the trees, verify the drafts, and commit the accepted path."""
        frame = self._frames.load(batch, pools)
        load(frame.verify_input, replace(verify_input, candidates=None))
        self._frames.run(frame, self._frames.phases.verify)
        return self._agreed("verify", self._verify_output(frame, batch.size))

    @torch.inference_mode()
    def draft_extend(self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool) -> DraftInput:
        """Rewrite the drafter's KV of the accepted rows from the target's features, and make the next DraftInput."""
        frame = self._frames.load(batch, pools)
        load_extend_input(frame.extend_input, draft_extend_input, frame.shape.width)
        self._frames.run(frame, self._frames.phases.extend)
        return self._agreed("draft_extend", unload(frame.output.draft_input, batch.size, frame.bucket))

    def finish(self, request_id: int, tokens: Sequence[int], prompt_len: int) -> None:
        """Note that a request has ended with these tokens, its prompt_len prompt tokens first."""
        for drafter in filter(None, (self.drafter, self._lookup)):
            drafter.finish(request_id, tokens, prompt_len)

    def _agreed(self, phase: str, output: T) -> T:
        """Return a phase's output, which is the same on every rank where ranks are compared."""
        if self._ranks is not None and self.options.compare_ranks:
            self._ranks.require_equal(phase, output)
        return output

    def _load(self, batch: Batch, draft_input: DraftInput, pools: KVPool, reserved: bool) -> Frame:
        """Reserve the columns of a round, if they are not, and load its input into a frame.

        Under release `round` the lanes are always reserved.
        """
        if not reserved or self.config.release == "round":
            models = self._frames.models
            rows = batch.req_pool_indices.tolist()
            lens = batch.seq_lens.tolist()
            reserve_lanes(pools, rows, lens, self.config, models.columns_ahead, models.setting_drafter.block_rows)
        return self._frames.load(batch, pools, draft_input)

    def _verify_output(self, frame: Frame, size: int) -> VerifyOutput:
        logits = frame.target_output.logits[: size * self.config.num_draft_tokens]
        if frame.reads_slices and self._ranks is not None:
            logits = join_slices(self._ranks, logits, frame.shape.vocab_size)
        return VerifyOutput(
            unload(frame.verdict, size, frame.bucket),
            target_logits=logits.clone(),
            draft_extend_input=unload_extend_input(frame.extend_input, size, frame.shape.width, self.config.extend),
        )
