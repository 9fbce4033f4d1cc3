# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Serving many requests
#
# * **Goal:** You can read the timeline of a server, and say what batching, preemption, overlap and prefix reuse change
#   in it: steps, rounds, prefilled tokens, and never the text.
# * **Before:** Notebooks 01, 02 and 07.
# * **Time:** 45 minutes to work through, 10 seconds to run. No GPU.
#
# So far a few requests began together and ended together. A server has another life. Requests arrive when they like,
# want outputs of different lengths, and together they need more KV than there is. A *scheduler* decides in every step
# who runs. This notebook runs a real one, on the shipped pair, and draws what it does.

# %%
import specsim
from specsim import ServingConfig, SpecConfig, plots
from specsim.serving.serve import serve
from specsim.serving.workload import parse_requests

pair = specsim.load()
config = SpecConfig(topk=1, num_steps=3, page_size=4)
engine = specsim.load_engine(pair, config)

# %% [markdown]
# ## Four requests
#
# A request is a line of JSON, as in the files of `specsim run`. `arrival` is the step in which it arrives; the first
# request arrives in step 0. All requests are greedy.

# %%
lines = """{"prompt": "def main():", "max_new_tokens": 16}
{"prompt": "import os", "arrival": 1, "max_new_tokens": 12}
{"prompt": "class Node:", "arrival": 3, "max_new_tokens": 12}
{"prompt": "for i in range", "arrival": 3, "max_new_tokens": 8}"""

# %% [markdown]
# First the simplest server: one request at a time, the others wait.

# %%
one_by_one = serve(engine, parse_requests(lines, "four requests", pair).requests, ServingConfig(max_running=1))
plots.timeline(one_by_one.trace)

# %% [markdown]
# A row is a request, and the steps run from left to right. A number is the number of tokens that a round gave. In the
# step of its prefill, a request gets the token after its prompt, which is not in the number, and runs its first round.
#
# * How many rounds does request 0 need, and how many tokens do they give? It has 16: where is the other one from?
# * Request 1 arrives in step 1. How long does its user wait for the first token?
# * A chain of three drafts gives at most four tokens. How often does a round give four?
#
# ## Batching
#
# Notebook 02 said that a forward pass takes about the same time for one token as for a hundred. So the requests can
# share their rounds: all of them draft together, and the target verifies all chains in one pass. New requests enter
# between two rounds, and a request that has ended leaves at once. This is *continuous batching*.
#
# ### Prediction
#
# One by one, the four requests took 23 steps. How many steps do they take if all may run at the same time?

# %%
guess = specsim.course.predict("23 steps one by one: how many with four requests at a time?", 6)
guess

# %%
batched = serve(engine, parse_requests(lines, "four requests", pair).requests, ServingConfig(max_running=4))
assert one_by_one.totals["steps"] == 23
guess.score(batched.totals["steps"])

# %%
plots.timeline(batched.trace)

# %% [markdown]
# * Which request decides how long the whole run takes? Could you have read the number of steps from the first picture?
# * Between which steps is the batch full? How many requests run in the last two steps?
# * Compare the numbers in a row with those of the first picture. Why are they the same?
#
# The last point is essential. A request must get the same text, whoever runs next to it. The next cell checks it.

# %%
texts = [request.text for request in one_by_one.requests]
assert [request.text for request in batched.requests] == texts
print(f"the same {len(texts)} texts, in {batched.totals['steps']} instead of {one_by_one.totals['steps']} steps")

# %% [markdown]
# ## Two times that matter
#
# A user of a chat notices two times. **TTFT**: the time to the first token. **TPOT**: the time per output token after
# the first. A scheduler trades one for the other. Here both are counted in steps.
#
# With speculation a third one is worth a look, the time between deliveries (**ITL**). A round delivers several tokens
# at once, so ITL and TPOT are not the same.

# %% [markdown]
# ### Exercise 11-1
#
# Write `time_per_token`, the TPOT of a request in steps. It receives the deliveries of the request: pairs of the step
# and the number of tokens that arrived in it. Return the number of steps from the first delivery to the last, divided
# by the number of tokens after the first *token*. Return 0 for a request with one token.
#
# A request may miss steps, for instance while it is preempted. These steps count.


