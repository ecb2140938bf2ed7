"""A long run: `python -m tests.fuzz --cases 100000`. Exit status 1 where anything was found.

With `--services` the cases go to a real prefill and a real decode worker instead: sessions and block messages.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.fuzz.campaign import Findings, fuzz_grpc, fuzz_http, fuzz_wire, ordinary_streams
from tests.fuzz.edge_process import EdgeProcess, Health, edge_process
from tests.fuzz.service_campaign import BLOCKS, SESSIONS, fuzz_calls, fuzz_sessions
from tests.fuzz.service_process import worker_process


def run(edge: EdgeProcess, num_cases: int, found: Findings) -> Health:
    """Half of the cases as HTTP bodies, a tenth on the wire, the rest over gRPC."""
    edge.health()  # from here on the lag counts
    with ordinary_streams(edge, found):
        fuzz_http(edge, num_cases // 2, found)
        fuzz_wire(edge, num_cases // 10, found)
        fuzz_grpc(edge, num_cases - num_cases // 2 - num_cases // 10, found)
        return edge.health()


def run_services(num_cases: int, found: Findings) -> None:
    """A quarter of the cases as sessions of each role, a quarter as block messages to each."""
    for role in SESSIONS:
        with worker_process(role) as worker:
            fuzz_sessions(worker, role, num_cases // 4, found)
            fuzz_calls(worker, BLOCKS, num_cases // 4, found)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the HTTP and gRPC APIs of a router's edge.")
    parser.add_argument("--cases", type=int, default=100_000, help="requests in all")
    parser.add_argument("--services", action="store_true", help="fuzz workers instead of the edge")
    arguments = parser.parse_args()
    num_cases: int = arguments.cases
    found = Findings()
    if arguments.services:
        run_services(num_cases, found)
        print(dict(sorted(found.outcomes.items())))
        return _report(found)
    begun = time.monotonic()
    with edge_process() as edge:
        before = edge.health()
        after = run(edge, num_cases, found)
    took_s = time.monotonic() - begun
    print(f"{sum(found.outcomes.values())} cases in {took_s:.0f} s: {dict(sorted(found.outcomes.items()))}")
    print(f"ordinary streams complete: {found.num_streams}")
    print(f"largest loop lag {after.loop_lag_ms:.0f} ms, computing {after.loop_busy_ms:.0f} ms in one turn")
    print(f"memory {before.rss_mb:.0f} -> {after.rss_mb:.0f} MB")
    return _report(found)


def _report(found: Findings) -> int:
    for failure in found.failures[:20]:
        print("FAILURE", failure)
    print(f"{len(found.failures)} failures")
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
