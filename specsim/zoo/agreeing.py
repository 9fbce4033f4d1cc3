"""Random pairs made on the spot: a small target, and a drafter that agrees with it about as often as a dial says.

The target's residual stream is dominated by the embedding of its last token, so its next token depends mostly on that
token. The drafter passes the same embedding on and reads it through the same head, so it proposes the same token
unless what the layers add (`noise`, and the context that the drafter does not model) turns the decision.
"""

from collections.abc import Callable

import torch

from specsim.checkpoint import DrafterCheckpoint, Pair, TargetCheckpoint
from specsim.drafter import DrafterConfig
from specsim.target import ModelConfig

Init = Callable[..., torch.Tensor]


def tiny_config(
    family: str = "llama", num_layers: int = 2, vocab_size: int = 48, window: int | None = None, **changes
) -> ModelConfig:
    """A decoder of hidden 32 with four query heads and two KV heads of 16."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    limits = {"rms_norm_eps": 1e-5, "max_position_embeddings": 512, "rope_theta": 10000.0}
    windows = (window,) * num_layers
    sizes = {"vocab_size": vocab_size, "num_layers": num_layers, "sliding_windows": windows}
    return ModelConfig(**{"family": family, **shape, **limits, **sizes, **changes})


def random_layer(config: ModelConfig, init: Init, prefix: str, attention_input: int) -> dict[str, torch.Tensor]:
    """One decoder layer's attention and MLP by their checkpoint names."""
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {
        "self_attn.q_proj": (heads, attention_input),
        "self_attn.k_proj": (kv_heads, attention_input),
        "self_attn.v_proj": (kv_heads, attention_input),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return {f"{prefix}{name}.weight": init(*shape) for name, shape in shapes.items()}


def random_target(config: ModelConfig, seed: int = 0, context: float = 0.1, sharpness: float = 0.5) -> TargetCheckpoint:
    """Random weights of a dense family. context: what the layers add to the embeddings, whose entries are ±1;
    sharpness: scale of the head.
    """
    generator = torch.Generator().manual_seed(seed)

    def init(*shape: int, scale: float = context) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    def norm(size: int) -> torch.Tensor:
        return 1 + init(size, scale=0.05)

    hidden = config.hidden_size
    signs = torch.randint(0, 2, (config.vocab_size, hidden), generator=generator) * 2.0 - 1
    signs[:, 0] = 1.0
    tensors = {"model.embed_tokens.weight": signs, "model.norm.weight": norm(hidden)}
    tensors["lm_head.weight"] = init(config.vocab_size, hidden, scale=sharpness)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        tensors |= random_layer(config, init, prefix, hidden)
        tensors |= {
            f"{prefix}input_layernorm.weight": norm(hidden),
            f"{prefix}post_attention_layernorm.weight": norm(hidden),
        }
        if config.family == "qwen3":
            tensors |= {f"{prefix}self_attn.{name}_norm.weight": norm(config.head_dim) for name in "qk"}
    return TargetCheckpoint(config, tensors)


def agreeing_pair(
    kind: str = "eagle3",
    family: str = "llama",
    seed: int = 0,
    noise: float = 0.03,
    num_layers: int = 2,
    draft_vocab_size: int | None = None,
    **changes,
) -> Pair:
    """A pair without a tokenizer whose drafter agrees with its target about half the time at the default noise; more
    noise, less agreement.

    changes: fields of the target's ModelConfig, or `window`. An EAGLE-3 drafter covers three quarters of the
    vocabulary unless told.
    """
    config = tiny_config(family, num_layers, **changes)
    target = random_target(config, seed)
    generator = torch.Generator().manual_seed(seed + 1)

    def init(*shape: int, scale: float = noise) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    model = tiny_config(family, 1, **changes)
    drafter = (
        _eagle(model, target, init) if kind == "eagle" else _eagle3(model, target, init, num_layers, draft_vocab_size)
    )
    return Pair(target=target, drafter=drafter, tokenizer=None, name=f"agreeing {kind} on {family}")


def _eagle(model: ModelConfig, target: TargetCheckpoint, init: Init) -> DrafterCheckpoint:
    """fc passes the embedding on."""
    hidden = model.hidden_size
    tensors = {
        "embed_tokens.weight": target.tensors["model.embed_tokens.weight"],
        "fc.weight": torch.cat([torch.eye(hidden, dtype=torch.float64), init(hidden, hidden)], dim=1),
        "fc.bias": init(hidden),
        **_plain_layer(model, init, "layers.0.", hidden),
    }
    config = DrafterConfig(kind="eagle", model=model, draft_vocab_size=model.vocab_size, target_hidden_size=hidden)
    return DrafterCheckpoint(config, tensors)


def _eagle3(
    model: ModelConfig, target: TargetCheckpoint, init: Init, num_layers: int, draft_vocab_size: int | None
) -> DrafterCheckpoint:
    """Attention, sharp on the row itself, replaces the residual by the new token's embedding."""
    hidden, draft_vocab = model.hidden_size, draft_vocab_size or model.vocab_size * 3 // 4
    chosen = torch.linspace(0, model.vocab_size - 1, draft_vocab).long()
    layer = _plain_layer(model, init, "midlayer.", 2 * hidden)
    for name in ("q_proj", "k_proj"):
        layer[f"midlayer.self_attn.{name}.weight"][:, 0] += 4.0
    identity = torch.eye(hidden, dtype=torch.float64)
    layer["midlayer.self_attn.v_proj.weight"] += torch.cat([identity, -identity], dim=1)
    group = model.num_heads // model.num_kv_heads
    spread = torch.zeros(hidden, model.num_kv_heads, group, model.head_dim, dtype=torch.float64)
    spread[:, :, 0] = identity.unflatten(1, (model.num_kv_heads, model.head_dim))
    layer["midlayer.self_attn.o_proj.weight"] += spread.flatten(1)
    feature_layers = tuple(range(num_layers)) if num_layers < 4 else (1, 2, 3)
    tensors = {
        "fc.weight": init(hidden, hidden * len(feature_layers), scale=(hidden * len(feature_layers)) ** -0.5),
        **layer,
        "midlayer.hidden_norm.weight": torch.ones(hidden, dtype=torch.float64),
        "midlayer.input_layernorm.weight": torch.ones(hidden, dtype=torch.float64),
        "norm.weight": torch.ones(hidden, dtype=torch.float64),
        "lm_head.weight": target.tensors["lm_head.weight"][chosen],
        "d2t": chosen - torch.arange(draft_vocab),
        "t2d": torch.zeros(model.vocab_size, dtype=torch.bool).index_fill(0, chosen, True),
    }
    config = DrafterConfig("eagle3", model, draft_vocab, hidden, feature_layers)
    return DrafterCheckpoint(config, tensors)


def _plain_layer(model: ModelConfig, init: Init, prefix: str, attention_input: int) -> dict[str, torch.Tensor]:
    norm = torch.ones(model.hidden_size, dtype=torch.float64)
    tensors = random_layer(model, init, prefix, attention_input) | {f"{prefix}post_attention_layernorm.weight": norm}
    if model.family == "qwen3":
        tensors |= {
            f"{prefix}self_attn.{name}_norm.weight": torch.ones(model.head_dim, dtype=torch.float64) for name in "qk"
        }
    return tensors