# %%
def time_per_token(deliveries: list[tuple[int, int]]) -> float:
    """Compute the mean number of steps that a token takes after the first delivery.

    deliveries: pairs of the step and the number of tokens that arrived in it, in order.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("11-1", time_per_token)

# %% [markdown]
# `specsim.course.solution("11-1")` shows a solution. The run keeps these times for every request. In its first step a
# request has two deliveries: the token after its prompt, and the tokens of its first round. So ITL can be below 1.

# %%
for name, served in (("one by one", one_by_one), ("batched", batched)):
    for request in served.to_json()["outputs"]:
        times = request["latency"]
        print(
            f"{name:10} request {request['id']}: TTFT {times['ttft_steps']:2.0f} steps, "
            f"TPOT {times['tpot_steps']:.2f}, ITL {times['itl_steps']:.2f}"
        )

# %% [markdown]
# * What does batching improve, TTFT or TPOT?
# * A step with four requests takes a little longer than a step with one. With how many requests would this matter?
#   Notebook 02 has the picture.
#
# ## Overlap
#
# So far the host and the GPU took turns. The GPU computes a round. The host waits for it, reads the tokens, looks for
# stop strings, plans the next step, and launches it. Meanwhile the GPU has nothing to do. In a fast engine this gap is
# a large part of the time.
#
# Under the schedule `overlap` the host launches the next round *before* it reads the last one. The GPU never waits. The
# price: the host plans with knowledge that is one step old. It does not know yet whether a request has ended.
#
# ### Prediction
#
# Under the schedule `sync` the four requests took part in 23 rounds, one by one or batched. How many are computed under
# `overlap`?

# %%
guess = specsim.course.predict("23 rounds of requests under sync: how many under overlap?", 23)
guess

# %%
overlapping = serve(engine, parse_requests(lines, "four requests", pair).requests, ServingConfig(schedule="overlap"))
assert batched.trace.counts()["decoded"] == 23
guess.score(overlapping.trace.counts()["decoded"])

# %%
plots.timeline(overlapping.trace)

# %% [markdown]
# A number stands in the step in which the host *reads* it, one step after the round.
#
# * A request's first tokens now arrive one step later. Where do you see it?
# * When a request has ended, one more round of it has already begun. Its result is thrown away, so the picture has no
#   number for it. How many such rounds are there?
# * Does this waste weigh more for short or for long outputs?
#
# The thrown-away round is harmless for the text, but it writes KV. So its slots must not be given to anybody else
# before it has ended. For this reason, a request reserves columns for *two* rounds.

# %% [markdown]
# ### Exercise 11-2
#
# Write `slots_of_chain`. A request has `seq_len` committed tokens. A round needs a column for each of its
# `num_draft_tokens` nodes. The next round may begin before the host knows how many drafts this one accepted, so the
# request needs room for *two* rounds. Slots come in pages of `page_size`. Return the number of slots.


# %%
def slots_of_chain(seq_len: int, num_draft_tokens: int, page_size: int) -> int:
    """Compute the number of KV slots that a request with chains of drafts reserves: two rounds, in whole pages."""
    raise NotImplementedError("your answer")


# %%
specsim.course.check("11-2", slots_of_chain)

# %%
for seq_len in (2, 8, 20):
    print(f"{seq_len:2} committed tokens: {config.reserved_columns(seq_len)} slots in pages of {config.page_size}")

# %% [markdown]
# * `reserved_columns` is the package's own function. A short request reserves many times its length. What does this
#   mean for a server with many short requests?
# * **Try** `SpecConfig(topk=4, num_steps=3, page_size=4)`. A tree with lanes needs much more. Notebook 07 shows why.
#
# ## When slots run out
#
# The pool had 4096 slots so far. Now it has 48. A scheduler cannot know how long an output will be, so it may have
# admitted too many requests. Then it takes the slots of one of them away: the request is *preempted*. Its KV is lost.
# It waits, and later its KV is computed again.

# %% [markdown]
# ### Exercise 11-3
#
# Write `victim`. When slots run out, one of the running requests must give its slots back and wait. Each is a tuple of
# its id, its priority and its step of arrival. A higher priority is more important. Return the id of the request that
# arrived last among those of the lowest priority. If two arrived in the same step, take the later one in the list.


# %%
def victim(requests: list[tuple[int, int, int]]) -> int:
    """Choose the request that loses its slots: of the lowest priority, the one that arrived last.

    requests: tuples of id, priority (higher is more important) and step of arrival. Of two that arrived in the same
    step, the later one in the list is the victim.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("11-3", victim)

# %%
crowded = serve(engine, parse_requests(lines, "four requests", pair).requests, ServingConfig(num_slots=48))
plots.timeline(crowded.trace)

