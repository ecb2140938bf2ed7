"""The cluster as one router sees it."""

from __future__ import annotations

from services.router.dispatch.dispatcher import Dispatcher
from services.router.dispatch.prefix_lookup import PrefixLookup
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
) -> inference_pb2.ClusterStatus:
    """One model's part of `tandem status` and `GET /status`, without what the router's settings say."""
    reason = dispatcher.not_ready_reason()
    counts = metrics.counts
    return inference_pb2.ClusterStatus(
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


def worker_status(link: WorkerLink) -> inference_pb2.WorkerStatus:
    """One worker in this router's view."""
    worker = link.welcome.worker if link.welcome is not None else types_pb2.WorkerId(name=link.name)
    load = types_pb2.Load()
    load.CopyFrom(link.load)
    load.draining |= link.retired
    return inference_pb2.WorkerStatus(
        worker=worker,
        role=role_to_proto(holder_role(link.roles)),
        roles=link.load.roles or roles_to_proto(link.roles),
        address=link.address,
        connected=link.connected,
        load=load if link.connected else None,
        num_requests=link.num_requests,
        kernels=link.welcome.kernels if link.welcome is not None else "",
        dtype=link.welcome.dtype if link.welcome is not None else "",
        pool_bytes=link.welcome.pool_bytes if link.welcome is not None else 0,
        tp=link.welcome.tp if link.welcome is not None else 0,
        pp=link.welcome.pp if link.welcome is not None else 0,
        ep=link.welcome.ep if link.welcome is not None else 0,
    )


def _failures(fleet: Fleet) -> list[str]:
    """Failures of the discovery, of the workers' sessions and of their store nodes."""
    found = [fleet.discovery_failure] if fleet.discovery_failure else []
    for link in fleet.links:
        if not link.connected:
            reason = f": {link.mismatch}" if link.mismatch else ""
            found.append(f"{roles_text(link.roles)} worker {link.name} is not connected{reason}")
        elif link.load.silent_stores:
            nodes = ", ".join(link.load.silent_stores)
            found.append(f"{roles_text(link.roles)} worker {link.name} gets no answer from store nodes: {nodes}")
    return found
