"""Faults of drafters that make all drafts in one block: context, shift, direction, confidence, distribution."""

from specsim.core.verifiers import VERIFIER_OF
from specsim.correctness.faults.fault import Fault, Trial

CHAIN = dict(topk=1, num_steps=3, page_size=4, batch=2, rounds=2)
SAMPLED = CHAIN | dict(sampling="warm", verifier=VERIFIER_OF["sampled"], kind="dspark")
DRAFTER = "specsim.fast.drafters.block"
HEAD = "specsim.fast.drafters.block_head"
TREE = "specsim.fast.drafters.slot_tree"
KV = ("draft keys", "draft values")

FAULTS = (
    Fault(
        name="block-shift-of-the-other-kind",
        source="inferred: DFlash and DSpark have tensors of the same names, and only their configs differ",
        operation="drafting",
        cause="a row's draft is taken for its own token where the checkpoint was trained for the next one",
        symptom="tokens stay right, and every draft stands one place too early",
        fields=("candidates.confidence", "candidates.tokens", "candidates.scores"),
        edits={DRAFTER: "hidden_RH.view(batch.size, self.block_rows, -1){+.roll(-1, 1)+}[:, block.first_slot :]"},
        trial=Trial("differential", CHAIN | dict(kind="dspark", rounds=1)),
    ),
    Fault(
        name="block-layer-ids-off-by-one",
        source="vllm-project/vllm#42704",
        operation="model",
        cause="ids of layers' outputs are read as ids of their inputs",
        symptom="the context is made of other features than the drafter was trained with, and few drafts are accepted",
        fields=KV,
        edits={
            "specsim.fast.drafters.autoregressive": "self.feature_layers = "
            "{+tuple(max(0, layer - 1) for layer in +}config.feature_layers{+)+}"
        },
        trial=Trial("differential", CHAIN | dict(kind="dflash", rounds=1)),
    ),
    Fault(
        name="block-kv-kept",
        source="inferred: a block's KV is dropped by the context that draft-extend writes over it",
        operation="extend",
        cause="draft-extend leaves the block's KV in the columns of accepted tokens",
        symptom="later blocks read keys of mask tokens where the context should be",
        fields=KV,
        edits={
            DRAFTER: "[-self._head.write_context(extend.hidden, -]extend_metadata(batch, extend, pools)"
            "[-, draft_kv(pools))-]"
        },
        trial=Trial("differential", CHAIN | dict(kind="dflash", rounds=1)),
    ),
    Fault(
        name="block-attention-causal",
        source="inferred: a block runs with the causal mask of other drafters",
        operation="attention",
        cause="a row sees the rows before it only",
        symptom="tokens stay right, and fewer drafts are accepted",
        fields=(*KV, "candidates.tokens", "candidates.scores"),
        edits={DRAFTER: "tl.minimum(num_rows, [-limit - length-]{+step + 1+}), 0)"},
        trial=Trial("differential", CHAIN | dict(kind="dflash", rounds=1, family="noisy")),
    ),
    Fault(
        name="block-mask-of-one-layer-dropped",
        source="hao-ai-lab/JetSpec, whose later layers read the first layer's length and lost their masks",
        operation="attention",
        cause="one of the layers in which rows see only the rows before them runs without that mask",
        symptom="tokens stay right, and fewer drafts are accepted",
        fields=(*KV, "candidates.tokens", "candidates.scores"),
        edits={HEAD: "layer in self._causal_layers{+[1:]+} else full"},
        trial=Trial("differential", CHAIN | dict(kind="dflash.causal", rounds=1, family="noisy")),
    ),
    Fault(
        name="block-window-from-the-other-end",
        source="inferred: readers count windows of a block from its first row, its last one or each row's own position",
        operation="attention",
        cause="the distance to a row of the block is counted from the block's other end",
        symptom="tokens stay right; rows miss their own keys and see some that the window excludes",
        fields=(*KV, "candidates.tokens", "candidates.scores"),
        edits={DRAFTER: "store_own_extras(metadata_ptrs, offs, slot, {+length + num_rows - 1 - step + 0 * +}position,"},
        trial=Trial("differential", CHAIN | dict(kind="dflash.causal", num_steps=7, rounds=1, family="gpt_oss")),
    ),
    Fault(
        name="block-confidence-of-another-slot",
        source="inferred: confidences are counted from the bonus token's row",
        operation="drafting",
        cause="a draft is kept or dropped by the confidence of the slot before its own",
        symptom="good drafts are dropped, and bad ones are verified",
        fields=("candidates.confidence", "candidates.num_alive"),
        edits={TREE: "head.confidence(hidden_SBH[level.depth{+ - 1+}],"},
        trial=Trial("differential", CHAIN | dict(kind="dspark", rounds=1)),
    ),
    Fault(
        name="block-q-marginal",
        source="inferred from deepseek-ai/DeepSpec, whose Markov head is applied while tokens are drawn",
        operation="sampling",
        cause="verify gets the slots' own distribution, and drafts were drawn with the bias of the token before",
        symptom="sampled tokens no longer have the target's distribution",
        fields=("draft_prob",),
        edits={
            TREE: "draw_drafts(batch, logits_RV, root, self._vocabulary, config, drafts, {+None, loop)\n"
            "            others = DrawnDrafts(*(part.clone() for part in drafts))\n"
            "            names = self._vocabulary, config, others, +}out.draft_prob, loop{+\n"
            "            draw_drafts(batch, logits_BV, root, *names+})"
        },
        trial=Trial("differential", SAMPLED | dict(rounds=1)),
    ),
)
