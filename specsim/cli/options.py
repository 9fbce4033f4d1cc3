"""Groups of options that commands share: their fields are options, and their methods give settings."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import click

from specsim.cli.option_fields import common, option, option_fields, refuse_changes
from specsim.core.config import PRESETS, SamplingParams, ServingConfig, SpecConfig
from specsim.core.errors import InputError, require
from specsim.core.json_schema import schema_name
from specsim.core.kinds import DEFAULT, KINDS
from specsim.core.limits import PageSize, StepCount, TokenCount, TreeTopk, Width
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.core.verifiers import VERIFIER_KINDS, Verifier, one_of

if TYPE_CHECKING:
    from rich.console import Console

    from specsim.core.engine_options import EngineOptions
    from specsim.core.pair import Pair
    from specsim.models.draft_vocabulary import DraftVocabulary
    from specsim.models.load import Parts

GREEDY = SamplingParams()
_TREE = SpecConfig()
_LOSSY = one_of(kind for kind in VERIFIER_KINDS if not kind.is_lossless)
_VERIFIERS = f"{one_of(VERIFIER_KINDS)}; all but {_LOSSY} are lossless"
_Settings = TypeVar("_Settings", SpecConfig, SamplingParams, ServingConfig)
KVFormatName = Literal["model", "fp8_e4m3"]
GraphName = Literal["eager", "step", "phase", "round"]


@dataclass(frozen=True, kw_only=True)
class JsonOptions:
    """The JSON output of a command."""

    # Also write the result to this JSON file; its fields: specsim schema COMMAND.
    json: Annotated[Path | None, common("Output", file="writes")] = None


@dataclass(frozen=True, kw_only=True)
class HtmlOptions:
    """The page of a command that runs rounds."""

    # Write the first 64 rounds to this HTML file, a page to click through.
    html: Annotated[Path | None, common("Output", file="writes")] = None


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """A policy that chooses the draft steps of every round."""

    # Policy that chooses the draft steps of every round, up to --num-steps: moving-average (as in SGLang), throughput,
    # or a JSON file of a policy or of an engine's schedule.
    adaptive: Annotated[
        str | None, option("Draft tree", values="POLICY|FILE.json", default="always --num-steps", file="reads")
    ] = None
    # Let the policy choose draft steps for each request of a round: moving-average, goodput and scripted can.
    adaptive_per_request: Annotated[bool, option("Draft tree")] = False

    def policy(self) -> Any:
        """Read the value of --adaptive, None without it."""
        from specsim.core.policies.named import policy_value

        if self.adaptive is not None:
            return policy_value(self.adaptive, self.adaptive_per_request)
        if self.adaptive_per_request:
            raise InputError("adaptive_per_request", True, "given with --adaptive POLICY only")
        return None

    def without(self, *names: str) -> None:
        """Refuse options that --adaptive excludes, where they are given."""
        for name in names:
            value = getattr(self, name)
            if self.adaptive is not None and value not in (None, False):
                raise exclusive(name, value, "--adaptive")


@dataclass(frozen=True, kw_only=True)
class RuleOptions:
    """An acceptance rule of a user."""

    # Acceptance rule of your own, in place of the verifier.
    rule: Annotated[str | None, option("Verification", values="FILE.py:NAME", default="none", file="reads")] = None


@dataclass(frozen=True, kw_only=True)
class DraftTreeOptions:
    """Width, depth and nodes of a tree."""

    # Draft tokens kept at each step; 1 makes a chain. Sampling has --top-k instead.
    topk: Annotated[TreeTopk, common("Draft tree")] = 1
    # Draft steps, the depth of the tree; 0 with --topk 1 is plain decoding.
    num_steps: Annotated[StepCount, common("Draft tree")] = _TREE.num_steps
    # Nodes of the tree that the target verifies, root included.
    num_draft_tokens: Annotated[
        int | None,
        common("Draft tree", limits="at least 2", default="num_steps + 1 for a chain, 8 for a tree, or what fits"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PageSizeOptions:
    """The pages of a KV pool."""

    # Tokens in a KV page.
    page_size: Annotated[PageSize, option("KV cache")] = _TREE.page_size


@dataclass(frozen=True, kw_only=True)
class TreeOptions(DraftTreeOptions, PageSizeOptions):
    """The tree of a round and its KV."""

    # Start from these settings, which other options change. naive-eagle: topk 1, one step, pages of one token.
    preset: Annotated[str | None, option("Draft tree", presets=PRESETS, default="none")] = None
    topk: int = _TREE.topk
    # Acceptance rule: {names}.
    verifier: Annotated[Verifier, common("Verification", values="NAME", names=_VERIFIERS)] = _TREE.verifier
    # KV that a draft token attends to: that of its lane, as in SGLang, or that of its ancestors, as in EAGLE.
    draft_kv: Annotated[Literal["lane", "ancestor"], option("KV cache")] = _TREE.draft_kv
    # Rank drafts by products of probabilities or by sums of log-probabilities, as in EAGLE.
    score: Annotated[Literal["prob", "logprob"], option("Draft tree")] = _TREE.score
    # Penalties count the tokens on a draft's own path (exact), or not, as in engines (relaxed, not lossless).
    penalties: Annotated[Literal["exact", "relaxed"], option("Verification")] = _TREE.penalties
    # Tokens of a request that draft-extend runs: always num_steps + 1 (fixed), or only the accepted ones (ragged).
    extend: Annotated[Literal["fixed", "ragged"], option("Execution")] = _TREE.extend
    # When unused KV slots are freed: when the request ends, or after each round.
    release: Annotated[Literal["finish", "round"], option("KV cache")] = _TREE.release


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """The device of an implementation."""

    # Device of the fast implementation.
    device: Annotated[
        Literal["cpu", "cuda"] | None, common("Execution", default="cuda if there is a GPU, else cpu")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ImplementationOptions(DeviceOptions):
    """The implementation that runs, and how."""

    # Implementation that runs.
    impl: Annotated[Literal["reference", "fast"], common("Execution")] = "reference"
    # Data type of weights and activations.
    dtype: Annotated[Literal["float32", "float64", "bfloat16", "float16"], option("Execution")] = "float32"
    # Part of a round that the fast implementation replays as one CUDA graph; eager: none.
    graph: Annotated[GraphName | None, option("Execution", default="round; phase with --release round")] = None
    # Results do not depend on the batch; slower, as no library matrix products run.
    batch_invariant: Annotated[bool, option("Execution")] = False
    # Number format of the target's KV; fp8_e4m3: 8 bits, rounded once when written.
    kv_dtype: Annotated[KVFormatName, option("Execution", default="model, as --dtype")] = "model"
    # Number format of the drafter's KV.
    draft_kv_dtype: Annotated[KVFormatName, option("Execution", default="model, as --dtype")] = "model"
    # Decode and verify forwards of the target: a kernel for each step, or one resident kernel; auto: the faster one as
    # measured.
    forward: Annotated[Literal["auto", "kernels", "persistent"], option("Execution")] = "auto"

    def engine_options(
        self,
        config: SpecConfig,
        has_grammars: bool = False,
        drafts_on_host: bool = False,
        verifies_on_host: bool = False,
    ) -> "EngineOptions":
        """Make the engine's options, for what this machine can run."""
        import torch

        from specsim.core.engine_options import EngineOptions
        from specsim.serving.generation import kernel_device

        names = [field.name for field in fields(EngineOptions) if hasattr(self, field.name)]
        values = {name: getattr(self, name) for name in names}
        engine_options = EngineOptions(**values | {"dtype": getattr(torch, self.dtype)})
        if engine_options.impl == "fast":
            kernel_device(engine_options.device)
        return engine_options.resolve(config, has_grammars, drafts_on_host, verifies_on_host)


