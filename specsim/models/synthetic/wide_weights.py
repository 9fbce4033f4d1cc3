"""Weights in which attention finds a token by its distance, and a head that keeps decisions apart.

Entries of a hidden state are CODE, CONTEXT and SOFT, as wide_pair says.
"""

import torch

from specsim.core.target import ModelConfig
from specsim.models.checkpoint.layout import Layout, target_layout
from specsim.models.synthetic.drafter import Tensors

PART = 32  # entries of each part of a hidden state
CODE = slice(0, PART)
CONTEXT = slice(PART, 2 * PART)
SOFT = slice(2 * PART, 3 * PART)
HEAD = 16  # entries of a head
SHAPE = {"hidden_size": 3 * PART, "num_heads": 8, "num_kv_heads": 4, "head_dim": HEAD, "vocab_size": 96}
CLASSES = 5  # of tokens; tokens of one class are followed by tokens of the next
CODES = 6  # of each class
UNIT = 0.25  # of the ladders, in nats
STEPS = (1.3, 4.7, 9.6, 14.9, 19.06)  # of each class's ladder; sums of five ranks are all different
NEAR = (9, 4, 2, 2, 1)  # ranks of each class with such steps; later ones have steps of FAR
FAR = 5.0
OTHERS = 130.0  # units at which tokens of other classes begin
BONUS = (2.5, 0.6)  # units added by the codes of the two tokens before
SHARE = (2 / 3) ** 0.5  # root mean square of an embedding
PEAK = 8.4  # of the queries and keys that find a token by its distance
HARD = 3.6  # the same in norms of queries and keys
BIAS = 0.02  # scale of projections' biases
SCALES = {"o_proj": 0.2, "down_proj": 0.33}  # of random weights, 1.2 / sqrt(inputs) otherwise
FUSING = ("fc.weight", "eh_proj", "pre_projection")  # projections of an embedding and a hidden state
_PAIRS = torch.tensor([0, 1, 2, HEAD // 2, HEAD // 2 + 1, HEAD // 2 + 2])  # entries of the three fastest rotations


def _hadamard(size: int) -> torch.Tensor:
    rows = torch.ones(1, 1, dtype=torch.float64)
    while len(rows) < size:
        rows = torch.cat([torch.cat([rows, rows], 1), torch.cat([rows, -rows], 1)])
    return rows


def embedding(vocab_size: int, generator: torch.Generator) -> torch.Tensor:
    """Make [V, H]: code, no context, random signs."""
    token = torch.arange(vocab_size)
    code = _hadamard(PART)[token % CLASSES * CODES + token // CLASSES % CODES]
    signs = torch.randint(2, (vocab_size, PART), generator=generator, dtype=torch.float64) * 2 - 1
    return torch.cat([code, torch.zeros(vocab_size, PART, dtype=torch.float64), signs], 1)


def head(vocab_size: int) -> torch.Tensor:
    """Make [V, H]: the ladder of every code, and the bonus by the bits of the context."""
    token = torch.arange(vocab_size)
    index = token // CLASSES
    code = torch.arange(CLASSES * CODES)[:, None]
    rank = (index + 7 * (code % CODES)) % (vocab_size // CLASSES + 1)  # [codes, V]
    near = torch.tensor(NEAR)[code // CODES]
    step = torch.tensor(STEPS, dtype=torch.float64)[code // CODES]
    ladder = step * rank.minimum(near) + FAR * (rank - near).clamp(min=0)
    is_next = token % CLASSES == (code // CODES + 1) % CLASSES
    cost = torch.where(is_next, ladder, OTHERS + 0.1 * ((token * 37 + 11 * code) % vocab_size))
    head = torch.zeros(vocab_size, 3 * PART, dtype=torch.float64)
    head[:, CODE] = -UNIT * cost.T @ _hadamard(PART)[: CLASSES * CODES] / PART
    for bit, bonus, sign in zip((3, HEAD + 5), BONUS, (index % 2, index // 2 % 2), strict=True):
        head[:, CONTEXT.start + bit] = UNIT * bonus * (sign - 0.5)
    return head


def random_tensors(layout: Layout, generator: torch.Generator) -> Tensors:
    """Draw the weights that make SOFT: projections to it, and norms around 1 there."""
    tensors = {}
    for name, shape in layout.items():
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name.endswith("bias"):
            tensors[name] = BIAS * values
        elif len(shape) == 1:
            tensors[name] = torch.ones(shape, dtype=torch.float64)
            tensors[name][SOFT] += 0.1 * values[SOFT]
        else:
            scale = next((factor for part, factor in SCALES.items() if part in name), 1.2 * shape[1] ** -0.5)
            tensors[name] = scale * values
        if any(part in name for part in ("o_proj", "down_proj", *FUSING)):
            tensors[name][: SOFT.start] = 0
    for name in layout:
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            tensors[name] = torch.ones(HEAD, dtype=torch.float64).index_fill(0, _PAIRS, HARD)
            projection = tensors[name.replace("_norm", "_proj")]
            projection.view(-1, HEAD, projection.shape[1])[:, _PAIRS] = 0
    return tensors


def look_for(tensors: Tensors, prefix: str, head: int, distance: int, model: ModelConfig, scale: float = 1.0) -> None:
    """Make a head's query that of `find`, for keys that are set elsewhere."""
    frequency = model.rope.theta ** (-torch.arange(3, dtype=torch.float64) / (HEAD // 2))
    angle = -distance * frequency
    query = tensors[f"{prefix}q_proj.weight"].unflatten(0, (-1, HEAD))[head]
    query[:] = 0
    query[_PAIRS, 0] = PEAK / scale * torch.cat([angle.cos(), angle.sin()])


def find(tensors: Tensors, prefix: str, head: int, distance: int, model: ModelConfig, scale: float = 1.0) -> None:
    """Make a head attend to the token at a distance: its query is rotated by that number of positions.

    scale: of the constant entry 0 in the attention's input.
    """
    look_for(tensors, prefix, head, distance, model, scale)
    key = tensors[f"{prefix}k_proj.weight"].unflatten(0, (-1, HEAD))[_kv_head(head, model)]
    key[:] = 0
    key[_PAIRS[:3], 0] = PEAK / scale


def _kv_head(head: int, model: ModelConfig) -> int:
    return head // (model.num_heads // model.num_kv_heads)


def copy(
    tensors: Tensors, prefix: str, head: int, source: int | None, to: int, model: ModelConfig, scale: float = 1.0
) -> None:
    """Make a head copy 16 entries of the attention's input from `source` to `to`.

    source None: the KV head's output is already set.
    """
    group = _kv_head(head, model)
    if source is not None:
        value = tensors[f"{prefix}v_proj.weight"]
        value[HEAD * group : HEAD * (group + 1)] = 0
        value[HEAD * group + torch.arange(HEAD), source + torch.arange(HEAD)] = scale
    output = tensors[f"{prefix}o_proj.weight"]
    output[:, HEAD * head : HEAD * (head + 1)] = 0
    output[to + torch.arange(HEAD), HEAD * head + torch.arange(HEAD)] = 1.0


def read_two_before(tensors: Tensors, prefix: str, model: ModelConfig) -> None:
    """Make two heads of one KV head copy the codes of the tokens one and two before into CONTEXT."""
    find(tensors, prefix, 0, 1, model)
    find(tensors, prefix, 1, 2, model)
    copy(tensors, prefix, 0, 0, CONTEXT.start, model)
    copy(tensors, prefix, 1, None, CONTEXT.start + HEAD, model)


def language_model(config: ModelConfig, generator: torch.Generator) -> Tensors:
    """Make a language model; with one layer it knows one token before, with two the token before that too."""
    tensors = random_tensors(target_layout(config), generator)
    tensors["model.embed_tokens.weight"] = embedding(config.vocab_size, generator)
    tensors["lm_head.weight"] = head(config.vocab_size)
    tensors["model.norm.weight"] *= 1.3
    for layer, norm in enumerate((SHARE, 1.0)[: config.num_layers]):  # of the layer's input, approximately
        prefix = f"model.layers.{layer}.self_attn."
        find(tensors, prefix, 0, 1 + layer, config, 1 / norm)
        copy(tensors, prefix, 0, 0, CONTEXT.start + HEAD * layer, config, norm)
    return tensors
