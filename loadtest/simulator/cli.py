"""The command line of the simulator."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from loadtest.rig.command_line import Option, Out, call, choice, decimals
from loadtest.rig.results import write
from loadtest.simulator.fleet import WorkerSpec
from loadtest.simulator.outcome import Outcome, Targets, outcome_table, results
from loadtest.simulator.simulation import POLICIES, Setup, simulate
from loadtest.simulator.tandem_router import TandemConfig
from loadtest.workloads.mooncake import BLOCK_LEN, read_mooncake
from loadtest.workloads.trace import TraceRequest, parse_slice, slice_requests
from services.router.admission.queue import ORDERS
from services.router.placement.decision import Thresholds
from services.router.placement.policy import PlacementConfig
from services.router.placement.scorers import weights
from shared.errors import ConfigError
from shared.sizing import memory
from shared.sizing.devices import H200
from shared.sizing.load import Hardware
from shared.sizing.measured_steps import measured
from shared.sizing.roofline import roofline, step_times
from shared.sizing.shapes import LLAMA_3_8B, LLAMA_3_70B, SPARSE_MODELS
from shared.sizing.spread import Spread

MODELS = {"llama-3-70b": LLAMA_3_70B, "llama-3-8b": LLAMA_3_8B, **SPARSE_MODELS}
BLOCK_SIZE = 16
MEMORY_SHARE = 0.9
"""Share of a GPU's memory for weights and KV."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """A simulated worker."""

    model: str = "llama-3-70b"
    gpus: int = 4
    """Number of H200s, taken as one GPU with their speed in sum."""
    table: Path | None = None
    """Step times measured by bench-engine; None = the roofline."""
    blocks: int = 0
    """Number of blocks of BLOCK_SIZE tokens; 0 = as many as fit in memory."""
    report_ms: float = 5.0
    """Minimum time between two load reports."""
    spread: Spread | None = None
    """Its ranks, an H200 each, with what they send each other and wait for; None = `gpus`."""
    decode_spread: Spread | None = None
    """Of decode workers; None = `spread`."""


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """A fleet, its routers and their targets."""

    prefill: int = 16
    decode: int = 16
    routers: int = 1
    ttft_s: float = 5.0
    tpot_s: float = 0.05
    peers_refuse: bool = False
    order: str = "fcfs"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """The settings of Tandem's router that a run may vary; see `placement` and `max_queued_tokens` there."""

    max_queued_tokens: int = 8192
    patience: float = 4.0
    prefix: float = 3.0
    """Weight of the prefix scorers, the prefill worker's and the decode worker's."""
    prefill_here: int = 512
    prefill_here_max: int = 4096
    min_hit_share: float = 0.125
    tie_margin: float = 0.1
    max_candidates: int = 32

    @property
    def config(self) -> PlacementConfig:
        """The policy's configuration."""
        return PlacementConfig(
            max_queued_tokens=self.max_queued_tokens,
            patience=self.patience,
            weights=weights(prefix=self.prefix, decode_prefix=self.prefix),
            thresholds=Thresholds(self.prefill_here, self.prefill_here_max),
            max_candidates=self.max_candidates,
            min_hit_share=self.min_hit_share,
            tie_margin=self.tie_margin,
            explain=False,
        )


_WORKER, _FLEET, _PLACEMENT = WorkerOptions(), FleetOptions(), PlacementOptions()


