"""The reference engine, whose round is draft, verify, draft-extend."""

from collections.abc import Sequence
from functools import partial
from typing import Self

import torch

from specsim.core.columns import release_uncommitted, reserve_lanes, reserve_tree
from specsim.core.config import SpecConfig
from specsim.core.display import engine_text
from specsim.core.drafter import Drafter, Placement, columns_ahead
from specsim.core.engine_options import EngineOptions
from specsim.core.grammar import Grammars, allowed_first, allowed_trees, check, stacked
from specsim.core.kv_buffer import FeatureRing, SideOutputs
from specsim.core.pair import Pair
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
    check_drafts,
)
from specsim.core.pool import KVBuffer, KVPool
from specsim.core.proposals import make_lookup
from specsim.core.rule import AcceptanceRule
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.core.target import Target
from specsim.reference import kv, tree, verify
from specsim.reference.attention import prefill_metadata, tree_metadata
from specsim.reference.drafters import make_drafter
from specsim.reference.drafters.none import NoDrafter
from specsim.reference.kv import draft_extend_input
from specsim.reference.targets import FAMILIES


class Engine:
    """Rounds of one pair under one setting.

    A pair without a drafter needs a setting without drafts. Without config.max_len the target's limit holds. Of the
    options only dtype matters. acceptance: decides how many drafts a round accepts, in place of the target. grammars:
    constraints by request id. rule: verifies in place of the setting's verifier. like: an engine whose models run and
    whose draft states pass between the rounds of both.
    """

    target: Target
    drafter: Drafter
    device = torch.device("cpu")

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
        self.options = options
        self.dtype = options.dtype
        self.acceptance = acceptance and acceptance.fit(config.num_steps)
        self.rule = rule
        self.grammars = grammars or {}
        check(self.grammars, config, target.vocab_size)
        if like is not None:
            self.target = like.target
            self.drafter = like.drafter
            self._setting_drafter = NoDrafter() if config.is_plain else like.drafter.with_config(self.config)
            self._lookup = None if config.is_plain or not like._lookup else like._lookup.with_config(self.config)
        else:
            self.target = FAMILIES[target.family](target, pair.target.tensors, self.dtype)
            make = partial(make_drafter, target=self.target, config=self.config, on=Placement(self.dtype))
            self.drafter = make(pair.drafter)
            self._setting_drafter = self.drafter
            self._lookup = make_lookup(pair, make, self.config)
        self._ahead = columns_ahead(self.drafter)
        self.options.check_draft_kv(config, self.drafter.kv_layout)

    def __repr__(self) -> str:
        return engine_text(self)

    def make_pools(self, num_requests: int, num_slots: int) -> KVPool:
        """Make empty pools for up to `num_requests` requests and `num_slots` slots (rounded down to whole pages)."""
        num_slots -= num_slots % self.config.page_size
        of_target, of_drafter = self.options.kv_format, self.options.draft_kv_format
        target = KVBuffer(self.target.config.kv_layout, num_slots, self.dtype, stored_as=of_target)
        layout = self.drafter.kv_layout
        draft = None if layout is None else KVBuffer(layout, num_slots, self.dtype, stored_as=of_drafter)
        width = self.config.reserved_columns(self.config.length_limit)
        num_features = self.target.config.hidden_size * max(1, len(self.drafter.feature_layers))
        recent = FeatureRing.make(num_requests, self.drafter.lookahead, self.config.num_steps, num_features, self.dtype)
        side = SideOutputs(self.target.config.side_outputs, num_slots)
        return KVPool(target, draft, self.config.page_size, num_requests, width, recent, side)

    def prefill(self, batch: Batch, prefill: PrefillInput, pools: KVPool) -> PrefillOutput:
        """Run a chunk of every prompt, which batch.seq_lens counts.

        Columns up to seq_lens, and those that the drafter needs ahead, must be owned.
        """
        pools.record(batch.req_pool_indices[prefill.requests], prefill.columns, prefill.input_ids)
        metadata = prefill_metadata(batch, prefill, pools)
        features = self.drafter.feature_layers
        output = self.target.forward(prefill.input_ids, metadata, pools.target, features)
        pools.side.write(metadata.slots, output.side)
        logits_BV = self.target.logits(output.hidden[prefill.last_rows])
        allowed_B1V = stacked(allowed_first(batch, pools, self.grammars), batch.size)
        next_tokens, logprobs = verify.first_tokens(batch, prefill.next_tokens, logits_BV, pools, allowed_B1V)
        pools.record(batch.req_pool_indices, batch.seq_lens, next_tokens)
        if self._lookup is not None:
            self._lookup.forget(batch)
        draft_input = self.drafter.seed(batch, prefill, next_tokens, output.features, pools)
        return PrefillOutput(next_tokens, logprobs, draft_input)

    def hidden_states(self, batch: Batch, prefill: PrefillInput, pools: KVPool) -> torch.Tensor:
        """Run a chunk of every prompt, and return the hidden states between the target's n layers, [R, (n + 1)·H].

        They are what enters each layer, then what the head reads, to find the layer of an error. Only the target's KV
        is written.
        """
        layers = tuple(range(self.target.config.num_layers))
        metadata = prefill_metadata(batch, prefill, pools)
        output = self.target.forward(prefill.input_ids, metadata, pools.target, layers)
        return torch.cat([output.features, output.hidden], dim=-1)

    def round(self, batch: Batch, draft_input: DraftInput, pools: KVPool, reserved: bool = False) -> RoundOutput:
        """Run one speculative round, after which the batch has seq_lens + num_accepted_tokens.

        reserved: the caller has reserved this round's columns. Under release `round` the round reserves its lanes
        anyway.
        """
        verify_input = self.draft(batch, draft_input, pools, reserved)
        verify_output = self.verify(batch, verify_input, pools)
        next_input = self.draft_extend(batch, verify_output.draft_extend_input, pools)
        return RoundOutput(verify_input, verify_output, next_input)

    def advance(self, batch: Batch, draft_input: DraftInput, pools: KVPool, reserved: bool = False) -> Advance:
        """Run a round and return only what a serving loop needs."""
        return self.round(batch, draft_input, pools, reserved).advance(batch)

    def draft(self, batch: Batch, draft_input: DraftInput, pools: KVPool, reserved: bool = False) -> VerifyInput:
        """Propose candidates and build trees of the best of them at columns L..L+N-1."""
        rows = batch.req_pool_indices.tolist()
        lengths = batch.seq_lens.tolist()
        if not reserved or self.config.release == "round":
            reserve_lanes(pools, rows, lengths, self.config, self._ahead, self._setting_drafter.block_rows)
        drafted = draft_input.narrowed(self.config.topk, self.config.num_steps)
        candidates = self._setting_drafter.propose(batch, drafted, pools)
        check_drafts(batch, candidates, self.dtype)
        looked_up = self._lookup and self._lookup.look_up(batch, pools)
        pools.take_snapshot()
        reserve_tree(pools, rows, lengths, self.config, self._ahead)
        locations_BN = kv.tree_locations(batch, self.config, pools)
        bonus_tokens = draft_input.bonus_tokens
        roots = bonus_tokens, batch.seq_lens, locations_BN
        return tree.build(candidates, *roots, self.config, batch.draft_steps, looked_up)

    def verify(self, batch: Batch, verify_input: VerifyInput, pools: KVPool) -> VerifyOutput:
        """Run the target over the trees, verify the drafts, and commit the accepted path."""
        metadata = tree_metadata(batch, verify_input, pools)
        tokens_BN = verify_input.draft_tokens
        features = self.drafter.feature_layers
        output = self.target.forward(tokens_BN.flatten(), metadata, pools.target, features)
        pools.side.write(metadata.slots, output.side)
        logits_RV = self.target.logits(output.hidden)
        allowed_BNV = None
        if self.grammars:
            allowed_BNV = stacked(allowed_trees(batch, verify_input, pools, self.grammars), batch.size)
        verdict = verify.verify(
            batch,
            verify_input,
            logits_RV,
            self.config,
            pools,
            acceptance=self.rule or self.acceptance,
            allowed=allowed_BNV,
        )
        kv.commit(batch, verify_input.cache_locations, verdict, pools)
        seq_lens = batch.seq_lens + verdict.num_accepted_tokens
        release_uncommitted(pools, batch.req_pool_indices.tolist(), seq_lens.tolist(), self.config, self._ahead)
        extend_input = draft_extend_input(
            batch,
            verdict,
            output.features,
            pools.req_to_token,
            self.config.length_limit,
            self.config.extend,
            self.drafter.bonus_columns,
        )
        kv.record_tokens(batch, verdict, pools)
        return VerifyOutput(verdict, logits_RV, extend_input)

    def draft_extend(self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool) -> DraftInput:
        """Rewrite the drafter's KV of the accepted rows from the target's features, and make the next DraftInput."""
        return self.drafter.extend(batch, draft_extend_input, pools)

    def finish(self, request_id: int, tokens: Sequence[int], prompt_len: int) -> None:
        """Note that a request has ended with these tokens, its prompt_len prompt tokens first."""
        for drafter in filter(None, (self.drafter, self._lookup)):
            drafter.finish(request_id, tokens, prompt_len)
