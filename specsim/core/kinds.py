"""Kinds of drafters: one record each, which every folder reads instead of a list of names.

Functions and objects of other folders are named as MODULE:NAME and imported where they are used, so that this file
needs none of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of a kind, which tests run too."""

    differs_in: Literal["nothing", "mode", "tensors", "vocabulary"]  # from its kind; another vocabulary is bridged
    fields: Mapping[str, Any] = field(default_factory=dict)  # of its config
    sampling_tests: tuple[str, ...] = ()  # as a record's


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """Everything that folders need to know of a kind of drafter.

    reference, fast: functions that make the drafter of an engine, with the parameters of `make_drafter` in
    specsim.reference.drafters and specsim.fast.drafters. oracle: a function of specsim.reference.oracle's Request,
    tokens, root and depth that grows the candidates. format: of its checkpoints, a DrafterFormat of
    specsim.models.checkpoint.drafter_format. settings: class of its settings, of a kind without weights. synthetic: its
    test models, a SyntheticDrafter or SyntheticLookup of specsim.models.synthetic.drafter.
    """

    name: str  # in commands, configs and files
    title: str  # in tables and pages
    reference: str
    fast: str
    oracle: str
    format: str = ""
    settings: str = ""
    has_weights: bool = True
    can_sample: bool = True  # drafts can be drawn, with the distribution that verifiers of sampled drafts read
    # Rounds whose draft phase is host code in the fast implementation, which no graph captures.
    on_host: Literal["never", "trees", "always"] = "never"
    parallel: tuple[str, ...] = ()  # values of draft_parallel with which it runs where ranks share the target
    synthetic: str = ""
    kv: Literal["own", "target", "none"] = "own"  # whose KV its drafts read
    sampling_tests: tuple[str, ...] = ()  # verifiers with which `specsim sampling-test` runs it besides EAGLE heads
    variants: Mapping[str, Variant] = field(default_factory=dict)  # by name

    def variant(self, name: str) -> Variant:
        """Return the variant of this name, which may be the kind's own."""
        return self.variants[name] if name != self.name else Variant("nothing", sampling_tests=self.sampling_tests)

    def drafts_on_host(self, topk: int) -> bool:
        """Check whether the fast implementation's draft phase is host code, which no graph captures."""
        return self.on_host == "always" or (self.on_host == "trees" and topk > 1)

    def is_shareable(self, draft_parallel: str) -> bool:
        """Check whether it runs where ranks share the target; a drafter without weights always does."""
        return not self.has_weights or draft_parallel in self.parallel


_EITHER = ("sharded", "replicated")
_LOOKED_UP: Mapping[str, Any] = {
    "oracle": "specsim.reference.oracle_draft:look_up",
    "has_weights": False,
    "can_sample": False,
    "kv": "none",
}