def simulate_trace(
    trace: Annotated[Path, Option(help="Mooncake's JSON lines")],
    slice_: Annotated[str, Option(name="slice", help="START:END of the trace, seconds")] = "",
    prefill: Annotated[int, Option(help="prefill workers; 0 = collocated (tandem only)")] = _FLEET.prefill,
    decode: Annotated[int, Option(help="decode workers")] = _FLEET.decode,
    routers: Annotated[int, Option(help="router replicas over the same fleet")] = _FLEET.routers,
    policy: Annotated[str, Option(help=f"{', '.join(POLICIES)}, or all")] = "all",
    seed: Annotated[int, Option()] = _FLEET.seed,
    speedup: Annotated[str, Option(help="speed relative to the trace; several give several rows")] = "",
    rate: Annotated[str, Option(help="mean requests/s instead of --speedup")] = "",
    ttft: Annotated[float, Option(help="target, seconds")] = _FLEET.ttft_s,
    tpot: Annotated[float, Option(help="target, seconds")] = _FLEET.tpot_s,
    peers_refuse: Annotated[
        bool, Option(name="peers-refuse", help="peers also refuse requests predicted to be late, like tandem")
    ] = False,
    model: Annotated[str, Option(help=", ".join(sorted(MODELS)))] = _WORKER.model,
    gpus: Annotated[
        int, Option(help="H200s a worker, taken as one GPU with their speed in sum; see --degrees")
    ] = _WORKER.gpus,
    degrees: Annotated[
        str, Option(help="a worker's ranks, tp=4,pp=2,ep=4: an H200 each, in place of --gpus; counts their sums")
    ] = "",
    decode_degrees: Annotated[str, Option(help="the same for decode workers; default: --degrees")] = "",
    table: Annotated[Path | None, Option(help="step times from bench-engine's JSON, not the roofline")] = _WORKER.table,
    blocks: Annotated[
        int, Option(help=f"blocks of {BLOCK_SIZE} tokens a worker; 0 = what fits in memory")
    ] = _WORKER.blocks,
    report_ms: Annotated[float, Option(help="minimum time between two load reports of a worker")] = _WORKER.report_ms,
    order: Annotated[
        str, Option(help=f"tandem: the admission queue's order, {', '.join(sorted(ORDERS))}")
    ] = _FLEET.order,
    max_queued_tokens: Annotated[int, Option(help="tandem: see the router's setting")] = _PLACEMENT.max_queued_tokens,
    patience: Annotated[float, Option(help="tandem: placement.patience")] = _PLACEMENT.patience,
    prefix: Annotated[float, Option(help="tandem: placement.prefix and placement.decode_prefix")] = _PLACEMENT.prefix,
    prefill_here: Annotated[int, Option(help="tandem: placement.prefill_here_tokens")] = _PLACEMENT.prefill_here,
    prefill_here_max: Annotated[
        int, Option(help="tandem: placement.prefill_here_max_tokens")
    ] = _PLACEMENT.prefill_here_max,
    min_hit_share: Annotated[float, Option(help="tandem: placement's min_hit_share")] = _PLACEMENT.min_hit_share,
    tie_margin: Annotated[
        float, Option(help="tandem: placement's tie_margin, for several routers")
    ] = _PLACEMENT.tie_margin,
    max_candidates: Annotated[int, Option(help="tandem: placement's max_candidates")] = _PLACEMENT.max_candidates,
    out: Out = None,
) -> None:
    """Replay a trace over a simulated fleet, with Tandem's router and with its peers' policies."""
    if speedup and rate:
        raise ConfigError("either --speedup or --rate", field="rate")
    policies = POLICIES if policy == "all" else (choice(policy, "policy", (*POLICIES, "all")),)
    worker = WorkerOptions(
        choice(model, "model", MODELS),
        gpus,
        table,
        blocks,
        report_ms,
        Spread.parse(degrees, "degrees") if degrees else None,
        Spread.parse(decode_degrees, "decode-degrees") if decode_degrees else None,
    )
    fleet = FleetOptions(prefill, decode, routers, ttft, tpot, peers_refuse, choice(order, "order", ORDERS), seed)
    placement = PlacementOptions(
        max_queued_tokens, patience, prefix, prefill_here, prefill_here_max, min_hit_share, tie_margin, max_candidates
    )
    requests = slice_requests(read_mooncake(trace), parse_slice(slice_))
    if not requests:
        raise ConfigError("the slice of the trace has no requests", field="slice")
    if min(prefill, decode) < 1 and (decode < 1 or policies != ("tandem",)):
        raise ConfigError("prefill and decode must be at least 1; only tandem runs without prefill", field="prefill")
    setup = setup_of(worker, fleet, placement)
    speedups = _speedups(decimals(speedup, "speedup"), decimals(rate, "rate"), requests)
    loads = [[_simulate(requests, times, name, setup) for name in policies] for times in speedups]
    print(
        f"{len(requests)} requests, {_pool(prefill, 'prefill', worker.spread, setup.worker, gpus)}, "
        f"{_pool(decode, 'decode', worker.decode_spread or worker.spread, setup.decode or setup.worker, gpus)}, "
        f"{model}, targets TTFT {ttft:g} s TPOT {tpot * 1e3:g} ms\n"
    )
    print(outcome_table(loads))
    if out is not None:
        write(out, results(loads))


