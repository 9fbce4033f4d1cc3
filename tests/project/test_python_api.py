"""Public functions and values: a wrong argument among good ones is an InputError, or a result, and nothing else."""

import inspect
import random
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from specsim import InputError, SamplingParams, ServingConfig, SpecConfig, load_engine, trace
from specsim.core.metrics import acceptance
from specsim.core.rule import Accepted
from specsim.models.synthetic_pair import synthetic_pair
from specsim.simulator.acceptance import Option, iid
from specsim.simulator.cell import Cell

ROOT = Path(__file__).parents[2]
SECONDS = 30  # limit of a call
LONG = {"specsim.correctness.faults.run_catalogue"}  # whose good call is not made
SAMPLE = 3  # wrong values of a parameter without --whole
ROOMS = ("specsim", "specsim.course", "specsim.simulator", "specsim.training", "specsim.plots")


RESULTS = set(
    """
    Accepted Generation InputError Output Proposal TokenDrafter TreeLimits CheckResult Exercise Mistake Prediction Score
    SessionScores Solution names scores Model Phases Continuation DrafterModule Drafts Roots TargetReading Trained
    TrainingText Slot
    """.split()
)  # protocols, and values that functions return


class Stranger:
    """An object that nothing takes."""


WRONG = {
    "None": None,
    "text": "no such thing",
    "empty text": "",
    "nan": float("nan"),
    "infinity": float("inf"),
    "-1": -1,
    "0": 0,
    "2^63": 2**63,
    "10^30": 10**30,
    "1.5": 1.5,
    "True": True,
    "empty list": [],
    "nested list": [[]],
    "list of None": [None],
    "dict": {"a": Stranger()},
    "object": Stranger(),
    "tensor": torch.ones(2, 3, 5, dtype=torch.float64),
    "scalar": torch.tensor(1),
    "meta tensor": torch.ones(4, dtype=torch.int64, device="meta"),
    "a setting": SpecConfig(),
}


@cache
def pair():
    return synthetic_pair("eagle")


@cache
def rounds():
    config = SpecConfig(topk=2, num_steps=3, num_draft_tokens=6, page_size=4)
    return trace(pair(), [[5, 17, 3, 40, 8]], config, SamplingParams(max_new_tokens=4), most_rounds=1)


@cache
def engine():
    return load_engine(pair(), SpecConfig(topk=2, num_steps=2))


@cache
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@cache
def tokens() -> torch.Tensor:
    return torch.randint(32, (200,), generator=torch.Generator().manual_seed(4))


@cache
def options():
    from specsim.training import TrainingOptions

    return TrainingOptions(num_steps=1, num_windows=1, window=8, num_drafts=1, draft_vocab_size=8)


@cache
def drafter():
    from specsim.training import train_drafter

    return train_drafter(llama(), tokens(), options()).drafter


@cache
def cost():
    from specsim.simulator import CostModel, hardware, model

    return CostModel(hardware("H100-SXM"), model("llama-3.1-8b"))


@cache
def cell() -> Cell:
    return Cell(requests=8, concurrency=4, prompt_tokens=16, output_tokens=8)


def option() -> Option:
    return Option(SpecConfig(topk=1, num_steps=2), iid(0.5, 2))


@cache
def workload():
    from specsim.simulator.workload import closed_loop

    return closed_loop(4, 2, 16, 8)


@cache
def cell_row():
    return {"key": "a", **cell().to_json(), **cell().run().metrics(), "error": None}


@cache
def simulated():
    from specsim.simulator.server import simulate

    return simulate(cost(), option(), workload(), ServingConfig("overlap", max_running=4))


@cache
def served():
    from specsim.serving.requests import make_requests
    from specsim.serving.serve import serve

    return serve(engine(), make_requests(pair(), [[5, 17, 3]], SamplingParams(max_new_tokens=3), None, 64))


def one_round() -> dict[str, Any]:
    (shown,) = rounds()
    return dict(verify_input=shown.verify_input, verdict=shown.verify_output.verdict)


def text_of(ids) -> str:
    return " ".join(map(str, ids))


def accept(tree, prob_NV, draft_prob_NV, uniforms, final_uniform):
    return Accepted([0], 0)


def model():
    from specsim.simulator import model as simulated_model

    return simulated_model("llama-3.1-8b")


def run(**changes: Any) -> dict[str, Any]:
    values = dict(pair=pair(), prompts=[[5, 17, 3]], config=SpecConfig(topk=2, num_steps=2))
    return values | dict(sampling=SamplingParams(max_new_tokens=3), request_ids=[7]) | changes


