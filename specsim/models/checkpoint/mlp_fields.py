"""MLP of every layer, dense or of experts, from a config.json."""

from specsim.core.limits import MOST_EXPERTS
from specsim.core.target import MLP, DenseMLP, Experts
from specsim.models.checkpoint.fields import Fields


def read_mlps(family: str, fields: Fields, num_layers: int) -> list[MLP]:
    """Read the MLP of each layer."""
    if family == "gpt_oss":
        return [_gpt_oss(fields)] * num_layers
    if family == "qwen3_moe":
        return _qwen3_moe(fields, num_layers)
    dense = DenseMLP(fields.integer("intermediate_size"), family == "llama" and fields.flag("mlp_bias"))
    if family == "deepseek_v3":
        count = fields.integer("first_k_dense_replace", least=0)
        experts = deepseek_experts(fields)
        return [dense if layer < count else experts for layer in range(num_layers)]
    return [dense] * num_layers


def _gpt_oss(fields: Fields) -> Experts:
    for name, value in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if fields.number(name, default=value) != value:
            raise fields.error(name, str(value))
    return Experts(
        _num_experts(fields),
        fields.integer("num_experts_per_tok"),
        fields.integer("intermediate_size"),
        "softmax_of_top",
        activation="clamped",
        bias=True,
        router_bias=True,
    )


def _qwen3_moe(fields: Fields, num_layers: int) -> list[MLP]:
    """Read experts, and dense MLPs in `mlp_only_layers` and off `decoder_sparse_step`."""
    dense_layers = fields.get("mlp_only_layers", [])
    allowed = f"a list of layers 0 to {num_layers - 1}"
    if not isinstance(dense_layers, list) or any(each not in range(num_layers) for each in dense_layers):
        raise fields.error("mlp_only_layers", allowed)
    step = fields.integer("decoder_sparse_step", default=1)
    sparse = [layer not in dense_layers and (layer + 1) % step == 0 for layer in range(num_layers)]
    experts = Experts(
        _num_experts(fields),
        fields.integer("num_experts_per_tok"),
        fields.integer("moe_intermediate_size"),
        "softmax",
        normalise=fields.flag("norm_topk_prob"),
    )
    if all(sparse):
        return [experts] * num_layers
    dense = DenseMLP(fields.integer("intermediate_size"))
    return [experts if is_sparse else dense for is_sparse in sparse]


def deepseek_experts(fields: Fields) -> Experts:
    """Read DeepSeek-V3's experts, which its MTP modules have too."""
    fields.choice("scoring_func", ("sigmoid",), default="sigmoid")
    fields.choice("topk_method", ("noaux_tc",), default="noaux_tc")
    if fields.integer("moe_layer_freq", default=1) != 1:
        raise fields.error("moe_layer_freq", "1")
    size = fields.integer("moe_intermediate_size")
    shared = fields.integer("n_shared_experts", default=0, least=0)
    return Experts(
        fields.integer("n_routed_experts", most=MOST_EXPERTS),
        fields.integer("num_experts_per_tok"),
        size,
        "grouped_sigmoid",
        normalise=fields.flag("norm_topk_prob", default=True),
        groups=fields.integer("n_group"),
        top_groups=fields.integer("topk_group"),
        scaling=fields.number("routed_scaling_factor"),
        shared_size=shared * size or None,
    )


def _num_experts(fields: Fields) -> int:
    """Read `num_experts`, which some files name `num_local_experts`."""
    names = [name for name in ("num_experts", "num_local_experts") if fields.get(name) is not None] or ["num_experts"]
    counts = [fields.integer(name, most=MOST_EXPERTS) for name in names]
    if len(set(counts)) > 1:
        raise fields.error("num_local_experts", f"num_experts, {counts[0]}, where both are given")
    return counts[0]
