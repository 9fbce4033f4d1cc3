"""The running batch, the calls that advance it, and the copies of their results to the host."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from specsim.core.engine import Engine
from specsim.core.phases import Batch, DraftInput, PrefillInput, Verdict
from specsim.core.policies.policy import FIRST_SETTING, Choice
from specsim.core.pool import KVPool
from specsim.core.state import upload
from specsim.core.text_forward import target_error
from specsim.serving.requests import Request


class Delivery(NamedTuple):
    """New tokens of a request from a prefill or a round."""

    request: Request
    token_ids: list[int]  # one from a prefill, num_accepted_tokens from a round, bonus last
    logprobs: list[float]
    is_round: bool
    proposed_depth: int = 0  # of a round: depth of the deepest draft of the tree
    draft_steps: int | None = None  # of a round in which requests have their own


class HostCopy:
    """Copies of contiguous tensors to the host, for which only `read` waits.

    Tensors of one storage, such as the results of a round, are sent in one copy.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        pieces: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors.values():
            pieces.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        self._tensors = tensors
        self._event: torch.cuda.Event | None = None
        self._pieces = {address: _sent(piece) for address, piece in pieces.items()}
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> dict[str, torch.Tensor]:
        """Wait for the copies, and return the tensors on the host."""
        if self._event is not None:
            self._event.synchronize()
        return {name: self._read(tensor) for name, tensor in self._tensors.items()}

    def _read(self, tensor: torch.Tensor) -> torch.Tensor:
        raw, first = self._pieces[tensor.untyped_storage().data_ptr()]
        offset = tensor.storage_offset() * tensor.itemsize - first
        return raw[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _sent(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Send the bytes from the first to the last of some tensors of one storage.

    Returns them with the offset of the first byte.
    """
    offsets = [int(tensor.storage_offset()) * tensor.itemsize for tensor in tensors]
    first = min(offsets) // 8 * 8  # keeps the views aligned
    size = max(offset + tensor.nbytes for offset, tensor in zip(offsets, tensors, strict=True)) - first
    piece = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
    piece.set_(tensors[0].untyped_storage(), first, (size,), (1,))
    sent = torch.empty(size, dtype=torch.uint8, pin_memory=piece.is_cuda)
    return sent.copy_(piece, non_blocking=True), first


@dataclass(frozen=True, slots=True)
class Launched:
    """A prefill or a round that has been launched."""

    step: int  # of the scheduler
    requests: tuple[Request, ...]
    results: HostCopy
    is_round: bool
    delivered_indices: tuple[int, ...]  # indices of the requests whose results count
    choice: Choice = FIRST_SETTING  # setting of the round, and draft steps of its requests

    def read(self) -> list[Delivery]:
        """Wait for the device, and return the new tokens of every request."""
        results = self.results.read()
        if self.is_round:
            depths = results.pop("proposed_depth").tolist()
            tokens = Verdict(**results).accepted_tokens()
            logprobs = results["logprobs"].tolist()
        else:
            depths = [0] * len(self.requests)
            tokens = results["next_tokens"][:, None].tolist()
            logprobs = results["logprobs"][:, None].tolist()
        steps = [None] * len(self.requests) if self.choice.steps is None else self.choice.steps.tolist()
        rows = zip(self.requests, tokens, logprobs, depths, steps, strict=True)
        deliveries = [
            Delivery(request, new, request_logprobs[: len(new)], self.is_round, depth, count)
            for request, new, request_logprobs, depth, count in rows
        ]
        return [deliveries[index] for index in self.delivered_indices]


class Runner:
    """Prefills and rounds of one engine over one pool.

    lagging: the host learns results late, so a round takes its lengths from the previous round on the device. Otherwise
    it takes those that the host knows.
    """

    def __init__(self, engine: Engine, pools: KVPool, lagging: bool) -> None:
        self._engine = engine
        self._pools = pools
        self._lagging = lagging
        self.requests: list[Request] = []  # the running batch, in the order of its rows
        self._batch = self._batch_of([])
        self._draft_input = engine.drafter.idle()

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
        """Fill columns start to end - 1 of every request, and add requests with a complete prefill to the batch.

        The token after a chunk is sampled only if it is not known. Every phase runs even without a request, as in a
        rank that has no work while others have some.
        """
        device = self._engine.device
        ends = [end for _, end in chunks]
        batch = replace(self._batch_of(requests), seq_lens=upload(torch.tensor(ends, dtype=torch.int64), device))
        output = self._engine.prefill(batch, _prefill_input(requests, chunks).to(device), self._pools)
        indices = [index for index, request in enumerate(requests) if ends[index] == request.prefill_len]
        rows = upload(torch.tensor(indices, dtype=torch.int64), device)
        self._join([requests[index] for index in indices], batch.filter(rows), output.draft_input.filter(rows))
        results = HostCopy({"next_tokens": output.next_tokens, "logprobs": output.logprobs})
        fresh = tuple(index for index in indices if not requests[index].token_ids)
        return Launched(step, tuple(requests), results, is_round=False, delivered_indices=fresh)

    def _join(self, requests: list[Request], batch: Batch, draft_input: DraftInput) -> None:
        self.requests += requests
        self._batch = self._batch.merge(batch)
        self._draft_input = self._draft_input.merge(draft_input)

    def round(self, step: int, choice: Choice = FIRST_SETTING) -> Launched:
        """Launch a round of the batch, even of an empty one.

        choice: the engine's setting, and the draft steps of each request where they have their own.
        """
        batch = self._batch if self._lagging else self._with_known_lengths()
        if choice.steps is not None:
            steps = torch.from_numpy(choice.steps).to(self._engine.device, torch.int32)
            batch = replace(batch, draft_steps=steps)
        advance = self._engine.advance(batch, self._draft_input, self._pools, reserved=True)
        self._draft_input = advance.draft_input
        self._batch = advance.batch
        results = HostCopy(advance.verdict.tensors | {"proposed_depth": advance.proposed_depth})
        indices = tuple(range(len(self.requests)))
        return Launched(step, tuple(self.requests), results, is_round=True, delivered_indices=indices, choice=choice)

    def _with_known_lengths(self) -> Batch:
        lens = torch.tensor([request.prefill_len for request in self.requests], dtype=torch.int64)
        return replace(self._batch, seq_lens=upload(lens, self._engine.device))

    def check(self, request: Request, count: int) -> None:
        """Raise NotFinite if one of a request's last `count` tokens comes from logits with NaN or +inf.

        Its logprob is NaN then, which reaches the host in any case.
        """
        first = len(request.token_ids) - count
        for index, logprob in enumerate(request.logprobs[first:], start=first):
            if math.isnan(logprob):
                number = len(request.accepted) + 1 if first else 0
                read = request.prompt_ids + request.token_ids[:index]
                raise target_error(self._engine, request.request_id, number, read)

    def side_outputs(self, request: Request) -> dict[str, torch.Tensor]:
        """Read the side outputs of all tokens but the last, which no forward has read; {} where the target has none."""
        if request.row < 0:  # preempted with its last result unread
            return {name: rows[: request.prefill_len] for name, rows in request.side_outputs.items()}
        if not self._pools.side.rows:
            return {}
        columns = torch.arange(request.prefill_len, device=self._pools.req_to_token.device)
        return self._pools.side.read(self._pools.slots(request.row, columns))

    def finish(self, request: Request) -> None:
        """Tell the drafter that a request has ended, with its tokens."""
        self._engine.finish(request.request_id, request.known_ids, len(request.prompt_ids))

    def drop(self, requests: Sequence[Request]) -> None:
        """Remove requests from the batch by index.

        An empty batch gets the drafter's idle state.
        """
        dropped = set(map(id, requests))
        indices = [index for index, request in enumerate(self.requests) if id(request) not in dropped]
        if len(indices) == len(self.requests):
            return
        self.requests = [self.requests[index] for index in indices]
        rows = upload(torch.tensor(indices, dtype=torch.int64), self._engine.device)
        self._batch = self._batch.filter(rows)
        self._draft_input = self._draft_input.filter(rows) if indices else self._engine.drafter.idle()


def _prefill_input(requests: Sequence[Request], chunks: Sequence[tuple[int, int]]) -> PrefillInput:
    known_ids = [request.known_ids for request in requests]
    parts = PrefillInput.of_prompts([ids[start:end] for ids, (start, end) in zip(known_ids, chunks, strict=True)])
    following = [ids[end] if end < len(ids) else -1 for ids, (_, end) in zip(known_ids, chunks, strict=True)]
    starts = torch.tensor([start for start, _ in chunks], dtype=torch.int64)
    return replace(parts, start_lens=starts, next_tokens=torch.tensor(following, dtype=torch.int64))