@dataclass(frozen=True, kw_only=True)
class DraftFieldOptions:
    """Fields of a drafter's config."""

    # Set a field that the drafter's config.json lacks or has wrong; may be repeated.
    draft_field: Annotated[list[str] | None, option("Model", values="NAME=JSON")] = None

    def draft_fields(self) -> dict[str, Any]:
        """Parse each NAME=JSON; a value that is no JSON is itself, so that words need no quotes."""
        values: dict[str, Any] = {}
        for assignment in self.draft_field or ():
            name, equals, value = assignment.partition("=")
            require(name and equals, "draft_field", assignment, "NAME=JSON, such as norm_before_residual=true")
            try:
                values[name] = json.loads(value)
            except (ValueError, RecursionError):
                values[name] = value
        return values


@dataclass(frozen=True, kw_only=True)
class DraftLimitOptions(DraftFieldOptions):
    """A drafter with fewer tokens, and with fewer keys."""

    # Draft only these tokens: a JSON list of ids, one id a line, or SGLang's .pt. With --draft-vocab-size: a text.
    draft_vocab: Annotated[Path | None, option("Model", default="all of the drafter's", file="reads")] = None
    # Draft only the most frequent tokens of the text in --draft-vocab, this number of them.
    draft_vocab_size: Annotated[Width | None, option("Model", default="none, a list")] = None
    # Last keys that the drafter sees, and not the whole request.
    draft_window: Annotated[TokenCount | None, option("Model", default="all")] = None
    # First columns of the request that the drafter sees besides its window.
    draft_first_columns: Annotated[int, option("Model", at_least=0)] = 0

    def limited(self, pair: "Pair") -> "Pair":
        """Limit the tokens and the keys of a pair's drafter."""
        for name, needed in (("draft_vocab_size", "draft_vocab"), ("draft_first_columns", "draft_window")):
            value = getattr(self, name)
            label = needed.replace("_", "-")
            require(not value or getattr(self, needed), name, value, f"nothing without --{label}")
        if self.draft_vocab is None and self.draft_window is None:
            return pair
        from specsim.models.draft_limits import DraftWindow, limit_drafts

        window = self.draft_window and DraftWindow(self.draft_window, self.draft_first_columns)
        return limit_drafts(pair, self._vocabulary(pair), window)

    def _vocabulary(self, pair: "Pair") -> "DraftVocabulary | Path | None":
        """Count the text's tokens, or name the list."""
        if self.draft_vocab is None or self.draft_vocab_size is None:
            return self.draft_vocab
        from specsim.core.files import read_text
        from specsim.models.draft_vocabulary import DraftVocabulary

        text = read_text(self.draft_vocab, "draft_vocab", "a UTF-8 text with --draft-vocab-size")
        allowed = "none for a target without a tokenizer, which counts the text"
        require(pair.tokenizer is not None, "draft_vocab_size", self.draft_vocab_size, allowed)
        return DraftVocabulary.most_frequent(pair.tokenizer, text, self.draft_vocab_size)


