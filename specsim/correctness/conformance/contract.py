"""The table of operations: what each is given and leaves, in the conventions in which its kernels are published.

It is data: nothing is dispatched through it. Shapes are in the letters of core.phases: `B*N` is one dimension, `*`
any shape, and no shape at all is a number of the host. An operation is called with its arguments by position.
"""

from dataclasses import dataclass
from typing import Literal

Role = Literal["in", "out", "inout", "scratch", "returned"]
Match = Literal["exact", "close", "law"]


@dataclass(frozen=True, slots=True)
class Value:
    """An argument or a returned value.

    role: `in` is read and stays as it is; `out` and `inout` are written in place; `scratch` may be overwritten and is
    compared with nothing. match: how what is left is compared: equal bit for bit, within the rounding of its dtype, or
    as samples of a law.
    """

    name: str
    dtype: str
    shape: str = ""
    role: Role = "in"
    match: Match = "exact"


@dataclass(frozen=True, slots=True)
class Operation:
    """name: as --ops takes it. functions: public names of functions of this signature, those in `_cpu` for a CPU alone.

    origin: whose convention it is. values: the arguments in their order, then what is returned.
    """

    name: str
    functions: tuple[str, ...]
    origin: str
    summary: str
    values: tuple[Value, ...]

    @property
    def arguments(self) -> tuple[Value, ...]:
        """What it is called with."""
        return tuple(value for value in self.values if value.role != "returned")

    @property
    def results(self) -> tuple[Value, ...]:
        """What is compared: written in place or returned."""
        return tuple(value for value in self.values if value.role in ("out", "inout", "returned"))


