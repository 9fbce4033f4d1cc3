"""Faults of ranks that share a model: most make ranks disagree, which engines hide by a broadcast from rank 0."""

from specsim.correctness.faults.fault import Fault, Trial

SECTIONS = "specsim.fast.sections"
SYNC = "sgl-project/sglang, sampler.py: SYNC_TOKEN_IDS_ACROSS_TP"
TREE = dict(topk=2, num_steps=2, num_draft_tokens=4, page_size=4, batch=2, rounds=2)

FAULTS = (
    Fault(
        name="rank-with-another-uniform",
        source=SYNC,
        operation="verification",
        cause="every rank draws its uniforms from a seed of its own",
        symptom="ranks accept other drafts or draw other bonus tokens, and their KV drifts apart",
        fields=("rank digests",),
        edits={
            SECTIONS: "from dataclasses import dataclass{+, replace+}\n"
            "@@"
            "    batch = frame.batch\n"
            "    config = models.config\n"
            "{+    rank = 0 if models.ranks is None else models.ranks.rank\n"
            "    batch = replace(batch, seeds=batch.seeds + rank)\n"
            "+}"
        },
        trial=Trial("ranks", TREE | dict(sampling="warm")),
    ),
    Fault(
        name="rank-breaks-a-tie-otherwise",
        source=SYNC,
        operation="drafting",
        cause="one rank gives equal drafts in another order, as a library's top-k may",
        symptom="ranks build different trees wherever two drafts have the same probability",
        fields=("rank digests",),
        edits={
            "specsim.fast.vocabulary.shared_topk": "{+    ties = best[0] == best[0].roll(-1, 1)\n"
            "    ties[:, -1] = False\n"
            "    if ranks.rank == 1:\n"
            "        other = best[1].roll(1, 1).where(ties.roll(1, 1), best[1])\n"
            "        best[1].copy_(best[1].roll(-1, 1).where(ties, other))\n"
            "+}    return best.scores_ptr, best.index_ptr\n"
        },
        trial=Trial("ranks", TREE | dict(family="twins")),
    ),
    Fault(
        name="stale-length-on-one-rank",
        source=SYNC,
        operation="slots",
        cause="one rank starts the round from a length that misses the last token",
        symptom="that rank reads and writes other columns than the others",
        fields=("rank digests",),
        edits={
            SECTIONS: "from dataclasses import dataclass{+, replace+}\n"
            "@@"
            "{+        ranks = self.models.ranks\n"
            "        rank = 0 if ranks is None else ranks.rank\n"
            "+}        frame.load([-batch-]{+replace(batch, seq_lens=batch.seq_lens - rank)+}, draft_input)\n"
        },
        trial=Trial("ranks", TREE),
    ),
    Fault(
        name="vocabulary-slice-off-by-one",
        source="slices of an embedding by rank, as in Megatron-LM's VocabUtility",
        operation="targets",
        cause="a rank's slice of the vocabulary begins one token too late",
        symptom="all ranks agree, on logits that belong to other tokens",
        fields=("logprobs", "next_tokens", "target keys"),
        edits={"specsim.core.rank_part": "return range(min(self.rank * chunk{+ + self.rank+}, vocab_size), min("},
        trial=Trial("ranks", TREE),
    ),
)
