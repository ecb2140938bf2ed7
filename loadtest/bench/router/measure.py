"""`make bench-router`: what a router process adds to a request, and how many tokens it can pass on.

The latency added to a request is the sum of the three ways through the router, each from the moment one process sent
to the moment another has read: client → Reserve on the decode worker, Reserved → Submit on the prefill worker, first
token → client. What a client or worker does meanwhile on a core that they share is in these times, so that on a machine
of two cores they are an upper bound; the router's own processor time is told beside them.

The peer is `relay`, in turn with the router under the same load: it passes on the same messages and does nothing else.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import quantiles
from typing import Any

from loadtest.bench.router.rig import PROMPT_TOKENS, ROUTER, Measured, Rig
from loadtest.figures import Result, machine, table, write

GOAL_P50_MS, GOAL_P99_MS, GOAL_TOKENS_PER_S = 1.0, 5.0, 20_000.0
RELAY = "loadtest.bench.router.relay"
WORKERS = (8, 64, 512)
IN_FLIGHT = (16, 128, 1024)


def added_ms(measured: Measured, stamps: dict[str, list[float]]) -> list[float]:
    """The latency that the router added to each answered request, milliseconds."""
    added = []
    for request_id, (sent, first) in measured.requests.items():
        reserve_came, reserved_went, submit_came, first_went = stamps[request_id]
        added.append(1e3 * (reserve_came - sent + submit_came - reserved_went + first - first_went))
    return added


def latency(num_workers: int, rate: float, duration_s: float, name: str) -> list[Result]:
    """Open loop: short answers at a rate."""

    def measure(router: str) -> tuple[list[float], float]:
        with tempfile.TemporaryDirectory() as scratch, Rig(num_workers, 20_000.0, Path(scratch), router=router) as rig:
            rig.load(1, "--rate", "20", "--duration", "2", "--max-tokens", "4", "--prefix", "warm")
            measured = rig.load(1, "--rate", str(rate), "--duration", str(duration_s), "--max-tokens", "4")
            _refuse_failures(measured)
            percent = quantiles(added_ms(measured, rig.stamps()), n=100, method="inclusive")
            return percent, measured.cpu_ms_per_request

    (ours, our_cpu_ms), (relay, relay_cpu_ms) = measure(ROUTER), measure(RELAY)
    return [
        Result(f"{name}: latency added p50", ours[49], "ms", GOAL_P50_MS, **_beside(relay[49] / ours[49], relay[49])),
        Result(f"{name}: latency added p99", ours[98], "ms", GOAL_P99_MS, **_beside(relay[98] / ours[98], relay[98])),
        Result(
            f"{name}: router's processor time a request", our_cpu_ms, "ms",
            **_beside(relay_cpu_ms / our_cpu_ms, relay_cpu_ms),
        ),
    ]  # fmt: skip


def fan_out(in_flight: int, tokens_per_s: float, duration_s: float, num_clients: int) -> list[Result]:
    """Closed loop: long answers whose tokens the workers send at a pace."""

    def measure(router: str) -> Measured:
        share = str(max(1, in_flight // num_clients))
        loop = ["--in-flight", share, "--duration", str(duration_s), "--max-tokens", "512"]
        with tempfile.TemporaryDirectory() as scratch, Rig(8, tokens_per_s, Path(scratch), in_flight, router) as rig:
            measured = rig.load(num_clients, *loop)
        _refuse_failures(measured)
        return measured

    ours, relay = measure(ROUTER), measure(RELAY)
    name = f"{in_flight} answers at once"
    return [
        Result(f"{name}: tokens passed on", ours.tokens_per_s, "tok/s", limit=tokens_per_s,
               fraction=ours.tokens_per_s / tokens_per_s),
        Result(f"{name}: tokens a message", ours.num_tokens / max(1, ours.num_messages), "tok"),
        Result(f"{name}: tokens a second of the router's core", ours.tokens_per_cpu_s, "tok/s",
               limit=GOAL_TOKENS_PER_S,
               **_beside(ours.tokens_per_cpu_s / relay.tokens_per_cpu_s, relay.tokens_per_cpu_s)),
    ]  # fmt: skip


def _beside(ratio: float, relay: float) -> dict[str, Any]:
    return {"peer": f"bare relay {relay:,.4g}", "ratio": ratio}


def _refuse_failures(measured: Measured) -> None:
    if measured.num_failed:
        raise SystemExit(f"{measured.num_failed} requests failed, such as: {measured.failure}")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--rate", type=float, default=300.0, help="requests per second")
    parser.add_argument("--duration", type=float, default=10.0, help="seconds a load")
    parser.add_argument("--pace", type=float, default=20_000.0, help="tokens per second that the workers send")
    parser.add_argument("--clients", type=int, default=2, help="client processes of the fan-out")
    options = parser.parse_args()
    print(f"{machine()}; prompts of {PROMPT_TOKENS} tokens")
    results = latency(8, options.rate, options.duration, f"8 workers, {options.rate:g} req/s")
    for num_workers in WORKERS:
        rate = options.rate / 10
        results += latency(num_workers, rate, options.duration, f"{num_workers} workers, {rate:g} req/s")
    for in_flight in IN_FLIGHT:
        results += fan_out(in_flight, options.pace, options.duration, options.clients)
    print(table(results))
    if options.out:
        write(options.out, results)


if __name__ == "__main__":
    main()
