"""Drafters as a cost needs them: shapes of their layers, and rows of their forwards in a round."""

from dataclasses import dataclass, replace
from math import gcd
from typing import Any, NamedTuple

from specsim.core.config import SpecConfig
from specsim.core.errors import require_choice
from specsim.simulator.bounds import whole
from specsim.simulator.layers import Layers
from specsim.simulator.model import Model
from specsim.simulator.weight_format import HALF

KINDS = ("eagle", "eagle3", "p-eagle", "mtp", "dflash", "dspark")
OWN_VOCABULARY = ("eagle3", "p-eagle")  # kinds whose heads have a vocabulary of drafts
BLOCKS = ("dflash", "dspark")
# As vLLM's llama_eagle.py and llama_eagle3.py launch them one by one; graphs are compiled, which fuses them. EAGLE-1:
# concatenation, fc and sum, less two norms that it lacks, and the fc that the layer's weights include counts as one.
EAGLE_KERNELS = 1
# A second norm, concatenation, and four that write the draft vocabulary's logits into the target's logits.
EAGLE3_KERNELS = 6
P_EAGLE_LAYERS = 4  # amazon/GPT-OSS-20B-P-EAGLE
BLOCK_LAYERS = 5  # z-lab's heads for Qwen3, which read as many of the target's layers, and DeepSpec's
MARKOV_RANK = 256  # DeepSpec's heads for Qwen3


class Rows(NamedTuple):
    """Rows of each request in the forwards of a round's drafts."""

    draft: int  # of every forward of the draft phase
    draft_head: int  # of these with logits
    beyond: float  # columns that they read after the context, on average
    extend: int  # of draft-extend
    extend_head: int  # of these with logits


@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafter that runs forwards.

    One that reads the target's hidden states (EAGLE, MTP) has its first draft from draft-extend, and num_steps - 1
    forwards make the others. A language model of its own runs num_steps forwards and catches up in the first of them.
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

    def rows(self, config: SpecConfig) -> Rows:
        """Count the rows of each request in the forwards of a round."""
        steps = config.num_steps
        if self.first_slot is not None:
            block = steps + self.first_slot
            return Rows(block, steps, block, steps + 1, 0)
        if self.is_parallel:
            return Rows(0, 0, 0, 2 * steps, steps)
        lanes = config.topk
        return Rows(lanes, lanes, lanes * self.forwards(steps) / 2, steps + 1, 1)

    def parents(self, config: SpecConfig) -> list[int]:
        """Count the nodes of each depth whose children's logits wait for the node, without step_weights none."""
        if not self.step_weights:
            return []
        return [size // config.topk for size in config.level_sizes]


def drafter(
    kind: str, target: Model, draft_vocab_size: int | None = None, intermediate_size: int | None = None
) -> Drafter:
    """Make the drafter of a target, of one or a few layers of the target's width.

    `eagle`: fc over token and feature [H, 2H] before every forward, the target's head. `eagle3`: fc over three features
    [H, 3H] in draft-extend, attention over token and feature, a head over `draft_vocab_size`. Both are a dense layer in
    16 bits whatever the target is, with a gated feed-forward of `intermediate_size`; None: that of the target's config,
    the rule by which vllm-project/speculators trains heads. Of targets with experts there are wider ones: those of
    sgl-project/SpecForge for gpt-oss-20b and Qwen3-235B-A22B, and nvidia/gpt-oss-120b-Eagle3, have 6 H. `mtp`: fc like
    eagle's, and the target's last layer, experts included. `p-eagle`: eagle3's, with three dense layers more. `dflash`,
    `dspark`: five dense layers, fc over five features in draft-extend, the target's head; dspark has two tables of
    MARKOV_RANK for the token before a draft. Sizes of the last three are those of published heads.
    """
    require_choice("drafter", kind, KINDS)
    last = replace(target.layers[-1], count=1, window=None)
    square = target.hidden_size**2
    alone = replace(target, name=f"{kind} of {target.name}", embedding_weights=0)
    if kind == "mtp":
        return Drafter(replace(alone, layers=(replace(last, dense_weights=last.dense_weights + 2 * square),)))
    width = target.intermediate_size if intermediate_size is None else whole("intermediate_size", intermediate_size)
    feed_forward = {"dense_weights": 3 * target.hidden_size * width, "parts": gcd(last.parts, width)}
    dense = replace(last, experts=0, experts_per_token=0, expert_weights=0, **feed_forward)
    alone = replace(alone, intermediate_size=width, weight_format=HALF, expert_format=HALF)
    if kind in BLOCKS:
        return _block(kind, alone, dense)
    if kind == "eagle":
        entering = replace(dense, dense_weights=dense.dense_weights + 2 * square)
        return Drafter(replace(alone, layers=(entering,), eager_kernels=EAGLE_KERNELS))
    vocab = target.vocab_size if draft_vocab_size is None else draft_vocab_size
    whole("draft_vocab_size", vocab)
    first = replace(dense, attention_weights=dense.attention_weights + dense.input_weights)
    more = replace(dense, count=P_EAGLE_LAYERS - 1)
    layers = (first, more) if kind == "p-eagle" else (first,)
    head: dict[str, Any] = {"vocab_size": vocab, "head_weights": vocab * target.hidden_size}
    model = replace(alone, layers=layers, entry_weights=3 * square, eager_kernels=EAGLE3_KERNELS, **head)
    return Drafter(model, is_parallel=kind == "p-eagle")


def _block(kind: str, alone: Model, layer: Layers) -> Drafter:
    """Make a block drafter of dense layers."""
    layers = (replace(layer, count=BLOCK_LAYERS),)
    markov = MARKOV_RANK * alone.vocab_size if kind == "dspark" else 0
    entry = BLOCK_LAYERS * alone.hidden_size**2
    model = replace(alone, layers=layers, entry_weights=entry, embedding_weights=2 * markov)
    return Drafter(model, first_slot=0 if kind == "dspark" else 1, step_weights=markov)