GOOD: dict[str, Any] = {
    "specsim.AcceptanceRule": lambda: dict(name="mine", drafts="best", accept=accept),
    "specsim.DraftVocabulary": lambda: dict(token_ids=(5, 2), tokens=("b", "a")),
    "specsim.DraftWindow": lambda: dict(size=16, first_columns=4),
    "specsim.EngineOptions": dict,
    "specsim.NgramConfig": dict,
    "specsim.SuffixConfig": dict,
    "specsim.SamplingParams": dict,
    "specsim.ServingConfig": dict,
    "specsim.SpecConfig": dict,
    "specsim.Pair": lambda: dict(target=pair().target, drafter=pair().drafter, tokenizer=None, name="pair"),
    "specsim.Scheduler": lambda: dict(engine=engine()),
    "specsim.explore": lambda: dict(result=rounds()),
    "specsim.generate": run,
    "specsim.trace": run,
    "specsim.load": lambda: dict(target="tiny", drafter="none"),
    "specsim.load_engine": lambda: dict(pair=pair(), config=SpecConfig(topk=2, num_steps=2)),
    "specsim.make_request": lambda: dict(
        target_config=pair().target.config, tokenizer=None, request_id=0, prompt=[5, 17], params=SamplingParams()
    ),
    "specsim.core.settings.Settings": lambda: dict(configs=(SpecConfig(),)),
    "specsim.core.settings.Settings.of_steps": lambda: dict(config=SpecConfig(), steps=[0, 2]),
    "specsim.core.synthetic_acceptance.SyntheticAcceptance": lambda: dict(rates=(0.5, 0.2)),
    "specsim.core.metrics.acceptance": lambda: dict(num_accepted_drafts=[1, 2], num_steps=2, num_draft_tokens=3),
    "specsim.serving.serve.serve": lambda: dict(engine=engine(), requests=[]),
    "specsim.course.check": lambda: dict(name="03-1", answer=accept),
    "specsim.course.exercise": lambda: dict(name="03-1"),
    "specsim.course.solution": lambda: dict(name="03-1"),
    "specsim.course.starter": lambda: dict(exercise=import_module("specsim.course").exercise("03-1")),
    "specsim.course.predict": lambda: dict(question="How many?", guess=2),
    "specsim.simulator.CostModel": lambda: dict(hardware=cost().hardware, model=model()),
    "specsim.simulator.Drafter": lambda: dict(model=model()),
    "specsim.simulator.Efficiency": dict,
    "specsim.simulator.Hardware": lambda: dict(
        name="card", peak_flops={"bfloat16": 1e15}, bandwidth=3e12, memory=8e10, interconnect=4e11
    ),
    "specsim.simulator.drafter": lambda: dict(kind="eagle3", target=model()),
    "specsim.simulator.hardware": lambda: dict(name="H100-SXM"),
    "specsim.simulator.model": lambda: dict(source="llama-3.1-8b"),
    "specsim.simulator.theory.expected_tokens": lambda: dict(alpha=0.5, gamma=3),
    "specsim.simulator.theory.speedup": lambda: dict(alpha=0.5, gamma=3, cost_ratio=0.1),
    "specsim.simulator.theory.operations": lambda: dict(alpha=0.5, gamma=3, cost_ratio=0.1),
    "specsim.simulator.acceptance.iid": lambda: dict(rate=0.5, num_steps=3),
    "specsim.simulator.acceptance.steady": lambda: dict(length=1.5, num_steps=3),
    "specsim.simulator.acceptance.accept_length": lambda: dict(distribution=iid(0.5, 3)),
    "specsim.simulator.acceptance.PerPosition": lambda: dict(by_position=(0.5, 0.2)),
    "specsim.simulator.acceptance.Mixture": lambda: dict(parts=(iid(0.5, 3), iid(0.2, 3)), weights=(0.5, 0.5)),
    "specsim.simulator.acceptance.Option": lambda: dict(config=SpecConfig(topk=1, num_steps=2), acceptance=iid(0.5, 2)),
    "specsim.simulator.slo.Slo": lambda: dict(ttft=1.0),
    "specsim.simulator.slo.RateGoal": lambda: dict(slo=import_module("specsim.simulator.slo").Slo(ttft=1.0)),
    "specsim.simulator.slo.highest_rate": lambda: dict(
        cell=cell(),
        option=option(),
        goal=import_module("specsim.simulator.slo").RateGoal(import_module("specsim.simulator.slo").Slo(ttft=1.0)),
    ),
    "specsim.simulator.workload.closed_loop": lambda: dict(
        num_requests=4, concurrency=2, prompt_tokens=16, output_tokens=8
    ),
    "specsim.simulator.workload.poisson": lambda: dict(num_requests=4, rate=2.0, prompt_tokens=16, output_tokens=8),
    "specsim.simulator.workload.open_loop": lambda: dict(num_requests=4, rate=2.0, prompt_tokens=16, output_tokens=8),
    "specsim.simulator.workload.Arrivals": dict,
    "specsim.simulator.server.simulate": lambda: dict(cost=cost(), options=option(), workload=workload()),
    "specsim.simulator.scenario.Scenario": lambda: dict(
        model=model(),
        hardware=cost().hardware,
        drafter=None,
        option=Option(SpecConfig.plain(), iid(0.5, 1)),
        workload=workload(),
    ),
    "specsim.simulator.scenario.speedup_range": lambda: dict(scenario=cell().scenario, requests=4),
    "specsim.simulator.cell.Cell": dict,
    "specsim.simulator.plan.plan": lambda: dict(cell=cell(), configs=[SpecConfig(topk=1, num_steps=2)], replicates=1),
    "specsim.simulator.policy_comparison.compare_policies": lambda: dict(
        cost=cost(), options=[option(), Option.plain()], workload=workload()
    ),
    "specsim.simulator.rank_by_depth.chain_shares": lambda: dict(rates=[0.5, 0.2]),
    "specsim.simulator.sweep.cells": lambda: dict(base=cell(), vary={"num_steps": [1, 2]}),
    "specsim.training.TrainingOptions": dict,
    "specsim.training.Conventions": dict,
    "specsim.training.join_texts": lambda: dict(texts=[[1, 2], [3]], separator=0),
    "specsim.training.label_column": lambda: dict(row=3, step=1),
    "specsim.training.continue_texts": lambda: dict(target=llama(), ids=[[1, 2]]),
    "specsim.training.continue_windows": lambda: dict(
        target=llama(), tokens_T=tokens(), count=1, prompt_len=4, length=8
    ),
    "specsim.training.train_drafter": lambda: dict(target=llama(), text=tokens(), options=options()),
    "specsim.training.estimate_acceptance": lambda: dict(
        drafter=drafter(),
        target=llama(),
        num_drafts=1,
        continuations=[import_module("specsim.training").Continuation(tokens()[:20], 4)],
    ),
    "specsim.training.feature_states": lambda: dict(
        hidden_states=[torch.ones(1, 2)] * 4, layers=[0, 1], convention="entering"
    ),
    "specsim.training.load_target": lambda: dict(folder=import_module("specsim.models.shipped").TINY / "target"),
    "specsim.training.read_eagle3": lambda: dict(
        folder=import_module("specsim.models.shipped").TINY / "eagle3", target=shipped_llama()
    ),
    "specsim.training.read_out": lambda: dict(
        hidden_BRH=torch.ones(1, 2, 16), norm=torch.nn.Identity(), lm_head=torch.nn.Identity()
    ),
    "specsim.training.read_target": lambda: dict(target=llama(), tokens_BC=tokens()[None, :8], layers=[0, 1]),
    "specsim.plots.acceptance": lambda: dict(results={"a": acceptance([1, 2], 2, 3)}),
    "specsim.plots.acceptance_rates": lambda: dict(records={"a": record()}),
    "specsim.plots.batch": lambda: dict(run=simulated()),
    "specsim.plots.distributions": lambda: dict(probs={"a": [0.5, 0.5]}, tokens=["x", "y"]),
    "specsim.plots.divergence": lambda: dict(difference=difference()),
    "specsim.plots.keys_seen": lambda: dict(panels={"a": [[1, 2], [3]]}, length=4),
    "specsim.plots.kv_move": lambda: one_round() | dict(decode=text_of),
    "specsim.plots.kv_pages": lambda: pools(),
    "specsim.plots.slots": lambda: pools(),
    "specsim.plots.losses": lambda: dict(runs={"a": [2.0, 1.0]}),
    "specsim.plots.mask": lambda: dict(verify_input=one_round()["verify_input"]),
    "specsim.plots.pareto": lambda: dict(rows=[cell_row()]),
    "specsim.plots.positions": lambda: dict(distributions={"a": iid(0.5, 3)}),
    "specsim.plots.rejection": lambda: dict(target_prob=[0.5, 0.5], draft_prob=[0.2, 0.8], tokens=["x", "y"]),
    "specsim.plots.roofline": lambda: dict(scenario=cell().scenario, most=64, marks={"a": 8}),
    "specsim.plots.speedup": lambda: dict(scenarios={"a": cell().scenario}, most=8),
    "specsim.plots.states": lambda: states(),
    "specsim.plots.timeline": lambda: dict(trace=served().trace),
    "specsim.plots.tree": lambda: one_round() | dict(decode=text_of),
    "specsim.correctness.exact.certify": lambda: dict(verifier="rejection"),
    "specsim.correctness.exact.certify_rules": lambda: dict(rules=[]),
    "specsim.correctness.exact.load_rules": lambda: dict(location=str(ROOT / "notebooks/examples/my_rule.py")),
    "specsim.correctness.explain.explain": lambda: dict(
        a=[], b=[], noise=import_module("specsim.correctness.explain").Noise(0.1, "measured")
    ),
    "specsim.correctness.explain.Noise": lambda: dict(error=0.1, source="measured"),
    "specsim.correctness.faults.run_catalogue": lambda: dict(names=["mask"]),
    "specsim.correctness.differential.grid": lambda: dict(name="quick"),
    "specsim.correctness.soak.soak": lambda: dict(num_requests=1),
    "specsim.correctness.statistics.run_sampling_tests": lambda: dict(verifier="rejection", tokens=1),
    "specsim.models.shapes.shape": lambda: dict(name_or_path="llama-3.1-8b"),
    "specsim.models.draft_cost.draft_cost": lambda: dict(pair=pair()),
    "specsim.models.shipped.load_prompts": dict,
    "specsim.core.policies.named.named_policy": lambda: dict(
        value="moving-average", config=SpecConfig(topk=1, num_steps=3)
    ),
}


