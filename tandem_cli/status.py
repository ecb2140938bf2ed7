"""`tandem status`: the cluster as its router sees it."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from shared.rpc.convert import role_from_proto, worker_roles
from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2
from shared.sizes import size
from tandem import AsyncTandemClient
from tandem_cli.console import console_of, json_of, share, table_of
from tandem_cli.options import LOCAL, Connection

_PIPED_WIDTH = 200
"""Width without a terminal, in columns: nothing is cut."""


def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print the router's full reply as JSON.")] = False,
    connection: Connection = LOCAL,
) -> None:
    """Show workers, free blocks, queue and prefix hits."""
    cluster = asyncio.run(_ask(connection.open(AsyncTandemClient)))
    if as_json:
        print(json_of(cluster))
        return
    console = console_of(_PIPED_WIDTH)
    for line in summary_lines(cluster):
        console.print(line, markup=False)
    console.print()
    console.print(worker_table(cluster))


def summary_lines(cluster: inference_pb2.ClusterStatus) -> list[str]:
    """Summary lines for the whole cluster."""
    state = "ready" if cluster.ready else f"not ready: {cluster.not_ready_reason}"
    served = [f"{cluster.model_name}, {cluster.mode}, {state}"]
    if cluster.models:
        served = [f"{len(cluster.models)} models, {state}", *map(_model_line, cluster.models)]
    lines = [
        *served,
        f"queue {cluster.queue_len} of {cluster.queue_limit}, running {cluster.num_running}, "
        f"finished {cluster.num_finished}, failed {cluster.num_failed}",
        f"prefix hits {share(cluster.num_cached_tokens, cluster.num_prompt_tokens)} "
        f"of {cluster.num_prompt_tokens} prompt tokens",
    ]
    if cluster.HasField("split"):
        lines.append(split_line(cluster.split))
    lines += [f"degraded: {what}" for what in cluster.degraded]
    if not cluster.store_available:
        lines.append(f"the KV store does not answer ({cluster.num_store_errors} errors): local caches only")
    return lines


def split_line(split: inference_pb2.RoleSplit) -> str:
    """Which workers of both roles decode just now, and how far that reaches."""
    everyone = f"split: all {split.num_workers} workers prefill and decode"
    if not split.HasField("headroom"):
        return f"{everyone}: nothing is decided yet"
    part = f"split: {split.num_decoding} of {split.num_workers} workers decode, the others only prefill"
    flips = f", {split.num_flips} change{'s' * (split.num_flips != 1)} of a preference" if split.num_flips else ""
    shown = everyone if split.num_decoding == split.num_workers else part
    return f"{shown}; headroom {split.headroom:.2f} times the demand{flips}"


def preference(worker: inference_pb2.WorkerStatus) -> str:
    """What a worker of both roles is used for first just now; empty for others."""
    return role_from_proto(worker.preference) if worker.preference else ""


def _model_line(model: inference_pb2.ModelStatus) -> str:
    names = f"{model.name} ({', '.join(model.aliases)})" if model.aliases else model.name
    state = "ready" if model.ready else f"not ready: {model.not_ready_reason}"
    split = f"\n    {split_line(model.split)}" if model.HasField("split") else ""
    return f"  {names}, {model.mode}, {state}, queue {model.queue_len}, running {model.num_running}{split}"


def worker_table(cluster: inference_pb2.ClusterStatus) -> Table:
    """One row a worker: what it is used for first where workers have both roles, sequences running and waiting, prompt
    tokens to compute, free blocks, prefix hits, memory of the process and of its KV pool, what computes, guesses that
    were right, adapters that are ready, the processes where a worker has several, and the model where there are
    several."""
    has_guesses = any(worker.load.guesses for worker in cluster.workers)
    has_groups = any(max(worker.tp, worker.pp) > 1 for worker in cluster.workers)
    has_adapters = any(worker.num_adapters for worker in cluster.workers)
    facts = (
        "kernels",
        *(("right guesses",) if has_guesses else ()),
        *(("adapters",) if has_adapters else ()),
        *(("ranks",) if has_groups else ()),
        *(("model",) if cluster.models else ()),
    )
    has_preferences = any(worker.preference for worker in cluster.workers)
    figures = ("run", "wait", "queued", "free blocks", "hits", "resident", "pool")
    rows = [
        (
            worker.worker.name,
            worker_roles(worker),
            *((preference(worker),) if has_preferences else ()),
            worker.address,
            _state(worker),
            *(_figures(worker) if worker.connected else ("",) * (len(figures) + 1)),
            *((right_guesses(worker.load),) if has_guesses else ()),
            *((adapters(worker),) if has_adapters else ()),
            *((_ranks(worker) if worker.connected else "",) if has_groups else ()),
            *((worker.model,) if cluster.models else ()),
        )
        for worker in cluster.workers
    ]
    names = ("worker", "role", *(("prefers",) if has_preferences else ()), "address", "state")
    return table_of((*names, *figures, *facts), rows, text=(*names, *facts))


def _figures(worker: inference_pb2.WorkerStatus) -> tuple[str, ...]:
    load = worker.load
    return (
        f"{load.num_running}",
        f"{load.num_waiting}",
        f"{load.num_queued_tokens}",
        f"{load.num_free_blocks}/{load.num_total_blocks}",
        share(load.num_prefix_hit_tokens, load.num_prompt_tokens),
        size(load.resident_bytes) if load.HasField("resident_bytes") else "-",
        size(worker.pool_bytes),
        " ".join(part for part in (worker.kernels, worker.dtype, _weights(worker), _kv(worker)) if part),
    )


def _weights(worker: inference_pb2.WorkerStatus) -> str:
    return f"weights {worker.quantization} {size(worker.weight_bytes)}" if worker.quantization else ""


def _kv(worker: inference_pb2.WorkerStatus) -> str:
    return f"KV {worker.kv_dtype}" if worker.kv_dtype not in ("", worker.dtype) else ""


def right_guesses(load: types_pb2.Load) -> str:
    """The share of right ones of each method of speculation, of those that were checked since the start."""
    return ", ".join(f"{of.method} {share(of.num_accepted, of.num_tokens)}" for of in load.guesses)


def adapters(worker: inference_pb2.WorkerStatus) -> str:
    """Adapters that are ready, of those that the worker knows."""
    return f"{worker.num_ready_adapters} of {worker.num_adapters}" if worker.num_adapters else ""


def _ranks(worker: inference_pb2.WorkerStatus) -> str:
    tp, pp = max(1, worker.tp), max(1, worker.pp)
    experts = f", ep {worker.ep}" if worker.ep > 1 else ""
    return f"{tp * pp}" + (f" (tp {tp}, pp {pp}{experts})" if tp * pp > 1 else "")


def _state(worker: inference_pb2.WorkerStatus) -> Text:
    if not worker.connected:
        return Text("lost", style="red")
    return Text("draining", style="yellow") if worker.load.draining else Text("up", style="green")


async def _ask(client: AsyncTandemClient) -> inference_pb2.ClusterStatus:
    async with client:
        return await client.status()
