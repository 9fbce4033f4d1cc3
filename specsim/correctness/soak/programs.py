"""Random programs for the scheduler, drawn from a seed or by any random number generator."""

import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from specsim.core.columns import round_columns
from specsim.core.config import SamplingParams, ServingConfig, SpecConfig, ceil_to
from specsim.core.errors import InputError
from specsim.core.kinds import TESTED, DrafterKind
from specsim.core.pair import Pair
from specsim.core.target import ModelConfig
from specsim.core.token_drafter import SuffixConfig
from specsim.core.verifiers import DEFAULT_VERIFIER, KIND_OF, LANES, VERIFIER_KINDS
from specsim.correctness.differential.cell import KV_FORMATS, LATER_FAMILIES
from specsim.correctness.differential.drafter_grid import LATENT
from specsim.correctness.differential.pairs import KINDS as PAIR_KINDS
from specsim.correctness.differential.pairs import make_pair
from specsim.serving.requests import Request, make_request

SHARED = "suffix.shared"  # a suffix drafter with the tree of finished outputs
KINDS = (*PAIR_KINDS, SHARED)
EARLIER_FAMILIES = ("llama", "qwen3", "mistral", "noisy")
_STEPS = 5
MOST_REQUESTS = 100
MOST_NODES = 12
VOCAB_SIZE = 48
STEM_LEN = 32
USUAL_LEN = 44


def _record(kind: str) -> DrafterKind:
    return TESTED["suffix" if kind == SHARED else kind]


def most_steps(kind: str) -> int:
    """Count the most drafts of one path; several modules make one each."""
    drafter = pair_of(f"{kind}-{EARLIER_FAMILIES[0]}", torch.float64).checkpoint
    num_modules = getattr(drafter and drafter.config, "num_modules", 1)
    return num_modules if num_modules > 1 else _STEPS


def families(kind: str) -> tuple[str, ...]:
    """List the families of targets that this kind drafts for."""
    every = (*EARLIER_FAMILIES, *LATER_FAMILIES)
    return tuple(family for family in every if family not in LATENT) if _record(kind).kv == "target" else every


def formats(kind: str) -> tuple[str, ...]:
    """List the number formats of KV, by name; a kind without KV of its own has the target's only."""
    return tuple(KV_FORMATS) if _record(kind).kv == "own" else ("model", "fp8_target")


def verifiers(kind: str, topk: int) -> tuple[str, ...]:
    """List the verifiers other than the default one that this kind's drafts allow."""
    sampled = ("sampled",) if topk == 1 else LANES
    drafts = ("best", *sampled) if _record(kind).can_sample else ("best",)
    names = (verifier.name for verifier in VERIFIER_KINDS if verifier.drafts in drafts)
    return tuple(name for name in names if name != DEFAULT_VERIFIER)


def possible_graph(graph: str, kind: str, config: SpecConfig) -> str:
    """Return the graph mode, or `phase` where no single graph holds the whole round."""
    is_on_host = not config.is_plain and _record(kind).drafts_on_host(config.topk)
    return "phase" if graph == "round" and (config.release == "round" or is_on_host) else graph


@cache
def pair_of(name: str, dtype: torch.dtype) -> Pair:
    """Make the pair `kind-family`; only SHARED has a tree of other requests' outputs."""
    pair = make_pair(name.replace(SHARED, "suffix"), dtype)
    return pair.with_drafter(SuffixConfig()) if name.startswith(SHARED) else pair


@dataclass(frozen=True, slots=True)
class Submission:
    """A request of a program; fields without a comment are named as in Request."""

    step: int  # submitted before this step
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrival: int = 0
    priority: int = 0
    continues: int | None = None
    abort_at: int | None = None
    keep: bool = False

    def request(self, request_id: int, target_config: ModelConfig) -> Request:
        """Make the request of that id."""
        names = ("arrival", "priority", "continues", "abort_at", "keep")
        fields = {name: getattr(self, name) for name in names}
        return make_request(target_config, None, request_id, self.prompt_ids, self.params, **fields)


@dataclass(frozen=True, slots=True)
class Program:
    """A target, a configuration, requests that arrive and end, and slots that are withheld and returned."""

    name: str  # seed-index-requests, from which `named` makes it again; empty for a program of another generator
    pair: str  # kind-family, of soak.drafters
    config: SpecConfig
    serving: ServingConfig
    num_ranks: int
    graph: str  # of the fast implementation
    submissions: tuple[Submission, ...]  # request i is the i-th
    limits: tuple[tuple[int, int], ...]  # (step, slots of the pool from that step on); the last one lifts the limit
    aborts: tuple[
        tuple[int, int], ...
    ]  # (step, place): abort the request at that place, modulo their number, of those with a row
    closes_at: int | None  # everything is given back before this step; None: once all requests have ended
    # Number formats of the KV, a name of setting.KV_FORMATS, with the reference. The fast implementation has `model`:
    # after a number that float32 rounds to the other side in fp8, logprobs differ by more than rounding does.
    kv: str = "model"
    script: tuple[int, ...] = ()  # steps of each round of the batch, over and over; (): always those of config
    has_own_steps: bool = False  # whether the script is that of each request's rounds

    @property
    def kind(self) -> str:
        """Kind of drafter."""
        return self.pair.rpartition("-")[0]


