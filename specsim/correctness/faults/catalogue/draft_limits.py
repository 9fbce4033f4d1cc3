"""Faults of drafters with fewer tokens and with fewer keys: tokens stay right, and fewer drafts are accepted."""

from specsim.correctness.faults.fault import Fault, Trial

CHAIN = dict(topk=1, num_steps=3, page_size=4, batch=2, rounds=2, family="noisy")
ATTENTION = "specsim.fast.attention"
DRAFTER = "specsim.fast.drafters.autoregressive"
HIDDEN = ("draft_input.hidden", "hidden", "draft logits")
KV = ("draft keys", "draft values")

FAULTS = (
    Fault(
        name="cut-vocabulary-of-another-list",
        source="sgl-project/SpecForge#764",
        operation="drafting",
        cause="a map from draft ids to target ids is kept for another list of the same size, here the lowest ids",
        symptom="tokens stay right; a draft is another token than the head chose, and almost none is accepted",
        fields=("draft_input.topk_index", "candidates.tokens"),
        edits={DRAFTER: "self.d2t = None if d2t is None else d2t{+.mul(0)+}.to(on.device, torch.int64)"},
        trial=Trial("differential", CHAIN | dict(kind="mtp.cut", rounds=1)),
    ),
    Fault(
        name="sink-columns-rotated",
        source="inferred: positions counted within the cache, as in StreamingLLM (arXiv 2309.17453)",
        operation="attention",
        cause="a drafter's keys are rotated by their places among those that the window leaves, here seven",
        symptom="once a request is longer than first columns and window, all distances are too short",
        fields=(*HIDDEN, *KV),
        edits={DRAFTER: "angles = rotations(metadata.positions{+.clamp(max=6)+}, self._inverse_D"},
        trial=Trial("differential", CHAIN | dict(kind="mtp.window")),
    ),
    Fault(
        name="first-columns-rolled-over",
        source="inferred: first columns and window in one ring buffer",
        operation="attention",
        cause="the columns that stay visible are those before the window, and not the first ones of the request",
        symptom="once a request is longer than first columns and window, drafts lose the first columns",
        fields=(*HIDDEN, *KV),
        edits={
            ATTENTION: "is_first = [-column < prefix.first_columns-]"
            "{+(column < prefix.start) & (column >= prefix.start - prefix.first_columns)+}\n"
        },
        trial=Trial("differential", CHAIN | dict(kind="eagle3.window")),
    ),
    Fault(
        name="first-columns-skipped",
        source="inferred: an attention kernel that starts at the window's first tile",
        operation="attention",
        cause="tiles before the window are skipped, those of the first columns too",
        symptom="drafts lose the first columns once the window begins in a later tile",
        fields=(*HIDDEN, *KV),
        edits={ATTENTION: "skipped = [-tl.maximum(-]window_tile[- - tl.cdiv(window.first, BLOCK_C), 0)-]\n"},
        trial=Trial("differential", CHAIN | dict(kind="mtp.window", page_size=256, batch=1, rounds=1)),
    ),
)
