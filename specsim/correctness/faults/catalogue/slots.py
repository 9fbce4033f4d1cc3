"""Faults of trees and of KV slots: selection, parent lists, placement, ownership and moves."""

from specsim.correctness.faults.fault import Fault, Trial

KV = "specsim.fast.kv.slots"
NODES = "specsim.fast.tree.nodes"
LANES = "specsim.fast.drafting.lanes"
TREE = dict(topk=2, num_steps=3, num_draft_tokens=5, batch=2, max_new_tokens=4)

FAULTS = (
    Fault(
        name="malformed-parent-walk",
        source="sgl-project/sglang#36201",
        operation="tree",
        cause="a parent that was not selected is accepted, and ancestors are walked without a bound",
        symptom="a malformed parent list is verified as a tree, or verification never ends",
        fields=("malformed trees",),
        edits={NODES: "return flat, parent, inside[- & ((block == 0) | (parent > 0))-]"},
        trial=Trial("trees", dict(pools="malformed", impl="fast", count=100)),
    ),
    Fault(
        name="tie-orphans-child",
        source="SafeAILab/EAGLE, whose tree is looked up by searchsorted among the selected",
        operation="drafting",
        cause="of candidates with equal scores the later ones are selected, a child without its parent among them",
        symptom="a node gets another parent than the one it was drafted after",
        fields=("tree",),
        edits={
            NODES: "{+    skipped = tl.sum(equal.to(tl.int32), axis=1, keep_dims=True) - missing\n"
            "+}    is_selected = above | (equal & (equals [-<= missing-]{+> skipped+}))\n"
            "@@"
            "tl.[-minimum(equals, missing-]{+maximum(equals - skipped, 0+}) - is_selected.to(tl.int32)"
        },
        trial=Trial("trees", dict(pools="tied", impl="fast", count=12)),
    ),
    Fault(
        name="tail-indices-moved-not-kv",
        source="sgl-project/sglang#7725",
        operation="kv",
        cause="each lane's page table points at a copy of the prefix's tail, which holds no KV",
        symptom="tokens stay right; all lanes but the first attend to old content of those slots",
        fields=("draft KV of copied tails",),
        edits={KV: "    if config.lanes_share_prefix{+ or config.topk > 1+}:\n        return\n"},
        trial=Trial("differential", dict(topk=2, num_steps=2, num_draft_tokens=5, page_size=4, batch=1, rounds=1)),
    ),
    Fault(
        name="kv-not-moved",
        source="sgl-project/sglang#15360",
        operation="kv",
        cause="the KV of the accepted path stays where the tree had it",
        symptom="the round itself is right; from the next one on the target reads the KV of other nodes",
        fields=("target keys", "target values"),
        edits={KV: "moves = (source >= 0) & (destination >= 0) & (source [-!= destination-]{+< 0+})"},
        trial=Trial("differential", dict(topk=4, num_steps=3, num_draft_tokens=8, page_size=4, batch=3, rounds=2)),
    ),
    Fault(
        name="kv-move-overlap",
        source="inferred: the move of an accepted path without a gather before its scatter",
        operation="kv",
        cause="accepted slots are moved one by one from the last, so that some are overwritten before they are read",
        symptom="where a slot is both source and destination, a deep path gets the KV of other nodes",
        fields=("target keys", "target values"),
        edits={
            KV: "        {+for back in range(BLOCK_W):\n"
            "            +}tl.debug_barrier()\n"
            "[-        -]{+            one = mask & (step == BLOCK_W - 1 - back)[:, None]\n"
            "            key = tl.load(kv_ptrs.keys_ptr + source[:, None] * SIZE + offs, mask=one)\n"
            "            value = tl.load(kv_ptrs.values_ptr + source[:, None] * SIZE + offs, mask=one)\n"
            "            +}tl.store(kv_ptrs.keys_ptr + destination[:, None] * SIZE + offs, key, mask=[-mask)\n"
            "        if kv_ptrs.values_ptr is not None:-]{+one)+}\n"
            "            tl.store("
            "kv_ptrs.values_ptr + destination[:, None] * SIZE + offs, value, mask=[-mask-]{+one+})\n"
        },
        trial=Trial(
            "differential",
            dict(
                topk=4,
                num_steps=3,
                num_draft_tokens=16,
                page_size=1,
                batch=3,
                rounds=3,
                sampling="warm",
                threshold_acc=0.1,
            ),
        ),
    ),
    Fault(
        name="draft-slots-without-topk",
        source="sgl-project/sglang#27338",
        operation="kv",
        cause="the buffer of the draft lanes' slots is sized without the number of lanes",
        symptom="large batches, wide trees and long requests write outside it",
        fields=("out of bounds",),
        edits={LANES: "extras = [-config.topk * (-]page_size - 1 + config.num_steps[-)-]"},
        trial=Trial("memory", TREE | dict(page_size=4)),
    ),
    Fault(
        name="accept-index-overrun",
        source="sgl-project/sglang#26866",
        operation="verify",
        cause="accepted paths are read with the width of a tree",
        symptom="with more than one lane, memory after the paths is read as nodes",
        fields=("out of bounds",),
        edits={KV: "width = [-verdict.accept_index.shape[1]-]{+cache_locations.numel() // max(1, batch.size)+}"},
        trial=Trial("memory", TREE | dict(page_size=1)),
    ),
    Fault(
        name="padded-seq-len-one",
        source="vllm-project/vllm#45005",
        operation="attention",
        cause="padding rows have one key, in a block that does not exist",
        symptom="attention reads before the start of the slot table",
        fields=("out of bounds",),
        edits={
            "specsim.fast.runtime.buffers": '    "req_pool_indices": -1,\n{+    "seq_lens": 1,\n+}',
            "specsim.fast.model.metadata": "length = tl.load(lens_ptr + request, mask=[-real & -]mask, other=0)",
        },
        trial=Trial("memory", TREE | dict(page_size=1, bucket=2, batch=1, max_new_tokens=2)),
    ),
    Fault(
        name="row-too-narrow",
        source="sgl-project/sglang#26972",
        operation="kv",
        cause="a row of the request table is as wide as the longest request, without the columns of draft lanes",
        symptom="near the length limit, lanes are written beyond the row's end",
        fields=("out of bounds",),
        edits={"specsim.fast.engine": "width = self.config.[-reserved_columns(self.config.-]length_limit[-)-]"},
        trial=Trial("memory", TREE | dict(page_size=4, max_len="near")),
    ),
    Fault(
        name="draft-page-table-transposed",
        source="sgl-project/sglang#7239",
        operation="attention",
        cause="the draft lanes' slots are written in one order of dimensions and read in another",
        symptom="two equal requests in a batch get fewer drafts accepted than one solo",
        fields=("draft tokens", "counters"),
        edits={LANES: "metadata_ptrs.extra_slots + [-request * most + extra-]{+extra * num_requests + request+}"},
        trial=Trial("batched", TREE | dict(impl="fast", page_size=4, batch=2, prompts="equal", family="noisy")),
    ),
    Fault(
        name="padded-row-writes",
        source="vllm-project/vllm#47066, sgl-project/sglang#18647",
        operation="graph",
        cause="a padding row keeps the index of a running request",
        symptom="the first request's KV and tokens are overwritten whenever the batch is padded",
        fields=("target KV", "draft KV"),
        edits={"specsim.fast.runtime.buffers": '    "req_pool_indices": [--1-]{+0+},\n'},
        trial=Trial(
            "batched", TREE | dict(impl="fast", page_size=1, batch=1, bucket=2, against="exact", max_new_tokens=5)
        ),
    ),
    Fault(
        name="pages-not-released",
        source="sgl-project/sglang#7112",
        operation="kv",
        cause="slots released after a round are rounded down to pages, which misses the page at the edge",
        symptom="a page leaks every round, until none is left",
        fields=("allocator balance",),
        edits={"specsim.core.page_pool": "self._allocator.free(pages[num_pages{+ + 1 +}:])"},
        trial=Trial("batched", TREE | dict(impl="reference", page_size=4, release="round")),
    ),
)
