"""Compile the kernels for GPUs that are not here: `python tests/tools/compile_kernels.py`.

Rounds of tiny pairs run on a CPU, but every launch only compiles its kernel, and what the kernel would have written is
zero. It shows what Triton's interpreter cannot: programs that do not compile, and too much shared memory.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.display import print_table, stdout_console
from specsim.core.engine_options import EngineOptions
from specsim.core.kv_buffer import KVBuffer
from specsim.core.rule import AcceptanceRule, Accepted
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.core.token_drafter import NgramConfig
from specsim.core.verifiers import DEFAULT_VERIFIER, LANES, VERIFIER_KINDS, VERIFIER_OF, Drafts
from specsim.models.synthetic_pair import synthetic_pair

SHARED_MEMORY = {80: 166_912, 90: 232_448, 100: 232_448}  # bytes of a program, by compute capability: A100, H100, B200
TREE, CHAIN = SpecConfig(2, 3, 6, page_size=4), SpecConfig(1, 3, 4, page_size=4)
PLAIN = SamplingParams(max_new_tokens=4)
WARM = SamplingParams(temperature=0.8, max_new_tokens=4)
FILTERED = SamplingParams(
    temperature=0.8, top_p=0.9, top_k=5, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1, max_new_tokens=4
)


@dataclass(frozen=True)
class KernelRun:
    """Rounds of one pair that are compiled."""

    kind: str  # of the drafter
    family: str
    config: SpecConfig = TREE
    sampling: SamplingParams = PLAIN
    dtype: torch.dtype = torch.bfloat16
    options: tuple[tuple[str, Any], ...] = ()  # of the engine
    arguments: tuple[tuple[str, Any], ...] = ()  # arguments of generate
    is_wide: bool = False  # wide enough for our own products, where narrow ones are a library's
    prompts: tuple[tuple[int, ...], ...] = ((3, 4, 5, 6, 7), (5, 6))
    is_linked: bool = False  # with ranks: they exchange parts through each other's memory


FP8 = (("kv_dtype", "fp8_e4m3"), ("draft_kv_dtype", "fp8_e4m3"))
ONE = ((3, 4, 5),)
TWO_RANKS = (("tensor_parallel", 2),)
WIDE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_heads": 32,
    "num_kv_heads": 16,
    "head_dim": 64,
}
RULE = AcceptanceRule("first", "best", lambda tree, *_: Accepted([0], tree.tokens[0]), lossless=False)


def verified(drafts: Drafts, *runs: KernelRun) -> Iterator[KernelRun]:
    """Give every verifier of such drafts, except the default one, the next of the runs."""
    kinds = (kind for kind in VERIFIER_KINDS if kind.drafts == drafts and kind.name != DEFAULT_VERIFIER)
    for kind, run in zip(kinds, cycle(runs), strict=False):
        yield replace(run, config=replace(run.config, verifier=kind.name))


_STATIC = SpecConfig(2, 3, 7, verifier=VERIFIER_OF["siblings"])
RUNS = (
    KernelRun("eagle3", "llama", sampling=FILTERED, is_wide=True),
    KernelRun("eagle", "mistral", SpecConfig(2, 3, 6, page_size=4, draft_kv="ancestor", release="round"), FILTERED),
    *verified(
        "sampled",
        KernelRun("eagle3", "qwen3", SpecConfig(1, 3, 4), FILTERED, torch.float32),
        KernelRun("eagle3", "llama", SpecConfig(1, 3, 4), FILTERED, options=(("batch_invariant", True),), is_wide=True),
        KernelRun("eagle3", "llama", SpecConfig(1, 3, 4), FILTERED),
    ),
    *(run for drafts in LANES for run in verified(drafts, KernelRun("eagle", "qwen2", SpecConfig(2, 3, 7), FILTERED))),
    *verified("best", KernelRun("eagle3", "llama", SpecConfig(2, 3, 6), FILTERED)),
    KernelRun("eagle3", "llama", SpecConfig(8, 5, 40, page_size=4), is_wide=True),  # attention in a pipeline
    KernelRun("eagle3", "gpt_oss", options=FP8),
    KernelRun("eagle3.1", "qwen3_moe", is_wide=True),
    KernelRun("eagle3", "gpt_oss", SpecConfig.plain(), prompts=ONE),
    KernelRun("mtp", "deepseek_v3", CHAIN),
    KernelRun("mtp.window", "llama"),
    KernelRun("frozen-kv", "gpt_oss", CHAIN),
    KernelRun("p-eagle", "llama"),
    KernelRun("p-eagle", "qwen3", _STATIC, FILTERED),
    KernelRun("dflash", "llama", is_wide=True),
    KernelRun("dflash", "gpt_oss", SpecConfig(1, 3, 4, verifier="block"), FILTERED, options=FP8),
    KernelRun("dspark.cut", "qwen3"),
    KernelRun("dspark", "llama", _STATIC, FILTERED, torch.float32),
    KernelRun("eagle3", "llama", sampling=FILTERED, arguments=(("verifier", RULE),)),
    KernelRun("eagle3", "llama", CHAIN, arguments=(("drafter", NgramConfig()),)),
    KernelRun("eagle3", "llama", arguments=(("acceptance", SyntheticAcceptance((0.5, 0.5, 0.5))),)),
    KernelRun("eagle3", "llama", sampling=WARM, options=TWO_RANKS, is_wide=True),
    KernelRun("eagle", "qwen3_moe", options=TWO_RANKS, is_wide=True, is_linked=True),
    KernelRun("eagle3", "gpt_oss", SpecConfig.plain(), options=TWO_RANKS, prompts=ONE, is_linked=True),
    KernelRun("mtp", "deepseek_v3", CHAIN, options=TWO_RANKS, is_linked=True),
)


# Persistent forwards: a shape, requests, rows of each, and whether they are batch-invariant.
PERSISTENT = (
    ("llama-3-8b", 1, 1, False),
    ("llama-3-8b", 1, 8, False),
    ("llama-3-8b", 4, 4, False),
    ("llama-3-8b", 4, 4, True),
    ("qwen3-8b", 1, 8, False),
    ("mistral-7b-v0.1", 2, 4, False),
    ("llama-2-70b", 1, 8, False),
)


# Kernels that no round launches, or that write sizes of later launches.
APART = {
    "_alive_kernel",
    "_append_kernel",
    "_bitpacked_mask_kernel",
    "_full_mask_kernel",
    "_malformed_kernel",
    "_nodes_kernel",
    "_select_kernel",
}


@dataclass(frozen=True)
class Compiled:
    """One kernel as compiled."""

    name: str
    registers: int
    stack_bytes: int  # of a thread; what did not fit into registers is there
    shared_bytes: int  # of a program


class Zeroed(TorchDispatchMode):
    """Fills new tensors with zeros, in place of what kernels would write."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func.overloadpacket.__name__.startswith(("empty", "new_empty")) else result


