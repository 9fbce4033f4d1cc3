"""Faults of switches between settings. Both implementations have them."""

from specsim.correctness.faults.fault import Fault, Trial
from specsim.correctness.faults.injection import Edit

# Rounds with a tree, without drafts, and with a shallower tree, there and back; compared with plain decoding.
SWITCHED = dict(
    impl="reference",
    topk=2,
    num_steps=3,
    num_draft_tokens=5,
    page_size=4,
    batch=2,
    max_new_tokens=12,
    temperature=0.0,
    script=[3, 0, 1],
    against="plain",
)

FAULTS = (
    Fault(
        name="switch-drops-bonus-token",
        source="no public report: the switches of sgl-project/sglang#23336 keep it",
        operation="scheduler",
        cause="a switch of settings makes a new draft state without the token that waits as the next root",
        symptom="the round after a switch verifies a tree below another root, and the output goes on from it",
        fields=("tokens",),
        edits=(
            Edit(
                "specsim.core.adaptive_engine",
                "        return self._engine.round(batch, draft_input, pools, reserved)\n",
                "        if self.current != self.__dict__.get('_last', self.current):\n"
                "            draft_input.bonus_tokens.zero_()\n"
                "        self._last = self.current\n"
                "        return self._engine.round(batch, draft_input, pools, reserved)\n",
            ),
        ),
        trial=Trial("batched", SWITCHED),
    ),
    Fault(
        name="switch-shrinks-reservations",
        source="sgl-project/sglang#23336",
        operation="scheduler",
        cause="columns are reserved for the setting of fewest steps, so a switch up finds too few",
        symptom="the next larger tree is written to columns that the request does not own",
        fields=("out of bounds",),
        edits=(
            Edit(
                "specsim.serving.residents",
                "max(two_rounds(length, config, self._ahead) for config in self._settings)",
                "min(two_rounds(length, config, self._ahead) for config in self._settings)",
            ),
        ),
        trial=Trial("batched", SWITCHED),
    ),
)
