"""Faults of verification and its outputs: tokens, logprobs, counters, the drafter's next input."""

from specsim.core.verifiers import KIND_OF, VERIFIER_KINDS, VERIFIER_OF
from specsim.correctness.faults.fault import Fault, Trial

TREE = dict(topk=2, num_steps=3, num_draft_tokens=5, page_size=1, batch=2, rounds=2)
EXTEND = "specsim.fast.kv.extend"
FINISH = "specsim.fast.acceptance"
DRAFT_DISTRIBUTION = "specsim.fast.vocabulary.draft_distribution"
DISTRIBUTION = "specsim.fast.vocabulary.distribution"
DISTINCT = KIND_OF[VERIFIER_OF["distinct"]]
FROM_LEAVES = next(kind for kind in reversed(VERIFIER_KINDS) if kind.drafts == "siblings")
LANES = dict(topk=4, num_steps=2, num_draft_tokens=9, page_size=1, batch=3, sampling="warm")

FAULTS = (
    Fault(
        name="bonus-stride",
        source="sgl-project/sglang#26866",
        operation="verify",
        cause="the bonus token is indexed with rows of num_draft_tokens, but a path has num_steps + 1",
        symptom="all requests but the first continue from another token than the target's",
        fields=("draft_extend_input.bonus_tokens",),
        edits={
            EXTEND: "    batch_size,\n    width,\n{+    num_nodes,\n+}"
            "@@"
            "verdict_ptrs.accept_index + request * [-width-]{+num_nodes+} + drafts"
            "@@"
            "        width=width,\n"
            "{+        num_nodes=len(verdict.predict) // max(1, batch_size),\n+}"
            "        BLOCK=requests,\n"
        },
        trial=Trial("differential", TREE),
    ),
    Fault(
        name="path-not-compacted",
        source="sgl-project/sglang#26866, sgl-project/sglang#15360",
        operation="extend",
        cause="tokens and features of the accepted path are taken in the tree's order",
        symptom="with more than one lane, the drafter continues from rejected siblings",
        fields=("draft_extend_input.input_ids", "draft_extend_input.hidden"),
        edits={EXTEND: "{+node = tl.where(live, root + step, -1)\n    +}source = tl.where(node >= 0, node, root)"},
        trial=Trial("differential", TREE),
    ),
    Fault(
        name="drafter-keeps-draft-features",
        source="vllm-project/vllm#14649",
        operation="extend",
        cause="the drafter keeps the KV of accepted drafts that its own features made, instead of the target's",
        symptom="tokens stay right; the further a request goes, the fewer drafts are accepted",
        fields=("draft keys", "draft values"),
        edits={
            "specsim.fast.drafters.autoregressive": "(batch, draft_extend_input, pools, self.bonus_columns)\n"
            "{+        from dataclasses import replace\n"
            "        width = self._config.num_steps + 1\n"
            "        step = torch.arange(len(metadata.slots), device=metadata.slots.device) % width\n"
            "        kept = (step < width - 2) & (step < extend.num_accepted_drafts.repeat_interleave(width))\n"
            "        metadata = replace(metadata, slots=torch.where(kept, -1, metadata.slots))\n"
            "+}"
        },
        trial=Trial("differential", dict(topk=1, num_steps=3, page_size=1, batch=3, rounds=3)),
    ),
    Fault(
        name="counter-mutated",
        source="sgl-project/sglang#23962",
        operation="phases",
        cause="the number of accepted drafts is incremented in place to get the number of accepted tokens",
        symptom="later readers of the counter in the round take the bonus token for a draft",
        fields=("num_accepted_drafts", "draft_extend_input.num_accepted_drafts"),
        edits={
            "specsim.fast.sections": "{+    frame.verdict.num_accepted_drafts.add_(1)\n+}"
            "    draft_extend_input(\n        frame.batch,\n"
        },
        trial=Trial("differential", TREE | dict(batch=3)),
    ),
    Fault(
        name="logprob-after-compaction",
        source="sgl-project/sglang#26866 and other gathers along a path",
        operation="verify",
        cause="rows are compacted to the accepted path, and logprobs then gathered from them by nodes of the tree",
        symptom="tokens stay right; with more than one lane logprobs are those of other nodes",
        fields=("logprobs",),
        edits={
            FINISH: "{+    place = tl.where(path - root <= num_steps, path - root, 0)\n"
            "    compacted = tl.load(accept_index_ptr + place, mask=path >= 0, other=0).to(tl.int64)\n"
            "+}    logprobs = logprob(distributions, [-path-]{+tl.maximum(compacted, root)+}, drafted, "
            "following >= 0)[-  # before the draw, which waits for its own loads-]"
            "@@"
            "[-last-]{+tl.maximum(tl.max(tl.where(offs == drafts, compacted, -1), axis=0), root)+}, bonus, length"
        },
        trial=Trial("differential", TREE),
    ),
    Fault(
        name="logprob-without-temperature",
        source="sgl-project/sglang#4195",
        operation="verify",
        cause="logprobs are those of the logits before they are divided by the temperature",
        symptom="tokens stay right; logprobs are wrong at every temperature but 0 and 1",
        fields=("logprobs",),
        edits={
            DISTRIBUTION: "{+    total = logits * 0\n"
            "    for other in range(distributions.vocab_size):\n"
            "        own = _rows_of(distributions, tl.where(mask, rows, 0))\n"
            "        total += tl.exp(logits_at(own, tokens * 0 + other, mask) - best)\n"
            "+}    return tl.where(mask, "
            "[-((logits - best) * scale - log_sum) * LN_2-]{+logits - best - tl.log(total)+}, 0.0)\n"
        },
        trial=Trial("differential", TREE | dict(batch=1, sampling="filtered", rounds=1)),
    ),
    Fault(
        name="logits-mutated-before-logprob",
        source="vllm-project/vllm#30846",
        operation="sampling",
        cause="top-k and top-p change the logits in place before logprobs are read from them",
        symptom="tokens stay right; with filters, logprobs are normalised over the kept tokens",
        fields=("logprobs",),
        edits={"specsim.fast.sampling": "offs * 4 + 2, tl.log2([-total-]{+mass+}), mask=written)"},
        trial=Trial("differential", TREE | dict(batch=1, sampling="filtered", rounds=1)),
    ),
    Fault(
        name="penalty-row-not-repeated",
        source="SGLang's eagle_sample, before parameters were repeated for every node",
        operation="sampling",
        cause="penalties of B requests are applied to the first B of the B·N rows",
        symptom="most nodes of every tree are verified without penalties, or with those of another request",
        fields=("processed logits",),
        edits={
            "specsim.fast.vocabulary.penalties": "{+            first = (root + offs_n < tl.num_programs(0))[:, None]\n"
            "            output = tl.where(first, output, 0)\n"
            "            in_prompt = tl.where(first, in_prompt, 0)\n"
            "+}            logits = tl.where(in_prompt + output > 0, repeated, logits)\n"
        },
        trial=Trial("differential", TREE | dict(sampling="penalties", rounds=1)),
    ),
    Fault(
        name="final-path-skips-processors",
        source="SafeAILab/EAGLE#215",
        operation="verify",
        cause="when every draft was accepted the last token is drawn without temperature and top-p",
        symptom="the better the drafter, the more tokens follow another distribution",
        fields=("predict",),
        edits={
            FINISH: "_finish_kernel(\n    distributions,\n{+    unprocessed,\n+}"
            "@@"
            "            {+if drafts == num_steps:\n"
            "                bonus = draw(unprocessed, last, siblings, uniform, workspace, request, "
            "GROUP, GROUPS, PER)\n"
            "            else:\n"
            "                +}bonus = draw(distributions, last, siblings"
            "@@"
            "{+    from dataclasses import replace\n"
            "    from specsim.fast import sampling\n"
            "    plain = replace(batch.sampling, temperature=torch.ones_like(batch.sampling.temperature),\n"
            "                    top_p=torch.ones_like(batch.sampling.top_p))\n"
            "    unprocessed = sampling.distributions(replace(batch, sampling=plain), distributions.logits)\n"
            "+}    _finish_kernel[(num_requests,)](\n"
            "        distributions=distributions.tables,\n"
            "{+        unprocessed=unprocessed.tables,\n"
            "+}"
        },
        trial=Trial("differential", TREE | dict(sampling="filtered", threshold_acc=0.1, rounds=4)),
    ),
    Fault(
        name="logits-column-copied",
        source="vllm-project/vllm#41162",
        operation="sampling",
        cause="the distributions of later draft steps are written to the result of advanced indexing, a copy",
        symptom="drafts after the first are verified with a distribution that they were not drawn from",
        fields=("draft_prob",),
        edits={
            DRAFT_DISTRIBUTION: "{+        parents = torch.arange(draft_prob.shape[1], device=draft_prob.device)\n"
            "        copied = draft_prob if loop is None else draft_prob[:, parents]\n"
            "+}        write_draft_prob("
            "logits_RV, moments, vocabulary, [-draft_prob-]{+copied+}, num_lanes, step, num_steps)\n"
        },
        trial=Trial("differential", dict(topk=1, num_steps=3, page_size=1, batch=2, sampling="warm", verifier="block")),
    ),
    Fault(
        name="sibling-drawn-twice",
        source="arXiv:2402.14160",
        operation="drafting",
        cause="siblings that are verified as distinct ones are drawn independently, so that two may hold one token",
        symptom="an equal sibling is rejected as soon as the first is, and the others are tested with a wrong q",
        fields=("draft_input.topk_index", "topk_index"),
        edits={DRAFT_DISTRIBUTION: "DISTINCT=[-next_power_of_2(num_drafts) if is_distinct else 0-]{+0+}"},
        trial=Trial("differential", LANES | dict(verifier=DISTINCT.name)),
    ),
    Fault(
        name="residual-not-normalised",
        source="arXiv:2402.14160",
        operation="verify",
        cause="after a rejection the next sibling is tested with relu(p - q) as it is, instead of a distribution",
        symptom="siblings after the first are accepted too seldom, and the output follows another distribution",
        fields=("accept_index", "predict"),
        edits={
            DISTINCT.fast.partition(":")[0]: "                draft_scale = tl.where(rest > 0, scale, draft_scale)\n"
            "[-                mass = tl.where(rest > 0, rest, mass)\n-]"
        },
        trial=Trial("differential", LANES | dict(verifier=DISTINCT.name)),
    ),
    Fault(
        name="rejected-sibling-kept-in-q",
        source="arXiv:2402.14160",
        operation="verify",
        cause="q keeps a rejected sibling, from which the next one was not drawn any more",
        symptom="siblings after the first are tested with too small a q, and accepted too often",
        fields=("accept_index", "predict"),
        edits={DISTINCT.fast.partition(":")[0]: '[-inputs.config.verifier_kind.drafts == "distinct"-]{+False+}'},
        trial=Trial("differential", LANES | dict(verifier=DISTINCT.name, family="noisy", rounds=6)),
    ),
    Fault(
        name="weight-kept-after-a-leaf",
        source="arXiv:2505.12398",
        operation="verify",
        cause="a node whose child was rejected is accepted with its weight from before, not with r / (r + 1 - w)",
        symptom="paths end above their leaves too often, and the output follows another distribution",
        fields=("accept_index", "predict"),
        edits={
            FROM_LEAVES.fast.partition(":")[0]: "[-depth < limit-]{+mass < 0+}, uniform * (mass + 1 - weight) - mass"
        },
        trial=Trial("differential", LANES | dict(verifier=FROM_LEAVES.name)),
    ),
)
