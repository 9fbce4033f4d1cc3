"""Sizes of a pair and of its training: the shipped one, and one that a CPU trains in seconds."""

from dataclasses import dataclass

from specsim.training.building import HeadSizes


@dataclass(frozen=True, slots=True)
class Recipe:
    """Sizes in files, tokens, rows or units, training times in seconds; a head is an EAGLE drafter's one layer."""

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
    target_seconds: float = 290

    num_rollouts: int = 98304
    rollouts_a_batch: int = 8192
    rollout_prompt: int = 128
    rollout_window: int = 261  # 256 rows, which suit matrix units, and the unrolled steps
    rollout_seconds: float = 60  # no batch begins later

    head_intermediate_size: int = 1280
    draft_vocab_size: int = 3584
    feature_layers: tuple[int, ...] = (1, 2, 3)
    num_unrolled: int = 5
    head_batch: int = 96
    eagle3_seconds: float = 900
    eagle_seconds: float = 100

    student_batch: int = 128  # of MTP, frozen KV and standalone
    num_mtp_modules: int = 3
    mtp_intermediate_size: int = 1024
    mtp_seconds: float = 330
    frozen_kv_hidden_size: int = 256
    frozen_kv_layers: int = 2
    frozen_kv_intermediate_size: int = 1024
    frozen_kv_steps: int = 4
    frozen_kv_seconds: float = 330
    standalone_layers: int = 2
    standalone_seconds: float = 330

    parallel_drafts: int = 7  # of P-EAGLE, DFlash and DSpark, most in training
    parallel_batch: int = 96
    parallel_roots: int = 48  # tokens of a window after which they draft
    p_eagle_layers: int = 2
    p_eagle_intermediate_size: int = 448
    p_eagle_seconds: float = 330
    block_layers: int = 2  # of DFlash and DSpark
    block_intermediate_size: int = 256
    dflash_seconds: float = 330
    markov_rank: int = 32
    dspark_seconds: float = 330

    @property
    def head(self) -> HeadSizes:
        """Sizes of an EAGLE head."""
        return HeadSizes(self.draft_vocab_size, self.head_intermediate_size, self.feature_layers)

    @property
    def rollout_rows(self) -> int:
        """Rows of a rollout that a drafter learns from."""
        return self.rollout_window - self.num_unrolled


SHIPPED = Recipe()

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
    num_rollouts=16,
    rollouts_a_batch=8,
    rollout_prompt=16,
    rollout_window=32,
    head_intermediate_size=128,
    draft_vocab_size=384,
    num_unrolled=3,
    head_batch=6,
    target_seconds=0.5,
    eagle3_seconds=0.3,
    eagle_seconds=0.3,
    student_batch=6,
    mtp_intermediate_size=96,
    mtp_seconds=0.3,
    frozen_kv_hidden_size=32,
    frozen_kv_intermediate_size=96,
    frozen_kv_steps=3,
    frozen_kv_seconds=0.3,
    standalone_seconds=0.3,
    parallel_drafts=4,
    parallel_batch=6,
    parallel_roots=4,
    p_eagle_intermediate_size=96,
    p_eagle_seconds=0.3,
    block_intermediate_size=96,
    dflash_seconds=0.3,
    markov_rank=8,
    dspark_seconds=0.3,
)
