"""Step times from a file: coefficients as they are, or fitted to what `make bench-engine … OUT=FILE` measured."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.sizing.step_fit import fitted
from shared.sizing.step_time import StepTimes, StepWork

LEAST_OF_A_KIND = 3
"""Steps with prompts' tokens, and steps that decode, that a file must hold."""

_PREFILL = re.compile(r"prefill (\d+)")
_DECODE = re.compile(r"decode (\d+) at (\d+)")
_MIXED = re.compile(r"(?:(\d+) decodes at (\d+))?(?: and a )?(?:chunk of (\d+)(?: behind (\d+))?)?")


def measured(path: Path, option: str = "table") -> StepTimes:
    """The fields of `StepTimes` under the key `step_times`; or fitted to the rows that are steps: `prefill N` and
    `decode B at C` in tokens/s, `B decodes at C and a chunk of N behind M` in ms.

    Raises ConfigError (`option`) where the file has fewer than LEAST_OF_A_KIND steps with chunks, or that decode, and
    for coefficients that are unknown, missing or negative.
    """
    document = _document(path, option)
    if "step_times" in document:
        return _coefficients(path, option, document["step_times"])
    steps = _steps(path, option, document)
    num_chunks = sum(work.num_chunks > 0 for work, _ in steps)
    num_decodes = sum(work.num_sequences > 0 for work, _ in steps)
    if min(num_chunks, num_decodes) < LEAST_OF_A_KIND:
        raise ConfigError(
            f"{path} holds {num_chunks} prefill and {num_decodes} decode steps, at least {LEAST_OF_A_KIND} of each are "
            "needed",
            field=option,
            limit=LEAST_OF_A_KIND,
        )
    return fitted([work for work, _ in steps], [seconds for _, seconds in steps])


def _document(path: Path, option: str) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise _unreadable(path, option, error) from error


def _coefficients(path: Path, option: str, values: object) -> StepTimes:
    try:
        times = StepTimes(**values)  # type: ignore[arg-type]  # whatever is wrong with it raises
        is_valid = all(0 <= value < math.inf for value in asdict(times).values())
    except TypeError as error:
        raise _unreadable(path, option, error) from error
    if not (is_valid and times.overlap <= 1 and times.num_stages >= 1):
        raise ConfigError(
            f"{path}: step_times must be finite and not negative, overlap at most 1, num_stages at least 1",
            field=option,
        )
    return times


def _unreadable(path: Path, option: str, error: Exception) -> ConfigError:
    return ConfigError(f"cannot read step times from {path}: {error}", field=option)


def _steps(path: Path, option: str, document: Mapping[str, Any]) -> list[tuple[StepWork, float]]:
    """The steps among a file's rows, with their seconds."""
    try:
        rows = [(str(row["name"]), float(row["value"]), row.get("unit")) for row in document["results"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(path, option, error) from error
    found = []
    for name, value, unit in rows:
        work = step_of(name)
        if work is not None and value > 0:
            found.append((work, value / 1e3 if unit == "ms" else work.num_tokens / value))
    return found


def step_of(name: str) -> StepWork | None:
    """The step that a benchmark's row is about; None where it is about something else."""
    if match := _PREFILL.fullmatch(name):
        return StepWork().with_chunk(int(match[1]), 0)
    if match := _DECODE.fullmatch(name):
        return StepWork(int(match[1]), int(match[1]) * int(match[2]))
    match = _MIXED.fullmatch(name)
    if not match or not name:
        return None
    batch, context, chunk, before = (int(group or 0) for group in match.groups())
    work = StepWork(batch, batch * context)
    return work.with_chunk(chunk, before) if chunk else work
