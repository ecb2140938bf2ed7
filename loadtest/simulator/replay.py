"""`python -m loadtest.simulator.replay --run FOLDER …`: a load test of real workers beside the same requests simulated.

FOLDER is what `python -m loadtest run --out FOLDER` wrote for a cluster of `tandem serve --device timed:FILE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np

from loadtest.metrics import is_good, request_metrics
from loadtest.rig.command_line import Option, Out, choice
from loadtest.rig.command_line import run as run_command
from loadtest.rig.markdown import table
from loadtest.rig.results import Result, write
from loadtest.run_folder import REQUESTS, read_requests
from loadtest.simulator.fleet import WorkerSpec
from loadtest.simulator.outcome import Targets
from loadtest.simulator.simulation import AUTO, COLLOCATED, STATIC, Group, Setup, play, two_pools
from loadtest.simulator.tandem_router import TandemConfig
from loadtest.slo import Slo
from loadtest.workloads.trace import TraceRequest
from services.router.placement.settings import PlacementSettings
from shared.errors import ConfigError
from shared.sizing.measured_steps import measured

QUANTILES = (0.1, 0.5, 0.9, 0.95)
MAX_QUEUED_TOKENS = 2048
"""The router's default."""
_LINK, _KV_BYTES = 1e9, 2048
"""Bytes/s, and bytes of a token, of small models on one machine: a hand-off takes no time that counts."""
_NEVER_S = 1e9


class Times(NamedTuple):
    """Times of the requests with a complete answer, in their order. Seconds."""

    ttft_s: Sequence[float]
    tpot_s: Sequence[float]
    """TPOT of the requests with several tokens."""


class Recorded(NamedTuple):
    """A load test."""

    requests: list[TraceRequest]
    """All that were sent, in their order."""
    times: Times
    num_in_time: int
    """Requests whose answers were complete within the targets."""


def replay(
    run: Annotated[Path, Option(help="folder that `python -m loadtest run` wrote")],
    steps: Annotated[Path, Option(help="FILE of the workers' timed:FILE")],
    policy: Annotated[str, Option(help=f"{STATIC}, {COLLOCATED} or {AUTO}")] = STATIC,
    prefill: Annotated[int, Option(help="workers")] = 1,
    decode: Annotated[int, Option(help="workers")] = 1,
    chunk: Annotated[int, Option(help="the workers' max_num_batched_tokens")] = 512,
    blocks: Annotated[int, Option(help="of a worker")] = 2000,
    ttft: Annotated[float, Option(help="the router's target, seconds; 0 = none")] = 0.0,
    tpot: Annotated[float, Option(help="likewise")] = 0.0,
    out: Out = None,
) -> None:
    """Simulate the requests of a load test, and compare the quantiles of their times, and with targets the share that
    was in time."""
    choice(policy, "policy", (STATIC, COLLOCATED, AUTO))
    targets = Targets(ttft or _NEVER_S, tpot or _NEVER_S)
    slo = Slo(ttft or None, tpot or None) if ttft or tpot else None
    requests, real, num_in_time = recorded(run, slo)
    worker = WorkerSpec(
        measured(steps, "steps"),
        blocks,
        _LINK,
        _KV_BYTES,
        max_num_seqs=64,
        max_num_batched_tokens=chunk,
        tpot_target_s=tpot,
    )
    if policy == AUTO:
        groups = [Group(prefill + decode, worker)]
    else:
        groups = two_pools(prefill if policy == STATIC else 0, decode, worker)
    config = TandemConfig(
        ttft_target_s=ttft or float("inf"), placement=PlacementSettings().config(MAX_QUEUED_TOKENS, ttft, tpot)
    )
    played = play(requests, 1.0, policy, Setup(groups, targets, tandem=config))
    served = [request for request in played if not request.refused]
    simulated = Times(
        [request.ttft_s for request in served],
        [request.tpot_s for request in served if request.num_output_tokens > 1],
    )
    results = compared(real, simulated)
    if slo is not None:
        share, real_share = sum(map(targets.met_by, played)) / len(played), num_in_time / len(requests)
        ratio = share / real_share if real_share else None
        results.append(Result("in time", 100 * share, "%", limit=100 * real_share, ratio=ratio))
    print(f"{len(requests)} requests, {len(real.ttft_s)} answered, {len(served)} in the simulation\n")
    cells = [
        [one.name, *(f"{value:.4g} {one.unit}" for value in (one.limit, one.value)), f"{one.ratio or 0:.3f}"]
        for one in results
    ]
    print(table(("", "real", "simulated", "simulated / real"), cells))
    if out is not None:
        write(out, results)


def recorded(folder: Path, slo: Slo | None = None) -> Recorded:
    """Reads what `python -m loadtest run` wrote; raises ConfigError."""
    sent = [(record.reply.sent_s, record) for record in read_requests(folder / REQUESTS)]
    in_order = sorted(((at_s, record) for at_s, record in sent if at_s is not None), key=lambda pair: pair[0])
    requests = [TraceRequest(at_s, record.num_prompt_tokens, record.max_tokens) for at_s, record in in_order]
    answers = [found for _, record in in_order if (found := request_metrics(record)) is not None]
    times = Times(
        [answer.ttft_s for answer in answers], [answer.tpot_s for answer in answers if answer.tpot_s is not None]
    )
    if not times.tpot_s:
        raise ConfigError(f"{folder} has no answers of several tokens", field="run")
    num_in_time = len(answers) if slo is None else sum(is_good(record, slo) for _, record in in_order)
    return Recorded(requests, times, num_in_time)


def compared(real: Times, simulated: Times) -> list[Result]:
    """Each quantile: the simulated value, the real one as its limit, and their ratio."""
    found = []
    for name, one, other in (("TTFT", real.ttft_s, simulated.ttft_s), ("TPOT", real.tpot_s, simulated.tpot_s)):
        for share in QUANTILES:
            expected, value = float(np.quantile(one, share)), float(np.quantile(other, share))
            found.append(
                Result(f"{name} p{share * 100:.0f}", value * 1e3, "ms", limit=expected * 1e3, ratio=value / expected)
            )
    return found


if __name__ == "__main__":
    run_command(replay, name="python -m loadtest.simulator.replay")
