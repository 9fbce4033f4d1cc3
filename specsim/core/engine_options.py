"""Options of an engine: implementation, number format, device and graph mode."""

from dataclasses import dataclass, replace
from typing import Literal, Self

import torch

from specsim.core.arguments import check_arguments
from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require, require_choice
from specsim.core.kv_buffer import KVDtype, KVFormat, KVLayout
from specsim.core.limits import PositiveInteger

IMPLEMENTATIONS = ("reference", "fast")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
GRAPHS = ("eager", "step", "phase", "round")
FORWARDS = ("auto", "kernels", "persistent")


@check_arguments
@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Implementation, number format, device and graph mode of an engine.

    Raises InputError for a value that no engine takes, and for an option of the fast implementation given to the
    reference.
    """

    impl: Literal["reference", "fast"] = "reference"
    dtype: torch.dtype = torch.float32  # of weights and activations
    device: str | None = None  # cpu or cuda; None: a GPU where there is one
    # `eager`: the host launches every kernel. `step`: one captured draft step is replayed. `phase`: one graph for each
    # of draft, verify and draft-extend. `round`: one graph for the three. None: `round` where the setting allows it.
    graph: Literal["eager", "step", "phase", "round"] | None = None
    bucket: PositiveInteger | None = None  # requests that the static buffers hold; None: the next power of two
    batch_invariant: bool = False  # sums are taken in an order that no other request of a batch changes
    kv_dtype: KVDtype = "model"  # of the target's KV
    draft_kv_dtype: KVDtype = "model"
    kv_scales: tuple[float, float] = (1.0, 1.0)  # of keys and values of the target in fp8_e4m3
    draft_kv_scales: tuple[float, float] = (1.0, 1.0)
    # ranks that share the target's weights; every rank is a process with an engine
    tensor_parallel: PositiveInteger = 1
    draft_parallel: Literal["sharded", "replicated"] = "sharded"  # the drafter's weights over these ranks
    compare_ranks: bool = False  # a digest of every phase's output is compared over ranks, for which the host waits
    # Decode and verify forwards of the target. `kernels`: a kernel for each step. `persistent`: one resident kernel for
    # all layers, on GPUs and for models that it takes. `auto`: the faster one by our measurements.
    forward: Literal["auto", "kernels", "persistent"] = "auto"

    def __post_init__(self) -> None:
        require_choice("dtype", self.dtype, DTYPES)
        _ = self.kv_format, self.draft_kv_format
        if self.impl == "reference":
            self._check_reference()
        else:
            self._check_fast()

    @property
    def kv_format(self) -> KVFormat:
        """Number format of the target's KV."""
        return KVFormat(self.kv_dtype, *self.kv_scales)

    @property
    def draft_kv_format(self) -> KVFormat:
        """Number format of the drafter's KV."""
        return KVFormat(self.draft_kv_dtype, *self.draft_kv_scales)

    def check_draft_kv(self, config: SpecConfig, layout: KVLayout | None) -> None:
        """Refuse a number format for the KV of a drafter that has none."""
        has_kv = layout is not None or config.is_plain
        allowed = "model with this drafter, which has no KV of its own"
        require(has_kv or self.draft_kv_dtype == "model", "draft_kv_dtype", self.draft_kv_dtype, allowed)

    def _check_reference(self) -> None:
        for name, value, only in (
            ("device", self.device, "cpu"),
            ("graph", self.graph, "eager"),
            ("bucket", self.bucket, None),
        ):
            require(value in (None, only), name, value, f"{only or 'nothing'} with impl 'reference'")
        require(not self.batch_invariant, "batch_invariant", self.batch_invariant, "False with impl 'reference'")
        require(self.tensor_parallel == 1, "tensor_parallel", self.tensor_parallel, "1 with impl 'reference'")
        require(self.forward != "persistent", "forward", self.forward, "kernels or auto with impl 'reference'")

    def _check_fast(self) -> None:
        allowed = "torch.float32, torch.bfloat16 or torch.float16 with impl 'fast'"
        require(self.dtype != torch.float64, "dtype", self.dtype, allowed)
        require(self.device in (None, "cpu", "cuda"), "device", str(self.device), "cpu or cuda, as a text")

    def resolve(
        self,
        config: SpecConfig,
        has_grammars: bool = False,
        drafts_on_host: bool = False,
        verifies_on_host: bool = False,
    ) -> Self:
        """Return the same options with device and graph mode chosen.

        Release `round` moves pages inside a round, a grammar runs on the host between draft and verify, and a user's
        acceptance rule inside verify. None of them fits in one graph of the whole round. Raises InputError where the
        setting or the machine does not allow the options.
        """
        if self.impl == "reference":
            return replace(self, device="cpu", graph="eager")
        check_graph(self.graph, config, has_grammars, drafts_on_host, verifies_on_host)
        in_phases = config.release == "round" or has_grammars or drafts_on_host or verifies_on_host
        graph = self.graph or ("phase" if in_phases else "round")
        return replace(self, device=check_device(self.device), graph=graph)


def check_graph(
    graph: str | None,
    config: SpecConfig,
    has_grammars: bool = False,
    drafts_on_host: bool = False,
    verifies_on_host: bool = False,
) -> None:
    """Refuse one graph of a whole round where pages move, or grammars, drafter or verifier run on the host."""
    if graph == "round" and config.release == "round":
        raise InputError("graph", graph, "eager, step or phase with release 'round', which moves pages in a round")
    if graph == "round" and has_grammars:
        raise InputError("graph", graph, "eager, step or phase with a grammar, which the host asks inside a round")
    if graph == "round" and drafts_on_host:
        raise InputError("graph", graph, "eager, step or phase with this drafter, which runs on the host")
    if graph == "round" and verifies_on_host:
        allowed = "eager, step or phase with an acceptance rule, which runs on the host inside a round"
        raise InputError("graph", graph, allowed)


def check_device(device: str | None) -> str:
    """Choose a device for the fast implementation: the one named, else a GPU where there is one, else the CPU."""
    has_gpu = torch.cuda.is_available()
    device = device or ("cuda" if has_gpu else "cpu")
    require(device in ("cpu", "cuda"), "device", str(device), "cpu or cuda, as a text")
    require(device == "cpu" or has_gpu, "device", device, "cpu: this machine has no GPU that CUDA can use")
    return device
