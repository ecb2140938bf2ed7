"""The command line of the simulator."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from loadtest.rig.command_line import Option, Out, call, choice, decimals, names
from loadtest.rig.results import write
from loadtest.simulator.fleet import DECODE_CHUNK, PREFILL_CHUNK, WorkerSpec, with_chunk
from loadtest.simulator.load import WORKLOADS, mean_rate, poisson
from loadtest.simulator.outcome import Outcome, Targets, outcome_table, results
from loadtest.simulator.peers import PEERS
from loadtest.simulator.residuals import lognormal_residuals, read_residuals
from loadtest.simulator.simulation import (
    AUTO,
    COLLOCATED,
    POLICIES,
    STATIC,
    TANDEM,
    Group,
    Setup,
    simulate,
    two_pools,
)
from loadtest.simulator.tandem_router import TandemConfig
from loadtest.workloads.trace import TraceRequest, parse_slice, slice_requests
from loadtest.workloads.trace_files import read_trace
from services.router.admission.queue import ORDERS
from services.router.placement.decision import Thresholds
from services.router.placement.policy import PlacementConfig
from services.router.placement.scorers import weights
from shared.errors import ConfigError
from shared.identity import DECODE, roles_text
from shared.sizing import memory
from shared.sizing.devices import GPUS
from shared.sizing.load import Hardware
from shared.sizing.measured_steps import measured
from shared.sizing.roofline import roofline, step_times
from shared.sizing.shapes import KV_DTYPES, LLAMA_3_8B, LLAMA_3_70B, SPARSE_MODELS
from shared.sizing.spread import Spread

MODELS = {"llama-3-70b": LLAMA_3_70B, "llama-3-8b": LLAMA_3_8B, **SPARSE_MODELS}
BLOCK_SIZE = 16
MEMORY_SHARE = 0.9
"""Share of a GPU's memory for weights and KV."""


@dataclass(frozen=True)
class WorkerOptions:
    """A simulated worker. Raises ConfigError for a name that is not known."""

    model: Annotated[str, Option(", ".join(sorted(MODELS)))] = "llama-3-70b"
    device: Annotated[str, Option(", ".join(GPUS))] = "H200"
    gpus: Annotated[
        int, Option("devices a worker, taken as one with their speed in sum; see --degrees", at_least=1)
    ] = 4
    slow_device: Annotated[str, Option("of the slower workers of a mixed fleet")] = "L40S"
    slow_share: Annotated[float, Option("share of each pool's workers that are slower", at_least=0, at_most=1)] = 0.0
    steps: Annotated[
        Path | None, Option("step times from bench-engine's JSON, or their coefficients, not the roofline")
    ] = None
    residuals: Annotated[
        Path | None, Option("JSON list of measured step times over predicted ones, to draw noise from")
    ] = None
    noise: Annotated[float, Option("without --residuals: standard deviation of their logarithm")] = 0.03
    blocks: Annotated[int, Option(f"blocks of {BLOCK_SIZE} tokens a worker; 0 = what fits in memory", at_least=0)] = 0
    report_ms: Annotated[float, Option("between two load reports of a worker at least", at_least=0)] = 5.0
    degrees: Annotated[
        str, Option("a worker's ranks, tp=4,pp=2,ep=4: a device each, in place of --gpus; counts their sums")
    ] = ""
    decode_degrees: Annotated[str, Option("the same for decode workers; default: --degrees")] = ""
    chunk: Annotated[
        int,
        Option(f"token budget of a step; 0 = {PREFILL_CHUNK} on prefill workers, {DECODE_CHUNK} on others", at_least=0),
    ] = 0
    paced: Annotated[bool, Option("steps keep the TPOT target; auto always does")] = False
    ahead: Annotated[bool, Option("a step is planned while the one before runs, as on a GPU")] = True
    kv_dtype: Annotated[str, Option(f"of the KV cache: {', '.join(KV_DTYPES)}")] = "bf16"

    def __post_init__(self) -> None:
        choice(self.model, "model", MODELS)
        choice(self.device, "device", GPUS)
        choice(self.slow_device, "slow-device", GPUS)
        choice(self.kv_dtype, "kv-dtype", KV_DTYPES)

    @property
    def spread(self) -> Spread | None:
        """Its ranks, with what they send each other and wait for; None = `gpus`. Raises ConfigError."""
        return Spread.parse(self.degrees, "degrees") if self.degrees else None

    @property
    def decode_spread(self) -> Spread | None:
        """Ranks of decode workers; None = `spread`. Raises ConfigError."""
        return Spread.parse(self.decode_degrees, "decode-degrees") if self.decode_degrees else None