@cache
def shipped_llama():
    from specsim.models.shipped import TINY
    from specsim.training import load_target

    return load_target(TINY / "target")


def record():
    from specsim.simulator.acceptance_record import AcceptanceRecord

    return AcceptanceRecord("a table", "a tool", "as it counts.", 1.75, rates=(0.5, 0.25))


@cache
def difference():
    from specsim.correctness.differential import Divergence

    return Divergence("cell", 1, "draft", 0, None, "scores", torch.ones(2), torch.zeros(2))


def pools() -> dict[str, Any]:
    from specsim.core.phases import Batch

    pool = engine().make_pools(1, 64)
    row = pool.open()
    pool.reserve(row, 5)
    batch = Batch.of([7], [row], [5], [SamplingParams()], 64)
    return dict(pools=pool, batch=batch, config=engine().config)


def states() -> dict[str, Any]:
    (shown,) = rounds()
    names = ("draft_input", "verify_input", "verify_output", "next_draft_input")
    return {name: getattr(shown, name) for name in names}


def resolve(path: str) -> Any:
    """Find a public object by its path."""
    value = None
    for end, name in enumerate(path.split("."), 1):
        try:
            value = getattr(value, name)
        except AttributeError:
            value = import_module(".".join(path.split(".")[:end]))
    return value


