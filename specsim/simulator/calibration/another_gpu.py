"""Parameters of a calibrated server on another GPU, in another machine."""

from dataclasses import replace

import numpy as np

from specsim.simulator.calibration.parameters import PRIORS
from specsim.simulator.calibration.posterior import Posterior

KEPT = 0.5  # of a parameter's distance from its prior
SHARES = ("bandwidth", "compute", "overlap")  # of the GPU's peaks
HOST = ("launch", "host", "host_request", "host_drafts", "draft_step")  # seconds of the machine's CPU
MOVED = (*SHARES, *HOST)


def moved(posterior: Posterior) -> Posterior:
    """Move parameters: shares of peaks and times of the host are half the engine's, and half the machine's.

    So each of them keeps half of its distance from its prior, and half of the prior's variance is added.
    """
    priors = np.log([PRIORS[name].value for name in posterior.names])
    spreads = np.array([PRIORS[name].spread for name in posterior.names])
    kept = np.where([name in MOVED for name in posterior.names], KEPT, 1.0)
    logs = priors + kept * (posterior.logs - priors)
    covariance = posterior.covariance * np.outer(kept, kept) + np.diag((1 - kept) * spreads**2)
    return replace(posterior, logs=logs, covariance=covariance)