_RECORDS = (
    DrafterKind(
        "eagle",
        "EAGLE",
        reference="specsim.reference.drafters.eagle:make",
        fast="specsim.fast.drafters.eagle:make",
        oracle="specsim.reference.oracle_eagle:draft_eagle",
        format="specsim.models.drafters.eagle:FORMAT",
        synthetic="specsim.models.synthetic.eagle:SYNTHETIC",
        parallel=_EITHER,
    ),
    DrafterKind(
        "eagle3",
        "EAGLE-3",
        reference="specsim.reference.drafters.eagle3:make",
        fast="specsim.fast.drafters.eagle3:make",
        oracle="specsim.reference.oracle_eagle:draft_eagle3",
        format="specsim.models.drafters.eagle3:FORMAT",
        synthetic="specsim.models.synthetic.eagle3:SYNTHETIC",
        variants={
            "eagle3.1": Variant("tensors", dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output"), True)),
        },
        parallel=_EITHER,
    ),
    DrafterKind(
        "p-eagle",
        "P-EAGLE",
        reference="specsim.reference.drafters.p_eagle:make",
        fast="specsim.fast.drafters.p_eagle:make",
        oracle="specsim.reference.oracle_p_eagle:draft_p_eagle",
        format="specsim.models.drafters.p_eagle:FORMAT",
        synthetic="specsim.models.synthetic.p_eagle:SYNTHETIC",
        sampling_tests=("rejection", "multi_round"),
        parallel=_EITHER,
    ),
    DrafterKind(
        "mtp",
        "MTP",
        reference="specsim.reference.drafters.mtp:make",
        fast="specsim.fast.drafters.mtp:make",
        oracle="specsim.reference.oracle_mtp:draft_mtp",
        format="specsim.models.drafters.mtp:FORMAT",
        synthetic="specsim.models.synthetic.mtp:SYNTHETIC",
        sampling_tests=("rejection",),
        variants={
            "mtp.one": Variant("mode", {"num_modules": 1}),
            "mtp.parallel": Variant("mode", {"hidden_chain": False}),
        },
        parallel=("sharded",),
    ),
    DrafterKind(
        "frozen-kv",
        "frozen KV",
        reference="specsim.reference.drafters.frozen_kv:make",
        fast="specsim.fast.drafters.frozen_kv:make",
        oracle="specsim.reference.oracle_frozen_kv:draft_frozen_kv",
        format="specsim.models.drafters.frozen_kv:FORMAT",
        synthetic="specsim.models.synthetic.frozen_kv:SYNTHETIC",
        kv="target",
        variants={"frozen-kv.next": Variant("mode", {"position": "next"})},
    ),
    DrafterKind(
        "dflash",
        "DFlash",
        reference="specsim.reference.drafters.block:make",
        fast="specsim.fast.drafters.block:make",
        oracle="specsim.reference.oracle_block:draft_block",
        format="specsim.models.drafters.block:DFLASH",
        synthetic="specsim.models.synthetic.block:DFLASH",
        sampling_tests=("rejection",),
    ),
    DrafterKind(
        "dspark",
        "DSpark",
        reference="specsim.reference.drafters.block:make",
        fast="specsim.fast.drafters.block:make",
        oracle="specsim.reference.oracle_block:draft_block",
        format="specsim.models.drafters.block:DSPARK",
        synthetic="specsim.models.synthetic.block:DSPARK",
        sampling_tests=("rejection", "block", "multi_round", "target_only"),
    ),
    DrafterKind(
        "standalone",
        "standalone",
        reference="specsim.reference.drafters.standalone:make",
        fast="specsim.fast.drafters.standalone:make",
        oracle="specsim.reference.oracle_standalone:draft_standalone",
        format="specsim.models.drafters.standalone:FORMAT",
        synthetic="specsim.models.synthetic.standalone:SYNTHETIC",
        sampling_tests=("rejection", "block", "multi_round", "gumbel"),
        variants={
            "standalone.shifted": Variant("mode", {"rows": "shifted"}),
            "standalone.tli": Variant("vocabulary", sampling_tests=("rejection", "multi_round")),
        },
        parallel=("replicated",),
    ),
    DrafterKind(
        "ngram",
        "n-gram",
        reference="specsim.reference.drafters.ngram:make",
        fast="specsim.fast.drafters.ngram:make",
        settings="specsim.core.token_drafter:NgramConfig",
        synthetic="specsim.models.synthetic.looked_up:NGRAM",
        sampling_tests=("target_only",),
        on_host="trees",
        **_LOOKED_UP,
    ),
    DrafterKind(
        "suffix",
        "suffix",
        reference="specsim.reference.drafters.suffix:make",
        fast="specsim.fast.drafters.suffix:make",
        settings="specsim.core.token_drafter:SuffixConfig",
        synthetic="specsim.models.synthetic.looked_up:SUFFIX",
        sampling_tests=("target_only",),
        on_host="always",
        **_LOOKED_UP,
    ),
)
KINDS: Mapping[str, DrafterKind] = {kind.name: kind for kind in _RECORDS}
# Kinds and their variants, each with the record of its kind.
TESTED: Mapping[str, DrafterKind] = {name: kind for kind in _RECORDS for name in (kind.name, *kind.variants)}
# A token drafter of a user.
OWN = DrafterKind(
    "own",
    "your own",
    reference="specsim.reference.drafters.host:make",
    fast="specsim.fast.drafters.host:make",
    on_host="always",
    **_LOOKED_UP,
)


def resolve(place: str) -> Any:
    """Import the object of a record, named as MODULE:NAME."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
