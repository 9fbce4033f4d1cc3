"""Drafters as a cost needs them: shapes of their layers, and rows of their forwards in a round."""

from dataclasses import dataclass, replace
from math import gcd
from typing import NamedTuple

from specsim.core.arguments import check_arguments
from specsim.core.config import SpecConfig
from specsim.core.errors import require_choice
from specsim.core.kinds import SERVED
from specsim.core.verifiers import resolve
from specsim.simulator.bounds import integer
from specsim.simulator.layers import Layers
from specsim.simulator.model import Model
from specsim.simulator.quantization import HALF

# As vLLM's llama_eagle.py and llama_eagle3.py launch them one by one; graphs are compiled, which fuses them. EAGLE-1:
# concatenation, fc and sum, less two norms that it lacks, and the fc that the layer's weights include counts as one.
EAGLE_KERNELS = 1
# A second norm, concatenation, and four that write the draft vocabulary's logits into the target's logits.
EAGLE3_KERNELS = 6
P_EAGLE_LAYERS = 4  # amazon/GPT-OSS-20B-P-EAGLE
BLOCK_LAYERS = 5  # z-lab's heads for Qwen3, which read as many of the target's layers, and DeepSpec's
MARKOV_RANK = 256  # DeepSpec's heads for Qwen3


class DrafterRows(NamedTuple):
    """Rows of each request in the forwards of a round's drafts."""

    draft: int  # of every forward of the draft phase
    draft_head: int  # of these with logits
    beyond: float  # columns that they read after the context, on average
    extend: int  # of draft-extend
    extend_head: int  # of these with logits


