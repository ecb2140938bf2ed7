"""Step times of this machine: the coefficients fitted to a file of `make bench-engine … OUT=FILE`."""

from __future__ import annotations

import json
import re
from pathlib import Path

from shared.errors import ConfigError
from shared.sizing.step_fit import fitted
from shared.sizing.step_time import StepTimes, StepWork

LEAST_OF_A_KIND = 3
"""Steps with prompts' tokens, and steps that decode, that a file must hold."""

_PREFILL = re.compile(r"prefill (\d+)")
_DECODE = re.compile(r"decode (\d+) at (\d+)")
_MIXED = re.compile(r"(?:(\d+) decodes at (\d+))?(?: and a )?(?:chunk of (\d+)(?: behind (\d+))?)?")


def measured(path: Path, option: str = "table") -> StepTimes:
    """Fitted to the rows that are steps: `prefill N` and `decode B at C` in tokens/s, `B decodes at C and a chunk of N
    behind M` in ms.

    Raises ConfigError (`option`) where the file has fewer than LEAST_OF_A_KIND steps with chunks, or that decode.
    """
    steps = _read(path, option)
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


def _read(path: Path, option: str) -> list[tuple[StepWork, float]]:
    """The steps among a file's rows, with their seconds."""
    try:
        rows = [
            (str(row["name"]), float(row["value"]), row.get("unit")) for row in json.loads(path.read_text())["results"]
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"cannot read step times from {path}: {error}", field=option) from error
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
