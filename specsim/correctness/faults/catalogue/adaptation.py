"""Faults of switches between settings. Both implementations have them."""

from specsim.core.verifiers import VERIFIER_OF
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
# Chains whose requests have other draft steps in every round, from those of the setting down to none.
OWN_STEPS = dict(
    kind="eagle3",
    topk=1,
    num_steps=3,
    page_size=4,
    batch=3,
    draft_steps="own",
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
                "max(round_columns(length, config, self._ahead) for config in self._settings)",
                "min(round_columns(length, config, self._ahead) for config in self._settings)",
            ),
        ),
        trial=Trial("batched", SWITCHED),
    ),
    Fault(
        name="draft-steps-of-another-request",
        source="no public report: the draft steps of requests follow the rows of the batch",
        operation="scheduler",
        cause="the draft steps that a policy chose by request are given to the rows in another order",
        symptom="a request accepts fewer drafts than its own steps allow, or more",
        fields=("counters", "tokens"),
        edits=(
            Edit(
                "specsim.serving.runner",
                "torch.from_numpy(choice.steps)",
                "torch.from_numpy(choice.steps[::-1].copy())",
            ),
        ),
        trial=Trial("oracle", OWN_STEPS),
    ),
    Fault(
        name="dead-node-accepted",
        source="no public report: vllm-project/vllm has a number of drafts by request, sgl-project/sglang one",
        operation="verify",
        cause="a verifier ends at the steps of the setting, not at those of the request",
        symptom="a token that nobody drafted is accepted",
        fields=("accept_index", "num_accepted_drafts"),
        edits=(
            Edit(
                "specsim.fast.verifiers.path",
                "tl.minimum(tl.minimum(limits.num_steps, drafted), limits.max_len - 1 - length)",
                "tl.minimum(limits.num_steps, limits.max_len - 1 - length)",
            ),
        ),
        trial=Trial("differential", OWN_STEPS | dict(verifier=VERIFIER_OF["sampled"], temperature=1.0)),
    ),
)
