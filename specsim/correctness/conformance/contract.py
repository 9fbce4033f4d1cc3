"""Table of operations: arguments and results of each, in the conventions of their published kernels.

It is data: nothing is dispatched through it. An operation is called with its arguments by position. A case holds the
arguments of one call and its expected results."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

# name = public functions of this signature, those in `_cpu` for a CPU only (origin of the convention)
#   summary
#   arguments -> returned values, each `role name dtype[shape] match`
# role: none is read and stays as it is; out and inout are written in place; scratch may be overwritten and is not
# compared. shape: in the letters of core.phases, B*N is one dimension, * any shape; none is a number of the host.
# match: none is equal bit for bit, close within the rounding of its dtype, sampled by a test of its distribution.
_TABLE = """
draft_topk = fast_topk (SGLang)
  the k largest of every row, largest first, ties to the lower index, NaN above every number
  values float32[R,V]; topk int; dim int
  -> topk_p float32[R,K]; topk_index int64[R,K]

expand = select_top_k_tokens (SGLang)
  one step of the draft loop: the children of all lanes, and the best of them as the next lanes
  i int; topk_p float32[*]; topk_index int64[*]; hidden_states float32[*]; scores float32[*]; topk int
  -> input_ids int64[B*K]; lane_hidden_states float32[B*K,H]; lane_scores float32[B,K]; tree_scores float32[*];
  tree_tokens int64[*]; tree_parents int64[*]

select = organize_draft_results (SGLang)
  the N-1 best candidates of all steps, as ascending indices, with their tokens
  score_list float32[*]; token_list int64[*]; parents_list int64[*]; num_draft_token int
  -> parent_list int64[*]; top_scores_index int64[B,N-1]; draft_tokens int64[B,N-1]

build_tree = build_tree_kernel_efficient, build_tree_kernel_efficient_cpu (SGLang (sgl-kernel))
  mask, positions and first-child / next-sibling links of the chosen candidates
  parent_list int64[B,K*(S-1)+1]; selected_index int64[B,N-1]; verified_seq_len int64[B];
  out tree_mask bool or packed[*]; out positions int64[B*N]; out retrive_index int64[B,N];
  out retrive_next_token int64[B,N]; out retrive_next_sibling int64[B,N]; topk int; depth int; draft_token_num int;
  tree_mask_mode int

verify_greedy = verify_tree_greedy, verify_tree_greedy_cpu (SGLang (sgl-kernel))
  the path of drafts that equal the target's best tokens; accept_token_num counts drafts only
  out predicts int32[B*N]; out accept_index int32[B,W]; out accept_token_num int32[B]; candidates int64[B,N];
  retrive_index int64[B,N]; retrive_next_token int64[B,N]; retrive_next_sibling int64[B,N];
  target_predict int64[B,N]

verify_target_only = tree_speculative_sampling_target_only (SGLang (sgl-kernel))
  target-only sampling of a path and its bonus token; one uniform a parent, in uniform_samples at its node
  out predicts int32[B*N]; out accept_index int32[B,W]; out accept_token_num int32[B]; candidates int64[B,N];
  retrive_index int64[B,N]; retrive_next_token int64[B,N]; retrive_next_sibling int64[B,N];
  uniform_samples float32[B,N]; uniform_samples_for_final_sampling float32[B]; target_probs float32[B,N,V];
  scratch draft_probs float32[B,N,V]; threshold_single float; threshold_acc float; deterministic bool

bonus_tokens = fill_bonus_tokens_cpu, fill_bonus_tokens (SGLang)
  the last accepted token of every row of W = S + 1; accept_lens count the bonus token
  accept_tokens int32[B*W]; accept_lens int32[B]; out bonus_tokens int32[B]; accept_stride int

move_kv = move_kv_cache_native (SGLang)
  the KV of the accepted path to its place, all layers, everything read before anything is written
  inout k_buffer float32[*]; inout v_buffer float32[*]; tgt_loc int64[*]; src_loc int64[*]

cache_locations = assign_extend_cache_locs_func (SGLang)
  the slots of columns start to end of every request, one request after the other
  req_pool_indices int64[B]; req_to_token int32[*]; start_offset int64[B]; end_offset int64[B]; batch_size int;
  draft_token_num int; device device
  -> out_cache_loc int64[B*N]

lane_locations = draft_lane_locations (specsim)
  the slots of every lane's steps, and which slots of the prefix's last page are copied where
  req_pool_indices int64[B]; req_to_token int64[*]; seq_lens int64[B]; topk int; num_steps int; page_size int
  -> out_cache_loc int64[B*K*S]; source_cache_loc int64[*]; target_cache_loc int64[*]

shift_ids = rotate_input_ids_triton, rotate_input_ids_cpu (SGLang)
  a request's ids one place to the left, then the token after them
  inout input_ids int64[R]; extend_start_loc int64[B]; extend_seq_lens int64[B]; topk_index int64[B]

