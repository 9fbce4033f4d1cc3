"""Faults of target families and of fp8 KV: windows, sinks, latent vectors, experts, scales, rotary embedding."""

from specsim.correctness.faults.fault import Fault, Trial

TREE = dict(topk=2, num_steps=2, num_draft_tokens=5, page_size=1, batch=1, rounds=2)
LOOP = dict(topk=1, num_steps=3, page_size=4, batch=1, rounds=1, kind="mtp.one", graph="step")
ATTENTION = "specsim.fast.attention"
IS_TREE = "metadata.extra_positions.shape[1] == metadata.max_rows"
LATER_STEP = {
    "specsim.fast.drafters.autoregressive": "{+from dataclasses import replace\n"
    "        first = replace(lanes, step=lanes.step * 0)\n"
    "        +}metadata = lane_metadata(batch, [-lanes-]{+first+}, self._config, pools, self.bonus_columns)"
}
KV = ("target keys", "target values", "target latent channels", "target rotated channels")

FAULTS = (
    Fault(
        name="verify-without-window",
        source="sgl-project/sglang#22679",
        operation="attention",
        cause="the metadata of verify has no sliding window, which prefill and drafting have",
        symptom="once a request is longer than the window, tokens differ from plain decoding",
        fields=("target_logits", *KV),
        edits={ATTENTION: f"window=Window(MANY if window is None {{+or {IS_TREE} +}}else window, first_columns),"},
        trial=Trial("differential", TREE | dict(family="gpt_oss")),
    ),
    Fault(
        name="verify-without-sinks",
        source="inferred: a verify kernel of its own, with the arguments of models that have no sinks",
        operation="attention",
        cause="the attention of verify leaves the sink out of the softmax",
        symptom="weights of keys in verify are too large, and tokens differ from plain decoding",
        fields=("target_logits", *KV),
        edits={ATTENTION: f"sinks_ptr={{+None if {IS_TREE} else +}}sinks,"},
        trial=Trial("differential", TREE | dict(family="gpt_oss")),
    ),
    Fault(
        name="latent-value-off-by-one",
        source="inferred: values of latent attention, which are channels of the keys, read at another offset",
        operation="attention",
        cause="the value is taken from the latent vector one channel too late",
        symptom="every token is made from shifted values, although the stored KV of the first layer is right",
        fields=("target_logits", "logprobs", "draft logits", *KV),
        edits={ATTENTION: "value = [-key-]{+_read(kv.keys_ptr + 1, slot, loaded, kv.stride_slot, query.nope, D)+}\n"},
        trial=Trial("differential", TREE | dict(family="deepseek_v3", rounds=1)),
    ),
    Fault(
        name="router-bias-in-weights",
        source="inferred: DeepSeek-V3's correction bias, which chooses experts and does not weigh them",
        operation="model",
        cause="the weights of the chosen experts are taken from the scores with the correction bias",
        symptom="the right experts run with wrong weights, so that logits are slightly off",
        fields=("target_logits", "logprobs", "hidden", "draft_input.hidden", *KV),
        edits={
            "specsim.fast.model.routing": "is_chosen = (rank < TOP_K) & (offs < E){+\n"
            "    score = tl.where(is_chosen, choice, score)+}"
        },
        trial=Trial("differential", TREE | dict(family="deepseek_v3", rounds=1)),
    ),
    Fault(
        name="shared-expert-forgotten",
        source="inferred: a launch that fuses the shared expert for some numbers of rows only",
        operation="model",
        cause="for one number of rows, that of this tree, the shared expert is left out",
        symptom="prompts are read correctly, and tokens differ from plain decoding in some batches only",
        fields=("target_logits", "hidden", *KV),
        edits={
            "specsim.fast.targets.experts": "base = rows.values if experts.shared_size is None {+or len(x) == 5 +}else"
        },
        trial=Trial("differential", TREE | dict(family="deepseek_v3", rounds=1)),
    ),
    Fault(
        name="side-outputs-in-tree-order",
        source="sgl-project/sglang#26866, which leaves outputs of nodes other than KV open",
        operation="verify",
        cause="the experts of accepted tokens are read from the tree's first nodes and not along the accepted path",
        symptom="tokens are right; training on the routed experts uses those of refused drafts",
        fields=("side output experts",),
        edits={
            "specsim.fast.sections": "[-    move_side(batch, verify_input.cache_locations, frame.verdict, pools)\n-]"
        },
        trial=Trial(
            "differential",
            TREE
            | dict(topk=4, num_steps=3, num_draft_tokens=16, family="qwen3_moe", sampling="warm", threshold_acc=0.1),
        ),
    ),
    Fault(
        name="fp8-scale-twice",
        source="inferred: scales of fp8 KV in a kernel that is given keys which are scaled already",
        operation="attention",
        cause="scores are multiplied by the scale of the keys twice",
        symptom="attention is too flat or too sharp, and fewer drafts are accepted",
        fields=("target_logits", "logprobs", "hidden", "draft logits", "draft_input.hidden", *KV),
        edits={ATTENTION: "else scale) * kv.key_scale{+**2+}\n"},
        trial=Trial("differential", TREE | dict(kv="fp8", rounds=1)),
    ),
    Fault(
        name="yarn-amplitude-forgotten",
        source="inferred: YaRN's factor of cosines and sines, which other scalings do not have",
        operation="model",
        cause="cosines and sines are not multiplied by YaRN's factor",
        symptom="scores are too small by the factor's square, and quality decreases in long contexts most",
        fields=("target keys",),
        edits={"specsim.fast.model.rotary": "        amplitude=[-amplitude-]{+1.0+},\n"},
        trial=Trial("differential", TREE | dict(family="gpt_oss", rounds=1)),
    ),
    *(
        Fault(
            name=f"mtp-step-metadata-stale-{word}",
            source="vllm-project/vllm#41162",
            operation="drafting",
            cause=f"a module of MTP on {what} runs its second draft step with the metadata of its first",
            symptom="the first two drafts are right, and later ones are at wrong positions and overwrite KV",
            fields=("draft slots", "draft positions", "draft logits"),
            edits=LATER_STEP,
            trial=Trial("differential", LOOP | dict(family=family)),
        )
        for word, what, family in (
            ("window", "a target with sliding windows", "mistral"),
            ("latent", "a target with latent KV", "deepseek_v3"),
        )
    ),
)
