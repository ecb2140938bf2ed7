"""The command line of the simulator."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from loadtest.rig.command_line import Option, Out, call, choice, decimals, names
from loadtest.rig.results import write
from loadtest.simulator.fleet import DECODE_CHUNK, PREFILL_CHUNK, WorkerSpec
from loadtest.simulator.load import WORKLOADS, mean_rate, poisson, read_trace
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
NOISE = 0.03
"""Standard deviation of the logarithm of a step's time over the one predicted."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """A simulated worker."""

    model: str = "llama-3-70b"
    device: str = "H200"
    gpus: int = 4
    """Number of devices, taken as one with their speed in sum."""
    slow_device: str = "L40S"
    """Of the slower workers, where there are any."""
    slow_share: float = 0.0
    """Of each pool's workers."""
    steps: Path | None = None
    """Step times measured by bench-engine, or their coefficients; None = the roofline."""
    residuals: Path | None = None
    """A JSON list of measured step times over predicted ones; None = log-normal with `noise`."""
    noise: float = NOISE
    blocks: int = 0
    """Number of blocks of BLOCK_SIZE tokens; 0 = as many as fit in memory."""
    report_ms: float = 5.0
    """Between two load reports at least."""
    spread: Spread | None = None
    """Its ranks, a device each, with what they send each other and wait for; None = `gpus`."""
    decode_spread: Spread | None = None
    """Of decode workers; None = `spread`."""
    chunk: int = 0
    """Token budget of a step; 0 = PREFILL_CHUNK and DECODE_CHUNK."""
    paced: bool = False
    """Whether steps keep the TPOT target, by their batch and by the chunks beside it."""
    plans_ahead: bool = True
    """A step is planned while the one before runs, as on a GPU."""
    kv_dtype: str = "bf16"
    """Of the KV cache, one of KV_DTYPES."""


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
_NO_THRESHOLDS = Thresholds()