@dataclass(frozen=True, kw_only=True)
class PairOptions(TreeOptions, DraftLimitOptions):
    """A target and its drafter, trained or with random weights, and the acceptance of its drafts."""

    # Drafter: {names}, MODULE:NAME of your own, KIND+suffix for both, or none, which is plain decoding.
    drafter: Annotated[
        str | None,
        common(
            "Model", names=", ".join(KINDS), values="NAME", default=f"{DEFAULT}, or the kind of --draft", file="reads"
        ),
    ] = None
    # Longest request in tokens, prompt included; at most the target's limit.
    max_len: Annotated[int | None, option("KV cache", at_least=2, default="the target's limit")] = None
    # Target model: a folder or a hub id.
    target: Annotated[str | None, common("Model", default="the shipped target, tiny", file="reads")] = None
    # Drafter's weights: a folder or a hub id.
    draft: Annotated[str | None, common("Model", default="the shipped drafter", file="reads")] = None
    # Draft only the tokens that target and drafter have in common, where their vocabularies differ (standalone).
    bridge_vocabularies: Annotated[bool, option("Model")] = False
    # Random weights of this shape. NAME-tpK-slice is one GPU's share of K in tensor parallelism.
    shape: Annotated[
        str | None, option("Model", values="NAME|config.json|folder", default="trained weights", file="reads")
    ] = None
    # Fraction of rounds that accept draft 1, 2, ...: a schedule decides in place of the target, for timing only.
    accept_rates: Annotated[
        str | None,
        option("Acceptance", limits="0 to 1, never rising", values="R1,R2,...", default="the target decides"),
    ] = None
    # How --accept-rates are spread over the rounds.
    accept_schedule: Annotated[Literal["minimum-variance", "independent"], option("Acceptance")] = "minimum-variance"

    def config(self) -> SpecConfig:
        """Make the setting; with drafter `none` the tree has to be the default."""
        if self.drafter != "none":
            return pick(SpecConfig, self)
        refuse_changes(self, [name for name in option_fields(TreeOptions) if name != "page_size"], "with drafter none")
        return SpecConfig.plain(self.page_size, self.max_len)

    def drafts_on_host(self, config: SpecConfig) -> bool:
        """Check whether the drafter runs on the host, between graphs."""
        from specsim.models.load import drafts_on_host

        return drafts_on_host(self.drafter, config)

    def acceptance(self) -> SyntheticAcceptance | None:
        """Make the schedule that decides the acceptance; None if the target decides it."""
        if self.accept_rates is None:
            refuse_changes(self, ("accept_schedule",), "without --accept-rates")
            return None
        rates = accepted_shares(self.accept_rates)
        if self.drafter == "none":
            raise exclusive("accept_rates", self.accept_rates, "--drafter none")
        with told_as(rates="accept_rates", schedule="accept_schedule"):  # run has a --schedule of its own
            return SyntheticAcceptance(rates, self.accept_schedule).fit(self.num_steps)

    def load(self, config: SpecConfig, engine: "EngineOptions", is_whole: bool = False) -> "Pair":
        """Load the pair, or make one of random weights on the engine's device; before, see that the setting fits it.

        Where ranks share the model, a rank reads only its slices, unless `is_whole`.
        """
        drafter: Any = self.drafter  # which `load` and `random_pair` check
        if self.shape is None:
            from specsim.models.load import load, load_config

            draft_fields = self.draft_fields()
            config.within(load_config(self.target, self.draft, drafter).max_position_embeddings)
            parts = None if is_whole or self.draft_vocab else parts_of(engine)
            pair = load(self.target, self.draft, drafter, draft_fields, self.bridge_vocabularies, parts)
            return self.limited(pair)
        for name in ("target", "draft", "draft_field", "bridge_vocabularies"):
            if value := getattr(self, name):
                raise exclusive(name, value, "--shape")
        from specsim.models.load import is_token_drafter, token_drafter
        from specsim.models.shapes import random_pair, shape

        of = shape(self.shape)
        config.within(of.config.max_position_embeddings)
        device = engine.device or "cpu"
        if is_token_drafter(drafter):
            return self.limited(random_pair(of, device, engine.dtype, None).with_drafter(token_drafter(drafter)))
        kind = None if drafter == "none" else drafter or DEFAULT
        return self.limited(random_pair(of, device, engine.dtype, kind))