def named(name: str) -> Program:
    """Make the program of that name."""
    parts = name.split("-")
    are_numbers = all(part.isascii() and part.isdecimal() and len(part) < 20 for part in parts)
    if len(parts) != 3 or not are_numbers or not 1 <= int(parts[2]) <= MOST_REQUESTS:
        raise InputError("program", name, f"SEED-INDEX-REQUESTS with 1 to {MOST_REQUESTS} requests, such as 0-17-40")
    return draw(*map(int, parts))


def draw(seed: int, index: int, most: int = MOST_REQUESTS) -> Program:
    """Draw the index-th program of a seed, cut to at most that many requests."""
    name = f"{seed}-{index}"
    program = _program(random.Random(name), random.Random(f"{name}-verifier"), most)
    program = _with_target(random.Random(f"{name}-target"), program)
    program = _with_script(random.Random(f"{name}-script"), program)
    has_own_steps = bool(program.script) and random.Random(f"{name}-own-steps").random() < 0.5
    return replace(program, name=f"{name}-{len(program.submissions)}", has_own_steps=has_own_steps)


def _program(rng: random.Random, verifier_rng: random.Random, most: int) -> Program:
    size = min(rng.choice((4, 8, 8, 16, 16, 32, 64, MOST_REQUESTS)), most)
    kind = rng.choice(KINDS)
    config = _config(rng, most_steps(kind))
    num_ranks = rng.choice((1, 1, 1, 2, 3))
    config = _with_verifier(verifier_rng, config, kind)
    pair = f"{kind}-{rng.choice(EARLIER_FAMILIES)}"
    graph = rng.choice(("eager", "step", "phase", "round"))
    serving = _serving(rng, config)
    pace = rng.choice((0, 1, 3))
    length = rng.choice((10, 40, 150))
    limits = _limits(rng, serving, length)
    closes_at = rng.randrange(5, length) if rng.random() < 0.05 else None
    aborts = [(rng.randrange(1, 2 * length), rng.randrange(100)) for _ in range(rng.choice((0, 0, 4, 12)))]
    return Program(
        name="",
        pair=pair,
        config=config,
        serving=serving,
        num_ranks=num_ranks,
        graph=possible_graph(graph, kind, config),
        submissions=_submissions(rng, size, pace),
        limits=limits,
        aborts=tuple(aborts),
        closes_at=closes_at,
    )


def _with_target(rng: random.Random, program: Program) -> Program:
    """Choose, half of the time each, one of the later families for the target, and KV in fp8."""
    kind = program.kind
    possible = [family for family in families(kind) if family in LATER_FAMILIES]
    pair = program.pair if rng.random() < 0.5 else f"{kind}-{rng.choice(possible)}"
    return replace(program, pair=pair, kv="model" if rng.random() < 0.5 else rng.choice(formats(kind)[1:]))


def _with_script(rng: random.Random, program: Program) -> Program:
    """Switch settings between rounds, in a third of the programs that draft."""
    most = program.config.num_steps
    if program.config.is_plain or rng.random() < 2 / 3:
        return program
    return replace(
        program, script=tuple(rng.choice((0, most, rng.randint(0, most))) for _ in range(rng.randint(2, 12)))
    )


def _config(rng: random.Random, most_steps: int) -> SpecConfig:
    topk = rng.randint(1, 4)
    num_steps = rng.randint(1, most_steps)
    page_size = rng.choice((1, 2, 4, 16))
    max_len = rng.choice((None, None, rng.randint(24, 64)))
    if rng.random() < 0.1:
        return SpecConfig.plain(page_size, max_len)
    most = min(MOST_NODES, 1 + topk + (num_steps - 1) * topk**2)
    return SpecConfig(
        topk=topk,
        num_steps=num_steps,
        num_draft_tokens=num_steps + 1 if topk == 1 else rng.randint(2, most),
        page_size=page_size,
        draft_kv=rng.choice(("lane", "ancestor")),
        extend=rng.choice(("fixed", "ragged")),
        release=rng.choice(("finish", "finish", "round")),
        score=rng.choice(("prob", "logprob")),
        penalties=rng.choice(("exact", "exact", "relaxed")),
        threshold_single=rng.choice((1.0, 1.0, 0.3)),
        threshold_acc=rng.choice((1.0, 1.0, 0.1)),
        max_len=max_len,
    )