@dataclass(frozen=True)
class FleetOptions:
    """A fleet, its routers and their targets. Raises ConfigError for an order that is not known."""

    prefill: Annotated[int, Option("prefill workers; 0 = collocated, or auto", at_least=0)] = 16
    decode: Annotated[int, Option("decode workers", at_least=0)] = 16
    routers: Annotated[int, Option("router replicas over the same fleet", at_least=1)] = 1
    ttft_s: Annotated[float, Option("target, seconds", name="ttft", above=0)] = 5.0
    tpot_s: Annotated[float, Option("target, seconds", name="tpot", above=0)] = 0.05
    peers_refuse: Annotated[bool, Option("peers also refuse requests predicted to be late, like tandem")] = False
    order: Annotated[str, Option(f"tandem: the admission queue's order, {', '.join(sorted(ORDERS))}")] = "fcfs"
    seed: Annotated[int, Option(at_least=0)] = 0

    def __post_init__(self) -> None:
        choice(self.order, "order", ORDERS)


@dataclass(frozen=True)
class PlacementOptions:
    """The settings of Tandem's router that a run may vary; see `placement` and `max_queued_tokens` there."""

    max_queued_tokens: Annotated[int, Option("tandem: see the router's setting", at_least=0)] = 8192
    patience: Annotated[float, Option("tandem: placement.patience", at_least=0)] = 4.0
    prefix: Annotated[float, Option("tandem: placement.prefix and placement.decode_prefix", at_least=0)] = 3.0
    prefill_here: Annotated[int, Option("tandem: placement.prefill_here_tokens", at_least=0)] = 512
    prefill_here_max: Annotated[int, Option("tandem: placement.prefill_here_max_tokens", at_least=0)] = 4096
    min_hit_share: Annotated[float, Option("tandem: placement's min_hit_share", at_least=0, at_most=1)] = 0.125
    tie_margin: Annotated[float, Option("tandem: placement's tie_margin, for several routers", at_least=0)] = 0.1
    max_candidates: Annotated[int, Option("tandem: placement's max_candidates", at_least=1)] = 32

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


_PLACEMENT = PlacementOptions()
_NO_THRESHOLDS = Thresholds()


