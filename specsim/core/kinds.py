"""Kinds of drafters: one record each, which every folder reads instead of a list of names.

Functions and objects of other folders are named as MODULE:NAME and imported where they are used, so that this file
needs none of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from specsim.core.verifiers import VERIFIER_KINDS, VERIFIER_OF

_SIZES = ("num_steps", "topk", "num_draft_tokens")


@dataclass(frozen=True, slots=True)
class ServedKind:
    """A kind that engines' servers run: its cost in the simulator, and the servers' options.

    cost: a function of the target, the vocabulary of drafts and the width of a feed-forward that makes the drafter of
    specsim.simulator.drafter.
    """

    cost: str
    vllm: Mapping[str, Any]  # of its speculative config
    sglang: str | None = None  # speculative algorithm, None: there is none
    sglang_sizes: tuple[str, ...] = _SIZES  # fields of SpecConfig that SGLang's options set
    tensorrt_llm: str | None = None  # decoding type, None: engines document no schedules by batch size
    has_vocabulary: bool = False  # its head has a vocabulary of drafts


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of a kind, which tests run too."""

    # From its kind; another vocabulary is bridged, and next to a lookup some drafts are looked up.
    differs_in: Literal["nothing", "mode", "tensors", "vocabulary", "lookup"]
    fields: Mapping[str, Any] = field(default_factory=dict)  # of its config
    sampling_tests: tuple[str, ...] = ()  # as a record's
    change: str = ""  # function that makes its pair of the kind's pair


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """Everything that folders need to know of a kind of drafter.

    reference, fast: functions that make the drafter of an engine, with the parameters of `make_drafter` in
    specsim.reference.drafters and specsim.fast.drafters. oracle: a function of specsim.reference.oracle's Request,
    tokens, root and depth that grows the candidates. format: of its checkpoints, a DrafterFormat of
    specsim.models.checkpoint.drafter_format. settings: class of its settings, of a kind without weights. synthetic: its
    test models, a SyntheticDrafter of specsim.models.synthetic.drafter, or a SyntheticLookup for a kind without weights
    whose tests need other settings than the defaults.
    """

    name: str  # in commands, configs and files
    title: str  # in tables and pages
    reference: str
    fast: str
    oracle: str
    # A forward for each step, a module for each, rows of mask tokens or of a block in one forward, or no model.
    drafts: Literal["lanes", "modules", "masks", "block", "lookup"]
    served: ServedKind | None = None  # None: the simulator has no cost of it
    in_target: bool = False  # weights may be in the target's own folder
    tree_steps: int = 4  # depth of the tree in the acceptance study
    accept_length: float | None = None  # least one of the shipped drafter's chain of 3 at temperature 0
    format: str = ""
    settings: str = ""
    has_weights: bool = True
    can_sample: bool = True  # drafts can be drawn, with the distribution that verifiers of sampled drafts read
    # Rounds whose draft phase is host code in the fast implementation, which no graph captures.
    on_host: Literal["never", "trees", "always"] = "never"
    parallel: tuple[str, ...] = ()  # values of draft_parallel with which it runs where ranks share the target
    synthetic: str = ""
    trainer: str = ""  # function of the target, a text and TrainingOptions that builds an untrained drafter
    kv: Literal["own", "target", "none"] = "own"  # whose KV its drafts read
    sampling_tests: tuple[str, ...] = ()  # verifiers with which `specsim sampling-test` runs it next tos EAGLE heads
    variants: Mapping[str, Variant] = field(default_factory=dict)  # by name

    def tested_as(self, name: str) -> "DrafterKind":
        """Return the record as that of a variant: what is looked up is not drawn."""
        return replace(self, can_sample=False) if self.variant(name).differs_in == "lookup" else self

    def variant(self, name: str) -> Variant:
        """Return the variant of this name, which may be the kind's own."""
        return self.variants[name] if name != self.name else Variant("nothing", sampling_tests=self.sampling_tests)

    def drafts_on_host(self, topk: int) -> bool:
        """Check whether the fast implementation's draft phase is host code, which no graph captures."""
        return self.on_host == "always" or (self.on_host == "trees" and topk > 1)

    def is_shareable(self, draft_parallel: str) -> bool:
        """Check whether it runs where ranks share the target; a drafter without weights always does."""
        return not self.has_weights or draft_parallel in self.parallel

    @property
    def is_parallel(self) -> bool:
        """Check whether one forward makes all drafts of a round."""
        return self.drafts in ("masks", "block")