_RETRIEVE = (
    Value("retrive_index", "int64", "B,N"),
    Value("retrive_next_token", "int64", "B,N"),
    Value("retrive_next_sibling", "int64", "B,N"),
)
_VERDICT = (
    Value("predicts", "int32", "B*N", "out"),
    Value("accept_index", "int32", "B,W", "out"),
    Value("accept_token_num", "int32", "B", "out"),
    Value("candidates", "int64", "B,N"),
    *_RETRIEVE,
)

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "draft_topk",
        ("fast_topk",),
        "SGLang",
        "the k largest of every row, largest first, ties to the lower index, NaN above every number",
        (
            Value("values", "float32", "R,V"),
            Value("topk", "int"),
            Value("dim", "int"),
            Value("topk_p", "float32", "R,K", "returned"),
            Value("topk_index", "int64", "R,K", "returned"),
        ),
    ),
    Operation(
        "expand",
        ("select_top_k_tokens",),
        "SGLang",
        "one step of the draft loop: the children of all lanes, and the best of them as the next lanes",
        (
            Value("i", "int"),
            Value("topk_p", "float32", "*"),
            Value("topk_index", "int64", "*"),
            Value("hidden_states", "float32", "*"),
            Value("scores", "float32", "*"),
            Value("topk", "int"),
            Value("input_ids", "int64", "B*K", "returned"),
            Value("lane_hidden_states", "float32", "B*K,H", "returned"),
            Value("lane_scores", "float32", "B,K", "returned"),
            Value("tree_scores", "float32", "*", "returned"),
            Value("tree_tokens", "int64", "*", "returned"),
            Value("tree_parents", "int64", "*", "returned"),
        ),
    ),
    Operation(
        "select",
        ("organize_draft_results",),
        "SGLang",
        "the N-1 best candidates of all steps, as ascending indices, with their tokens",
        (
            Value("score_list", "float32", "*"),
            Value("token_list", "int64", "*"),
            Value("parents_list", "int64", "*"),
            Value("num_draft_token", "int"),
            Value("parent_list", "int64", "*", "returned"),
            Value("top_scores_index", "int64", "B,N-1", "returned"),
            Value("draft_tokens", "int64", "B,N-1", "returned"),
        ),
    ),
    Operation(
        "build_tree",
        ("build_tree_kernel_efficient", "build_tree_kernel_efficient_cpu"),
        "SGLang (sgl-kernel)",
        "mask, positions and first-child / next-sibling links of the chosen candidates",
        (
            Value("parent_list", "int64", "B,K*(S-1)+1"),
            Value("selected_index", "int64", "B,N-1"),
            Value("verified_seq_len", "int64", "B"),
            Value("tree_mask", "bool or packed", "*", "out"),
            Value("positions", "int64", "B*N", "out"),
            *(Value(value.name, value.dtype, value.shape, "out") for value in _RETRIEVE),
            Value("topk", "int"),
            Value("depth", "int"),
            Value("draft_token_num", "int"),
            Value("tree_mask_mode", "int"),
        ),
    ),
    Operation(
        "verify_greedy",
        ("verify_tree_greedy", "verify_tree_greedy_cpu"),
        "SGLang (sgl-kernel)",
        "the path of drafts that equal the target's best tokens; accept_token_num counts drafts only",
        (*_VERDICT, Value("target_predict", "int64", "B,N")),
    ),
    Operation(
        "verify_target_only",
        ("tree_speculative_sampling_target_only",),
        "SGLang (sgl-kernel)",
        "target-only sampling of a path and its bonus token; one uniform a parent, in uniform_samples at its node",
        (
            *_VERDICT,
            Value("uniform_samples", "float32", "B,N"),
            Value("uniform_samples_for_final_sampling", "float32", "B"),
            Value("target_probs", "float32", "B,N,V"),
            Value("draft_probs", "float32", "B,N,V", "scratch"),
            Value("threshold_single", "float"),
            Value("threshold_acc", "float"),
            Value("deterministic", "bool"),
        ),
    ),
    Operation(
        "bonus_tokens",
        ("fill_bonus_tokens_cpu", "fill_bonus_tokens"),
        "SGLang",
        "the last accepted token of every row of W = S + 1; accept_lens count the bonus token",
        (
            Value("accept_tokens", "int32", "B*W"),
            Value("accept_lens", "int32", "B"),
            Value("bonus_tokens", "int32", "B", "out"),
            Value("accept_stride", "int"),
        ),
    ),
    Operation(
        "move_kv",
        ("move_kv_cache_native",),
        "SGLang",
        "the KV of the accepted path to its place, all layers, everything read before anything is written",
        (
            Value("k_buffer", "float32", "*", "inout"),
            Value("v_buffer", "float32", "*", "inout"),
            Value("tgt_loc", "int64", "*"),
            Value("src_loc", "int64", "*"),
        ),
    ),
    Operation(
        "cache_locations",
        ("assign_extend_cache_locs_func",),
        "SGLang",
        "the slots of columns start to end of every request, one request after the other",
        (
            Value("req_pool_indices", "int64", "B"),
            Value("req_to_token", "int32", "*"),
            Value("start_offset", "int64", "B"),
            Value("end_offset", "int64", "B"),
            Value("batch_size", "int"),
            Value("draft_token_num", "int"),
            Value("device", "device"),
            Value("out_cache_loc", "int64", "B*N", "returned"),
        ),
    ),
    Operation(
        "lane_locations",
        ("draft_lane_locations",),
        "specsim",
        "the slots of every lane's steps, and which slots of the prefix's last page are copied where",
        (
            Value("req_pool_indices", "int64", "B"),
            Value("req_to_token", "int64", "*"),
            Value("seq_lens", "int64", "B"),
            Value("topk", "int"),
            Value("num_steps", "int"),
            Value("page_size", "int"),
            Value("out_cache_loc", "int64", "B*K*S", "returned"),
            Value("source_cache_loc", "int64", "*", "returned"),
            Value("target_cache_loc", "int64", "*", "returned"),
        ),
    ),
    Operation(
        "shift_ids",
        ("rotate_input_ids_triton", "rotate_input_ids_cpu"),
        "SGLang",
        "a request's ids one place to the left, then the token after them",
        (
            Value("input_ids", "int64", "R", "inout"),
            Value("extend_start_loc", "int64", "B"),
            Value("extend_seq_lens", "int64", "B"),
            Value("topk_index", "int64", "B"),
        ),
    ),
    Operation(
        "tree_attention",
        ("tree_attention",),
        "specsim",
        "softmax(q·k / √D) v of every node over its prefix, its ancestors and itself",
        (
            Value("q", "float32", "B*N,A,D"),
            Value("k_buffer", "float32", "*"),
            Value("v_buffer", "float32", "*"),
            Value("o", "float32", "B*N,A,D", "out", "close"),
            Value("kv_indptr", "int32", "B+1"),
            Value("kv_indices", "int64", "*"),
            Value("tree_mask", "bool or packed", "*"),
            Value("tree_mask_mode", "int"),
            Value("draft_token_num", "int"),
        ),
    ),
    Operation(
        "chain_rejection",
        ("rejection_sample",),
        "vLLM",
        "rejection sampling of chains of unequal lengths, one after the other; rows padded with -1",
        (
            Value("draft_token_ids", "int32", "R"),
            Value("num_draft_tokens", "list"),
            Value("max_spec_len", "int"),
            Value("cu_num_draft_tokens", "int32", "B"),
            Value("draft_probs", "float32", "R,V"),
            Value("target_probs", "float32", "R,V", "scratch"),
            Value("bonus_token_ids", "int32", "B,1"),
            Value("sampling_metadata", "object"),
            Value("output_token_ids", "int32", "B,W", "returned", "law"),
        ),
    ),
)

BY_NAME = {operation.name: operation for operation in OPERATIONS}
