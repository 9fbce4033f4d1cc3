"""Outputs of finished requests, and the result of a run with its acceptance."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from specsim.core.config import SpecConfig
from specsim.core.display import generation_html
from specsim.core.files import without_nan
from specsim.core.metrics import Acceptance, acceptance
from specsim.core.rule import AcceptanceRule
from specsim.core.synthetic_acceptance import SyntheticAcceptance, acceptance_json
from specsim.serving.adaptation import Switching
from specsim.serving.requests import Request
from specsim.serving.trace import data_frame

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True)
class Output:
    """The output of a finished request."""

    text: str  # ends before a stop string
    token_ids: tuple[int, ...]  # generated tokens: [T], with the EOS or stop token that ended it
    logprobs: tuple[float, ...]  # natural logarithms under penalties, bias and temperature; nan where not reported
    finish_reason: str  # stop or length
    # tokens that each round accepted, bonus token included; the last round may exceed the output: [rounds]
    num_accepted_tokens_per_round: tuple[int, ...]
    proposed_depth_per_round: tuple[int, ...] = ()  # depth of the deepest draft, () if always num_steps
    prompt_token_ids: tuple[int, ...] = ()  # tokens of the prompt
    temperature: float = 0.0  # sampling temperature; 0 is greedy
    setting_per_round: tuple[int, ...] = ()  # number of each round's setting, () where there is one
    draft_steps_per_round: tuple[int, ...] = ()  # the request's own, () where no policy gives it any
    top_logprobs: tuple[dict[int, float], ...] = ()  # of the likeliest tokens at each place, by id; () if not asked for
    # By name, a row for each token of prompt and output but the last, which no forward read: `experts` has the experts
    # of each layer with some, i16 [tokens - 1, layers, experts of a row]. Not in to_json.
    side_outputs: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False)


def output_of(request: Request, top_logprobs: tuple[dict[int, float], ...] = ()) -> Output:
    """Make the output of a finished request, with the likeliest tokens at each place if they were asked for."""
    return Output(
        text=request.text,
        token_ids=tuple(request.token_ids),
        logprobs=tuple(request.logprobs),
        finish_reason=request.finish_reason or "",
        num_accepted_tokens_per_round=tuple(request.accepted),
        proposed_depth_per_round=tuple(request.proposed),
        prompt_token_ids=tuple(request.prompt_ids),
        temperature=request.params.temperature,
        setting_per_round=tuple(request.settings) if any(request.settings) else (),
        draft_steps_per_round=tuple(request.draft_steps),
        top_logprobs=top_logprobs,
        side_outputs=request.side_outputs,
    )


@dataclass(frozen=True, slots=True, repr=False)
class Generation:
    """The result of a run."""

    outputs: tuple[Output, ...]  # in the order of the prompts
    config: SpecConfig
    seconds: float  # wall-clock, without loading, with the fast implementation's compilation and graph capture
    synthetic: SyntheticAcceptance | None = None  # decided acceptance in place of the target: not lossless
    rule: AcceptanceRule | None = None  # decided acceptance in place of the setting's verifier
    switching: Switching | None = None  # rounds by setting, where a policy chose them
    # the tokenizer's, for pictures; None where the target has no tokenizer
    decode: Callable[[Sequence[int]], str] | None = field(default=None, compare=False)

    @property
    def acceptance(self) -> Acceptance:
        """Acceptance over all rounds of all requests."""
        drafts = [count - 1 for output in self.outputs for count in output.num_accepted_tokens_per_round]
        depths = [depth for output in self.outputs for depth in output.proposed_depth_per_round]
        proposed = depths if len(depths) == len(drafts) else None
        nodes = self.config.num_draft_tokens if self.switching is None else self.switching.mean_nodes
        return acceptance(drafts, self.config.num_steps, nodes, proposed)

    @property
    def metrics(self) -> dict[str, Any]:
        """Acceptance metrics of core.metrics, new tokens, seconds and tokens_per_s, over all requests."""
        tokens = sum(len(output.token_ids) for output in self.outputs)
        timing = {"tokens": tokens, "seconds": self.seconds, "tokens_per_s": tokens / self.seconds}
        return {**asdict(self.acceptance), **timing}

    def __repr__(self) -> str:
        metrics = self.metrics
        counts = f"{len(self.outputs)} outputs, {metrics['tokens']} tokens, {metrics['rounds']} rounds"
        kind = "synthetic accept length" if self.synthetic else "accept length"
        return f"Generation({counts}, {kind} {metrics['accept_length']:.2f}, {self.seconds:.2f} s)"

    def to_json(self) -> dict[str, Any]:
        """Convert to a JSON value, in which undefined metrics (without rounds) are null."""
        outputs = [asdict(replace(output, side_outputs={})) for output in self.outputs]
        for output in outputs:
            del output["side_outputs"]
        rule = self.rule and self.rule.name
        settings = {"config": asdict(self.config), "acceptance": acceptance_json(self.synthetic, rule)}
        settings["adaptive"] = self.switching and self.switching.to_json()
        return without_nan({"outputs": outputs, "metrics": self.metrics, **settings})

    def to_pandas(self) -> "pandas.DataFrame":
        """Make a table of all rounds.

        Columns: output (its index), round (from 0), num_accepted_drafts, num_accepted_tokens (bonus included), and
        first_token (index in token_ids of the round's first token). An output may end inside its last round.
        """
        counts = [output.num_accepted_tokens_per_round for output in self.outputs]
        rows = [
            (index, number, count - 1, count, 1 + sum(request_counts[:number]))
            for index, request_counts in enumerate(counts)
            for number, count in enumerate(request_counts)
        ]
        names = ("output", "round", "num_accepted_drafts", "num_accepted_tokens", "first_token")
        columns = {name: [row[index] for row in rows] for index, name in enumerate(names)}
        return data_frame(columns, dict.fromkeys(names, "int64"))

    def _repr_html_(self) -> str:
        return generation_html(self)
