"""The public entry generate(...), which runs a batch of prompts to their ends on one implementation."""

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from tqdm.auto import tqdm

from specsim.core.adaptive_engine import AdaptiveEngine
from specsim.core.arguments import check_arguments
from specsim.core.columns import two_rounds
from specsim.core.config import MOST_TOKENS, SamplingParams, ServingConfig, SpecConfig
from specsim.core.engine import Engine
from specsim.core.engine_options import EngineOptions, check_device
from specsim.core.errors import InputError, require_int, require_type
from specsim.core.grammar import Grammar, Grammars
from specsim.core.pair import AnyDrafter, Pair
from specsim.core.policies.named import NamedPolicy, named_policy
from specsim.core.policies.policy import AnyPolicy
from specsim.core.rule import AcceptanceRule, check_rule
from specsim.core.settings import Settings
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.models.load import load
from specsim.serving.adaptation import Switching, settings_of
from specsim.serving.outputs import Generation, output_of
from specsim.serving.requests import Request, make_requests
from specsim.serving.scheduler import Scheduler
from specsim.serving.scoring import likeliest


@check_arguments
def load_engine(
    pair: Pair,
    config: SpecConfig,
    options: EngineOptions | None = None,
    *,
    acceptance: SyntheticAcceptance | None = None,
    grammars: Grammars | None = None,
    verifier: AcceptanceRule | None = None,
) -> Engine:
    """Make the engine that the options name (None: the reference in float32), without any fallback.

    acceptance: decides how many drafts a round accepts in place of the target, which is not lossless. grammars: by
    request id. verifier: a rule of your own, in place of the setting's verifier. Raises InputError for arguments of the
    wrong type or that exclude each other.
    """
    options = EngineOptions() if options is None else options
    require_type("pair", pair, Pair, "a Pair, such as specsim.load returns")
    require_type("config", config, SpecConfig, "a SpecConfig")
    require_type("engine", options, EngineOptions, "EngineOptions, such as EngineOptions(impl='fast')")
    if acceptance is not None:
        require_type("acceptance", acceptance, SyntheticAcceptance, "a SyntheticAcceptance")
    if verifier is not None:
        check_rule(verifier)
        verifier.check_config(config)
        if acceptance is not None:
            raise InputError("verifier", verifier.name, "none with synthetic acceptance, which decides in its place")
    if grammars and acceptance is not None:
        raise InputError("grammars", len(grammars), "none with synthetic acceptance, which does not follow the target")
    if options.impl == "fast":
        kernel_device(options.device)
    engine = importlib.import_module(f"specsim.{options.impl}.engine").Engine
    return engine(pair, config, options, acceptance, grammars, verifier)


def load_adaptive_engine(
    pair: Pair,
    settings: Settings,
    options: EngineOptions | None = None,
    *,
    acceptance: SyntheticAcceptance | None = None,
    grammars: Grammars | None = None,
) -> AdaptiveEngine:
    """Make an engine that switches between settings from round to round, each with graphs of its own.

    options, acceptance, grammars: as for load_engine; shorter settings have the first rates only.
    """
    options = EngineOptions() if options is None else options
    require_type("settings", settings, Settings, "Settings, such as Settings.of_steps(config, [0, 3])")

    def make(config: SpecConfig, like: Engine | None) -> Engine:
        rates = acceptance and acceptance.cut(config.num_steps)
        if like is None:
            return load_engine(pair, config, options, acceptance=rates, grammars=grammars)
        return type(like)(pair, config, options, rates, grammars, like=like)  # pyright: ignore[reportCallIssue]

    return AdaptiveEngine(make, settings, acceptance)


def kernel_device(device: str | None) -> str:
    """Choose a device for the kernels of this process, as check_device does.

    Raises InputError without Triton.
    """
    device = check_device(device)
    try:
        interpreted = importlib.import_module("specsim.fast.runtime.launch").INTERPRETED
    except ImportError as error:
        raise InputError("impl", "fast", f"reference, unless Triton is installed ({error})") from error
    if interpreted != (device == "cpu"):
        allowed = "cpu where TRITON_INTERPRET=1 is set in the environment, else cuda"
        raise InputError("device", device, allowed)
    return device


