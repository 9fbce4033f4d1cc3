"""specsim predict: predict accept lengths of many settings from one recording, and measure them."""

from dataclasses import dataclass
from typing import Annotated

from specsim.cli.acceptance_options import MeasuredAcceptance
from specsim.cli.option_fields import common, refuse_changes
from specsim.cli.options import JsonOptions, report, shipped_texts
from specsim.core.config import SamplingParams
from specsim.core.kinds import DEFAULT, KINDS, SERVED

DRAFTERS = tuple(name for name in SERVED if KINDS[name].drafts == "lanes")


@dataclass(frozen=True, kw_only=True)
class PredictOptions(MeasuredAcceptance, JsonOptions):
    """Options of specsim predict."""

    # Predict from this acceptance record, or metrics of vLLM, SGLang or AIPerf, without running a model.
    acceptance: Annotated[
        str | None, common("Acceptance", values="FILE", default="record the shipped pair", file="reads")
    ] = None
    # Number of shipped prompts.
    prompts: Annotated[int, common("Requests", at_least=1)] = 12
    # Largest number of new tokens per prompt.
    max_new_tokens: Annotated[int, common("Requests", at_least=1)] = 64
    # Drafter architecture.
    drafter: Annotated[str, common("Model", choices=DRAFTERS)] = DEFAULT


def predict(options: PredictOptions) -> None:
    """Predict accept lengths of 30 settings, then measure them.

    All predictions come from one recorded run of the shipped pair; the command takes a few minutes. With --acceptance
    or --accept-lengths they follow from what was measured, and nothing runs.

    Exit status: 0 if the mean error is at most 3 %, 1 if it is above, 2 for bad input.

    Examples:
      specsim predict --prompts 6 --json shares.json
      specsim predict --acceptance shares.json
      specsim predict --accept-lengths 1.8,2.4,2.8
    """
    if options.acceptance is not None or options.accept_lengths is not None:
        refuse_changes(options, ("prompts", "max_new_tokens", "drafter"), "with a measured acceptance")
        _predict_from_record(options)
        return
    from specsim.acceptance.prediction import TARGET_ERROR, show
    from specsim.acceptance.prediction import predict as run
    from specsim.models.load import load

    SamplingParams(max_new_tokens=options.max_new_tokens)
    texts = shipped_texts(options.prompts)
    predictions = run(load(drafter=options.drafter), texts, options.max_new_tokens, progress=True)
    is_ok = predictions.mean_error <= TARGET_ERROR
    report("predict", lambda console: show(predictions, console), predictions.to_json(), options.json, is_ok)


def _predict_from_record(options: PredictOptions) -> None:
    from specsim.acceptance.record_prediction import predict_from, show

    record = options.record()
    assert record is not None
    predictions = predict_from(record)
    report("predict-record", lambda console: show(predictions, console), predictions.to_json(), options.json)