def simulate_trace(
    worker: WorkerOptions,
    fleet: FleetOptions,
    placement: PlacementOptions,
    trace: Annotated[
        Path | None, Option("JSON lines of Mooncake or Qwen-Bailian, CSV of Azure, BurstGPT or Splitwise; also .gz")
    ] = None,
    unit: Annotated[str, Option("of the timestamps in JSON lines, where it is not their format's: ms or s")] = "",
    workload: Annotated[str, Option(f"in place of a trace: {', '.join(WORKLOADS)}")] = "",
    requests: Annotated[int, Option("of the workload", at_least=1)] = 2000,
    poisson_arrivals: Annotated[bool, Option("in place of the trace's times", name="poisson")] = False,
    slice_: Annotated[str, Option("START:END of the trace, seconds", name="slice")] = "",
    policy: Annotated[str, Option(f"some of {', '.join(POLICIES)}; all = tandem and the peers")] = "all",
    speedup: Annotated[str, Option("speed relative to the trace; several give several rows")] = "",
    rate: Annotated[str, Option("mean requests/s instead of --speedup")] = "",
    out: Out = None,
) -> None:
    """Replay a trace over a simulated fleet, with Tandem's router and with its peers' policies."""
    if speedup and rate:
        raise ConfigError("either --speedup or --rate", field="rate")
    policies = (*PEERS, TANDEM) if policy == "all" else tuple(names(policy, "policy", POLICIES))
    no_prefill = min(fleet.prefill, fleet.decode) < 1
    if no_prefill and (fleet.decode < 1 or not set(policies) <= {TANDEM, COLLOCATED, AUTO}):
        raise ConfigError(
            "prefill and decode must be at least 1; only tandem, collocated and auto run without prefill",
            field="prefill",
        )
    arriving = _requests(trace, unit, workload, requests, slice_, poisson_arrivals, fleet.seed)
    setups = {name: setup_of(worker, fleet, placement, name) for name in policies}
    speedups = _speedups(decimals(speedup, "speedup"), decimals(rate, "rate"), arriving)
    loads = [[_simulate(arriving, times, name, setups[name]) for name in policies] for times in speedups]
    pools = " or ".join(dict.fromkeys(_pools(setup, worker) for setup in setups.values()))
    targets = f"TTFT {fleet.ttft_s:g} s TPOT {fleet.tpot_s * 1e3:g} ms"
    print(f"{len(arriving)} requests, {pools}, {worker.model}, targets {targets}\n")
    print(outcome_table(loads))
    if out is not None:
        write(out, results(loads))


def main(argv: Sequence[str]) -> None:
    """Prints the table and, with --out, writes the JSON; raises ConfigError."""
    call(simulate_trace, argv, "python -m loadtest.simulator")


def setup_of(
    worker: WorkerOptions, fleet: FleetOptions, placement: PlacementOptions = _PLACEMENT, policy: str = TANDEM
) -> Setup:
    """The simulation's setup from the options, for a policy; raises ConfigError."""
    spec = worker_spec(worker, worker.spread, fleet.tpot_s)
    decode = spec if worker.decode_spread is None else worker_spec(worker, worker.decode_spread, fleet.tpot_s)
    config = replace(placement.config, tpot_target_s=fleet.tpot_s, ttft_target_s=fleet.ttft_s)
    if policy in (STATIC, COLLOCATED):
        config = replace(config, thresholds=_NO_THRESHOLDS)
    prefills = with_chunk(spec, worker.chunk or PREFILL_CHUNK)
    decodes = with_chunk(decode, worker.chunk or DECODE_CHUNK)
    count = fleet.prefill + fleet.decode
    if policy == AUTO:
        groups = [Group(count, replace(prefills, tpot_target_s=fleet.tpot_s))]
    elif policy == COLLOCATED:
        groups = two_pools(0, count, prefills, decodes)
    else:
        groups = two_pools(fleet.prefill, fleet.decode, prefills, decodes)
    return Setup(
        [part for group in groups for part in _mixed(group, worker, fleet.tpot_s)],
        Targets(fleet.ttft_s, fleet.tpot_s),
        num_routers=fleet.routers,
        peers_refuse=fleet.peers_refuse,
        tandem=TandemConfig(order=fleet.order, ttft_target_s=fleet.ttft_s, placement=config),
        seed=fleet.seed,
    )


def _mixed(group: Group, worker: WorkerOptions, tpot_s: float) -> list[Group]:
    """The group, with its share of slower workers."""
    num_slow = round(group.count * worker.slow_share)
    if not num_slow:
        return [group]
    slow = worker_spec(replace(worker, device=worker.slow_device, steps=None), worker.spread, tpot_s)
    slow = replace(
        slow,
        tpot_target_s=group.worker.tpot_target_s,
        max_num_batched_tokens=group.worker.max_num_batched_tokens,
    )
    parts = [replace(group, count=group.count - num_slow), Group(num_slow, slow, group.roles)]
    return [part for part in parts if part.count]


