"""specsim predict: predict accept lengths of many settings from one recording, and measure them."""

from pathlib import Path
from typing import Annotated

from specsim.cli import options
from specsim.cli.acceptance_options import AcceptLengths, check_one, given_record
from specsim.cli.file_options import reads
from specsim.cli.options import option
from specsim.core.config import SamplingParams
from specsim.core.errors import require
from specsim.core.kinds import DEFAULT, KINDS, SERVED

PROMPTS = 12
NEW_TOKENS = 64
DRAFTERS = tuple(name for name in SERVED if KINDS[name].drafts == "lanes")


def predict(
    acceptance: Annotated[
        str | None,
        option(
            "Acceptance",
            "Predict from this acceptance record, or metrics of vLLM, SGLang or AIPerf, without running a model.",
            metavar="FILE",
            show_default="record the shipped pair",
            callback=reads,
        ),
    ] = None,
    accept_lengths: AcceptLengths = None,
    prompts: Annotated[int, option("Requests", "Number of shipped prompts. [at least 1]")] = PROMPTS,
    max_new_tokens: Annotated[
        int, option("Requests", "Largest number of new tokens per prompt. [at least 1]")
    ] = NEW_TOKENS,
    drafter: Annotated[str, option("Model", "Drafter architecture.", metavar="|".join(DRAFTERS))] = DEFAULT,
    json_file: options.JsonFile = None,
) -> None:
    """Predict accept lengths of 30 settings, then measure them.

    All predictions come from one recorded run of the shipped pair; the command takes a few minutes. With --acceptance
    or --accept-lengths they follow from what was measured, and nothing runs.

    Exit status: 0 if the mean error is at most 3 %, 1 if it is above, 2 for bad input.

    Examples:
      specsim predict --prompts 6 --json shares.json
      specsim predict --acceptance shares.json
      specsim predict --accept-lengths 1.8,2.4,2.8
    """
    if acceptance is not None or accept_lengths is not None:
        for name, value, default in (
            ("prompts", prompts, PROMPTS),
            ("max_new_tokens", max_new_tokens, NEW_TOKENS),
            ("drafter", drafter, DEFAULT),
        ):
            require(value == default, name, value, f"only {default}, the default, with a measured acceptance")
        _from_record({"acceptance": acceptance, "accept_lengths": accept_lengths, "accept_rates": None}, json_file)
        return
    from specsim.acceptance.prediction import TARGET_ERROR, show
    from specsim.acceptance.prediction import predict as run
    from specsim.models.load import load

    SamplingParams(max_new_tokens=max_new_tokens)
    texts = options.shipped_texts(prompts)
    require(drafter in DRAFTERS, "drafter", drafter, " or ".join(DRAFTERS))
    predictions = run(load(drafter=drafter), texts, max_new_tokens, progress=True)
    is_ok = predictions.mean_error <= TARGET_ERROR
    options.report("predict", lambda console: show(predictions, console), predictions.to_json(), json_file, is_ok)


def _from_record(arguments: dict[str, str | None], json_file: Path | None) -> None:
    """Predict from a record."""
    from specsim.acceptance.record_prediction import predict_from, show

    check_one(arguments)
    record = given_record(arguments)
    assert record is not None
    predictions = predict_from(record)
    options.report("predict-record", lambda console: show(predictions, console), predictions.to_json(), json_file)
