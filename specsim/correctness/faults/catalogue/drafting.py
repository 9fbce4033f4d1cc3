"""Faults of drafting: most leave tokens right and only lower the number of accepted drafts."""

from specsim.correctness.faults.fault import Fault, Trial

TREE = dict(topk=2, num_steps=3, num_draft_tokens=5, batch=2, rounds=1)
DRAFTER = "specsim.fast.drafters.autoregressive"
LANES = "specsim.fast.drafting.lanes"

FAULTS = (
    Fault(
        name="draft-position-early",
        source="sgl-project/sglang#25015",
        operation="drafting",
        cause="the position is raised before a draft forward, not after it",
        symptom="tokens stay right; every draft after the first is rotated one place too far and fewer are accepted",
        fields=("draft positions", "draft logits"),
        edits={LANES: "position=tl.where(live, length + step{+ + 1+}, 0)"},
        trial=Trial("differential", TREE | dict(page_size=1)),
    ),
    Fault(
        name="nothing-looked-up-empties-trees",
        source="vllm-project/vllm#39273, where a request without drafts of its own was taken for one with some",
        operation="tree",
        cause="a request for which nothing is looked up gets a tree without drafts in place of the drafter's",
        symptom="tokens stay right; rounds of texts that do not repeat accept nothing",
        fields=("draft_tokens", "parents"),
        edits={"specsim.fast.tree.construction": "roots, config, skips_empty=[-True-]{+False+})"},
        trial=Trial("differential", TREE | dict(kind="eagle3+suffix")),
    ),
    Fault(
        name="draft-kv-not-reparented",
        source="sgl-project/sglang#7523",
        operation="drafting",
        cause="a lane with a new parent continues on its own KV instead of that of its true ancestors",
        symptom="from the third step of a tree on, a draft attends to tokens that are not on its path",
        fields=("draft logits",),
        edits={"specsim.fast.drafting.expansion": 'ANCESTOR=[-config.draft_kv == "ancestor"-]{+False+}'},
        trial=Trial("differential", TREE | dict(topk=4, page_size=1, batch=1, draft_kv="ancestor", family="noisy")),
    ),
    Fault(
        name="replay-runs-later-steps",
        source="sgl-project/sglang#25077",
        operation="graph",
        cause="all draft steps' metadata is made before the first replay, so each step reads that of the last one",
        symptom="replayed steps use the slots and positions of a later step",
        fields=("draft slots", "draft positions", "draft logits"),
        edits={
            DRAFTER: "{+from dataclasses import replace\n"
            "        last = lanes.step.new_full((2,), self._config.num_steps - 2)\n"
            "        lanes = replace(lanes, step=last)\n"
            "        +}metadata = lane_metadata(batch, lanes, self._config, pools, self.bonus_columns)"
        },
        trial=Trial("differential", TREE | dict(page_size=1, batch=1, graph="step")),
    ),
    Fault(
        name="metadata-not-rebuilt",
        source="vllm-project/vllm#41162",
        operation="graph",
        cause="between draft steps, lengths and positions advance, but the map to slots does not",
        symptom="every draft step overwrites the KV of the first",
        fields=("draft slots",),
        edits={LANES: "column = lane_column(length, lane, step{+ * 0+}, num_steps, page_size)"},
        trial=Trial("differential", TREE | dict(page_size=1, batch=1)),
    ),
    Fault(
        name="swa-window-stale",
        source="vllm-project/vllm#41162, sgl-project/sglang#9279",
        operation="attention",
        cause="the start of the sliding window is computed once, before the draft loop",
        symptom="once a request is as long as the window, later draft steps see too many of the oldest keys",
        fields=("draft logits",),
        edits={
            "specsim.fast.attention": "        metadata_ptrs=metadata.tensors{+ if metadata.is_causal\n"
            "        or metadata.extra_positions.shape[1] == metadata.max_rows\n"
            "        else metadata.tensors._replace(\n"
            "            positions=metadata.extra_positions[:, 0].repeat_interleave(metadata.max_rows)\n"
            "        )+},\n"
        },
        trial=Trial("differential", TREE | dict(page_size=1, batch=1, family="mistral")),
    ),
    Fault(
        name="draft-seq-len-with-rejected",
        source="vllm-project/vllm#26498",
        operation="drafting",
        cause="the sequence length of the drafter counts rejected drafts",
        symptom="from the second round on, draft positions are too large, and drafts attend to KV of rejected tokens",
        fields=("draft logits",),
        edits={
            "specsim.fast.sections": "from dataclasses import dataclass{+, replace+}\n"
            "@@"
            "{+rejected = models.config.num_steps - frame.verdict.num_accepted_drafts\n"
            "    lens = frame.batch.seq_lens + rejected * (frame.batch.num_rounds > 0)\n"
            "    batch = replace(frame.batch, seq_lens=lens)\n"
            "    +}models.setting_drafter.step([-frame.-]batch, frame.draft_buffers, frame.pools)"
        },
        trial=Trial("differential", TREE | dict(page_size=1, batch=1, rounds=2)),
    ),
    Fault(
        name="hidden-without-residual",
        source="vllm-project/vllm#14464",
        operation="model",
        cause="the hidden state that a draft step hands to the next lacks the residual",
        symptom="the first draft is right, later ones are made from a state that the head was not trained on",
        fields=("draft logits",),
        edits={
            "specsim.fast.drafters.eagle3": "{+self.residual_RH = hidden.values\n        +}"
            "hidden_RH = self._further_layers(",
            DRAFTER: "[-hidden_RH-]{+(hidden_RH - self._head.residual_RH)+}.unflatten(0, shape), config)",
        },
        trial=Trial("differential", TREE | dict(page_size=1, batch=1, kind="eagle3")),
    ),
    Fault(
        name="aux-layer-off-by-one",
        source="SafeAILab/EAGLE and sgl-project/SpecForge, which count feature layers differently",
        operation="model",
        cause="EAGLE-3's features are taken from a layer's output, but the head was trained on its input",
        symptom="tokens stay right, and acceptance is low from the first draft on",
        fields=("draft logits",),
        edits={
            "specsim.fast.targets.decoder": "entering.get(layer[- + 1-])"
            "@@"
            "self._input_norm(0)[-, out=entering.get(0))-]{+)+}"
        },
        trial=Trial("differential", TREE | dict(page_size=1, batch=1, kind="eagle3")),
    ),
    Fault(
        name="draft-vocab-offset-as-index",
        source="NVIDIA-NeMo/Automodel#2447",
        operation="drafting",
        cause="d2t, which holds the difference of target id and draft id, is read as if it held target ids",
        symptom="tokens stay right; almost no draft is accepted",
        fields=("draft_input.topk_index", "candidates.tokens"),
        edits={
            "specsim.fast.vocabulary.topk": "target_ids [-+-]= tl.load(d2t_ptr + target_ids, mask=mask & live, other=0)"
        },
        trial=Trial("differential", TREE | dict(page_size=1, batch=1, kind="eagle3")),
    ),
    Fault(
        name="second-layer-reads-the-firsts-kv",
        source="inferred: heads of several layers in code that was written for heads of one",
        operation="kv",
        cause="every layer of a head writes and reads the KV of the first",
        symptom="tokens stay right; the first layer attends to keys of the last one, and fewer drafts are accepted",
        fields=("draft keys", "draft values", "draft logits"),
        edits={
            "specsim.fast.drafters.eagle3": "rows, _ = run_layer(rows, weights, self._model, {+0 * +}layer, forward,"
        },
        trial=Trial("differential", TREE | dict(page_size=1, batch=1, kind="eagle3.1", family="noisy")),
    ),
    Fault(
        name="chain-differs-from-tree-of-one",
        source="NVIDIA/TensorRT-LLM#15842",
        operation="drafting",
        cause="the fast path of a chain does not pass on the hidden state, which the path of trees does",
        symptom="a chain proposes other drafts than a tree of width one, and fewer are accepted",
        fields=("candidates.tokens", "candidates.scores"),
        edits={"specsim.fast.drafting.expansion": "mask_hidden = mask_lane & (offs < [-HIDDEN-]{+0+})"},
        trial=Trial("differential", dict(topk=1, num_steps=3, page_size=1, batch=1, rounds=1, family="noisy")),
    ),
)