def parts_of(engine: "EngineOptions") -> "Parts | None":
    """Name this rank's slices of target and drafter; None: one rank has the whole model."""
    from specsim.core.rank_group import RankGroup
    from specsim.models.load import Parts

    group = RankGroup.joined(engine.tensor_parallel)
    return group and Parts(group.part, group.part if engine.draft_parallel == "sharded" else None)


def pick(settings: type[_Settings], options: Any, **changes: Any) -> _Settings:
    """Make settings from the options of the same names."""
    values = {field.name: getattr(options, field.name) for field in fields(settings) if hasattr(options, field.name)}
    return settings(**values | changes)


@contextmanager
def told_as(**names: str) -> Iterator[None]:
    """Name the option in an error that names its field."""
    try:
        yield
    except InputError as error:
        if error.name not in names:
            raise
        raise InputError(names[error.name], error.value, error.allowed) from error


def exclusive(name: str, value: object, other: str) -> InputError:
    """Make the error of an option that another one excludes; other: as it is written, with its dashes."""
    option = f"--{name.replace('_', '-')}"
    display_value = value if isinstance(value, (int, float)) else str(value)
    return InputError(name, display_value, f"nothing with {other}: leave out {option} or {other}")


def accepted_shares(text: str) -> tuple[float, ...]:
    """Parse the numbers of --accept-rates."""
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise InputError("accept_rates", text, "numbers with commas between them, such as 0.8,0.6,0.4") from None


def shipped_texts(count: int | None, name: str = "prompts") -> list[str]:
    """Give the first `count` shipped prompts of a set; None: all."""
    from specsim.models.shipped import load_prompts

    texts = [prompt["text"] for prompt in load_prompts(name=name)]
    require(count is None or 1 <= count <= len(texts), "prompts", count, f"1 to {len(texts)}")
    return texts[:count]


def report(
    output: str, show: Callable[["Console"], object], value: dict[str, Any], file: Path | None, is_ok: bool = True
) -> None:
    """Print a result and write it as JSON with its schema's name; exit with status 1 unless is_ok."""
    from specsim.core.display import stdout_console
    from specsim.core.files import write_json

    try:
        show(stdout_console())
    finally:  # neither a closed terminal nor a full disk costs the other its result
        write_json(file, {"schema": schema_name(output)} | value)
    if not is_ok:
        raise click.exceptions.Exit(1)
