"""The loads at which one pool and two change places, and the tokens at which own GPUs pay."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shared.errors import ConfigError
from shared.sizing.fit import Fit, fit

HOURS_OF_A_MONTH = 730.0
STEP = math.sqrt(2)
"""Factor from one load that is tried to the next."""
MOST_STEPS = 12
"""Loads that are tried in each direction: up to 64 times the given one, and down to a 64th."""
MOST_GPUS = 256
"""A load that takes more, in two pools, is not tried: sizing it takes long, and nothing changes there any more."""
HALVINGS = 4
"""How often the step in which the answer changes is halved."""


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The nearest loads, with as many more or fewer sequences at once, at which the other number of pools is better:
    cheaper, or without prices on fewer GPUs. Requests/s; None where that is not so within 64 times."""

    one_pool: bool
    """Whether one pool is better at the load itself."""
    below: float | None
    above: float | None


def break_even(found: Fit) -> BreakEven:
    """Tries loads around that of the fit, of at most MOST_GPUS."""
    return BreakEven(found.takes_one_pool, _nearest_other(found, 1 / STEP), _nearest_other(found, STEP))


def _nearest_other(found: Fit, step: float) -> float | None:
    """Requests/s, by steps of this factor and then by halving the last one."""
    same, factor = 1.0, step
    for _ in range(MOST_STEPS):
        other = _at(found, factor)
        if other is None:
            return None
        if other.takes_one_pool != found.takes_one_pool:
            break
        same, factor = factor, factor * step
    else:
        return None
    for _ in range(HALVINGS):
        middle = math.sqrt(same * factor)
        between = _at(found, middle)
        if between is not None and between.takes_one_pool != found.takes_one_pool:
            factor = middle
        else:
            same = middle
    return found.load.rate * factor


def _at(found: Fit, factor: float) -> Fit | None:
    """The same with `factor` times the sequences and requests; None where it is not tried, or cannot be served."""
    load = found.load
    sequences = round(load.concurrency * factor)
    if sequences < 1 or found.gpus * factor > MOST_GPUS:
        return None
    try:
        return fit(found.model, replace(load, concurrency=sequences, rate=load.rate * factor), found.hardware)
    except ConfigError:
        return None


def paying_tokens(per_hour: float, token_price: float) -> float:
    """Tokens a month from which GPUs of that price cost less than tokens at `token_price` for a million."""
    return per_hour * HOURS_OF_A_MONTH / token_price * 1e6
