"""Probabilities of acceptance by depth and rank among siblings, as plans and sweeps take them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from specsim.core.errors import InputError, require
from specsim.simulator.bounds import probability

Shares = tuple[tuple[float, ...], ...]


def checked_shares(rows: Any) -> Shares:
    """Check a row for each depth, with a probability for each rank."""
    try:
        shares = tuple(tuple(probability("shares", share) for share in row) for row in rows)
    except TypeError as error:
        raise InputError("shares", rows, "rows of numbers") from error
    require(shares and all(shares), "shares", rows, "a row for each depth, at least one, with a number for each rank")
    return shares


def chain_shares(rates: Sequence[float]) -> Shares:
    """Make the shares of a chain from unconditional rates by position, for best drafts only."""
    for before, rate in pairwise((1.0, *rates)):
        if not 0 <= rate <= before:
            raise InputError("accept_rates", tuple(rates), "numbers from 0 to 1, none larger than the one before")
    return tuple((rate / before if before else 0.0,) for before, rate in pairwise((1.0, *rates)))
