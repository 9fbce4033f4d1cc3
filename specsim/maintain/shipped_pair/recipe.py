"""Recipe of the shipped pair, and of one that a CPU trains in seconds."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from specsim.training import TrainingOptions

# Windows of the drafters that are unrolled have 256 rows, which suit matrix units, and one token for each draft.
_ROWS = 256
_EAGLE = TrainingOptions(
    num_windows=96, window=_ROWS + 5, num_drafts=5, intermediate_size=1280, draft_vocab_size=3584, from_target=False
)
_DISTILLED = TrainingOptions(num_windows=128, intermediate_size=1024, window=_ROWS + 4)
_PARALLEL = TrainingOptions(
    num_windows=96, window=_ROWS + 1, num_drafts=7, num_roots=48, position_weights="equal", greedy_share=0.75
)
# By folder, in the order of training; steps are those that the shipped drafters took.
_DRAFTERS = {
    "eagle3": replace(_EAGLE, num_steps=16953),
    "eagle": replace(_EAGLE, drafter="eagle", num_steps=2058),
    "mtp": replace(_DISTILLED, drafter="mtp", num_steps=7941, num_drafts=3, window=_ROWS + 3),
    "frozen-kv": replace(_DISTILLED, drafter="frozen-kv", num_steps=6038, num_drafts=4),
    "standalone": replace(_DISTILLED, drafter="standalone", num_steps=6572, num_drafts=1, text_share=1 / 3),
    "p-eagle": replace(_PARALLEL, drafter="p-eagle", num_steps=6924, intermediate_size=448),
    "dflash": replace(_PARALLEL, drafter="dflash", num_steps=6714, intermediate_size=256),
    "dspark": replace(_PARALLEL, drafter="dspark", num_steps=6232, intermediate_size=256, markov_rank=32),
}
# Sentences of the model card, with the fields of a drafter's options.
ARCHITECTURES = {
    "eagle": "EAGLE: reads the tensor that the target's lm_head reads, borrows that lm_head, has an embedding of its "
    "own.",
    "eagle3": "EAGLE-3: reads the hidden states *entering* layers {layers}, transformers' `output_hidden_states[i]`; "
    "it drafts the {options.draft_vocab_size} most frequent tokens, which are {coverage:.1%} of the training text.",
    "p-eagle": "P-EAGLE: an EAGLE-3 head of {options.num_layers} layers, intermediate {options.intermediate_size}, on "
    "the same hidden states; its mask rows read one learned vector in their place; embedding and lm_head are the "
    "target's.",
    "mtp": "MTP: {options.num_drafts} modules of one layer each, intermediate {options.intermediate_size}; each reads "
    "the normed output of the one before, the first one what the target's lm_head reads; embedding and lm_head are "
    "the target's.",
    "frozen-kv": "Frozen KV: {options.num_layers} layers with queries only, which read the keys and values of the "
    "target's last layer from the last committed position; it has an lm_head of its own.",
    "dflash": "DFlash: {options.num_layers} Qwen3 layers, intermediate {options.intermediate_size}, over blocks of a "
    "root and {options.num_drafts} mask tokens; keys and values of the context are made of the hidden states that "
    "EAGLE-3 reads; embedding and lm_head are the target's.",
    "dspark": "DSpark: such layers, whose {options.num_drafts} rows draft the next token, with a bias of rank "
    "{options.markov_rank} by the token before each draft, and a confidence head that reads this token too; its "
    "threshold is 0, so it ends no block unless one is set.",
    "standalone": "Standalone: a Llama of {options.num_layers} layers, tied embedding, with the target's tokenizer; "
    "training started from the target's embedding and evenly spaced layers.",
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Sizes of a pair and of its training, in files, tokens, rows, units and steps."""

    corpus_bytes: int | None = None
    encoded_bytes: int | None = None  # of the training part
    heldout_one_in: int = 64
    tokenizer_one_in: int = 4
    num_prompts: int = 64
    prompts_a_distribution: int = 3
    num_texts: int = 1024  # excerpts of the training part that are shipped
    texts_a_distribution: int = 40

    vocab_size: int = 4096
    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    intermediate_size: int = 768
    target_window: int = 1024
    target_batch: int = 128
    target_steps: int = 8840

    num_continuations: int = 98304  # greedy ones, and as many sampled ones
    prompt_len: int = 128  # tokens of the corpus that they begin with
    continued_len: int = 261  # tokens with them
    drafters: Mapping[str, TrainingOptions] = field(default_factory=lambda: MappingProxyType(_DRAFTERS))


SHIPPED = Recipe()
_SMALL = {"num_steps": 4, "num_windows": 6, "window": 24, "intermediate_size": 96, "draft_vocab_size": 384}
SMOKE = Recipe(
    corpus_bytes=1_500_000,
    heldout_one_in=8,
    tokenizer_one_in=1,
    num_prompts=4,
    num_texts=8,
    vocab_size=512,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=128,
    target_window=64,
    target_batch=8,
    target_steps=4,
    num_continuations=16,
    prompt_len=16,
    continued_len=32,
    drafters={
        name: replace(options, **_SMALL, num_drafts=min(options.num_drafts, 4), num_roots=4, markov_rank=8)
        for name, options in _DRAFTERS.items()
    },
)
