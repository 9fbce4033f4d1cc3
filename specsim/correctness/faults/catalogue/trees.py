"""Faults of trees: selection of candidates, and checks of parent lists."""

from specsim.correctness.faults.fault import Edit, Fault, Trial

FAULTS = (
    Fault(
        name="malformed-parent-walk",
        source="sgl-project/sglang#36201",
        operation="tree",
        cause="a parent that was not selected is accepted, and ancestors are walked without a bound",
        symptom="a malformed parent list is verified as a tree, or verification never ends",
        fields=("malformed trees",),
        edits=(
            Edit(
                "specsim.fast.tree.nodes",
                "return flat, parent, inside & ((block == 0) | (parent > 0))",
                "return flat, parent, inside",
            ),
        ),
        trial=Trial("trees", dict(pools="malformed", impl="fast", count=100)),
    ),
    Fault(
        name="tie-orphans-child",
        source="SafeAILab/EAGLE, whose tree is looked up by searchsorted among the selected",
        operation="drafting",
        cause="of candidates with equal scores the later ones are selected, a child without its parent among them",
        symptom="a node gets another parent than the one it was drafted after",
        fields=("tree",),
        edits=(
            Edit(
                "specsim.fast.tree.selection",
                "    kept = above | (equal & (equals <= missing))\n",
                "    skipped = tl.sum(equal.to(tl.int32), axis=1, keep_dims=True) - missing\n"
                "    kept = above | (equal & (equals > skipped))\n",
            ),
            Edit(
                "specsim.fast.tree.selection",
                "tl.minimum(equals, missing) - kept.to(tl.int32)",
                "tl.maximum(equals - skipped, 0) - kept.to(tl.int32)",
            ),
        ),
        trial=Trial("trees", dict(pools="tied", impl="fast", count=12)),
    ),
)