# %%
for name, served in (("4096 slots", batched), ("48 slots", crowded)):
    totals = served.totals
    print(f"{name}: {totals['steps']} steps, {totals['num_prefilled']} tokens prefilled")
assert [request.text for request in crowded.requests] == texts

# %% [markdown]
# * Requests 2 and 3 arrive in step 3. Why do they not begin then?
# * Request 3 had delivered 5 tokens before it was preempted: the one after its prompt, and 4 from a round. Its user has
#   seen them. Which tokens are prefilled when it resumes, and why is no token delivered twice?
# * The text is the same as before, and it would be at a temperature above 0 too. A request's random numbers have names:
#   its id, its seed, the position. What would go wrong if they were drawn from one stream for all requests?
# * **Try** `ServingConfig(num_slots=36)` and `num_slots=24`. What does the scheduler do with a request that can
#   never fit? `crowded.requests[0].error` gives the reason, and the assertion above fails.
#
# The slots tell the same story. `committed` are slots with final KV, `reserved` are held for drafts and for rounds to
# come.

# %%
print("step  committed  reserved  free")
for record in crowded.trace.records:
    print(f"{record.step:4}  {record.committed_slots:9}  {record.reserved_slots:8}  {record.free_slots:4}")

# %% [markdown]
# * In which steps are more slots reserved than committed?
# * In step 6, request 3 is preempted. Which number shows it?
#
# ## Reuse of a prefix
#
# Many prompts begin with the same text: a system prompt, a file, a conversation so far. Its KV is the same each time.
# With a *prefix cache*, pages stay in the pool when their request has ended, and a new prompt that begins with the same
# tokens uses them again.

# %%
system = '"""Tools for lists of numbers, with no imports.\n\nEvery function returns a float.\n"""\n\n\n'
functions = ("def mean(values):", "def median(values):")
first, second = (pair.tokenizer.encode(system + function) for function in functions)
shared = next(place for place, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
print(f"the second prompt has {len(second)} tokens, the first {shared} as in the first prompt")

# %% [markdown]
# ### Prediction
#
# The pages have 16 slots. How many tokens of the second prompt need not be prefilled?

# %%
guess = specsim.course.predict("How many tokens of the second prompt are reused, with pages of 16?", 28)
guess

# %%
pages_of_16 = specsim.load_engine(pair, SpecConfig(topk=1, num_steps=3, page_size=16))
prompts = "\n".join(
    f'{{"prompt_ids": {ids}, "arrival": {arrival}, "max_new_tokens": 8}}'
    for ids, arrival in ((first, 0), (second, 3), (second, 4))
)
cached = serve(pages_of_16, parse_requests(prompts, "prompts", pair).requests, ServingConfig(prefix_cache=True))
guess.score(cached.requests[1].num_reused)

# %% [markdown]
# Only whole pages are shared. A page that differs in a part is computed again, since every slot of a page belongs to
# the same requests. The third request has the *same* prompt as the second. What does it reuse?

# %%
for request in cached.requests:
    print(f"prompt of {len(request.prompt_ids)} tokens: {request.num_reused} reused")
plots.timeline(cached.trace)

# %% [markdown]
# * Requests 1 and 2 have equal prompts. Why is not everything reused? Count the pages.
# * Notebook 01: a row of the drafter has the features of a token with the id of the token *after* it. So a page of the
#   draft KV depends on one token beyond its end. If two prompts agree in exactly 16 tokens, may they share a page of
#   16?
# * **Try** `page_size=1` and `page_size=8`. What do small pages cost, what do they gain?
#
# ## Your predictions

# %%
specsim.course.scores()

# %% [markdown]
# ## What to remember
#
# * Continuous batching shares every pass among all running requests. Requests enter and leave between rounds.
# * Overlap hides the host's work behind the GPU's. It costs one round per request, and slots for a second round.
# * Preemption is the price of admitting requests whose length is not known. What is lost is time, never a token.
# * A prefix cache shares whole pages. With a drafter that keeps KV, a page depends on the token after it, too.
# * None of this changes a text. `specsim soak` checks that on thousands of random runs.
#
# In the package: `specsim run` serves a file, and [the guide](guide/serving.md) describes a step of the scheduler.
# Continuous batching is from [Orca](https://www.usenix.org/conference/osdi22/presentation/yu), paged KV from
# [vLLM](https://arxiv.org/abs/2309.06180), the cache of prefixes from [SGLang](https://arxiv.org/abs/2312.07104).