def worker_spec(worker: WorkerOptions, spread: Spread | None, tpot_s: float) -> WorkerSpec:
    """A worker of these ranks, or of `gpus` without any; raises ConfigError."""
    model, device = MODELS[worker.model], GPUS[worker.device]
    kv_bytes = model.kv_bytes(model.num_kv_heads, worker.kv_dtype)
    if spread is None:
        ranks, field = worker.gpus, "gpus"
        room = device.memory_bytes * ranks * MEMORY_SHARE - model.weight_bytes
        num_tokens = room / kv_bytes
        times = roofline(model, device, ranks, kv_dtype=worker.kv_dtype)
    else:
        _check_steps(worker)
        ranks, field = spread.num_ranks, "degrees"
        num_tokens = memory.room(
            model, device, spread, Hardware(kv_dtype=worker.kv_dtype, memory_share=MEMORY_SHARE)
        ).kv_tokens
        times = step_times(model, device, spread, kv_dtype=worker.kv_dtype)
    num_blocks = worker.blocks or int(num_tokens / BLOCK_SIZE)
    if num_blocks < 1:
        raise ConfigError(f"{worker.model} leaves no room for KV on {ranks} {worker.device}", field=field, value=ranks)
    return WorkerSpec(
        times=measured(worker.steps, "steps") if worker.steps else times,
        num_blocks=num_blocks,
        link=device.link * device.link_efficiency * ranks,
        kv_bytes_per_token=round(kv_bytes),
        block_size=BLOCK_SIZE,
        tpot_target_s=tpot_s if worker.paced else 0.0,
        plans_ahead=worker.ahead,
        residuals=read_residuals(worker.residuals) if worker.residuals else lognormal_residuals(worker.noise),
        report_s=worker.report_ms / 1e3,
    )


def _check_steps(worker: WorkerOptions) -> None:
    if worker.steps is not None:
        raise ConfigError("a file holds the times of the ranks that it was measured with: no degrees", field="steps")


def _pools(setup: Setup, worker: WorkerOptions) -> str:
    found = []
    for group in setup.groups:
        spread = worker.decode_spread if group.roles == DECODE and worker.decode_spread else worker.spread
        ranks = f"{worker.gpus} {worker.device}" if spread is None else f"{spread.num_ranks} {worker.device} ({spread})"
        role = "collocated" if len(setup.groups) == 1 and group.roles == DECODE else roles_text(group.roles)
        found.append(f"{group.count} {role} workers of {ranks} with {group.worker.num_blocks} blocks")
    return ", ".join(found)


def _requests(
    trace: Path | None, unit: str, workload: str, count: int, part: str, poisson_arrivals: bool, seed: int
) -> Sequence[TraceRequest]:
    if (trace is None) == (not workload):
        raise ConfigError("either --trace or --workload", field="trace")
    if trace is None:
        made = WORKLOADS[choice(workload, "workload", WORKLOADS)].requests(count, seed)
        return poisson(made, seed)
    found = slice_requests(read_trace(trace, unit), parse_slice(part))
    if not found:
        raise ConfigError("the slice of the trace has no requests", field="slice")
    if found[0].at_s == found[-1].at_s:
        raise ConfigError("all requests of the slice have the same time: it has no rate", field="slice")
    return poisson(found, seed) if poisson_arrivals else found


def _simulate(requests: Sequence[TraceRequest], speedup: float, policy: str, setup: Setup) -> Outcome:
    outcome = simulate(requests, speedup, policy, setup)
    took = f"{policy} at {outcome.offered:.1f} req/s took {outcome.wall_s:.1f} s"
    print(took, file=sys.stderr, flush=True)
    return outcome


def _speedups(speedups: Sequence[float], rates: Sequence[float], requests: Sequence[TraceRequest]) -> list[float]:
    if rates:
        speedups = [wanted / mean_rate(requests) for wanted in rates]
    speedups = speedups or [1.0]
    if min(speedups) <= 0:
        raise ConfigError("speedup and rate must be above 0", field="speedup")
    return list(speedups)