def simulate_trace(
    trace: Annotated[Path | None, Option(help="Mooncake's JSON lines, or Azure's CSV")] = None,
    workload: Annotated[str, Option(help=f"in place of a trace: {', '.join(WORKLOADS)}")] = "",
    requests: Annotated[int, Option(help="of the workload")] = 2000,
    poisson_arrivals: Annotated[bool, Option(name="poisson", help="in place of the trace's times")] = False,
    slice_: Annotated[str, Option(name="slice", help="START:END of the trace, seconds")] = "",
    prefill: Annotated[int, Option(help="prefill workers; 0 = collocated, or auto")] = _FLEET.prefill,
    decode: Annotated[int, Option(help="decode workers")] = _FLEET.decode,
    routers: Annotated[int, Option(help="router replicas over the same fleet")] = _FLEET.routers,
    policy: Annotated[str, Option(help=f"some of {', '.join(POLICIES)}; all = tandem and the peers")] = "all",
    seed: Annotated[int, Option()] = _FLEET.seed,
    speedup: Annotated[str, Option(help="speed relative to the trace; several give several rows")] = "",
    rate: Annotated[str, Option(help="mean requests/s instead of --speedup")] = "",
    ttft: Annotated[float, Option(help="target, seconds")] = _FLEET.ttft_s,
    tpot: Annotated[float, Option(help="target, seconds")] = _FLEET.tpot_s,
    peers_refuse: Annotated[
        bool, Option(name="peers-refuse", help="peers also refuse requests predicted to be late, like tandem")
    ] = False,
    model: Annotated[str, Option(help=", ".join(sorted(MODELS)))] = _WORKER.model,
    device: Annotated[str, Option(help=", ".join(GPUS))] = _WORKER.device,
    gpus: Annotated[
        int, Option(help="devices a worker, taken as one with their speed in sum; see --degrees")
    ] = _WORKER.gpus,
    slow_device: Annotated[str, Option(help="of the slower workers of a mixed fleet")] = _WORKER.slow_device,
    slow_share: Annotated[float, Option(help="share of each pool's workers that are slower")] = _WORKER.slow_share,
    degrees: Annotated[
        str, Option(help="a worker's ranks, tp=4,pp=2,ep=4: a device each, in place of --gpus; counts their sums")
    ] = "",
    decode_degrees: Annotated[str, Option(help="the same for decode workers; default: --degrees")] = "",
    steps: Annotated[
        Path | None, Option(help="step times from bench-engine's JSON, or their coefficients, not the roofline")
    ] = _WORKER.steps,
    residuals: Annotated[
        Path | None, Option(help="JSON list of measured step times over predicted ones, to draw noise from")
    ] = _WORKER.residuals,
    noise: Annotated[float, Option(help="without --residuals: standard deviation of their logarithm")] = _WORKER.noise,
    chunk: Annotated[
        int, Option(help=f"token budget of a step; 0 = {PREFILL_CHUNK} on prefill workers, {DECODE_CHUNK} on others")
    ] = _WORKER.chunk,
    paced: Annotated[bool, Option(help="steps keep the TPOT target; auto always does")] = _WORKER.paced,
    ahead: Annotated[
        bool, Option(help="a step is planned while the one before runs, as on a GPU")
    ] = _WORKER.plans_ahead,
    blocks: Annotated[
        int, Option(help=f"blocks of {BLOCK_SIZE} tokens a worker; 0 = what fits in memory")
    ] = _WORKER.blocks,
    kv_dtype: Annotated[str, Option(help=f"of the KV cache: {', '.join(KV_DTYPES)}")] = _WORKER.kv_dtype,
    report_ms: Annotated[float, Option(help="between two load reports of a worker at least")] = _WORKER.report_ms,
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
    policies = (*PEERS, TANDEM) if policy == "all" else tuple(names(policy, "policy", POLICIES))
    worker = WorkerOptions(
        choice(model, "model", MODELS),
        choice(device, "device", GPUS),
        gpus,
        choice(slow_device, "slow-device", GPUS),
        slow_share,
        steps,
        residuals,
        noise,
        blocks,
        report_ms,
        Spread.parse(degrees, "degrees") if degrees else None,
        Spread.parse(decode_degrees, "decode-degrees") if decode_degrees else None,
        chunk,
        paced,
        ahead,
        choice(kv_dtype, "kv-dtype", KV_DTYPES),
    )
    fleet = FleetOptions(prefill, decode, routers, ttft, tpot, peers_refuse, choice(order, "order", ORDERS), seed)
    placement = PlacementOptions(
        max_queued_tokens, patience, prefix, prefill_here, prefill_here_max, min_hit_share, tie_margin, max_candidates
    )
    if min(prefill, decode) < 1 and (decode < 1 or not set(policies) <= {TANDEM, COLLOCATED, AUTO}):
        raise ConfigError(
            "prefill and decode must be at least 1; only tandem, collocated and auto run without prefill",
            field="prefill",
        )
    arriving = _requests(trace, workload, requests, slice_, poisson_arrivals, seed)
    setups = {name: setup_of(worker, fleet, placement, name) for name in policies}
    speedups = _speedups(decimals(speedup, "speedup"), decimals(rate, "rate"), arriving)
    loads = [[_simulate(arriving, times, name, setups[name]) for name in policies] for times in speedups]
    pools = " or ".join(dict.fromkeys(_pools(setup, worker) for setup in setups.values()))
    print(f"{len(arriving)} requests, {pools}, {model}, targets TTFT {ttft:g} s TPOT {tpot * 1e3:g} ms\n")
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
    prefills = replace(spec, max_num_batched_tokens=worker.chunk or PREFILL_CHUNK)
    decodes = replace(decode, max_num_batched_tokens=worker.chunk or DECODE_CHUNK)
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
        plans_ahead=worker.plans_ahead,
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
    trace: Path | None, workload: str, count: int, part: str, poisson_arrivals: bool, seed: int
) -> Sequence[TraceRequest]:
    if (trace is None) == (not workload):
        raise ConfigError("either --trace or --workload", field="trace")
    if trace is None:
        made = WORKLOADS[choice(workload, "workload", WORKLOADS)].requests(count, seed)
        return poisson(made, seed)
    found = slice_requests(iter(read_trace(trace)), parse_slice(part))
    if not found:
        raise ConfigError("the slice of the trace has no requests", field="slice")
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
