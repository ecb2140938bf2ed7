"""The command line of the simulator."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from loadtest.figures import write
from loadtest.simulator import report
from loadtest.simulator.fleet import WorkerSpec
from loadtest.simulator.outcome import Targets
from loadtest.simulator.shapes import H200, MODELS
from loadtest.simulator.simulation import POLICIES, Setup, simulate
from loadtest.simulator.step_time import measured, roofline
from loadtest.simulator.tandem_router import TandemConfig
from loadtest.workloads.mooncake import BLOCK_LEN, read_mooncake
from loadtest.workloads.trace import TraceRequest, parse_slice, slice_requests
from services.router.admission.orders import ORDERS
from services.router.placement.disaggregation import Thresholds
from services.router.placement.policy import PlacementConfig, Weights
from shared.errors import ConfigError

BLOCK_SIZE = 16
MEMORY_SHARE = 0.9
"""Of a GPU's memory, what weights and KV may take."""


def parser() -> argparse.ArgumentParser:
    """All flags."""
    made = argparse.ArgumentParser(prog="python -m loadtest.simulator", description="A trace over a simulated fleet.")
    add = made.add_argument
    add("--trace", type=Path, required=True, help="Mooncake's JSON lines")
    add("--slice", default="", help="START:END of the trace, seconds")
    add("--prefill", type=int, default=16, help="prefill workers; 0 = collocated (tandem only)")
    add("--decode", type=int, default=16, help="decode workers")
    add("--routers", type=int, default=1, help="router replicas over the same fleet")
    add("--policy", choices=(*POLICIES, "all"), default="all")
    add("--seed", type=int, default=0)
    load = made.add_mutually_exclusive_group()
    load.add_argument("--speedup", type=float, nargs="+", help="times as fast as the trace; several make a table")
    load.add_argument("--rate", type=float, nargs="+", help="mean requests/s instead")
    add("--ttft", type=float, default=5.0, help="target, seconds")
    add("--tpot", type=float, default=0.05, help="target, seconds")
    add("--peers-refuse", action="store_true", help="peers refuse what they predict to be late, as ours does")
    add("--model", choices=sorted(MODELS), default="llama-3-70b")
    add("--gpus", type=int, default=4, help="H200s a worker (tensor parallel)")
    add("--table", type=Path, help="step times from bench-engine's JSON instead of the roofline")
    add("--blocks", type=int, default=0, help=f"blocks of {BLOCK_SIZE} tokens a worker; 0 = what the memory holds")
    add("--report-ms", type=float, default=5.0, help="least time between two load reports of a worker")
    add("--order", choices=sorted(ORDERS), default="fcfs", help="ours: the admission queue's order")
    add("--max-queued-tokens", type=int, default=8192, help="ours: see the router's setting")
    add("--patience", type=float, default=PATIENCE, help="ours: likewise placement.patience")
    add("--prefix", type=float, default=PREFIX, help="ours: placement.prefix and placement.decode_prefix")
    add("--prefill-here", type=int, default=HERE[0], help="ours: placement.prefill_here_tokens")
    add("--prefill-here-max", type=int, default=HERE[1], help="ours: placement.prefill_here_max_tokens")
    add("--min-hit-share", type=float, default=0.125, help="ours: placement.min_hit_share")
    add("--tie_margin", type=float, default=0.1, help="ours: placement.tie_margin, for several routers")
    add("--max-candidates", type=int, default=32, help="ours: placement.max_candidates")
    add("--out", type=Path, help="where to write the results as JSON")
    return made


PATIENCE = 4.0
PREFIX = 3.0
HERE = (512, 4096)


def main(argv: list[str] | None = None) -> None:
    """Prints the table and, with --out, writes the JSON; raises ConfigError."""
    args = parser().parse_args(argv)
    trace = slice_requests(read_mooncake(args.trace), parse_slice(args.slice))
    if not trace:
        raise ConfigError("the slice of the trace holds no request", field="slice")
    policies = POLICIES if args.policy == "all" else (args.policy,)
    if min(args.prefill, args.decode) < 1 and (args.decode < 1 or policies != ("tandem",)):
        raise ConfigError("prefill and decode must be at least 1; only tandem runs without prefill", field="prefill")
    setup = setup_of(args)
    loads = []
    for speedup in _speedups(args, trace):
        outcomes = []
        for policy in policies:
            outcome = simulate(trace, speedup, policy, setup)
            took = f"{policy} at {outcome.offered:.1f} req/s took {outcome.wall_s:.1f} s"
            print(took, file=sys.stderr, flush=True)
            outcomes.append(outcome)
        loads.append(outcomes)
    print(
        f"{len(trace)} requests, {args.prefill} prefill and {args.decode} decode workers of {args.gpus} H200, "
        f"{args.model}, {setup.worker.num_blocks} blocks each, "
        f"targets TTFT {args.ttft:g} s TPOT {args.tpot * 1e3:g} ms\n"
    )
    print(report.outcome_table(loads))
    if args.out:
        write(args.out, report.results(loads))


def setup_of(args: argparse.Namespace) -> Setup:
    """The fleet that the flags describe; raises ConfigError."""
    model = MODELS[args.model]
    room = H200.memory_bytes * args.gpus * MEMORY_SHARE - model.weight_bytes
    num_blocks = args.blocks or int(room / (model.kv_bytes_per_token * BLOCK_SIZE))
    if num_blocks < 1:
        raise ConfigError(f"{args.model} leaves no room for KV on {args.gpus} GPUs", field="gpus", value=args.gpus)
    worker = WorkerSpec(
        times=measured(args.table) if args.table else roofline(model, H200, args.gpus),
        num_blocks=num_blocks,
        link=H200.link * H200.link_efficiency * args.gpus,
        kv_bytes_per_token=model.kv_bytes_per_token,
        block_size=BLOCK_SIZE,
        run_len=BLOCK_LEN,
        report_s=args.report_ms / 1e3,
    )
    placement = PlacementConfig(
        max_queued_tokens=args.max_queued_tokens,
        patience=args.patience,
        weights=Weights(prefix=args.prefix, decode_prefix=args.prefix),
        thresholds=Thresholds(args.prefill_here, args.prefill_here_max),
        max_candidates=args.max_candidates,
        min_hit_share=args.min_hit_share,
        tie_margin=args.tie_margin,
        explain=False,
    )
    return Setup(
        worker,
        args.prefill,
        args.decode,
        Targets(args.ttft, args.tpot),
        num_routers=args.routers,
        peers_refuse=args.peers_refuse,
        tandem=TandemConfig(order=args.order, ttft_target_s=args.ttft, placement=placement),
        seed=args.seed,
    )


def _speedups(args: argparse.Namespace, trace: list[TraceRequest]) -> list[float]:
    if args.rate:
        rate = len(trace) / max(trace[-1].at_s - trace[0].at_s, 1e-9)
        speedups = [wanted / rate for wanted in args.rate]
    else:
        speedups = args.speedup or [1.0]
    if min(speedups) <= 0:
        raise ConfigError("speedup and rate must be above 0", field="speedup")
    return speedups
