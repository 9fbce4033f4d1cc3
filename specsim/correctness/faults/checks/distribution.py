"""Sampling test of a running engine on a target whose distribution is known, see specsim.correctness.statistics."""

import math
from typing import Any

from specsim.core.engine_options import EngineOptions
from specsim.core.verifiers import DEFAULT_VERIFIER
from specsim.correctness.faults.fault import FaultFinding
from specsim.correctness.statistics.e_value import ln_e_value
from specsim.correctness.statistics.samples import CONFIGS, Load, SamplingSetting, outputs, sample
from specsim.correctness.statistics.small_vocabulary import opposed

FALSE_ALARM = 1e-6


def check(setting: dict[str, Any], device: str) -> list[FaultFinding]:
    """Test the tokens of requests against their distribution.

    setting: impl; tokens, the least number; verifier; of every request temperature and other SamplingParams. device: of
    the fast implementation.
    """
    params = dict(setting)
    impl = params.pop("impl")
    count = params.pop("tokens")
    config = CONFIGS[params.pop("verifier", DEFAULT_VERIFIER)]
    tested = SamplingSetting("tested", params)
    engine = EngineOptions("fast", device=device) if impl == "fast" else EngineOptions()
    model = opposed()
    samples = sample(
        model, tested, outputs(model, Load(config, [tested], count, engine=engine), lambda _: None)["tested"]
    )
    p_value = math.exp(min(0.0, -ln_e_value(samples)))
    if p_value >= FALSE_ALARM:
        return []
    about = f"{len(samples)} tokens, false alarms at most {FALSE_ALARM:.0e}"
    return [FaultFinding("distribution", about, f"a p-value of at least {FALSE_ALARM:.0e}", f"{p_value:.0e}")]
