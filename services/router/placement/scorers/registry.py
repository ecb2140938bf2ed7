"""All scorers, in the order in which explanations show them. A new one is a file and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from services.router.placement.scorers import decode_load, prefill_load, prefix, session, topology
from services.router.placement.scorers.scorer import Scorer

SCORERS: tuple[Scorer, ...] = (
    decode_load.SCORER,
    prefix.DECODE_SCORER,
    session.DECODE_SCORER,
    prefill_load.SCORER,
    prefix.SCORER,
    topology.SCORER,
    session.SCORER,
)


def weights(**changes: float) -> Mapping[str, float]:
    """Weight by setting: the defaults with these changes. Raises KeyError for an unknown name."""
    found = {scorer.setting: scorer.default_weight for scorer in SCORERS}
    for name, weight in changes.items():
        if name not in found:
            raise KeyError(name)
        found[name] = weight
    return found
