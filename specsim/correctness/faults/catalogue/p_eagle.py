"""Faults of P-EAGLE heads: tokens stay right, and fewer drafts after the first of a round are accepted."""

from specsim.correctness.faults.fault import Fault, Trial
from specsim.correctness.faults.injection import Edit

CHAIN = dict(topk=1, num_steps=3, page_size=4, batch=2, rounds=2, kind="p-eagle", family="noisy")
DRAFTER = "specsim.fast.drafters.p_eagle"
ROWS = "specsim.fast.drafters.p_eagle_rows"
INPUT = ("draft_input.hidden", "hidden")
KV = ("draft keys", "draft values")

FAULTS = (
    Fault(
        name="p-eagle-mask-row-with-real-features",
        source="inferred: rows of mask tokens in a kernel that copies the features of the last accepted token",
        operation="drafting",
        cause="mask rows read the target's features of the last token in place of the learned ones",
        symptom="the first draft is right, deeper ones come from an input that the head was not trained on",
        fields=INPUT,
        edits=(
            Edit(
                ROWS,
                "learned = tl.load(mask_features_ptr + offs, mask=mask_f, other=0.0)",
                "before = tl.load(new_ptrs.row_starts + request) + tl.maximum(count, 1) - 1\n"
                "    learned = tl.load(new_ptrs.features + before * FEATURES + offs, mask=mask_f, other=0.0)",
            ),
        ),
        trial=Trial("differential", CHAIN | dict(rounds=1)),
    ),
    Fault(
        name="p-eagle-mask-kv-kept",
        source="inferred: a draft length that counts every row of the last forward",
        operation="kv",
        cause="the length of the draft KV counts mask rows, so that the next round's rows stand after them",
        symptom="from the second round on, drafts attend to the KV of mask tokens and are rotated too far",
        fields=("hidden", *KV),
        edits=(
            Edit(
                DRAFTER,
                "            new.start_lens,\n            starts,",
                "            new.start_lens + self.num_mask_rows * has_equal_rows,\n            starts,",
            ),
        ),
        trial=Trial("differential", CHAIN | dict(page_size=16)),
    ),
    Fault(
        name="p-eagle-padding-for-mask-token",
        source="inferred: rows of mask tokens that keep the padding's token",
        operation="drafting",
        cause="mask rows read token 0 in place of the mask token",
        symptom="the first draft is right, and fewer of the deeper ones are accepted",
        fields=INPUT,
        edits=(Edit(ROWS, "mask_token=mask.token_id,", "mask_token=0,"),),
        trial=Trial("differential", CHAIN | dict(rounds=1)),
    ),
)
