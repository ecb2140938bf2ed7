"""A long run: `make fuzz CASES=100000 OUT=file`. Exit status 1 where anything was found."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from loadtest.rig.command_line import Option, run
from loadtest.rig.results import write_json
from tests.fuzz.campaign import Findings
from tests.fuzz.cluster_target import fuzz_cluster

SHARES: Mapping[str, float] = {
    "http": 0.49, "wire": 0.1, "schema": 0.02, "grpc": 0.31, "services": 0.06, "adapters": 0.02,
}  # fmt: skip
"""Of the cases. A case of Schemathesis, of adapters, or a session that stays open takes a hundred times as long
as the others."""
MOST_BUSY_MS = 50.0
"""Of a loop's own computing at a time, in any process of a cluster."""


def shares(num_cases: int) -> dict[str, int]:
    """Cases of each kind."""
    return {name: int(share * num_cases) for name, share in SHARES.items()}


def main(
    cases: Annotated[int, Option("requests in all")] = 100_000,
    out: Annotated[Path | None, Option("a JSON file with what came back")] = None,
    folder: Annotated[Path, Option("where a cluster's logs go")] = Path(".tandem/fuzz"),
) -> int:
    """Fuzz a cluster's routers, and its workers' sessions and block messages."""
    counts, found, begun = shares(cases), Findings(), time.monotonic()
    measured = _cluster(counts, found, folder)
    took_s = time.monotonic() - begun
    outcomes = dict(sorted(found.outcomes.items()))
    print(f"ordinary streams complete: {found.num_streams}")
    print(f"{sum(outcomes.values())} cases in {took_s:.0f} s: {outcomes}")
    for failure in found.failures[:20]:
        print("FAILURE", failure)
    print(f"{len(found.failures)} failures")
    if out is not None:
        said = {"cases": sum(outcomes.values()), "took_s": round(took_s), "ordinary_streams": found.num_streams}
        said |= {**measured, "outcomes": outcomes, "failures": found.failures}
        write_json(out, said)
    return 1 if found.failures else 0


def _cluster(counts: Mapping[str, int], found: Findings, folder: Path) -> dict[str, object]:
    lags = asyncio.run(fuzz_cluster(counts, found, folder))
    print(f"largest loop lag by the clock, ms: {_rounded(lags.clock_ms)}")
    print(f"of the loops' own computing, ms: {_rounded(lags.computing_ms)}")
    for name, largest_ms in lags.computing_ms.items():
        if largest_ms > MOST_BUSY_MS:
            found.failed(name, f"its event loop computed for {largest_ms:.0f} ms between two looks")
    return {"loop_lag_ms": _rounded(lags.clock_ms), "loop_computing_ms": _rounded(lags.computing_ms)}


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in sorted(values.items())}


if __name__ == "__main__":
    run(main, name="python -m tests.fuzz")
