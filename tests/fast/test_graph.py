"""Recorded work: what a replay repeats, what a capture refuses, and the guards around static buffers."""

import pytest
import torch
import triton.language as tl
from torch.nn.functional import embedding, linear

from specsim.core.phases import DraftInput
from specsim.fast.runtime.graph import Buffers, GuardError, HostRead, Tape, capture
from specsim.fast.runtime.launch import kernel


@kernel
def _plus(x_ptr, out_ptr, count, addend, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < count) + addend, mask=offs < count)


class Work:
    """A look-up, a linear layer, a kernel and a copy, with one number of the host in the kernel's launch."""

    def __init__(self, device: str):
        self.ids = torch.tensor([1, 2], device=device)
        self.table, self.weight = torch.randn(9, 4, device=device), torch.randn(4, 4, device=device)
        self.out, self.addend = torch.zeros(2, 4, device=device), 1

    def __call__(self) -> None:
        x = linear(embedding(self.ids, self.table), self.weight)
        moved = torch.empty_like(x)
        _plus[(2,)](x, moved, 8, self.addend, BLOCK=4)
        self.out.copy_(moved)

    def expected(self, addend: int) -> torch.Tensor:
        return linear(self.table[self.ids], self.weight) + addend


@torch.inference_mode()
def test_a_replay_computes_anew_from_the_buffers_and_with_the_numbers_of_the_capture(device):
    work = Work(device)
    graph = capture(work, torch.device(device))
    work.ids.copy_(torch.tensor([7, 3]))
    work.addend = 5
    work.out.zero_()
    graph.replay()
    assert torch.equal(work.out, work.expected(addend=1))


@torch.inference_mode()
def test_the_tape_lists_what_torch_computed(device):
    work = Work(device)
    tape = Tape.of(work)
    assert [step.name for step in tape.steps if step.is_kernel] == ["_plus"]
    assert tape.framework_operations == ["aten.embedding.default", "aten.linear.default", "aten.copy_.default"]


@torch.inference_mode()
def test_memory_taken_inside_a_tape_is_poisoned_before_every_replay(device):
    """A kernel that leaves a part unwritten would find there what it wrote in the replay before."""
    x, out = torch.ones(8, device=device), torch.zeros(8, device=device)

    def half() -> None:
        scratch = torch.empty(8, device=device)
        _plus[(1,)](x, scratch, 4, 1, BLOCK=8)
        out.copy_(scratch)

    tape = Tape.of(half)
    tape.replay()
    assert out[:4].tolist() == [2.0] * 4
    assert out[4:].isnan().all()


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
    "mask assignment": lambda x: x.__setitem__(x > 1, 0),
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
    with pytest.raises(HostRead, match="on the host"):
        Tape.of(lambda: read(x))
    read(x)  # and nothing of the refusal stays behind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.bool])
@pytest.mark.parametrize("place", ["before", "behind"])
def test_a_write_beside_a_buffer_is_found(dtype, place):
    buffers = Buffers(torch.device("cpu"))
    body = buffers.like("tokens", torch.zeros(3, 2, dtype=dtype))
    buffers.like("others", torch.zeros(5))
    body.fill_(1)
    buffers.check()
    outside = -1 if place == "before" else body.numel()
    whole = torch.empty(0, dtype=dtype).set_(body.untyped_storage())
    whole[body.storage_offset() + outside] = 1
    with pytest.raises(GuardError, match=f"{place} the static buffer tokens"):
        buffers.check()


@pytest.mark.parametrize("name", ["a", "b", "c"])
@pytest.mark.parametrize("place", ["before", "behind"])
def test_a_write_between_the_tensors_of_a_block_is_found(name, place):
    values = {"a": torch.zeros(3, 2), "b": torch.zeros(5, 0), "c": torch.ones(7, dtype=torch.int64)}
    buffers = Buffers(torch.device("cpu"))
    block = buffers.block(values)
    for each in block.tensors.values():
        each.fill_(1)
    buffers.check()
    body = block.tensors[name]
    whole = torch.empty(0, dtype=body.dtype).set_(body.untyped_storage())
    whole[body.storage_offset() + (-1 if place == "before" else body.numel())] = 1
    with pytest.raises(GuardError, match=f"{place} the static buffer {name}"):
        buffers.check()


@pytest.mark.parametrize("size", [0, 1, 4])
def test_a_block_is_copied_whole_and_its_first_requests_are_taken(size):
    values = {
        "odd": torch.rand(4, 3).bfloat16(),
        "rows": torch.arange(8),  # two a request
        "none": torch.empty(4, 0),
        "last": torch.arange(12, dtype=torch.int32).view(4, 3),
    }
    block = Buffers(torch.device("cpu")).block(values)
    raw, taken = block.copy(size, 4)
    assert torch.equal(raw, block.raw)
    for value, copied, each in zip(values.values(), taken, block.tensors.values(), strict=True):
        assert torch.equal(copied, value[: size * len(value) // 4])
        each.fill_(99)
        assert torch.equal(copied, value[: size * len(value) // 4])


def test_buffers_like_a_state_are_its_copy_in_memory_of_their_own():
    state = DraftInput(torch.rand(3, 2), torch.ones(3, 2, dtype=torch.int64), None, torch.arange(3, dtype=torch.int32))
    static = Buffers(torch.device("cpu")).like("draft_input", state)
    assert static.hidden is None
    for name in ("topk_p", "topk_index", "bonus_tokens"):
        before, copied = getattr(state, name), getattr(static, name)
        assert torch.equal(before, copied)
        assert before.dtype == copied.dtype
        assert before.data_ptr() != copied.data_ptr()
