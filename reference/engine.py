"""The reference engine: a round is draft, verify, draft-extend."""

from dataclasses import replace

import torch

from specsim.config import InputError, SpecConfig
from specsim.drafter import Drafter
from specsim.phases import Batch, DraftExtendInput, DraftInput, PrefillInput, PrefillOutput, VerifyInput, VerifyOutput
from specsim.pool import KVBuffer, KVPool, own_committed, own_lanes, own_tree
from specsim.reference import kv, tree, verify
from specsim.reference.attention import prefill_metadata, tree_metadata
from specsim.reference.drafters import HEADS
from specsim.reference.drafters.autoregressive import AutoregressiveDrafter
from specsim.reference.drafters.none import NoDrafter
from specsim.reference.extend import draft_extend_input
from specsim.reference.sampling import adjust_logits, inverse_cdf, logprob, target_prob
from specsim.reference.targets import FAMILIES
from specsim.uniforms import Stream, coins


class Engine:
    """Rounds of one pair under one setting.

    pair: target and drafter with config and tensors (specsim.checkpoint.Pair); drafter None decodes plainly.
    config.max_len None takes the target's limit. dtype: of weights, activations and KV.
    """

    def __init__(self, pair, config: SpecConfig, dtype: torch.dtype = torch.float32):
        target = pair.target.config
        limit = target.max_position_embeddings
        if config.max_len is not None and config.max_len > limit:
            raise InputError("max_len", config.max_len, f"at most the target's max_position_embeddings, {limit}")
        self.config = replace(config, max_len=config.max_len or limit)
        self.dtype = dtype
        self.target = FAMILIES[target.family](target, pair.target.tensors, dtype)
        self.drafter = self._drafter(pair.drafter)

    def _drafter(self, checkpoint) -> Drafter:
        if self.config.is_plain:
            return NoDrafter()
        if checkpoint is None:
            raise InputError("num_steps", self.config.num_steps, "0 (SpecConfig.plain()) for a pair without a drafter")
        if self.config.topk > checkpoint.config.draft_vocab_size:
            most = checkpoint.config.draft_vocab_size
            raise InputError("topk", self.config.topk, f"at most the draft vocabulary, {most}")
        head = HEADS[checkpoint.config.kind](checkpoint.config, checkpoint.tensors, self.target, self.dtype)
        return AutoregressiveDrafter(head, self.config, self.dtype)

    def make_pools(self, num_requests: int, num_slots: int) -> KVPool:
        """Empty pools for up to `num_requests` requests and `num_slots` slots (rounded down to whole pages)."""
        num_slots -= num_slots % self.config.page_size
        draft = self.drafter.kv_layout and KVBuffer(self.drafter.kv_layout, num_slots, self.dtype)
        target = KVBuffer(self.target.config.kv_layout, num_slots, self.dtype)
        width = self.config.reserved_columns(self.config.max_len)
        return KVPool(target, draft, self.config.page_size, num_requests, width)

    def prefill(self, batch: Batch, prefill: PrefillInput, pools: KVPool) -> PrefillOutput:
        """Run a chunk of every prompt; batch.seq_lens counts it. Columns up to seq_lens must be owned."""
        pools.token_ids[batch.req_pool_indices[prefill.requests], prefill.columns] = prefill.input_ids
        metadata, features = prefill_metadata(batch, prefill, pools), self.drafter.feature_layers
        hidden_RH, features_RF = self.target.forward(prefill.input_ids, metadata, pools.target, features)
        logits_BV = self.target.logits(hidden_RH[prefill.last_rows])
        next_tokens, logprobs = self._next_tokens(batch, prefill, logits_BV, pools)
        pools.token_ids[batch.req_pool_indices, batch.seq_lens] = next_tokens.long()
        draft_input = self.drafter.seed(batch, prefill, next_tokens, features_RF, pools)
        return PrefillOutput(next_tokens, logprobs, draft_input)

    def _next_tokens(
        self, batch: Batch, prefill: PrefillInput, logits_BV: torch.Tensor, pools: KVPool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The token after each request's chunk, sampled where it is not known: (i32 [B], logprobs f32 [B])."""
        next_tokens, logprobs = prefill.next_tokens.int().clone(), torch.zeros(batch.size)
        coins_B = coins(batch.seeds, batch.request_ids, Stream.PREFILL, batch.seq_lens - 1, 0)
        for request, (row, length) in enumerate(batch.rows_and_lens):
            context, prompt_len = pools.token_ids[row, :length], int(batch.prompt_lens[request])
            adjusted_V = adjust_logits(logits_BV[request], context, prompt_len, batch.sampling, request)
            if next_tokens[request] < 0:
                prob_V = target_prob(adjusted_V, batch.sampling, request)
                next_tokens[request] = inverse_cdf(prob_V, float(coins_B[request]))
            logprobs[request] = logprob(adjusted_V, batch.sampling, request, int(next_tokens[request]))
        return next_tokens, logprobs

    def round(self, batch: Batch, draft_input: DraftInput, pools: KVPool) -> tuple[VerifyOutput, DraftInput]:
        """One speculative round; the batch after it has seq_lens + num_accepted_tokens."""
        verify_input = self.draft(batch, draft_input, pools)
        verify_output = self.verify(batch, verify_input, pools)
        return verify_output, self.draft_extend(batch, verify_output.draft_extend_input, pools)

    def draft(self, batch: Batch, draft_input: DraftInput, pools: KVPool) -> VerifyInput:
        """Propose candidates and lay the best of them out as trees over columns L..L+N-1."""
        rows, lengths = batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
        own_lanes(pools, rows, lengths, self.config)
        candidates = self.drafter.propose(batch, draft_input, pools)
        own_tree(pools, rows, lengths, self.config)
        columns_BN = batch.seq_lens[:, None] + torch.arange(self.config.num_draft_tokens)
        locations_BN = pools.slots(batch.req_pool_indices[:, None], columns_BN)
        return tree.build(candidates, draft_input.bonus_tokens, batch.seq_lens, locations_BN, self.config)

    def verify(self, batch: Batch, verify_input: VerifyInput, pools: KVPool) -> VerifyOutput:
        """Run the target over the trees, walk them, commit the accepted path."""
        metadata = tree_metadata(batch, verify_input, pools)
        tokens_BN = verify_input.draft_tokens
        features = self.drafter.feature_layers
        hidden_RH, features_RF = self.target.forward(tokens_BN.flatten(), metadata, pools.target, features)
        logits_RV = self.target.logits(hidden_RH)
        trees = verify.trees(batch, verify_input, self.config.max_len)
        logits_BNV = logits_RV.unflatten(0, tokens_BN.shape)
        adjusted_BNV = verify.node_logits(batch, trees, logits_BNV, self.config, pools)
        depths_D = torch.arange(self.config.num_steps + 1)
        seeds_B1, ids_B1, lens_B1 = batch.seeds[:, None], batch.request_ids[:, None], batch.seq_lens[:, None]
        coins_BD = coins(seeds_B1, ids_B1, Stream.ACCEPT, lens_B1, depths_D)
        final_coins_B = coins(batch.seeds, batch.request_ids, Stream.FINAL, batch.seq_lens, 0)
        verdict = verify.verify(batch, trees, adjusted_BNV, coins_BD, final_coins_B, self.config)
        return self._commit(batch, verify_input, verdict, features_RF, logits_RV, pools)

    def _commit(self, batch, verify_input, verdict, features_RF, logits_RV, pools: KVPool) -> VerifyOutput:
        rows = batch.req_pool_indices.tolist()
        kv.commit(batch, verify_input.cache_locations, verdict.accept_index, pools)
        own_committed(pools, rows, (batch.seq_lens + verdict.num_accepted_tokens).tolist(), self.config)
        max_len, extend = self.config.max_len, self.config.extend
        extend_input = draft_extend_input(batch, verdict, features_RF, pools.req_to_token, max_len, extend)
        output = VerifyOutput(
            predict=verdict.predict,
            accept_index=verdict.accept_index,
            num_accepted_drafts=verdict.num_accepted_drafts,
            num_accepted_tokens=verdict.num_accepted_tokens,
            logprobs=verdict.logprobs,
            target_logits=logits_RV,
            draft_extend_input=extend_input,
        )
        for (row, length), tokens in zip(batch.rows_and_lens, output.accepted_tokens(), strict=True):
            pools.token_ids[row, length + 1 : length + 1 + len(tokens)] = torch.tensor(tokens)
        return output

    def draft_extend(self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool) -> DraftInput:
        """Rewrite the drafter's KV of the accepted rows from the target's features: a fresh DraftInput."""
        return self.drafter.extend(batch, draft_extend_input, pools)
