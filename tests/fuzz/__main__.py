"""A long run: `make fuzz CASES=100000 OUT=file`. Exit status 1 where anything was found."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from tests.fuzz.campaign import Findings, fuzz_grpc, fuzz_http, fuzz_wire, ordinary_streams
from tests.fuzz.edge_process import EdgeProcess, Health, edge_process
from tests.fuzz.service_campaign import BLOCKS, SESSIONS, fuzz_calls, fuzz_sessions
from tests.fuzz.service_process import worker_process

SHARES: Mapping[str, float] = {"http": 0.5, "wire": 0.1, "schema": 0.02, "grpc": 0.32, "services": 0.06}
"""Of the cases. A case of Schemathesis, or a session that stays open, takes a hundred times as long as the others."""


def run(edge: EdgeProcess, counts: Mapping[str, int], found: Findings) -> Health:
    """So many cases of each kind against the edge while two ordinary streams go on."""
    edge.health()  # from here on the lag counts
    with ordinary_streams(edge, found):
        fuzz_http(edge, counts["http"], found)
        fuzz_wire(edge, counts["wire"], found)
        if counts.get("schema"):
            from tests.fuzz.schema_campaign import fuzz_schema  # it takes a second to import

            fuzz_schema(edge, counts["schema"], found)
        fuzz_grpc(edge, counts["grpc"], found)
        return edge.health()


def run_services(num_cases: int, found: Findings) -> None:
    """A quarter of the cases as sessions of each role, a quarter as block messages to each."""
    for role in SESSIONS:
        with worker_process(role) as worker:
            fuzz_sessions(worker, role, num_cases // 4, found)
            fuzz_calls(worker, BLOCKS, num_cases // 4, found)


def shares(num_cases: int) -> dict[str, int]:
    """Cases of each kind."""
    return {name: int(share * num_cases) for name, share in SHARES.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz a router's edge, the workers' sessions and block messages.")
    parser.add_argument("--cases", type=int, default=100_000, help="requests in all")
    parser.add_argument("--out", type=Path, help="a JSON file with what came back")
    arguments = parser.parse_args()
    counts, found, begun = shares(arguments.cases), Findings(), time.monotonic()
    with edge_process() as edge:
        before = edge.health()
        after = run(edge, counts, found)
    print(f"ordinary streams complete: {found.num_streams}")
    print(f"largest loop lag {after.loop_lag_ms:.0f} ms, computing {after.loop_busy_ms:.0f} ms in one turn")
    print(f"memory {before.rss_mb:.0f} -> {after.rss_mb:.0f} MB", flush=True)
    run_services(counts["services"], found)
    took_s = time.monotonic() - begun
    outcomes = dict(sorted(found.outcomes.items()))
    print(f"{sum(outcomes.values())} cases in {took_s:.0f} s: {outcomes}")
    for failure in found.failures[:20]:
        print("FAILURE", failure)
    print(f"{len(found.failures)} failures")
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        said = {"cases": sum(outcomes.values()), "took_s": round(took_s), "ordinary_streams": found.num_streams}
        said |= {"edge_before": asdict(before), "edge_after": asdict(after)}
        said |= {"outcomes": outcomes, "failures": found.failures}
        arguments.out.write_text(json.dumps(said, indent=1) + "\n")
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