class NoGpu:
    """Triton's driver for a GPU of a compute capability that is not here."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@contextmanager
def compile_only(capability: int, done: Callable[[Compiled], None]) -> Iterator[None]:
    """Let launches compile for a GPU of this compute capability and do nothing else, until the process ends."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from specsim.fast.runtime import launch
    from specsim.serving import generation

    seen = set()

    def compiled(function: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*args: object, **kwargs: object) -> None:
            program = function.warmup(*args, grid=grid, **kwargs)
            if program.hash not in seen:
                seen.add(program.hash)
                done(Compiled(function.__name__, *_resources(program.asm["cubin"]), program.metadata.shared))

        return run

    driver.set_active(NoGpu(capability))  # pyright: ignore[reportArgumentType] - the part that compiling needs
    for owner, name, value in (
        (JITFunction, "__getitem__", compiled),
        (launch, "capability", lambda: divmod(capability, 10)),
        (launch, "_shared_memory", lambda: SHARED_MEMORY[capability]),
        (generation, "kernel_device", lambda _: torch.device("cpu")),
    ):
        setattr(owner, name, value)
    with Zeroed():
        yield


def _resources(program: bytes) -> tuple[int, int]:
    """Read registers and stack bytes of a program."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert usage, text
    return int(usage[1]), int(usage[2])


def every_kernel() -> set[str]:
    """Name all kernels of the fast implementation."""
    import specsim.fast

    files = Path(specsim.fast.__file__ or "").parent.rglob("*.py")
    return {name for file in files for name in re.findall(r"^@kernel\n(?:@.*\n)*def (\w+)", file.read_text(), re.M)}


def compile_run(run: KernelRun) -> None:
    """Run rounds in which launches only compile."""
    from specsim.serving.generation import generate

    options = EngineOptions("fast", run.dtype, "cpu", **dict(run.options))
    changes: dict[str, Any] = WIDE if run.is_wide else {}
    if options.tensor_parallel > 1:
        changes = changes | {"vocab_size": 2048}  # which ranks share
    pair = synthetic_pair(run.kind, run.family, **changes)
    prompts = [list(prompt) for prompt in run.prompts]
    with alone_of(options.tensor_parallel, run.is_linked):
        generate(pair, prompts, run.config, run.sampling, engine=options, **dict(run.arguments))


def compile_persistent(name: str, requests: int, nodes: int, batch_invariant: bool) -> None:
    """Launch the persistent forward of a shape, with tensors that have no memory."""
    from specsim.fast.layers import Weights
    from specsim.fast.model.metadata import AttentionMetadata
    from specsim.fast.persistent.forward import PersistentForward
    from specsim.models.checkpoint.layout import target_layout
    from specsim.models.shapes import shape

    def new(*sizes: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    model = shape(name).config
    weights = Weights({tensor: new(*size, dtype=torch.bfloat16) for tensor, size in target_layout(model).items()})
    rows = requests * nodes
    metadata = AttentionMetadata(
        positions=new(rows, dtype=torch.int64),
        slots=new(rows, dtype=torch.int64),
        row_starts=new(requests + 1, dtype=torch.int64),
        max_rows=nodes,
        has_equal_rows=True,
        table=new(requests, 1024, dtype=torch.int64),
        table_rows=new(requests, dtype=torch.int64),
        prefix_lens=new(rows),
        key_lens=new(requests),
        is_causal=False,
        num_extras=new(requests),
        extra_slots=new(requests, nodes),
        extra_positions=new(requests, nodes),
        visible=new(rows, 1),
    )
    kv = KVBuffer(model.kv_layout, 1024, torch.bfloat16, "meta")
    cos_sin = new(rows, 2, 64, dtype=torch.bfloat16)
    forward = PersistentForward(model, dict(weights.tensors), batch_invariant=batch_invariant)
    forward(new(rows, dtype=torch.int64), cos_sin, metadata, kv, (0, 1, 2) if nodes > 1 else ())


@contextmanager
def alone_of(size: int, is_linked: bool) -> Iterator[None]:
    """Be rank 0 of ranks whose others are not there: nothing is exchanged."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from specsim.fast import engine
    from specsim.fast.runtime.peer_memory import PROGRAMS, LinkedRanks, PeerMemory

    if size == 1:
        yield
        return

    def linked(ranks: Any, device: torch.device) -> LinkedRanks:
        half = 2**19
        memory = tuple(torch.empty(PeerMemory.num_bytes(half, size), dtype=torch.uint8) for _ in range(size))
        peers = PeerMemory(memory, 0, torch.empty(PROGRAMS, dtype=torch.int32), half)
        return LinkedRanks(0, size, ranks.board, peers, half)

    distributed.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        if is_linked:
            with patch.object(engine, "linked", linked), patch.object(LinkedRanks, "links", lambda *_: True):
                yield
        else:
            yield
    finally:
        distributed.destroy_process_group()


