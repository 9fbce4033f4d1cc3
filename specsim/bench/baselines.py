"""Generation by transformers as a baseline: eager, with a static cache, and assisted."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from specsim.bench.clock import walled
from specsim.bench.contest import Contender, contest
from specsim.bench.dense import DenseRows, target_forward
from specsim.bench.roofline import Peaks, forward_bound
from specsim.bench.row import OURS, BenchRow, Check
from specsim.bench.scene import PLAIN, SPECULATIVE
from specsim.bench.tree_attention import attention_row
from specsim.core.config import SamplingParams, ServingConfig, SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import require
from specsim.core.pair import Pair
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.models.load import load
from specsim.models.shipped import load_prompts
from specsim.serving.generation import load_engine
from specsim.serving.requests import make_requests
from specsim.serving.scheduler import Scheduler

EAGER = "transformers, eager"
STATIC = "transformers, static cache, compiled"
# An assistant has to be a causal language model. An EAGLE head is not one: it reads the target's features.
FIRST_LAYER = "transformers, assisted by the target's first layer"
ITSELF = "transformers, assisted by the target itself"
ASSISTANTS = (
    "an EAGLE head is no causal language model and cannot assist in transformers: the target's first layer under its "
    "head is as large as the drafter, but nobody trained it to draft; the target itself accepts every draft, the "
    "most that assistance can gain, at the price of a target forward a draft"
)
NUM_DRAFTS = 3
ATTENTION = ((1, 8), (4, 8), (4, 64))  # requests and nodes
TINY_TOKENS = 128
SAMPLES = 3


def shipped_rows(peaks: Peaks) -> Iterator[BenchRow]:
    """Time the shipped pair in float32, where tokens have to be equal."""
    pair = load()
    prompt = pair.tokenizer.encode(load_prompts()[0]["text"])
    yield _row("shipped pair", pair, prompt, TINY_TOKENS, torch.float32, peaks)


def attention_rows(peaks: Peaks) -> Iterator[BenchRow]:
    """Time some settings of tree attention, SDPA and flex_attention; the suite kernels has all of them."""
    for requests, nodes in ATTENTION:
        yield attention_row(requests, nodes, 16, peaks)


def modes_of(theirs: "TransformersModel") -> dict[str, dict[str, Any]]:
    """List the modes of transformers, with the options of each."""
    return {
        EAGER: {},
        FIRST_LAYER: {"assistant": theirs.first_layer},
        ITSELF: {"assistant": theirs.model},
        STATIC: {"cache_implementation": "static"},
    }


def _row(name: str, pair: Pair, prompt: Sequence[int], count: int, dtype: torch.dtype, peaks: Peaks) -> BenchRow:
    """Time one request, prefill included, on the wall clock, in microseconds per token."""
    ours = {config: Ours(pair, config, prompt, count, dtype) for config in (SPECULATIVE, PLAIN)}
    expected = ours[PLAIN]()
    check = lambda tokens: _same_tokens(tokens, expected)  # noqa: E731
    contenders = [
        Contender(OURS, lambda _: ours[SPECULATIVE](), check, lambda: walled(ours[SPECULATIVE], SAMPLES, count))
    ]
    contenders.append(
        Contender(f"{OURS}, plain", lambda _: expected, check, lambda: walled(ours[PLAIN], SAMPLES, count))
    )
    theirs = TransformersModel(pair, prompt, count, dtype)
    for who, options in modes_of(theirs).items():
        run = lambda options=options: theirs(**options)  # noqa: E731
        contenders.append(Contender(who, lambda _, run=run: run(), check, lambda run=run: walled(run, SAMPLES, count)))
    model = pair.target.config
    itemsize = dtype.itemsize
    bound = forward_bound(model, 1, 1, len(prompt) + count // 2, itemsize)
    setting = {"prompt": len(prompt), "tokens": count, "dtype": str(dtype).removeprefix("torch.")}
    notes = [ASSISTANTS, "the roofline bound is that of one token of plain decoding"]
    return contest(f"generation, {name}", setting, contenders, bound, peaks, notes=notes)


class Ours:
    """Generation on one server, whose graphs the first request records."""

    def __init__(
        self,
        pair: Pair,
        config: SpecConfig,
        prompt: Sequence[int],
        count: int,
        dtype: torch.dtype,
        device: str = "cuda",
        acceptance: SyntheticAcceptance | None = None,
    ) -> None:
        self._pair = replace(pair, drafter=None) if config.is_plain else pair
        options = EngineOptions("fast", dtype, device, "round", 1)
        engine = load_engine(self._pair, config, options, acceptance=acceptance)
        self.count = count
        self.accepted: list[int] = []  # tokens of each round of the last run
        self._prompt = list(prompt)
        self._params = SamplingParams(max_new_tokens=count, ignore_eos=True)
        room = 2 * engine.config.reserved_columns(len(prompt) + count)
        self._scheduler = Scheduler(engine, ServingConfig("overlap", max_running=1, num_slots=room))
        self._served = 0

    @torch.inference_mode()
    def __call__(self) -> list[int]:
        scheduler = self._scheduler
        self._served = self._served + 1
        (request,) = make_requests(self._pair, [self._prompt], self._params, [self._served], scheduler.max_len)
        scheduler.submit(request)
        scheduler.run()
        self.accepted = request.accepted
        return list(request.token_ids)


class TransformersModel:
    """The model of transformers with the same tensors, and its first layer under the same head."""

    def __init__(self, pair: Pair, prompt: Sequence[int], count: int, dtype: torch.dtype, device: str = "cuda") -> None:
        self._ids = torch.tensor([list(prompt)], device=device)
        self._count = count
        self.model, self.first_layer = (_causal_model(pair, dtype, device, layers) for layers in (None, 1))

    def __call__(self, assistant: Any = None, **options: Any) -> list[int]:
        if assistant is not None:
            settings = assistant.generation_config
            settings.num_assistant_tokens = NUM_DRAFTS
            settings.num_assistant_tokens_schedule = "constant"
            settings.assistant_confidence_threshold = 0.0
            options["assistant_model"] = assistant
        length = {"max_new_tokens": self._count, "min_new_tokens": self._count}
        with torch.inference_mode(), _without_warnings():
            output = self.model.generate(
                self._ids, attention_mask=torch.ones_like(self._ids), do_sample=False, **length, **options
            )
        return output[0, self._ids.shape[1] :].tolist()


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence transformers' generation, which warns about a call of its own in assisted generation."""
    logger = logging.getLogger("transformers.generation.utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _causal_model(pair: Pair, dtype: torch.dtype, device: str, layers: int | None) -> Any:
    """Make the causal model of transformers over these tensors; it copies only those of another dtype or device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = pair.target.config
    require(model.family == "llama", "shape", model.family, "a Llama shape in the suite baselines")
    config = LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=layers or model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rms_norm_eps=model.rms_norm_eps,
        max_position_embeddings=model.max_position_embeddings,
        rope_parameters={"rope_type": "default", **model.rope.scaling, "rope_theta": model.rope.theta},
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    with torch.device("meta"):
        causal_model = LlamaForCausalLM(config)
    names = causal_model.state_dict().keys()
    causal_model.load_state_dict({name: pair.target.tensors[name].to(device, dtype) for name in names}, assign=True)
    with torch.device(device):  # the frequencies are not in the checkpoint
        causal_model.model.rotary_emb = type(causal_model.model.rotary_emb)(config)
    causal_model.generation_config.eos_token_id = None
    return causal_model.eval()


def _same_tokens(tokens: list[int], expected: list[int]) -> Check:
    compared = f"{len(expected)} tokens of our plain decoding"
    index = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), None)
    if index is None and len(tokens) != len(expected):
        index = min(len(tokens), len(expected))
    return Check(compared, float(index is not None), 0, "" if index is None else f"token {index} differs")


def likeliest(pair: Pair, prompt: Sequence[int]) -> Callable[[list[int]], Check]:
    """Check logits in bf16, where tokens may differ at near ties.

    By plain torch in float32 each token has to be the likeliest, up to rounding.
    """

    def check(tokens: list[int]) -> Check:
        device = pair.target.tensors["lm_head.weight"].device
        ids = torch.tensor([*prompt, *tokens[:-1]], device=device)
        rows = DenseRows.causal(len(ids), device)
        exact, rounded = (
            target_forward(pair, ids, rows, dtype, len(tokens))[0].double() for dtype in (torch.float32, torch.bfloat16)
        )
        error = float((exact - rounded).abs().max())
        chosen_logits = exact.gather(1, torch.tensor(tokens, device=device)[:, None])[:, 0]
        behind = float((exact.amax(dim=1) - chosen_logits).max())
        compared = "float32 logit of every token, at most two bf16 rounding errors below the largest"
        return Check(
            compared, behind / (2 * error), 1, "" if behind <= 2 * error else f"{behind:.3g} below the largest logit"
        )

    return check