tree_attention = tree_attention (specsim)
  softmax(q·k / √D) v of every node over its prefix, its ancestors and itself
  q float32[B*N,A,D]; k_buffer float32[*]; v_buffer float32[*]; out o float32[B*N,A,D] close; kv_indptr int32[B+1];
  kv_indices int64[*]; tree_mask bool or packed[*]; tree_mask_mode int; draft_token_num int

chain_rejection = rejection_sample (vLLM)
  rejection sampling of chains, one after the other; rows padded with -1; a draft of -1 is rejected, NaN gives a token
  draft_token_ids int32[R]; num_draft_tokens list; max_spec_len int; cu_num_draft_tokens int32[B];
  draft_probs float32[R,V]; scratch target_probs float32[R,V]; bonus_token_ids int32[B,1];
  sampling_metadata object
  -> output_token_ids int32[B,W] sampled
"""
_HEAD = re.compile(r"(\w+) = ([\w, ]+) \((.+)\)")
_VALUE = re.compile(r"(?:(out|inout|scratch) )?(\w+) ([\w ]+?)(?:\[(.+)\])?(?: (close|sampled))?")


@dataclass(frozen=True, slots=True)
class Value:
    """An argument or a returned value."""

    name: str
    dtype: str
    shape: str = ""
    role: str = "in"  # in, out, inout, scratch, returned
    match: str = "exact"  # exact, close, sampled


@dataclass(frozen=True, slots=True)
class Operation:
    """A row of the table."""

    name: str  # as --ops takes it
    functions: tuple[str, ...]
    origin: str
    summary: str
    values: tuple[Value, ...]  # arguments in their order, then returned values

    @property
    def arguments(self) -> tuple[Value, ...]:
        """Values that it is called with, in order."""
        return tuple(value for value in self.values if value.role != "returned")

    @property
    def results(self) -> tuple[Value, ...]:
        """Values that are compared: written in place or returned."""
        return tuple(value for value in self.values if value.role in ("out", "inout", "returned"))


def _operation(text: str) -> Operation:
    head, summary, *lines = (line.strip() for line in text.splitlines())
    name, functions, origin = _fields(_HEAD, head)
    arguments, _, returned = " ".join(lines).partition(" -> ")
    values = [_value(entry, "in") for entry in arguments.split("; ")]
    values += [_value(entry, "returned") for entry in returned.split("; ") if entry]
    return Operation(name, tuple(functions.split(", ")), origin, summary, tuple(values))


def _value(text: str, role: str) -> Value:
    written, name, dtype, shape, match = _fields(_VALUE, text)
    return Value(name, dtype, shape or "", written or role, match or "exact")


def _fields(pattern: re.Pattern[str], text: str) -> tuple[str, ...]:
    match = pattern.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not written as an entry of the table")
    return match.groups()


OPERATIONS = tuple(map(_operation, _TABLE.strip().split("\n\n")))
BY_NAME = {operation.name: operation for operation in OPERATIONS}


DEVICE = object()  # stands for the device of the call, as an argument


@dataclass(frozen=True, slots=True)
class SampleDistribution:
    """Distribution of a result, int32 [rows, width], whose rows are independent draws."""

    outcomes: Mapping[tuple[int, ...], float]  # probability of each row; they sum to one, all others are impossible
    rows: int
    dtype: ClassVar[torch.dtype] = torch.int32

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the result."""
        return self.rows, len(next(iter(self.outcomes)))


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operation."""

    arguments: Mapping[str, Any]  # by name, in the contract's order
    expected: Mapping[str, torch.Tensor | list[torch.Tensor] | SampleDistribution]  # compared results, by name
    rows: Mapping[str, torch.Tensor] = field(default_factory=dict)  # compared rows of a result, bool; default all
    tolerance: float = 0.0  # greatest difference of a result whose match is `close`
    alternatives: tuple[Mapping[str, torch.Tensor], ...] = ()  # other accepted results, each as a whole


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One case of an operation."""

    operation: str
    name: str
    build: Callable[[], Call]  # makes the call, with the results of the reference implementation
    may_refuse: bool = False  # whether an exception passes too, for input that the contract excludes
    # Adapts the call to the function, where a name stands for several conventions.
    adapt: Callable[[Callable[..., Any], Call], Call] | None = None

    @property
    def id(self) -> str:
        """The name printed in a report."""
        return f"{self.operation}: {self.name}"


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor so that neighbours in a row are not neighbours in memory."""
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
    wide[..., ::2] = tensor
    return wide[..., ::2]


def arguments(operation: str, *values: Any) -> dict[str, Any]:
    """Name an operation's arguments, given in the contract's order."""
    return dict(zip((value.name for value in BY_NAME[operation].arguments), values, strict=True))


def replaced(call: Call, **changes: Any) -> Call:
    """Replace arguments of a call."""
    return replace(call, arguments={**call.arguments, **changes})


def integers(rows: Iterable[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Make a tensor of integers, possibly empty."""
    return torch.tensor(list(rows), dtype=dtype)
