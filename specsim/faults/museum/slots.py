"""Faults of KV slots: what lies where, who owns it, what is moved when."""

from specsim.faults.fault import Fault, Trial
from specsim.faults.planting import Edit

FAULTS = (
    Fault(
        name="kv-not-moved",
        source="sgl-project/sglang#15360",
        operation="kv",
        cause="the KV of the accepted path stays where the tree had it",
        symptom="the round itself is right; from the next one on the target reads the KV of other nodes",
        fields=("target keys", "target values"),
        edits=(
            Edit(
                "specsim.fast.kv",
                "moved = (source >= 0) & (destination >= 0) & (source != destination)",
                "moved = (source >= 0) & (destination >= 0) & (source < 0)",
            ),
        ),
        trial=Trial("differential", dict(topk=4, num_steps=3, num_draft_tokens=8, page_size=4, batch=3, rounds=2)),
    ),
    Fault(
        name="tail-indices-moved-not-kv",
        source="sgl-project/sglang#7725",
        operation="kv",
        cause="each lane's page table points at a copy of the prefix's tail, which holds no KV",
        symptom="tokens stay right; all lanes but the first attend to whatever those slots held",
        fields=("draft KV of copied tails",),
        edits=(
            Edit(
                "specsim.fast.kv",
                "    if config.lanes_share_prefix:\n        return\n",
                "    if config.lanes_share_prefix or config.topk > 1:\n        return\n",
            ),
        ),
        trial=Trial("differential", dict(topk=2, num_steps=2, num_draft_tokens=5, page_size=4, batch=1, rounds=1)),
    ),
)