def main(argv: Sequence[str]) -> None:
    """Prints the table and, with --out, writes the JSON; raises ConfigError."""
    call(simulate_trace, argv, "python -m loadtest.simulator")


def setup_of(worker: WorkerOptions, fleet: FleetOptions, placement: PlacementOptions = _PLACEMENT) -> Setup:
    """The simulation's setup from the options; raises ConfigError."""
    own = worker.decode_spread
    return Setup(
        worker_spec(worker, worker.spread),
        fleet.prefill,
        fleet.decode,
        Targets(fleet.ttft_s, fleet.tpot_s),
        num_routers=fleet.routers,
        peers_refuse=fleet.peers_refuse,
        tandem=TandemConfig(order=fleet.order, ttft_target_s=fleet.ttft_s, placement=placement.config),
        seed=fleet.seed,
        decode=None if own is None else worker_spec(worker, own),
    )


def worker_spec(worker: WorkerOptions, spread: Spread | None) -> WorkerSpec:
    """A worker of these ranks, or of `gpus` without any; raises ConfigError."""
    model = MODELS[worker.model]
    if spread is None:
        ranks, field = worker.gpus, "gpus"
        room = H200.memory_bytes * ranks * MEMORY_SHARE - model.weight_bytes
        num_tokens = room / model.kv_bytes_per_token
        times = roofline(model, H200, ranks)
    else:
        _check_table(worker)
        ranks, field = spread.num_ranks, "degrees"
        num_tokens = memory.room(model, H200, spread, Hardware(memory_share=MEMORY_SHARE)).kv_tokens
        times = step_times(model, H200, spread)
    num_blocks = worker.blocks or int(num_tokens / BLOCK_SIZE)
    if num_blocks < 1:
        raise ConfigError(f"{worker.model} leaves no room for KV on {ranks} GPUs", field=field, value=ranks)
    return WorkerSpec(
        times=measured(worker.table) if worker.table else times,
        num_blocks=num_blocks,
        link=H200.link * H200.link_efficiency * ranks,
        kv_bytes_per_token=model.kv_bytes_per_token,
        block_size=BLOCK_SIZE,
        run_len=BLOCK_LEN,
        report_s=worker.report_ms / 1e3,
    )


def _check_table(worker: WorkerOptions) -> None:
    if worker.table is not None:
        raise ConfigError("a table holds the times of the ranks that it was measured with: no degrees", field="table")


def _pool(count: int, role: str, spread: Spread | None, spec: WorkerSpec, gpus: int) -> str:
    of = f"{gpus} H200" if spread is None else f"{spread.num_ranks} H200 ({spread})"
    return f"{count} {role} workers of {of} with {spec.num_blocks} blocks"


def _simulate(requests: Sequence[TraceRequest], speedup: float, policy: str, setup: Setup) -> Outcome:
    outcome = simulate(requests, speedup, policy, setup)
    took = f"{policy} at {outcome.offered:.1f} req/s took {outcome.wall_s:.1f} s"
    print(took, file=sys.stderr, flush=True)
    return outcome


def _speedups(speedups: Sequence[float], rates: Sequence[float], requests: Sequence[TraceRequest]) -> list[float]:
    if rates:
        rate = len(requests) / max(requests[-1].at_s - requests[0].at_s, 1e-9)
        speedups = [wanted / rate for wanted in rates]
    speedups = speedups or [1.0]
    if min(speedups) <= 0:
        raise ConfigError("speedup and rate must be above 0", field="speedup")
    return list(speedups)
