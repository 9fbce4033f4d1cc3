"""Faults of drafters that keep other KV than EAGLE heads: language models of their own, and drafters on frozen KV."""

from specsim.core.verifiers import VERIFIER_OF
from specsim.correctness.faults.fault import Fault, Trial

TREE = dict(topk=2, num_steps=3, num_draft_tokens=5, page_size=1, batch=1, family="noisy")
SAMPLED = dict(topk=1, num_steps=2, page_size=1, batch=1, rounds=1, sampling="warm", verifier=VERIFIER_OF["sampled"])
FROZEN = "specsim.fast.drafters.frozen_kv"
DRAFTER = "specsim.fast.drafters.autoregressive"
DISTRIBUTION = "specsim.fast.vocabulary.draft_distribution"

FAULTS = (
    Fault(
        name="frozen-kv-of-another-layer",
        source="vllm-project/vllm-ascend#16980",
        operation="attention",
        cause="a drafter on the target's KV reads the KV group of another layer",
        symptom="tokens stay right, and almost no draft is accepted",
        fields=("draft logits",),
        edits={FROZEN: "self._sources = {+(0,) * len(+}source_layers(config, target.config){+)+}"},
        trial=Trial("differential", TREE | dict(kind="frozen-kv", rounds=1)),
    ),
    Fault(
        name="frozen-kv-refused-key",
        source="huggingface/transformers, which keeps one key more than the committed ones for such a drafter",
        operation="attention",
        cause="the prefix of a drafter on the target's KV is counted with the root, whose KV is not there yet",
        symptom="after a rejection, drafts attend to the key of the refused draft",
        fields=("hidden", "draft logits"),
        edits={FROZEN: "key_len=length{+ + (length > 0)+},"},
        trial=Trial("differential", TREE | dict(kind="frozen-kv", rounds=2)),
    ),
    Fault(
        name="frozen-position-advances",
        source="inferred: draft steps of a constant position, run by the loop of drafters that advance theirs",
        operation="drafting",
        cause="the position of a drafter on the target's KV is raised after each step",
        symptom="tokens stay right; every draft after the second is rotated too far and fewer are accepted",
        fields=("draft positions",),
        edits={
            FROZEN: "{+metadata.positions.add_(lanes.step[0])\n"
            "        +}handed_RH = self._head.hand_on(lanes.hidden.flatten(0, 1))"
        },
        trial=Trial("differential", TREE | dict(kind="frozen-kv", rounds=1)),
    ),
    Fault(
        name="draft-model-lead-forgotten",
        source="inferred: a draft model of its own in the draft loop of EAGLE heads",
        operation="kv",
        cause="the lanes of a draft model begin at the root's column, as EAGLE's do",
        symptom="the first draft overwrites the KV of the root, and every draft is rotated one place too short",
        fields=("draft slots", "draft positions"),
        edits={DRAFTER: "metadata = lane_metadata(batch, lanes, self._config, pools[-, self.bonus_columns-])"},
        trial=Trial("differential", TREE | dict(kind="standalone", rounds=1)),
    ),
    Fault(
        name="draft-model-stale-key",
        source="inferred: a draft model's cache that is cropped to the accepted tokens, one column too late",
        operation="kv",
        cause="after a rejection, the draft model's KV of the refused draft stays in the column of the new root",
        symptom="tokens stay right; from the next round on, drafts attend to a token that is not in the text",
        fields=("draft keys", "draft values"),
        edits={
            DRAFTER: "{+kv = draft_kv(pools)\n"
            "        last = extend.row_starts[:-1] + extend.num_accepted_drafts\n"
            "        stale = extend.cache_locations[last].clamp(min=0)\n"
            "        keys = kv.keys[:, stale].clone()\n"
            "        values = kv.values[:, stale].clone()\n"
            "        +}hidden_RH = self._head.forward(extend.input_ids, fused_RH, metadata, "
            "[-draft_kv(pools))-]{+kv)\n"
            "        kv.keys[:, stale] = keys\n"
            "        kv.values[:, stale] = values+}"
        },
        trial=Trial("differential", TREE | dict(kind="standalone", rounds=1)),
    ),
    Fault(
        name="draft-prob-in-another-dtype",
        source="deepseek-ai/DeepSpec#31",
        operation="drafting",
        cause="drafts are drawn from a distribution in float32, and verified with one rounded to bfloat16",
        symptom="the output's distribution differs slightly from the target's",
        fields=("draft_input.draft_prob",),
        edits={
            DISTRIBUTION: "weights_of(logits, best, scale) / tl.where(total > 0, total, 1.0), 0.0){+\n"
            "    prob = prob.to(tl.bfloat16).to(tl.float32)+}"
        },
        trial=Trial("differential", SAMPLED | dict(kind="standalone")),
    ),
    Fault(
        name="draft-ids-taken-for-target-ids",
        source="sgl-project/sglang#23838, vllm-project/vllm#54780",
        operation="drafting",
        cause="ids of a draft model with another vocabulary are verified as if they were the target's",
        symptom="tokens stay right; only drafts whose ids happen to be equal are accepted",
        fields=("draft_input.topk_index", "candidates.tokens"),
        edits={
            "specsim.fast.vocabulary.topk": "ids += [-tl.load(d2t_ptr + target_ids, mask=mask & live, other=0)-]{+0+}"
        },
        trial=Trial("differential", TREE | dict(kind="standalone.tli", rounds=1)),
    ),
    Fault(
        name="intersection-not-renormalised",
        source="inferred: a draft model with another vocabulary, as in vllm-project/vllm#38174",
        operation="drafting",
        cause="drafts are drawn from the tokens that both models have, and verified with their probabilities among all "
        "of the drafter's tokens",
        symptom="drafts are accepted too often and the output's distribution is not the target's",
        fields=("draft_input.draft_prob",),
        edits={
            DISTRIBUTION: "{+total += 1.0  # another token, as likely as the best\n    +}"
            "prob = tl.where(mask_id, weights_of(logits, best, scale) / tl.where(total > 0, total, 1.0), 0.0)"
        },
        trial=Trial("differential", SAMPLED | dict(kind="standalone.tli")),
    ),
    Fault(
        name="draft-and-accept-share-noise",
        source="vllm-project/vllm#54282",
        operation="drafting",
        cause="drafts are drawn with the uniforms that decide whether they are accepted",
        symptom="a draft's probability and its chance of acceptance depend on each other, so the output is biased",
        fields=("draft_input.topk_index", "candidates.tokens"),
        edits={
            DISTRIBUTION: "from specsim.fast.runtime.uniforms import [-DRAFT,-]{+ACCEPT as DRAFT\n"
            "from specsim.fast.runtime.uniforms import+} named_uniform, token_noise"
        },
        trial=Trial("differential", SAMPLED | dict(kind="standalone")),
    ),
)
