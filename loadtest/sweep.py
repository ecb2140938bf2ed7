"""Runs one workload at several rates and finds the highest that meets the targets."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from loadtest.config import MAX_SEED, LoadConfig
from loadtest.rate_search import Point, SearchSpace, highest_at, knee, next_rate
from loadtest.run import RunResult
from loadtest.summary import FORMAT_VERSION, invalid_reasons, summarize
from shared.errors import ConfigError, WorkerLost

_SHOWN = (
    "mean_ttft_ms",
    "p50_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p50_tpot_ms",
    "p99_tpot_ms",
    "p99_itl_ms",
    "output_throughput",
    "completed",
    "failed",
    "cached_share",
    "seed",
)
"""Figures of a run that are copied into the sweep's file for each point."""

RunPoint = Callable[[LoadConfig, str], Awaitable[RunResult]]
"""Runs a config and writes its folder of the given name."""


@dataclass(slots=True)
class Sweep:
    """A sweep's points so far."""

    config: LoadConfig
    space: SearchSpace
    points: list[Point] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    date: str = ""
    model: str = ""
    stopped: str = ""

    def add(self, rate: float, folder: str, result: RunResult) -> Point:
        """Adds the results at one rate."""
        summary = summarize(result)
        self.date = self.date or result.started_at
        self.model = result.target.model
        point = point_of(rate, summary)
        self.points.append(point)
        lag = summary["schedule_lag_ms"]
        self.rows.append(
            {
                **asdict(point),
                "folder": folder,
                **{name: summary[name] for name in _SHOWN},
                "lag_p99_ms": None if lag is None else lag["p99"],
                "invalid_reasons": summary["invalid_reasons"],
            }
        )
        return point

    def as_json(self) -> dict[str, Any]:
        """The content of `sweep.json`."""
        slo = self.config.slo
        assert slo is not None
        wanted = self.space.attainment
        best, strict, bend = highest_at(self.points, wanted), highest_at(self.points, 0.99), knee(self.points)
        return {
            "format_version": FORMAT_VERSION,
            "date": self.date,
            "label": self.config.label,
            "target": self.config.target,
            "model_id": self.model,
            "workload": self.config.workload,
            "seed": self.config.seed,
            "slo_ms": slo.as_ms(),
            "wanted_attainment": wanted,
            "max_goodput": None if best is None else asdict(best),
            "max_goodput_at_99": None if strict is None else asdict(strict),
            "knee": None if bend is None else asdict(bend),
            "limit_found": _limit_found(self.space, self.points),
            "partial": bool(self.stopped),
            "partial_reason": self.stopped,
            "points": sorted(self.rows, key=lambda row: row["rate"]),
            "config": self.config.as_json(),
        }


def point_of(rate: float, summary: Mapping[str, Any]) -> Point:
    """The results at a rate, from the summary of a run with targets."""
    return Point(
        rate=rate,
        offered_rate=summary["offered_rate"],
        goodput=summary["goodput"],
        attainment=summary["attainment"],
        valid=not summary["invalid"],
    )


async def run_sweep(
    config: LoadConfig,
    space: SearchSpace,
    rates: Sequence[float],
    run_point: RunPoint,
    on_point: Callable[[Sweep, Point], None],
) -> Sweep:
    """Measures the given rates, or searches if there are none.

    Ends early if a run was stopped or the target was gone; such a rate gives no point. Raises ConfigError if there is
    nothing to search for, and errors of the first run.
    """
    if config.slo is None:
        raise ConfigError("a sweep needs targets: slo=ttft=200ms,tpot=30ms", field="slo")
    if config.traffic.concurrency is not None:
        raise ConfigError("a sweep varies the rate: it has no concurrency", field="concurrency")
    sweep = Sweep(config, space)
    planned = list(rates)
    while not sweep.stopped:
        rate = (planned.pop(0) if planned else None) if rates else next_rate(space, sweep.points)
        if rate is None:
            break
        point = await measure_rate(sweep, rate, run_point)
        if point is not None:
            on_point(sweep, point)
    return sweep


async def measure_rate(sweep: Sweep, rate: float, run_point: RunPoint) -> Point | None:
    """Runs one rate and adds it to the sweep; None if the run did not finish, with the reason in `sweep.stopped`.

    A rate at which the generator could not keep up is run once more. Raises errors of a sweep's first run.
    """
    folder = f"rate-{rate:g}"
    try:
        result = await run_point(config_at(sweep.config, rate), folder)
        if invalid_reasons(result) and not result.stopped:
            # Usually another process took the generator's core for a moment; twice in a row it is the generator.
            folder += "-again"
            result = await run_point(config_at(sweep.config, rate, attempt=2), folder)
    except WorkerLost as error:
        if not sweep.points:
            raise
        sweep.stopped = error.message
        return None
    if result.stopped:
        sweep.stopped = f"{result.stopped}, at {rate:g} req/s"
        return None
    return sweep.add(rate, folder, result)


def config_at(config: LoadConfig, rate: float, attempt: int = 1) -> LoadConfig:
    """One point's config. Its seed depends on the sweep's seed and the rate: no point finds its prompts cached by
    another, and two systems swept with the same seed get the same requests at the same rate."""
    digest = hashlib.blake2b(f"{config.seed}/{rate:.6g}/{attempt}".encode(), digest_size=4).digest()
    label = f"{config.label or config.workload} at {rate:g} req/s"
    return replace(
        config, traffic=config.traffic.with_rate(rate), seed=int.from_bytes(digest, "little") & MAX_SEED, label=label
    )


def _limit_found(space: SearchSpace, points: Sequence[Point]) -> bool:
    """Whether a rate above the result missed the targets."""
    return any(point.attainment < space.attainment for point in points)
