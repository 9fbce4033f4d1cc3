"""The drafter of a pair, as the record of its kind names it."""

from specsim.core.config import SpecConfig
from specsim.core.drafter import Drafter, Placement
from specsim.core.pair import AnyDrafter, check_drafter, record_of
from specsim.core.target import Target
from specsim.core.verifiers import resolve
from specsim.reference.drafters.none import NoDrafter


def make_drafter(drafter: AnyDrafter | None, target: Target, config: SpecConfig, on: Placement) -> Drafter:
    """Make the drafter of a reference engine.

    Raises InputError for a setting with drafts and a pair without a drafter, or one that cannot draw them.
    """
    if config.is_plain:
        return NoDrafter()
    drafter = check_drafter(drafter, config)
    return resolve(record_of(drafter).reference)(drafter, target, config, on)
