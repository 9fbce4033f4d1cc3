"""Groups of options that commands share: their fields are options, and their methods give settings."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Any

from specsim.cli import options
from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require, require_choice
from specsim.core.kinds import DEFAULT, KINDS, OWN
from specsim.core.synthetic_acceptance import SCHEDULES, SyntheticAcceptance

if TYPE_CHECKING:
    from specsim.core.engine_options import EngineOptions
    from specsim.core.pair import Pair
    from specsim.models.load import Parts

_TREE = SpecConfig()


@dataclass(frozen=True, slots=True)
class TreeGroup:
    """The tree of a round and its KV."""

    preset: options.Preset = None
    topk: options.Topk = _TREE.topk
    num_steps: options.NumSteps = _TREE.num_steps
    num_draft_tokens: options.NumDraftTokens = None
    verifier: options.Verifier = _TREE.verifier
    page_size: options.PageSize = _TREE.page_size
    draft_kv: options.DraftKV = _TREE.draft_kv
    score: options.Score = _TREE.score
    penalties: options.Penalties = _TREE.penalties
    extend: options.Extend = _TREE.extend
    release: options.Release = _TREE.release


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """The implementation that runs, and how."""

    impl: options.Impl = "reference"
    dtype: options.Dtype = "float32"
    device: options.Device = None
    graph: options.Graph = None
    bucket: options.Bucket = None
    batch_invariant: options.BatchInvariant = False
    kv_dtype: options.KVDtype = "model"
    draft_kv_dtype: options.DraftKVDtype = "model"
    forward: options.Forward = "auto"

    def options(
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

        require_choice("dtype", self.dtype, options.DTYPES)
        engine_options = EngineOptions(**flat({"engine": self}) | {"dtype": getattr(torch, self.dtype)})
        if engine_options.impl == "fast":
            kernel_device(engine_options.device)
        return engine_options.resolve(config, has_grammars, drafts_on_host, verifies_on_host)


@dataclass(frozen=True, slots=True)
class PairGroup:
    """A target and its drafter, trained or with random weights, and the acceptance of its drafts."""

    drafter: options.Drafter = None
    max_len: options.MaxLen = None
    target: options.Target = None
    draft: options.Draft = None
    draft_field: options.DraftField = None
    bridge_vocabularies: options.BridgeVocabularies = False
    shape: options.Shape = None
    accept_rates: options.AcceptRates = None
    accept_schedule: options.AcceptSchedule = SCHEDULES[0]

    def config(self, tree: TreeGroup) -> SpecConfig:
        """Make the setting of a tree; with drafter `none` the tree has to be the default."""
        if self.drafter != "none":
            return options.pick(SpecConfig, flat({"tree": tree, "pair": self}))
        for field in fields(tree):
            value = getattr(tree, field.name)
            if field.name != "page_size" and value != field.default:
                raise InputError(field.name, value, f"only {field.default}, the default, with drafter none")
        return SpecConfig.plain(tree.page_size, self.max_len)

    def drafts_on_host(self, config: SpecConfig) -> bool:
        """Check whether the drafter runs on the host, between graphs."""
        from specsim.models.load import is_token_drafter

        kind = self.drafter or DEFAULT
        return is_token_drafter(kind) and KINDS.get(kind, OWN).drafts_on_host(config.topk)

    def acceptance(self, num_steps: int) -> SyntheticAcceptance | None:
        """Make the schedule that decides the acceptance; None if the target decides it."""
        if self.accept_rates is None:
            allowed = f"only {SCHEDULES[0]}, the default, without --accept-rates"
            require(self.accept_schedule == SCHEDULES[0], "accept_schedule", self.accept_schedule, allowed)
            return None
        rates = options.accepted_shares(self.accept_rates)
        if self.drafter == "none":
            raise options.exclusive("accept_rates", self.accept_rates, "--drafter none")
        schedule: Any = self.accept_schedule  # which SyntheticAcceptance checks
        with options.told_as(rates="accept_rates", schedule="accept_schedule"):  # run has a --schedule of its own
            return SyntheticAcceptance(rates, schedule).fit(num_steps)

    def load(self, config: SpecConfig, engine: "EngineOptions", is_whole: bool = False) -> "Pair":
        """Load the pair, or make one of random weights on the engine's device; before, see that the setting fits it.

        Where ranks share the model, a rank reads only its slices, unless `is_whole`.
        """
        drafter: Any = self.drafter  # which `load` and `random_pair` check
        if self.shape is None:
            from specsim.models.load import load, load_config

            draft_fields = dict(map(options.draft_field, self.draft_field or ()))
            config.within(load_config(self.target, self.draft, drafter).max_position_embeddings)
            parts = None if is_whole else parts_of(engine)
            return load(self.target, self.draft, drafter, draft_fields, self.bridge_vocabularies, parts)
        for name in ("target", "draft", "draft_field", "bridge_vocabularies"):
            if value := getattr(self, name):
                raise options.exclusive(name, value, "--shape")
        from specsim.models.load import is_token_drafter, token_drafter
        from specsim.models.shapes import random_pair, shape

        of = shape(self.shape)
        config.within(of.config.max_position_embeddings)
        device = engine.device or "cpu"
        if is_token_drafter(drafter):
            return random_pair(of, device, engine.dtype, None).with_drafter(token_drafter(drafter))
        kind = None if drafter == "none" else drafter or DEFAULT
        return random_pair(of, device, engine.dtype, kind)


def parts_of(engine: "EngineOptions") -> "Parts | None":
    """Name this rank's slices of target and drafter; None: one rank has the whole model."""
    from specsim.core.rank_group import RankGroup
    from specsim.models.load import Parts

    group = RankGroup.joined(engine.tensor_parallel)
    return group and Parts(group.part, group.part if engine.draft_parallel == "sharded" else None)


def flat(arguments: dict[str, Any]) -> dict[str, Any]:
    """Replace each group among values by name by the values of its fields."""
    values: dict[str, Any] = {}
    for name, value in arguments.items():
        is_group = is_dataclass(value)
        values |= {field.name: getattr(value, field.name) for field in fields(value)} if is_group else {name: value}
    return values


def with_groups(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command of a function whose parameters include groups: each becomes the options of its fields."""
    parameters: list[Parameter] = []
    groups: dict[str, Any] = {}
    for name, parameter in signature(function).parameters.items():
        if is_dataclass(parameter.annotation):
            groups[name] = parameter.annotation
            parameters += [
                Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
                for field in fields(parameter.annotation)
            ]
        else:
            parameters.append(parameter)

    @wraps(function)
    def command(**arguments: Any) -> None:
        for name, group in groups.items():
            arguments[name] = group(**{field.name: arguments.pop(field.name) for field in fields(group)})
        function(**arguments)

    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    setattr(command, "__signature__", Signature(parameters))  # noqa: B010 - no attribute that functions declare
    return command