@contextmanager
def limited():
    def stop(*_):
        raise TimeoutError(f"no result within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def failure(path: str, arguments: dict[str, Any]) -> str | None:
    """Describe an error other than InputError; the warnings of what is called are no failure."""
    try:
        with limited(), warnings.catch_warnings(action="ignore"):
            resolve(path)(**arguments)
    except InputError:
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return None


def test_every_public_name_is_called_or_is_a_result():
    for room in ROOMS:
        public = {name for name in import_module(room).__all__ if callable(getattr(import_module(room), name))}
        assert public - RESULTS == {path.rpartition(".")[2] for path in GOOD if path.rpartition(".")[0] == room}


def wrong_calls(path: str, is_whole: bool) -> Iterator[tuple[str, str]]:
    """List a parameter and the name of a wrong value: all of them, or a few of each parameter."""
    parameters = inspect.signature(resolve(path)).parameters.values()
    for parameter in parameters:
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            labels = list(WRONG) if is_whole else random.Random(f"{path} {parameter.name}").sample(list(WRONG), SAMPLE)
            yield from ((parameter.name, label) for label in labels if WRONG[label] is not parameter.default)


@pytest.mark.parametrize("path", GOOD)
def test_a_wrong_argument_is_an_input_error(path, pytestconfig):
    good = GOOD[path]
    if path not in LONG:
        resolve(path)(**good())
    failures = [
        f"{path}({name}={label}): {description}"
        for name, label in wrong_calls(path, pytestconfig.getoption("--whole"))
        if (description := failure(path, good() | {name: WRONG[label]}))
    ]
    assert not failures
