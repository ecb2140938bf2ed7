"""The duration of an engine step: six coefficients, from a roofline or from measurements.

decode step  = fixed + batch · sequence + (KV tokens of the batch) · kv
chunk        = fixed + n · token + n · (tokens before it + n / 2) · attention, and no less than a decode step's fixed
mixed step   = decode step + the chunk without its fixed part
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loadtest.simulator.shapes import GpuShape, ModelShape
from shared.errors import ConfigError

_Row = tuple[float, float, float, float]  # seconds and the three features

STEP_OVERHEAD_S = 0.5e-3
"""Scheduling, input preparation and sampling of one step."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The coefficients, in seconds."""

    chunk_fixed_s: float
    token_s: float
    attention_s: float
    decode_fixed_s: float
    sequence_s: float
    kv_s: float

    def chunk_s(self, num_tokens: int, num_before: int) -> float:
        """Time of a prompt's next `num_tokens` after `num_before`, without the step's fixed part."""
        return num_tokens * (self.token_s + self.attention_s * (num_before + num_tokens / 2))

    def prefill_step_s(self, chunks_s: float) -> float:
        """Time of a step of chunks only, which take `chunks_s` together."""
        return max(self.chunk_fixed_s + chunks_s, self.decode_fixed_s)

    def decode_step_s(self, batch: int, num_kv_tokens: int) -> float:
        """Time of one token for each of `batch` sequences."""
        return self.decode_fixed_s + batch * self.sequence_s + num_kv_tokens * self.kv_s


def roofline(model: ModelShape, gpu: GpuShape, num_gpus: int) -> StepTimes:
    """Step times of a tensor-parallel group: compute-bound chunks, decode steps that read weights and KV once."""
    flops = gpu.flops * gpu.flops_efficiency * num_gpus
    bandwidth = gpu.bandwidth * gpu.bandwidth_efficiency * num_gpus
    return StepTimes(
        chunk_fixed_s=STEP_OVERHEAD_S,
        token_s=2 * model.num_params / flops,
        attention_s=model.attention_flops / flops,
        decode_fixed_s=STEP_OVERHEAD_S + model.weight_bytes / bandwidth,
        sequence_s=2 * model.num_params / flops,
        kv_s=model.kv_bytes_per_token / bandwidth,
    )


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