def show(compiled_kernels: list[Compiled], console: Console) -> None:
    """Print a line for each kernel: how often it was compiled, and the most that it needs."""
    rows = []
    for name in sorted({kernel.name for kernel in compiled_kernels}):
        variants = [kernel for kernel in compiled_kernels if kernel.name == name]
        most = [
            max(getattr(kernel, field) for kernel in variants) for field in ("registers", "stack_bytes", "shared_bytes")
        ]
        rows.append((name, str(len(variants)), *map(str, most)))
    print_table(console, ("kernel", "compiled", "registers", "stack bytes", "shared bytes"), rows)


def main() -> int:
    """Compile all runs, or those of the drafters and families that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, default=90, choices=SHARED_MEMORY)
    parser.add_argument("--run", type=int, action="append", choices=range(len(RUNS)), help="numbers of RUNS")
    parser.add_argument("--persistent", type=int, action="append", choices=range(len(PERSISTENT)), help="its numbers")
    arguments = parser.parse_args()
    is_whole = arguments.run is None and arguments.persistent is None
    has_hopper = arguments.capability == 90
    runs = range(len(RUNS)) if is_whole else arguments.run or ()
    persistent = range(len(PERSISTENT)) if is_whole and has_hopper else arguments.persistent or ()
    compiled_kernels: list[Compiled] = []
    with compile_only(arguments.capability, compiled_kernels.append):
        has_fp8 = arguments.capability >= 89
        for number in runs:
            if has_fp8 or RUNS[number].options != FP8:
                compile_run(RUNS[number])
        for number in persistent:
            compile_persistent(*PERSISTENT[number])
    console = stdout_console()
    show(compiled_kernels, console)
    console.print(f"{len(compiled_kernels)} programs compiled for compute capability {arguments.capability}.")
    missing = sorted(every_kernel() - APART - {kernel.name for kernel in compiled_kernels}) if is_whole else []
    if missing:
        console.print(f"No run launched {', '.join(missing)}.")
    return 1 if missing else 0


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"
    sys.exit(main())
