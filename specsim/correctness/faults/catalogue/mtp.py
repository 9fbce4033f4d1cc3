"""Faults of MTP modules, P-EAGLE heads, cut vocabularies and windows: tokens stay right, and fewer drafts are accepted.

Those of vocabularies and windows can be of any drafter.
"""

from specsim.correctness.faults.fault import Fault, Trial

CHAIN = dict(topk=1, num_steps=3, page_size=4, batch=2, rounds=2, kind="mtp", family="noisy")
DRAFTER = "specsim.fast.drafters.mtp"
CUT = CHAIN | dict(kind="mtp.cut")
WINDOWED = CHAIN | dict(kind="mtp.window")
P_EAGLE_CHAIN = CHAIN | dict(kind="p-eagle")
HEAD = "specsim.fast.drafters.autoregressive"
ATTENTION = "specsim.fast.attention"
P_EAGLE = "specsim.fast.drafters.p_eagle"
P_EAGLE_ROWS = "specsim.fast.drafters.p_eagle_rows"
INPUT = ("draft_input.hidden", "hidden")
KV = ("draft keys", "draft values")

FAULTS = (
    Fault(
        name="mtp-modules-share-weights",
        source="sgl-project/sglang#25368",
        operation="model",
        cause="every module is loaded with the weights of the last one",
        symptom="all drafts but those of the last depth come from weights that were trained for another depth",
        fields=INPUT,
        edits={DRAFTER: 'prefix = f"modules.{[-index-]{+config.num_modules - 1+}}."'},
        trial=Trial("differential", CHAIN | dict(rounds=1)),
    ),
    Fault(
        name="mtp-hidden-not-chained",
        source="sgl-project/sglang#22041",
        operation="drafting",
        cause="every module reads the target's hidden state instead of that of the module before it",
        symptom="the first draft is right, deeper ones are made from a state that their module was not trained on",
        fields=INPUT,
        edits={DRAFTER: "hidden_RH = [-hidden_RH if self._is_chained else -]target_RH"},
        trial=Trial("differential", CHAIN | dict(rounds=1)),
    ),
    Fault(
        name="mtp-hidden-before-norm",
        source="vllm-project/vllm#45895, vllm-project/vllm#47448",
        operation="drafting",
        cause="a module hands on its hidden state before its norm, and only its logits are made after the norm",
        symptom="the first draft is right, and fewer of the deeper ones are accepted",
        fields=INPUT,
        edits={
            DRAFTER: 'forward, self._norm("norm"))\n'
            "        {+self.before_norm = rows.values\n"
            "        +}return rows.normed()"
            "@@"
            "[-hidden_RH-]{+module.before_norm+} if self._is_chained"
        },
        trial=Trial("differential", CHAIN | dict(rounds=1)),
    ),
    Fault(
        name="mtp-boundary-stale",
        source="sgl-project/sglang, where SGLANG_ENABLE_MTP_BOUNDARY_KV_FIX is off by default",
        operation="extend",
        cause="after a rejection, the rows of deeper modules that read refused drafts are not written again",
        symptom="later drafts attend to KV of tokens that are not in the output, and fewer are accepted",
        fields=("hidden", *KV),
        edits={DRAFTER: "extend.num_accepted_tokens, [-self.lookahead-]{+0+}, most_rows, pools)"},
        trial=Trial("differential", CHAIN),
    ),
    Fault(
        name="mtp-chunk-without-lookahead",
        source="vllm-project/vllm#50062, NVIDIA/TensorRT-LLM#18295",
        operation="extend",
        cause="the last rows of a prompt's chunk, whose modules read tokens of the next chunk, are not completed there",
        symptom="drafts after a long prompt attend to KV of guessed tokens at every chunk's end",
        fields=("draft_input.hidden", *KV),
        edits={DRAFTER: "prefill.row_starts.diff(), [-self.lookahead-]{+0+}, 0, pools)"},
        trial=Trial("differential", CHAIN | dict(chunks=2, rounds=1)),
    ),
    Fault(
        name="p-eagle-mask-row-with-real-features",
        source="inferred: rows of mask tokens in a kernel that copies the features of the last accepted token",
        operation="drafting",
        cause="mask rows read the target's features of the last token in place of the learned ones",
        symptom="the first draft is right, deeper ones come from an input that the head was not trained on",
        fields=INPUT,
        edits={
            P_EAGLE_ROWS: "{+before = tl.load(new_ptrs.row_starts + request) + tl.maximum(count, 1) - 1\n"
            "    +}learned = tl.load([-mask_features_ptr-]{+new_ptrs.features + before * FEATURES+} + offs, "
            "mask=mask_f, other=0.0)"
        },
        trial=Trial("differential", P_EAGLE_CHAIN | dict(rounds=1)),
    ),
    Fault(
        name="p-eagle-mask-kv-kept",
        source="inferred: a draft length that counts every row of the last forward",
        operation="kv",
        cause="the length of the draft KV counts mask rows, so that the next round's rows stand after them",
        symptom="from the second round on, drafts attend to the KV of mask tokens and are rotated too far",
        fields=("hidden", *KV),
        edits={P_EAGLE: "            new.start_lens{+ + self.num_mask_rows * has_equal_rows+},\n            starts,"},
        trial=Trial("differential", P_EAGLE_CHAIN | dict(page_size=16)),
    ),
    Fault(
        name="p-eagle-padding-for-mask-token",
        source="inferred: rows of mask tokens that keep the padding's token",
        operation="drafting",
        cause="mask rows read token 0 in place of the mask token",
        symptom="the first draft is right, and fewer of the deeper ones are accepted",
        fields=INPUT,
        edits={P_EAGLE_ROWS: "mask_token=[-mask.token_id-]{+0+},"},
        trial=Trial("differential", P_EAGLE_CHAIN | dict(rounds=1)),
    ),
    Fault(
        name="cut-vocabulary-of-another-list",
        source="sgl-project/SpecForge#764",
        operation="drafting",
        cause="a map from draft ids to target ids is kept for another list of the same size, here the lowest ids",
        symptom="tokens stay right; a draft is another token than the head chose, and almost none is accepted",
        fields=("draft_input.topk_index", "candidates.tokens"),
        edits={HEAD: "self.d2t = None if d2t is None else d2t{+.mul(0)+}.to(on.device, torch.int64)"},
        trial=Trial("differential", CUT | dict(rounds=1)),
    ),
    Fault(
        name="sink-columns-rotated",
        source="inferred: positions counted within the cache, as in StreamingLLM (arXiv 2309.17453)",
        operation="attention",
        cause="a drafter's keys are rotated by their places among those that the window leaves, here seven",
        symptom="once a request is longer than first columns and window, all distances are too short",
        fields=(*INPUT, "draft logits", *KV),
        edits={HEAD: "angles = rotations(metadata.positions{+.clamp(max=6)+}, self._inverse_D"},
        trial=Trial("differential", WINDOWED),
    ),
    Fault(
        name="first-columns-rolled-over",
        source="inferred: first columns and window in one ring buffer",
        operation="attention",
        cause="the columns that stay visible are those before the window, and not the first ones of the request",
        symptom="once a request is longer than first columns and window, drafts lose the first columns",
        fields=(*INPUT, "draft logits", *KV),
        edits={
            ATTENTION: "is_first = [-column < prefix.first_columns-]"
            "{+(column < prefix.start) & (column >= prefix.start - prefix.first_columns)+}\n"
        },
        trial=Trial("differential", WINDOWED),
    ),
    Fault(
        name="first-columns-skipped",
        source="inferred: an attention kernel that starts at the window's first tile",
        operation="attention",
        cause="tiles before the window are skipped, those of the first columns too",
        symptom="drafts lose the first columns once the window begins in a later tile",
        fields=(*INPUT, "draft logits", *KV),
        edits={ATTENTION: "skipped = [-tl.maximum(-]window_tile[- - tl.cdiv(window.first, BLOCK_C), 0)-]\n"},
        trial=Trial("differential", WINDOWED | dict(page_size=256, batch=1, rounds=1)),
    ),
)