def _with_verifier(rng: random.Random, config: SpecConfig, kind: str) -> SpecConfig:
    """Choose, half of the time, another verifier for such drafts, without thresholds."""
    if config.is_plain or rng.random() < 0.5:
        return config
    verifier = rng.choice(verifiers(kind, config.topk))
    is_static = KIND_OF[verifier].has_lanes
    static = {"num_draft_tokens": 1 + config.topk * config.num_steps} if is_static else {}
    return replace(config, verifier=verifier, threshold_single=1.0, threshold_acc=1.0, **static)


def _serving(rng: random.Random, config: SpecConfig) -> ServingConfig:
    """Give slots for one request of usual length, or for a few shorter ones, which need more as they grow."""
    usual, shorter = (min(length, config.max_len or length) for length in (USUAL_LEN, rng.randint(8, USUAL_LEN)))
    ahead = config.num_steps  # at least the columns that any drafter needs after the committed ones
    columns = max(round_columns(usual, config, ahead), rng.randint(1, 4) * round_columns(shorter, config, ahead))
    return ServingConfig(
        schedule="sync" if config.release == "round" else rng.choice(("sync", "overlap")),
        max_running=rng.randint(1, 6),
        num_slots=ceil_to(columns, config.page_size),
        chunk_tokens=rng.choice((None, 1, 3, 8, 24)),
        prefix_cache=rng.random() < 0.6,
        preemption=rng.choice(("latest", "shortest", "longest")),
    )


def _limits(rng: random.Random, serving: ServingConfig, length: int) -> tuple[tuple[int, int], ...]:
    """Limit the slots now and then within that many steps, down to none; the last limit is lifted."""
    if rng.random() < 0.5:
        return ()
    steps = sorted(rng.sample(range(1, length), rng.randint(2, 9)))
    slots = [int(serving.num_slots * rng.choice((0, 0.3, 0.6, 0.9, 1))) for _ in steps]
    return tuple(zip(steps, [*slots[:-1], serving.num_slots], strict=True))


def _submissions(rng: random.Random, size: int, pace: int) -> tuple[Submission, ...]:
    """Make requests with shared prefixes, at most `pace` steps apart, some of them turns of conversations."""
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(STEM_LEN)] for _ in range(3)]
    stems[1][: STEM_LEN // 2] = stems[0][: STEM_LEN // 2]
    is_live = rng.random() < 0.5
    has_priorities = rng.random() < 0.5
    submissions = []
    now = 0
    for request_id in range(size):
        now += rng.randint(0, pace)
        turn = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 6))]
        continues = rng.randrange(max(0, request_id - 8), request_id) if request_id and rng.random() < 0.3 else None
        prompt = turn if continues is not None else rng.choice(stems)[: rng.randint(1, STEM_LEN)] + turn
        if rng.random() < 0.01:
            prompt = prompt * 100  # never fits
        submission = Submission(
            step=now if is_live else 0,
            prompt_ids=tuple(prompt),
            params=_params(rng),
            arrival=now + rng.choice((0, 0, 3)),
            priority=rng.choice((0, 0, 1)) if has_priorities else 0,
            continues=continues,
            abort_at=now + rng.randrange(12) if rng.random() < 0.08 else None,
            keep=rng.random() < 0.1,
        )
        submissions.append(submission)
    return tuple(submissions)


def _params(rng: random.Random) -> SamplingParams:
    """Choose greedy or sampled, with filters, penalties, a bias and stop tokens in any mixture."""
    is_greedy, is_filtered, is_penalised, is_biased = (rng.random() < share for share in (0.5, 0.3, 0.3, 0.2))
    filters: dict[str, Any] = dict(
        top_k=rng.choice((0, 8)), top_p=rng.choice((1.0, 0.8)), min_p=rng.choice((0.0, 0.05))
    )
    penalties: dict[str, Any] = dict(
        repetition_penalty=rng.choice((1.0, 1.3)),
        presence_penalty=rng.choice((0.0, 0.5)),
        frequency_penalty=rng.choice((0.0, 0.3)),
    )
    bias = {rng.randrange(VOCAB_SIZE): rng.choice((2.0, -3.0)) for _ in range(2)}
    return SamplingParams(
        temperature=0.0 if is_greedy else rng.choice((0.5, 1.0)),
        max_new_tokens=rng.randint(1, 20),
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice((0, 0, 2, 4)))),
        seed=rng.choice((rng.randrange(2**64), 0)),
        **(filters if is_filtered else {}),
        **(penalties if is_penalised else {}),
        logit_bias=bias if is_biased else {},
    )