_EITHER = ("sharded", "replicated")
_CUT = Variant("mode", change="specsim.models.synthetic_pair:cut_pair")
_WINDOWED = Variant("mode", change="specsim.models.synthetic_pair:windowed_pair")
_LOOKED_UP: Mapping[str, Any] = {
    "oracle": "specsim.reference.oracle_draft:look_up",
    "drafts": "lookup",
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
        drafts="lanes",
        served=ServedKind("specsim.simulator.drafter:eagle_head", {"method": "eagle"}, "EAGLE", tensorrt_llm="Eagle"),
        accept_length=2.5,
        synthetic="specsim.models.synthetic.eagle:SYNTHETIC",
        trainer="specsim.training.eagle:build_eagle",
        parallel=_EITHER,
    ),
    DrafterKind(
        "eagle3",
        "EAGLE-3",
        reference="specsim.reference.drafters.eagle3:make",
        fast="specsim.fast.drafters.eagle3:make",
        oracle="specsim.reference.oracle_eagle:draft_eagle3",
        format="specsim.models.drafters.eagle3:FORMAT",
        drafts="lanes",
        served=ServedKind(
            "specsim.simulator.drafter:eagle3_head",
            {"method": "eagle3"},
            "EAGLE3",
            tensorrt_llm="Eagle3",
            has_vocabulary=True,
        ),
        accept_length=3.2,
        synthetic="specsim.models.synthetic.eagle3:SYNTHETIC",
        trainer="specsim.training.eagle:build_eagle3",
        variants={
            "eagle3.1": Variant("tensors", dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output"), True)),
            "eagle3.cut": _CUT,
            "eagle3.window": _WINDOWED,
            "eagle3+suffix": Variant("lookup", change="specsim.models.synthetic_pair:pair_with_lookup"),
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
        drafts="masks",
        # SGLang has none (sgl-project/sglang#23171).
        served=ServedKind(
            "specsim.simulator.drafter:p_eagle_head",
            {"method": "eagle3", "parallel_drafting": True},
            has_vocabulary=True,
        ),
        accept_length=2.7,
        synthetic="specsim.models.synthetic.p_eagle:SYNTHETIC",
        trainer="specsim.training.p_eagle:build_p_eagle",
        sampling_tests=(VERIFIER_OF["sampled"], VERIFIER_OF["siblings"]),
        parallel=_EITHER,
    ),
    DrafterKind(
        "mtp",
        "MTP",
        reference="specsim.reference.drafters.mtp:make",
        fast="specsim.fast.drafters.mtp:make",
        oracle="specsim.reference.oracle_mtp:draft_mtp",
        format="specsim.models.drafters.mtp:FORMAT",
        drafts="modules",
        served=ServedKind("specsim.simulator.drafter:mtp_module", {"method": "mtp"}, "EAGLE", tensorrt_llm="MTP"),
        in_target=True,
        tree_steps=3,  # as deep as the shipped drafter has modules
        accept_length=2.85,
        synthetic="specsim.models.synthetic.mtp:SYNTHETIC",
        trainer="specsim.training.mtp:build_mtp",
        sampling_tests=(VERIFIER_OF["sampled"],),
        variants={
            "mtp.one": Variant("mode", {"num_modules": 1}),
            "mtp.parallel": Variant("mode", {"hidden_chain": False}),
            "mtp.cut": replace(_CUT, sampling_tests=(VERIFIER_OF["sampled"],)),
            "mtp.window": _WINDOWED,
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
        drafts="lanes",
        accept_length=2.4,
        synthetic="specsim.models.synthetic.frozen_kv:SYNTHETIC",
        trainer="specsim.training.frozen_kv:build_frozen_kv",
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
        drafts="block",
        served=ServedKind(
            "specsim.simulator.drafter:dflash_head", {"method": "dflash"}, "DFLASH", sglang_sizes=("num_draft_tokens",)
        ),
        tree_steps=7,  # the whole block of the shipped drafter
        accept_length=2.4,
        synthetic="specsim.models.synthetic.block:DFLASH",
        trainer="specsim.training.block:build_dflash",
        sampling_tests=(VERIFIER_OF["sampled"],),
        variants={
            "dflash.causal": Variant("mode", {"causal_layers": (1,)}),  # the first layer sees the whole block
            "dflash.window": _WINDOWED,
        },
    ),
    DrafterKind(
        "dspark",
        "DSpark",
        reference="specsim.reference.drafters.block:make",
        fast="specsim.fast.drafters.block:make",
        oracle="specsim.reference.oracle_block:draft_block",
        format="specsim.models.drafters.block:DSPARK",
        drafts="block",
        # Its own block decides how much SGLang drafts (lm-sys/lm-sys.github.io#413).
        served=ServedKind("specsim.simulator.drafter:dspark_head", {"method": "dspark"}, "DSPARK", sglang_sizes=()),
        tree_steps=7,  # the whole block of the shipped drafter
        accept_length=2.5,
        synthetic="specsim.models.synthetic.block:DSPARK",
        trainer="specsim.training.block:build_dspark",
        sampling_tests=tuple(
            verifier.name for verifier in VERIFIER_KINDS if verifier.is_lossless and not verifier.is_coupled
        ),
        variants={"dspark.cut": _CUT},
    ),
    DrafterKind(
        "standalone",
        "standalone",
        reference="specsim.reference.drafters.standalone:make",
        fast="specsim.fast.drafters.standalone:make",
        oracle="specsim.reference.oracle_standalone:draft_standalone",
        format="specsim.models.drafters.standalone:FORMAT",
        drafts="lanes",
        accept_length=2.3,
        synthetic="specsim.models.synthetic.standalone:SYNTHETIC",
        trainer="specsim.training.standalone:build_standalone",
        sampling_tests=tuple(verifier.name for verifier in VERIFIER_KINDS if verifier.drafts != "best"),
        variants={
            "standalone.shifted": Variant("mode", {"rows": "shifted"}),
            "standalone.tli": Variant(
                "vocabulary",
                sampling_tests=(VERIFIER_OF["sampled"], VERIFIER_OF["siblings"]),
                change="specsim.models.synthetic_pair:bridged_pair",
            ),
        },
        parallel=("replicated",),
    ),
    DrafterKind(
        "ngram",
        "n-gram",
        reference="specsim.reference.drafters.ngram:make",
        fast="specsim.fast.drafters.ngram:make",
        settings="specsim.core.token_drafter:NgramConfig",
        sampling_tests=(VERIFIER_OF["best"],),
        on_host="trees",
        **_LOOKED_UP,
    ),
    DrafterKind(
        "suffix",
        "suffix",
        reference="specsim.reference.drafters.suffix:make",
        fast="specsim.fast.drafters.suffix:make",
        settings="specsim.core.token_drafter:SuffixConfig",
        synthetic="specsim.models.synthetic.drafter:SUFFIX",
        sampling_tests=(VERIFIER_OF["best"],),
        on_host="always",
        **_LOOKED_UP,
    ),
)
KINDS: Mapping[str, DrafterKind] = {kind.name: kind for kind in _RECORDS}
SERVED: Mapping[str, ServedKind] = {kind.name: kind.served for kind in _RECORDS if kind.served}
TRAINABLE = tuple(kind.name for kind in _RECORDS if kind.trainer)
DEFAULT = "eagle3"  # of commands and loads that name none
# Kinds and their variants, each with the record of its kind.
TESTED: Mapping[str, DrafterKind] = {
    name: kind.tested_as(name) for kind in _RECORDS for name in (kind.name, *kind.variants)
}
# A token drafter of a user.
OWN = DrafterKind(
    "own",
    "your own",
    reference="specsim.reference.drafters.host:make",
    fast="specsim.fast.drafters.host:make",
    on_host="always",
    **_LOOKED_UP,
)
