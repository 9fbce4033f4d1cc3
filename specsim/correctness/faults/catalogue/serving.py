"""Faults of shared code: states between rounds, switches between settings, the server, randomness."""

from specsim.core.kinds import DEFAULT
from specsim.core.verifiers import VERIFIER_OF
from specsim.correctness.faults.fault import Fault, Trial

TREE = dict(impl="reference", topk=2, num_steps=3, num_draft_tokens=5, page_size=1, batch=3)
RUNNER = "specsim.serving.runner"
# Two of three requests are preempted before step 3 and resume from step 8 on.
PREEMPTED = dict(max_new_tokens=12, slots=96, limits=[[3, 34], [8, 96]])
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
    kind=DEFAULT,
    topk=1,
    num_steps=3,
    page_size=4,
    batch=3,
    draft_steps="own",
)

FAULTS = (
    Fault(
        name="filter-slices",
        source="sgl-project/sglang#9252",
        operation="phases",
        cause="when requests finish, the first rows of the draft state are kept, whichever requests they belong to",
        symptom="a request continues from the drafts and the root of another",
        fields=("draft state",),
        edits={
            RUNNER: "draft_input.filter([-rows-]{+torch.arange(len(indices), device=rows.device)+}) if indices else"
        },
        trial=Trial("batched", TREE),
    ),
    Fault(
        name="empty-batch-keeps-verify-state",
        source="sgl-project/sglang#24859",
        operation="phases",
        cause="after the last request has finished, its state stays instead of an empty one",
        symptom="the next request is merged after a row of no request",
        fields=("next merge",),
        edits={RUNNER: "if indices else self.[-_engine.drafter.idle()-]{+_draft_input+}"},
        trial=Trial("batched", TREE | dict(batch=2, arrivals=[0, 30])),
    ),
    Fault(
        name="preempt-keeps-draft-state",
        source="sgl-project/sglang#2711",
        operation="scheduler",
        cause="a request that resumes after a preemption gets its first draft state again",
        symptom="it continues from an old root",
        fields=("tokens",),
        edits={
            RUNNER: "{+        old = self.__dict__.setdefault('_old', {})\n"
            "        for place, request in enumerate(requests):\n"
            "            own = draft_input.filter(torch.tensor([place], device=self._engine.device))\n"
            "            own = old.setdefault(request.request_id, own)\n"
            "            self._draft_input = self._draft_input.merge(own)\n"
            "+}        self._batch = self._batch.merge(batch)\n"
            "[-        self._draft_input = self._draft_input.merge(draft_input)\n"
            "-]"
        },
        trial=Trial("batched", TREE | PREEMPTED),
    ),
    Fault(
        name="tokens-after-eos",
        source="sgl-project/sglang#33758",
        operation="scheduler",
        cause="the length limit is checked before stop tokens, and stop tokens only at the end of an accepted path",
        symptom="tokens after a stop token are kept, and the finish reason is length",
        fields=("tokens", "finish reason"),
        edits={
            "specsim.serving.requests": "            if[- self.stop_reason is not None:\n"
            '                self.finish_reason = "stop"\n'
            "            elif-] len(self.token_ids) == self.max_tokens:\n"
            '                self.finish_reason = "length"\n'
            "{+            elif token is token_ids[-1] and not self.stop_ids.isdisjoint(token_ids):\n"
            '                self.finish_reason = "stop"\n'
            "+}"
        },
        trial=Trial(
            "oracle",
            dict(topk=4, num_steps=3, num_draft_tokens=8, page_size=1, batch=3, stop_token_ids=list(range(0, 48, 4))),
        ),
    ),
    Fault(
        name="seed-by-row",
        source="vllm-project/vllm#11123 and similar reports",
        operation="uniforms",
        cause="uniforms are named by a request's row in the batch, not by the request",
        symptom="with the same seed, a request gets other tokens in a batch than solo",
        fields=("tokens",),
        edits={RUNNER: "request_ids=[-[request.request_id for request in requests]-]{+list(range(len(requests)))+},"},
        trial=Trial("batched", TREE | dict(sampling="warm")),
    ),
    Fault(
        name="dict-order-rows",
        source="vllm-project/vllm#14645",
        operation="scheduler",
        cause="results are assigned in the order of a table of requests, not of the batch",
        symptom="a request gets tokens of another",
        fields=("tokens",),
        edits={
            RUNNER: "step, tuple({+sorted(+}self.requests{+, key=lambda each: each.request_id)+}), results,[- -]{+\n"
            "                        +}is_round=True,"
        },
        trial=Trial("batched", TREE | dict(arrivals=[1, 0, 0])),
    ),
    Fault(
        name="uniform-reused-for-final",
        source="review of sgl-project/sglang#7163",
        operation="verify",
        cause="the last draw of a round uses the uniform that decided about the first draft",
        symptom="both implementations and the oracle agree, but tokens drawn after a rejection are biased",
        fields=("distribution",),
        edits={"specsim.core.uniforms": "    FINAL = [-2-]{+1+}\n"},
        trial=Trial("distribution", dict(impl="reference", tokens=2304)),
    ),
    Fault(
        name="gumbel-noise-shared",
        source="vllm-project/vllm#54282, vllm-project/vllm#47386",
        operation="sampling",
        cause="the replacement of a rejected draft is drawn with the noise of the draft",
        symptom="both implementations agree; the bias of the output grows with the distance of drafter and target",
        fields=("distribution",),
        edits={"specsim.core.uniforms": "    DRAFT = [-4-]{+2+}\n"},
        trial=Trial("distribution", dict(impl="reference", tokens=2304, verifier=VERIFIER_OF["sampled"])),
    ),
    Fault(
        name="switch-drops-bonus-token",
        source="no public report: the switches of sgl-project/sglang#23336 keep it",
        operation="scheduler",
        cause="a switch of settings makes a new draft state without the token that waits as the next root",
        symptom="the round after a switch verifies a tree below another root, and the output goes on from it",
        fields=("tokens",),
        edits={
            "specsim.core.adaptive_engine": "{+        if self.current != self.__dict__.get('_last', self.current):\n"
            "            draft_input.bonus_tokens.zero_()\n"
            "        self._last = self.current\n"
            "+}        return self._engine.round(batch, draft_input, pools, reserved)\n"
        },
        trial=Trial("batched", SWITCHED),
    ),
    Fault(
        name="switch-shrinks-reservations",
        source="sgl-project/sglang#23336",
        operation="scheduler",
        cause="columns are reserved for the setting of fewest steps, so a switch up finds too few",
        symptom="the next larger tree is written to columns that the request does not own",
        fields=("out of bounds",),
        edits={"specsim.serving.reservations": "[-max-]{+min+}(round_columns(length, config, self._ahead) for"},
        trial=Trial("batched", SWITCHED),
    ),
    Fault(
        name="draft-steps-of-another-request",
        source="no public report: the draft steps of requests follow the rows of the batch",
        operation="scheduler",
        cause="the draft steps that a policy chose by request are given to the rows in another order",
        symptom="a request accepts fewer drafts than its own steps allow, or more",
        fields=("counters", "tokens"),
        edits={"specsim.serving.runner": "torch.from_numpy(choice.steps[-)-]{+[::-1].copy())+}"},
        trial=Trial("oracle", OWN_STEPS),
    ),
    Fault(
        name="dead-node-accepted",
        source="no public report: vllm-project/vllm has a number of drafts by request, sgl-project/sglang one",
        operation="verify",
        cause="a verifier ends at the steps of the setting, not at those of the request",
        symptom="a token that nobody drafted is accepted",
        fields=("accept_index", "num_accepted_drafts"),
        edits={"specsim.fast.acceptance": "[-tl.minimum(-]tl.minimum(limits.num_steps[-, drafted)-], limits.max_len"},
        trial=Trial("differential", OWN_STEPS | dict(verifier=VERIFIER_OF["sampled"], temperature=1.0)),
    ),
)
