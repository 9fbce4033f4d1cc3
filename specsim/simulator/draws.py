"""Accepted drafts of a workload's requests, drawn round by round before the workload is served."""

from collections.abc import Iterator
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np

from specsim.simulator.acceptance import Distribution, DraftedRounds, Option
from specsim.simulator.uniforms import named_uniforms
from specsim.simulator.workload import SimulatedWorkload

REQUESTS = 1024  # drawn together
MOST_STEPS = 255  # drafts that a byte can count


class DrawnRounds(NamedTuple):
    """Accepted drafts by request and round."""

    starts: np.ndarray  # int64 [R + 1], first round of each request
    accepted: np.ndarray  # uint8, all rounds of the first request, then those of the next

    def of(self, request: int) -> Iterator[int]:
        """Iterate over the rounds of a request, and over rounds after its end, which the host does not know yet."""
        start, stop = self.starts[request : request + 2].tolist()
        return chain(self.accepted[start:stop].tobytes(), repeat(0))


def is_drawn_before(option: Option) -> bool:
    """Check whether a setting's acceptance depends on nothing but the request, the round and their uniforms."""
    return isinstance(option.acceptance, Distribution) and option.config.num_steps <= MOST_STEPS


def draw_rounds(option: Option, keys: np.ndarray, workload: SimulatedWorkload) -> DrawnRounds:
    """Draw at least one round of every request with this setting, and all up to its end."""
    blocks = [
        _draw(option, keys, np.arange(start, min(start + REQUESTS, len(keys))), workload.output_tokens)
        for start in range(0, len(keys), REQUESTS)
    ]
    rounds = np.concatenate([block.starts for block in blocks])
    return DrawnRounds(
        np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(rounds)]),
        np.concatenate([block.accepted for block in blocks]),
    )


def _draw(option: Option, keys: np.ndarray, requests: np.ndarray, output_tokens: np.ndarray) -> DrawnRounds:
    """Draw the rounds of some requests; starts holds their number by request."""
    first = requests[0]
    steps = option.config.num_steps
    positions = np.zeros(len(requests), dtype=np.int64)
    wanted = output_tokens[requests] - 1  # beyond the first token
    going = np.arange(len(requests))  # with one token too, as a round may run before the host has read it
    drawn = []
    owners = []
    index = 0
    while len(going):
        ids = first + going
        places = positions[going]
        rounds = DraftedRounds(ids, np.full(len(ids), index), places, named_uniforms(keys[ids], places))
        accepted = np.minimum(option.acceptance.accepted(rounds), steps)
        drawn.append(accepted.astype(np.uint8))
        owners.append(going.astype(np.uint16))
        positions[going] = places + accepted + 1
        going = going[positions[going] < wanted[going]]
        index += 1
    owner = np.concatenate(owners)
    order = np.argsort(owner, kind="stable")
    return DrawnRounds(np.bincount(owner, minlength=len(requests)), np.concatenate(drawn)[order])