@check_arguments
@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafter that runs forwards.

    One that reads the target's hidden states has its first draft from draft-extend, and num_steps - 1 forwards make the
    others. A language model of its own runs num_steps forwards and catches up in the first of them.
    """

    model: Model
    is_feature: bool = True  # reads the target's hidden states
    is_parallel: bool = False  # draft-extend makes all drafts, with num_steps - 1 mask rows more (P-EAGLE)
    # Row of a block that makes the first draft: 1 (DFlash) or 0 (DSpark). One forward over a block makes all drafts,
    # and draft-extend only writes its context. None: there is no block.
    first_slot: int | None = None
    step_weights: int = 0  # product between one draft and the next (DSpark's Markov head)

    @property
    def is_block(self) -> bool:
        return self.first_slot is not None

    def forwards(self, num_steps: int) -> int:
        """Number of forwards of one draft phase."""
        if self.is_parallel or self.is_block:
            return min(num_steps, 1) if self.is_block else 0
        return max(num_steps - 1, 0) if self.is_feature else num_steps

    def steps(self, num_steps: int) -> int:
        """Number of drafting steps that the server's own work follows."""
        return min(num_steps, 1) if self.is_parallel or self.is_block else num_steps

    def rows(self, config: SpecConfig) -> DrafterRows:
        """Count the rows of each request in the forwards of a round."""
        steps = config.num_steps
        if self.first_slot is not None:
            block = steps + self.first_slot
            return DrafterRows(block, steps, block, steps + 1, 0)
        if self.is_parallel:
            return DrafterRows(0, 0, 0, 2 * steps, steps)
        lanes = config.topk
        return DrafterRows(lanes, lanes, lanes * self.forwards(steps) / 2, steps + 1, 1)

    def parents(self, config: SpecConfig) -> list[int]:
        """Count the nodes of each depth whose children's logits wait for the node, without step_weights none."""
        if not self.step_weights:
            return []
        return [size // config.topk for size in config.level_sizes]


@check_arguments
def drafter(
    kind: str, target: Model, draft_vocab_size: int | None = None, intermediate_size: int | None = None
) -> Drafter:
    """Make the drafter of a target, of one or a few layers of the target's width.

    draft_vocab_size: tokens that its head drafts from; None: the target's. intermediate_size: of the gated
    feed-forward of a head's dense layers; None: that of the target's config, the rule by which
    vllm-project/speculators trains heads. Of targets with experts there are wider ones: those of sgl-project/SpecForge
    for gpt-oss-20b and Qwen3-235B-A22B, and nvidia/gpt-oss-120b-Eagle3, have 6 H.
    """
    require_choice("drafter", kind, tuple(SERVED))
    head = resolve(SERVED[kind].cost)(target, draft_vocab_size, intermediate_size)
    sizes = {} if draft_vocab_size is None else _vocabulary(target, draft_vocab_size)
    return replace(head, model=replace(head.model, name=f"{kind} of {target.name}", **sizes))


def trained_vocabulary(kind: str, size: int) -> int | None:
    """Return this size for a kind whose heads are trained with a vocabulary of drafts, None for others."""
    return size if kind in SERVED and SERVED[kind].has_vocabulary else None


def _vocabulary(target: Model, draft_vocab_size: int | None) -> dict[str, int]:
    """Size a head with a vocabulary of drafts, the target's where there is none."""
    size = integer("draft_vocab_size", target.vocab_size if draft_vocab_size is None else draft_vocab_size)
    return {"vocab_size": size, "head_weights": size * target.hidden_size}


def _dense(target: Model, intermediate_size: int | None) -> tuple[Model, Layers]:
    """Make a head without layers, and a dense layer of it, in 16 bits whatever the target is."""
    width = target.intermediate_size if intermediate_size is None else integer("intermediate_size", intermediate_size)
    last = target.layers[-1]
    feed_forward = {"dense_weights": 3 * target.hidden_size * width, "parts": gcd(last.parts, width)}
    none = {"window": None, "experts": 0, "experts_per_token": 0, "expert_weights": 0}
    formats = {"weight_format": HALF, "expert_format": HALF}
    head = replace(target, embedding_weights=0, intermediate_size=width, **formats)
    return head, replace(last, count=1, **none, **feed_forward)


def eagle_head(target: Model, _: int | None, intermediate_size: int | None) -> Drafter:
    """Make a dense layer with fc over token and feature [H, 2H] before every forward, and the target's head."""
    head, layer = _dense(target, intermediate_size)
    entering = replace(layer, dense_weights=layer.dense_weights + 2 * target.hidden_size**2)
    return Drafter(replace(head, layers=(entering,), eager_kernels=EAGLE_KERNELS))


def eagle3_head(target: Model, draft_vocab_size: int | None, intermediate_size: int | None) -> Drafter:
    """Make fc over three features [H, 3H] in draft-extend, attention over token and feature, a head over its drafts."""
    head, layer = _dense(target, intermediate_size)
    first = replace(layer, attention_weights=layer.attention_weights + layer.input_weights)
    weights = {"entry_weights": 3 * target.hidden_size**2, **_vocabulary(target, draft_vocab_size)}
    return Drafter(replace(head, layers=(first,), eager_kernels=EAGLE3_KERNELS, **weights))


def p_eagle_head(target: Model, draft_vocab_size: int | None, intermediate_size: int | None) -> Drafter:
    """Make an EAGLE-3 head with three dense layers more, as published heads have."""
    head = eagle3_head(target, draft_vocab_size, intermediate_size).model
    more = replace(_dense(target, intermediate_size)[1], count=P_EAGLE_LAYERS - 1)
    return Drafter(replace(head, layers=(*head.layers, more)), is_parallel=True)


def mtp_module(target: Model, *_: int | None) -> Drafter:
    """Make the target's last layer, experts included, with fc over token and feature before every forward."""
    last = replace(target.layers[-1], count=1, window=None)
    entering = replace(last, dense_weights=last.dense_weights + 2 * target.hidden_size**2)
    return Drafter(replace(target, embedding_weights=0, layers=(entering,)))


def dflash_head(target: Model, _: int | None, intermediate_size: int | None) -> Drafter:
    """Make five dense layers, fc over five features in draft-extend, and the target's head, as published heads have."""
    head, layer = _dense(target, intermediate_size)
    entry = BLOCK_LAYERS * target.hidden_size**2
    return Drafter(replace(head, layers=(replace(layer, count=BLOCK_LAYERS),), entry_weights=entry), first_slot=1)


def dspark_head(target: Model, draft_vocab_size: int | None, intermediate_size: int | None) -> Drafter:
    """Make a DFlash head with two tables of MARKOV_RANK, for the token before a draft and for the draft."""
    head = dflash_head(target, None, intermediate_size).model
    markov = MARKOV_RANK * _vocabulary(target, draft_vocab_size)["vocab_size"]
    tables = MARKOV_RANK * target.vocab_size + markov
    return Drafter(replace(head, embedding_weights=tables), first_slot=0, step_weights=markov)