@check_arguments
def generate(
    pair: Pair | str,
    prompts: str | Sequence[str] | Sequence[Sequence[int]],
    config: SpecConfig | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    grammars: Grammar | Sequence[Grammar | None] | None = None,
    request_ids: Sequence[int] | None = None,
    engine: EngineOptions | None = None,
    acceptance: SyntheticAcceptance | None = None,
    drafter: AnyDrafter | None = None,
    verifier: AcceptanceRule | None = None,
    adaptive: str | Mapping[str, Any] | None = None,
    top_logprobs: int = 0,
    progress: bool = False,
    watch: Callable[[Engine], Engine] | None = None,
) -> Generation:
    """Continue every prompt (text or token ids) with the pair under one setting, all prompts in one batch.

    pair: from load, or a name such as `tiny`, which is then loaded at every call. config None: SpecConfig(), or plain
    decoding for a pair without a drafter, or a setting with the drafts that the verifier is for. sampling: one for all
    prompts or one each. request_ids (default 0, 1, ...) name the random streams, so a request with the same id, seed
    and prompt gives the same tokens in any batch. engine, acceptance, verifier: see load_engine. grammars: constraints
    of the outputs (core.grammar, serving.guidance), one for all prompts or one each, None for an unconstrained output.
    adaptive: a policy that chooses the number of steps of every round, up to config's, by its name such as
    `moving-average` or as an object with its fields (core.policies.named).
    top_logprobs: the number of likeliest tokens that are reported at every place, for which the target runs over each
    text again. drafter: replaces the pair's, such as a token drafter of your own or NgramConfig().
    watch: gives the engine that runs in place of the one made here, for instance one that records its rounds. Raises
    InputError for an empty or too long prompt and for token ids outside the vocabulary.
    """
    pair = load(pair) if isinstance(pair, str) else pair
    require_type("pair", pair, Pair, "a Pair, such as specsim.load returns, or the name of the shipped pair, tiny")
    pair = pair if drafter is None else pair.with_drafter(drafter)
    config = _default_config(pair, verifier) if config is None else config
    require_type("config", config, SpecConfig, "a SpecConfig")
    require_int("top_logprobs", top_logprobs, 0, pair.target.config.vocab_size)
    most = config.within(pair.target.config.max_position_embeddings).length_limit
    requests = make_requests(pair, prompts, sampling, request_ids, most)
    named = _by_request(grammars, requests)
    policy = None if adaptive is None else adaptive_policy(adaptive, config, verifier)
    if policy is None:
        running = load_engine(pair, config, engine, acceptance=acceptance, grammars=named, verifier=verifier)
    else:
        running = load_adaptive_engine(pair, policy.settings, engine, acceptance=acceptance, grammars=named)
    if watch is not None:
        running = watch(running)
    start = time.perf_counter()
    with torch.inference_mode():
        schedule = "sync" if policy or watch else late_schedule(running)
        choices = run_together(running, requests, progress, policy and policy.make(), schedule)
        seconds = time.perf_counter() - start
        scores = [likeliest(running, request, top_logprobs, named.get(request.request_id)) for request in requests]
    outputs = tuple(map(output_of, requests, scores))
    decode = pair.tokenizer and pair.tokenizer.decode
    switching = None if policy is None else Switching.of(policy, requests, choices)
    return Generation(outputs, config, seconds, acceptance, verifier, switching, decode)


def late_schedule(engine: Engine) -> Literal["sync", "overlap"]:
    """Choose the schedule that reads a round's tokens while the next one runs, where a GPU runs it.

    Outputs are the same. It runs a round more, which on a CPU only costs time. Policies and watchers see every round,
    so generate serves them by the other schedule.
    """
    return "overlap" if engine.device.type == "cuda" and engine.config.release == "finish" else "sync"


def adaptive_policy(
    adaptive: str | Mapping[str, Any], config: SpecConfig, verifier: AcceptanceRule | None = None
) -> NamedPolicy:
    """Read a policy for a setting, or raise InputError with an acceptance rule, whose drafts are one setting's."""
    if verifier is not None:
        raise InputError("verifier", verifier.name, "none with an adaptive policy")
    return named_policy(adaptive, config)


def _default_config(pair: Pair, verifier: AcceptanceRule | None) -> SpecConfig:
    """Make the setting of a run that names none."""
    if pair.drafter is None:
        return SpecConfig.plain()
    if verifier is None:
        return SpecConfig()
    check_rule(verifier)
    return verifier.config()


def _by_request(grammars: Grammar | Sequence[Grammar | None] | None, requests: list[Request]) -> Grammars:
    """Map the ids of the constrained requests to their grammars."""
    grammar_list = grammars if isinstance(grammars, Sequence) else [grammars] * len(requests)
    if len(grammar_list) != len(requests) or not all(
        grammar is None or hasattr(grammar, "matcher") for grammar in grammar_list
    ):
        allowed = f"a grammar for all of the {len(requests)} prompts, or one or None for each"
        raise InputError("grammars", f"{len(grammar_list)} values" if grammar_list is grammars else grammars, allowed)
    return {
        request.request_id: grammar
        for request, grammar in zip(requests, grammar_list, strict=True)
        if grammar is not None
    }


def run_together(
    engine: Engine,
    requests: list[Request],
    progress: bool = False,
    policy: AnyPolicy | None = None,
    schedule: Literal["sync", "overlap"] = "sync",
) -> tuple[int, ...]:
    """Run all requests in one batch from start to end, so that its rows keep their order.

    Returns the numbers of the rounds' settings, in order, where the engine has several.
    """
    if not requests:
        return ()
    longest = max(len(request.prompt_ids) + request.max_tokens for request in requests)
    ahead = engine.drafter.num_mask_rows
    room = len(requests) * max(two_rounds(longest, config, ahead) for config in settings_of(engine))
    if room > MOST_TOKENS:
        most = max(request.params.max_new_tokens for request in requests)
        raise InputError("max_new_tokens", most, f"fewer, or fewer prompts: together they need {room:,} KV slots")
    serving = ServingConfig(schedule, max_running=len(requests), num_slots=room)
    scheduler = Scheduler(engine, serving, policy=policy)
    for request in requests:
        scheduler.submit(request)
    with tqdm(total=sum(r.max_tokens for r in requests), unit="token", disable=None if progress else True) as bar:
        scheduler.run(lambda: bar.update(sum(len(request.token_ids) for request in requests) - bar.n))
    scheduler.close()
    return scheduler.choices
