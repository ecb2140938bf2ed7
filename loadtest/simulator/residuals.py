"""How far steps are from their predicted times: factors that a simulated engine draws from."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist

from shared.errors import ConfigError

_NUM_QUANTILES = 101


def lognormal_residuals(sigma: float) -> Sequence[float]:
    """Evenly spaced quantiles of a log-normal distribution of mean 1; none for sigma 0. Raises ConfigError."""
    if not 0 <= sigma <= 1:
        raise ConfigError(f"noise must be from 0 to 1, got {sigma:g}", field="noise", limit=1)
    if sigma == 0:
        return ()
    normal = NormalDist(-sigma * sigma / 2, sigma)
    return tuple(math.exp(normal.inv_cdf((number + 0.5) / _NUM_QUANTILES)) for number in range(_NUM_QUANTILES))


def read_residuals(path: Path) -> Sequence[float]:
    """A JSON list of measured step times over predicted ones; raises ConfigError."""
    try:
        found = tuple(float(value) for value in json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"cannot read residuals from {path}: {error}", field="residuals") from error
    if not found or not all(0 < value < math.inf for value in found):
        raise ConfigError(f"{path} must hold numbers above 0", field="residuals")
    return found
