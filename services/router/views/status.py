"""The cluster as one router sees it."""

from __future__ import annotations

import math

from services.router.dispatch.dispatcher import Dispatcher
from services.router.dispatch.prefix_lookup import PrefixLookup
from services.router.placement.split import SplitController
from services.router.views.metrics import RouterMetrics
from services.router.workers.fleet import Fleet
from services.router.workers.link import WorkerLink
from shared.identity import holder_role, roles_text
from shared.rpc.convert import role_to_proto, roles_to_proto
from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2


def cluster_status(
    model_name: str,
    fleet: Fleet,
    dispatcher: Dispatcher,
    lookup: PrefixLookup,
    metrics: RouterMetrics,
    split: SplitController | None = None,
) -> inference_pb2.ClusterStatus:
    """One model's part of `tandem status` and `GET /status`, without what the router's settings say. `split`: in mode
    auto."""
    reason = dispatcher.not_ready_reason()
    counts = metrics.counts
    status = inference_pb2.ClusterStatus(
        model_name=model_name,
        ready=not reason,
        not_ready_reason=reason,
        workers=[worker_status(link) for link in (*fleet.links, *fleet.retiring)],
        queue_len=dispatcher.num_waiting,
        num_running=dispatcher.num_active - dispatcher.num_waiting,
        num_finished=counts.num_finished,
        num_failed=counts.num_failed,
        num_prompt_tokens=counts.num_prompt_tokens,
        num_cached_tokens=counts.num_cached_tokens,
        store_available=lookup.available,
        num_store_errors=lookup.num_errors,
        degraded=_failures(fleet),
    )
    if split is not None:
        _add_split(status, fleet, split)
    return status


def _add_split(status: inference_pb2.ClusterStatus, fleet: Fleet, split: SplitController) -> None:
    both = [worker for worker in status.workers if len(worker.roles) > 1 and worker.worker.name in fleet.decode_pool]
    decodes = split.split.decodes
    for worker in both:
        is_prefill = decodes and worker.worker.name not in decodes
        worker.preference = types_pb2.WORKER_ROLE_PREFILL if is_prefill else types_pb2.WORKER_ROLE_DECODE
    status.split.num_workers = len(both)
    status.split.num_decoding = sum(worker.preference == types_pb2.WORKER_ROLE_DECODE for worker in both)
    status.split.num_flips = split.num_flips
    if math.isfinite(split.split.headroom):
        status.split.headroom = split.split.headroom


def worker_status(link: WorkerLink) -> inference_pb2.WorkerStatus:
    """One worker in this router's view."""
    welcome = types_pb2.Welcome() if link.welcome is None else link.welcome
    worker = link.welcome.worker if link.welcome is not None else types_pb2.WorkerId(name=link.name)
    load = types_pb2.Load()
    load.CopyFrom(link.load)
    load.draining |= link.retired
    load.ClearField("adapters")  # a key may see the status and not the names of other tenants
    num_adapters, num_ready_adapters = link.num_adapters
    return inference_pb2.WorkerStatus(
        worker=worker,
        role=role_to_proto(holder_role(link.roles)),
        roles=link.load.roles or roles_to_proto(link.roles),
        address=link.address,
        connected=link.connected,
        load=load if link.connected else None,
        num_requests=link.num_requests,
        num_adapters=num_adapters,
        num_ready_adapters=num_ready_adapters,
        kernels=welcome.kernels,
        dtype=welcome.dtype,
        pool_bytes=welcome.pool_bytes,
        kv_dtype=_kv_dtype(welcome.layout) if link.welcome is not None else "",
        quantization=welcome.quantization,
        weight_bytes=welcome.weight_bytes,
        tp=welcome.tp,
        pp=welcome.pp,
        ep=welcome.ep,
        max_num_seqs=welcome.max_num_seqs,
        max_num_batched_tokens=welcome.max_num_batched_tokens,
        block_size=welcome.layout.block_size,
        layout=link.welcome.layout if link.welcome is not None else None,
    )


def _failures(fleet: Fleet) -> list[str]:
    """Failures of the discovery, of the workers' sessions and of their store nodes."""
    found = [fleet.discovery_failure] if fleet.discovery_failure else []
    for link in fleet.links:
        if not link.connected:
            reason = f": {link.mismatch}" if link.mismatch else ""
            found.append(f"{roles_text(link.roles)} worker {link.name} is not connected{reason}")
        elif link.mismatch:
            found.append(f"{roles_text(link.roles)} worker {link.name} gets no requests: it {link.mismatch}")
        elif link.load.silent_stores:
            nodes = ", ".join(link.load.silent_stores)
            found.append(f"{roles_text(link.roles)} worker {link.name} gets no answer from store nodes: {nodes}")
    return found


def _kv_dtype(layout: types_pb2.BlockLayout) -> str:
    """The KV format; where prompts come converted, with what they were computed in: `int8<bfloat16`."""
    return f"{layout.dtype}<{layout.source_dtype}" if layout.source_dtype else layout.dtype
