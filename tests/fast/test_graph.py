"""Captured work: what a replay repeats and a capture refuses."""

import pytest
import torch
import triton.language as tl
from torch.nn.functional import embedding, linear

from specsim.fast.runtime.graph import HostRead, Tape, capture
from specsim.fast.runtime.launch import kernel


@kernel
def _plus(x_ptr, out_ptr, count, addend, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < count) + addend, mask=offs < count)


class Work:
    """A look-up, a linear layer, a kernel and a copy, with one host number in the kernel's launch."""

    def __init__(self, device: str):
        self.ids = torch.tensor([1, 2], device=device)
        self.table, self.weight = torch.randn(9, 4, device=device), torch.randn(4, 4, device=device)
        self.out, self.addend = torch.zeros(2, 4, device=device), 1

    def __call__(self) -> None:
        x = linear(embedding(self.ids, self.table), self.weight)
        moved = torch.empty_like(x)
        _plus[(2,)](x_ptr=x, out_ptr=moved, count=8, addend=self.addend, BLOCK=4)
        self.out.copy_(moved)

    def expected(self, addend: int) -> torch.Tensor:
        return linear(self.table[self.ids], self.weight) + addend


@torch.inference_mode()
def test_a_replay_reads_buffers_and_keeps_captured_numbers(device):
    work = Work(device)
    graph = capture(work, torch.device(device))
    work.ids.copy_(torch.tensor([7, 3]))
    work.addend = 5
    work.out.zero_()
    graph.replay()
    assert torch.equal(work.out, work.expected(addend=1))


@torch.inference_mode()
def test_the_tape_lists_torchs_computations(device):
    work = Work(device)
    tape = Tape.of(work)
    assert [step.name for step in tape.steps if step.is_kernel] == ["_plus"]
    assert tape.framework_operations == ["aten.embedding.default", "aten.linear.default", "aten.copy_.default"]


@torch.inference_mode()
def test_memory_allocated_in_a_tape_is_poisoned_at_replay(device):
    """A kernel that leaves a part unwritten would find the previous replay's content there."""
    x, out = torch.ones(8, device=device), torch.zeros(8, device=device)

    def half() -> None:
        scratch = torch.empty(8, device=device)
        _plus[(1,)](x_ptr=x, out_ptr=scratch, count=4, addend=1, BLOCK=8)
        out.copy_(scratch)

    tape = Tape.of(half)
    tape.replay()
    assert out[:4].tolist() == [2.0] * 4
    assert out[4:].isnan().all()


MAYBE_VIEWS = {
    "to": lambda x: x.to(torch.int64),
    "reshape": lambda x: x.t().reshape(6),
    "contiguous": lambda x: x.t().contiguous(),
    "flatten": lambda x: x.t().flatten(),
    "the same type": lambda x: x.to(torch.int32),
    "a view": lambda x: x.reshape(6),
}


@pytest.mark.parametrize("is_inference", [False, True], ids=["", "inference mode"])
@pytest.mark.parametrize("operation", MAYBE_VIEWS.values(), ids=MAYBE_VIEWS)
def test_a_replay_repeats_views_that_copy(operation, is_inference):
    """In inference mode torch hands such an operation on as one, which may be a view or a copy."""
    with torch.inference_mode(is_inference):
        x = torch.zeros(2, 3, dtype=torch.int32)
        out = torch.zeros_like(operation(x))
        tape = Tape.of(lambda: out.copy_(operation(x)))
        x.copy_(torch.arange(6).view(2, 3))
        tape.replay()
        assert torch.equal(out, operation(x))


HOST_READS = {
    "item": lambda x: x[0].item(),
    "int": lambda x: int(x[0]),
    "float": lambda x: float(x[0]),
    "bool": lambda x: bool((x > 0).any()),
    "index": lambda x: [1, 2, 3][x[0]],
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "mask": lambda x: x[x > 1],
    "mask assignment": lambda x: x.__setitem__(x > 1, torch.zeros(1, dtype=torch.int64)),
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 1),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x.float(), x.float()),
    "to": lambda x: x.to("cpu"),
    "to a device": lambda x: x.to(torch.device("cpu")),
    "unique": lambda x: x.unique(),
    "bincount": lambda x: x.bincount(),
    "repeat_interleave": lambda x: x.repeat_interleave(x),
}


@pytest.mark.parametrize("read", HOST_READS.values(), ids=HOST_READS)
def test_a_capture_refuses_host_reads(read):
    x = torch.tensor([0, 1, 2])
    with pytest.raises(HostRead):
        Tape.of(lambda: read(x))
    read(x)  # and nothing of the refusal stays behind
