"""The batch that is being decoded, the calls that advance it, and what of their results the host has not read yet."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch

from specsim.phases import Batch, DraftInput, PrefillInput, Verdict
from specsim.pool import KVPool
from specsim.requests import Request


class Delivery(NamedTuple):
    """New tokens of a request, bonus last; a prefill brings one, a round num_accepted_tokens."""

    request: Request
    token_ids: list[int]
    logprobs: list[float]
    is_round: bool


class Relay:
    """Lengths as the device knows them, keyed by row of the request table: futures, for a host that lags behind."""

    @torch.inference_mode(False)  # such a tensor may be written inside that mode and outside
    def __init__(self, num_rows: int, device: torch.device):
        self._seq_lens = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def put(self, batch: Batch) -> None:
        """Note the lengths of a batch's requests."""
        self._seq_lens[batch.req_pool_indices] = batch.seq_lens

    def get(self, batch: Batch) -> Batch:
        """The batch with the lengths that were put last for its requests, whatever place they had then."""
        return replace(batch, seq_lens=self._seq_lens[batch.req_pool_indices])


class HostCopy:
    """Tensors on their way to the host, which waits for them in `read` only."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self._tensors, self._event = tensors, None
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._tensors = {
                name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                for name, tensor in tensors.items()
            }
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> dict[str, torch.Tensor]:
        """The tensors on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


@dataclass(frozen=True, slots=True)
class Launched:
    """A prefill or a round of `requests`, launched in a step. places: of the requests whose results count."""

    step: int
    requests: tuple[Request, ...]
    results: HostCopy
    is_round: bool
    places: tuple[int, ...]

    def read(self) -> list[Delivery]:
        """The new tokens of every request; waits for the device."""
        results = self.results.read()
        if self.is_round:
            tokens, logprobs = Verdict(**results).accepted_tokens(), results["logprobs"].tolist()
        else:
            tokens, logprobs = results["next_tokens"][:, None].tolist(), results["logprobs"][:, None].tolist()
        return [
            Delivery(self.requests[place], tokens[place], logprobs[place][: len(tokens[place])], self.is_round)
            for place in self.places
        ]


class Runner:
    """Prefills and rounds of one engine over one pool. Between rounds the batch has no lengths of its own.

    requests: those that are being decoded, in the order of the batch's rows. lagging: the host learns results late, so
    that lengths come from the relay; else they come from what the host knows.
    """

    def __init__(self, engine, pools: KVPool, lagging: bool):
        self._engine, self._pools, self._lagging = engine, pools, lagging
        self._relay = Relay(len(pools.req_to_token), engine.device)
        self.requests: list[Request] = []
        self._batch, self._draft_input = self._batch_of([]), engine.drafter.idle()

    def _batch_of(self, requests: Sequence[Request]) -> Batch:
        batch = Batch.of(
            request_ids=[request.request_id for request in requests],
            rows=[request.row for request in requests],
            prompt_lens=[len(request.prompt_ids) for request in requests],
            params=[request.params for request in requests],
            vocab_size=self._engine.target.config.vocab_size,
            num_rounds=[len(request.accepted) for request in requests],
        )
        return batch.to(self._engine.device)

    def prefill(self, step: int, requests: Sequence[Request], chunks: Sequence[tuple[int, int]]) -> Launched:
        """Fill columns start to end - 1 of every request; those that are complete then join the batch.

        The token after a chunk is sampled only if it is not known. No request: every phase is passed through all the
        same, as a rank does that has nothing to do while others have.
        """
        ends = torch.tensor([end for _, end in chunks], dtype=torch.int64, device=self._engine.device)
        batch = replace(self._batch_of(requests), seq_lens=ends)
        output = self._engine.prefill(batch, _prefill_input(requests, chunks).to(self._engine.device), self._pools)
        whole = [place for place, request in enumerate(requests) if chunks[place][1] == request.prefill_len]
        kept = torch.tensor(whole, dtype=torch.int64, device=self._engine.device)
        self._join([requests[place] for place in whole], batch.filter(kept), output.draft_input.filter(kept))
        results = HostCopy({"next_tokens": output.next_tokens, "logprobs": output.logprobs})
        fresh = tuple(place for place in whole if not requests[place].token_ids)
        return Launched(step, tuple(requests), results, is_round=False, places=fresh)

    def _join(self, requests: list[Request], batch: Batch, draft_input: DraftInput) -> None:
        self.requests += requests
        self._batch, self._draft_input = self._batch.merge(batch), self._draft_input.merge(draft_input)
        self._relay.put(batch)

    def round(self, step: int) -> Launched:
        """One round of the batch, also of an empty one."""
        batch = self._relay.get(self._batch) if self._lagging else self._with_known_lengths()
        _, output, self._draft_input = self._engine.round(batch, self._draft_input, self._pools, reserved=True)
        after = batch.after(output.num_accepted_tokens)
        self._relay.put(after)
        self._batch = replace(self._batch, num_rounds=after.num_rounds)
        results = HostCopy({each.name: getattr(output, each.name) for each in fields(Verdict)})
        return Launched(step, tuple(self.requests), results, is_round=True, places=tuple(range(len(self.requests))))

    def _with_known_lengths(self) -> Batch:
        lens = torch.tensor([request.prefill_len for request in self.requests], dtype=torch.int64)
        return replace(self._batch, seq_lens=lens.to(self._engine.device))

    def drop(self, requests: Sequence[Request]) -> None:
        """Take requests out of the batch, by index; when nobody is left the idle state takes the place of the last."""
        gone = set(map(id, requests))
        kept = [place for place, request in enumerate(self.requests) if id(request) not in gone]
        if len(kept) == len(self.requests):
            return
        self.requests = [self.requests[place] for place in kept]
        rows = torch.tensor(kept, dtype=torch.int64, device=self._engine.device)
        self._batch = self._batch.filter(rows)
        self._draft_input = self._draft_input.filter(rows) if kept else self._engine.drafter.idle()


def _prefill_input(requests: Sequence[Request], chunks: Sequence[tuple[int, int]]) -> PrefillInput:
    known = [request.known_ids for request in requests]
    parts = PrefillInput.whole([ids[start:end] for ids, (start, end) in zip(known, chunks, strict=True)])
    following = [ids[end] if end < len(ids) else -1 for ids, (_, end) in zip(known, chunks, strict=True)]
    starts = torch.tensor([start for start, _ in chunks], dtype=torch.int64)
    return replace(parts, start_lens=starts, next_tokens=torch.tensor(following, dtype=torch.int64))
