"""`python -m loadtest.bench router`: latency that a router process adds to a request, and its token throughput.

The latency added to a request is the sum of three paths through the router, each from the time one process has sent to
the time another has read: client → Reserve on the decode worker, Reserved → Submit on the prefill worker, first token →
client. Work of clients and workers on shared cores is part of these times, so on a machine with two cores they are an
upper bound; the router's own processor time is given as well.

The peer is `relay`, measured in turns with the router under the same load: it forwards the same messages and does
nothing else.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated, Any

from loadtest.bench.router.measured_router import PROMPT_TOKENS, ROUTER, Measured, MeasuredRouter
from loadtest.rig.command_line import Option, Out
from loadtest.rig.measure import percentile
from loadtest.rig.results import Report, Result, machine
from shared.errors import Internal

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


async def latency(num_workers: int, rate: float, duration_s: float, name: str) -> list[Result]:
    """Open loop: short answers at a given rate."""

    async def measure(module: str) -> tuple[list[float], float]:
        with tempfile.TemporaryDirectory() as scratch:
            async with MeasuredRouter(num_workers, 20_000.0, Path(scratch), router=module) as router:
                await router.load(1, rate=20, duration=2, max_tokens=4, prefix="warm")
                measured = await router.load(1, rate=rate, duration=duration_s, max_tokens=4)
                _refuse_failures(measured)
                added = added_ms(measured, await router.stamps())
        return [percentile(added, percent) for percent in (50, 99)], measured.cpu_ms_per_request

    (ours, our_cpu_ms), (relay, relay_cpu_ms) = await measure(ROUTER), await measure(RELAY)
    return [
        Result(f"{name}: latency added p50", ours[0], "ms", GOAL_P50_MS, **_peer(relay[0] / ours[0], relay[0])),
        Result(f"{name}: latency added p99", ours[1], "ms", GOAL_P99_MS, **_peer(relay[1] / ours[1], relay[1])),
        Result(
            f"{name}: router's processor time a request", our_cpu_ms, "ms",
            **_peer(relay_cpu_ms / our_cpu_ms, relay_cpu_ms),
        ),
    ]  # fmt: skip


async def fan_out(in_flight: int, tokens_per_s: float, duration_s: float, num_clients: int) -> list[Result]:
    """Closed loop: long answers whose tokens the workers send at a given pace."""

    async def measure(module: str) -> Measured:
        share = max(1, in_flight // num_clients)
        with tempfile.TemporaryDirectory() as scratch:
            async with MeasuredRouter(8, tokens_per_s, Path(scratch), in_flight, module) as router:
                measured = await router.load(num_clients, in_flight=share, duration=duration_s, max_tokens=512)
        _refuse_failures(measured)
        return measured

    ours, relay = await measure(ROUTER), await measure(RELAY)
    name = f"{in_flight} answers at once"
    return [
        Result(f"{name}: tokens passed on", ours.tokens_per_s, "tok/s", limit=tokens_per_s,
               fraction=ours.tokens_per_s / tokens_per_s),
        Result(f"{name}: tokens a message", ours.num_tokens / max(1, ours.num_messages), "tok"),
        Result(f"{name}: tokens a second of the router's core", ours.tokens_per_cpu_s, "tok/s",
               limit=GOAL_TOKENS_PER_S,
               **_peer(ours.tokens_per_cpu_s / relay.tokens_per_cpu_s, relay.tokens_per_cpu_s)),
    ]  # fmt: skip


def _peer(ratio: float, relay: float) -> dict[str, Any]:
    return {"peer": f"bare relay {relay:,.4g}", "ratio": ratio}


def _refuse_failures(measured: Measured) -> None:
    if measured.num_failed:
        raise Internal(f"{measured.num_failed} requests failed, such as: {measured.failure}")


async def measure_all(rate: float, duration: float, pace: float, clients: int, report: Report) -> None:
    """Latency over fleets of several sizes, then the fan-out of several batches."""
    report.add(await latency(8, rate, duration, f"8 workers, {rate:g} req/s"))
    for num_workers in WORKERS:
        slower = rate / 10
        report.add(await latency(num_workers, slower, duration, f"{num_workers} workers, {slower:g} req/s"))
    for in_flight in IN_FLIGHT:
        report.add(await fan_out(in_flight, pace, duration, clients))


def main(
    out: Out = None,
    rate: Annotated[float, Option(help="requests per second")] = 300.0,
    duration: Annotated[float, Option(help="seconds a load")] = 10.0,
    pace: Annotated[float, Option(help="tokens per second that the workers send")] = 20_000.0,
    clients: Annotated[int, Option(help="client processes of the fan-out")] = 2,
) -> None:
    """Measure the latency that a router process adds to a request, and its token throughput."""
    print(f"{machine()}; prompts of {PROMPT_TOKENS} tokens")
    report = Report(out)
    asyncio.run(measure_all(rate, duration, pace, clients, report))
    report.print()
