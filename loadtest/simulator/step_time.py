"""Step times from measurements: the coefficients of `shared/sizing/step_time.py`, fitted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from shared.errors import ConfigError
from shared.sizing.step_time import StepTimes

_Row = tuple[float, float, float, float]  # seconds and the three features


def measured(path: Path) -> StepTimes:
    """Fitted to the output of `make bench-engine … --out FILE` (`prefill N`, `decode B at C`, tokens/s).

    Raises ConfigError (`table`) if the file has fewer than three steps of either kind.
    """
    try:
        rows = json.loads(path.read_text())["results"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read step times from {path}: {error}", field="table") from error
    chunks: list[_Row] = []
    decodes: list[_Row] = []
    for row in rows:
        if match := re.fullmatch(r"prefill (\d+)", row["name"]):
            n = int(match[1])
            chunks.append((n / row["value"], 1.0, n, n * n / 2))
        elif match := re.fullmatch(r"decode (\d+) at (\d+)", row["name"]):
            batch, context = int(match[1]), int(match[2])
            decodes.append((batch / row["value"], 1.0, batch, batch * context))
    if min(len(chunks), len(decodes)) < 3:
        raise ConfigError(
            f"{path} holds {len(chunks)} prefill and {len(decodes)} decode steps, at least 3 of each are needed",
            field="table",
            limit=3,
        )
    return StepTimes(*_fit(chunks), *_fit(decodes))


def _fit(rows: list[_Row]) -> tuple[float, float, float]:
    """Least squares of relative errors, coefficients ≥ 0: drops the most negative one until none is negative."""
    table = np.array(rows)
    seconds, features = table[:, 0], table[:, 1:]
    kept = [0, 1, 2]
    while True:
        solved, *_ = np.linalg.lstsq(features[:, kept] / seconds[:, None], np.ones(len(rows)), rcond=None)
        if solved.min() >= 0:
            break
        kept.pop(int(solved.argmin()))
    result = [0.0, 0.0, 0.0]
    for i, value in zip(kept, solved, strict=True):
        result[i] = float(value)
    return result[0], result[1], result[2]
