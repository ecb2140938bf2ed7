"""The cluster over all models behind one router."""

from __future__ import annotations

from collections.abc import Sequence

from services.router.served_model import ServedModel
from shared.rpc.pb.tandem.v1 import inference_pb2

_SUMS = (
    "queue_len",
    "queue_limit",
    "num_running",
    "num_finished",
    "num_failed",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_store_errors",
)
"""Counts of a ClusterStatus."""


def joined_status(models: Sequence[ServedModel], cache_failures: Sequence[str]) -> inference_pb2.ClusterStatus:
    """The whole cluster: one model's status, or the sums over several and each one's own line in `models`."""
    parts = [model.status() for model in models]
    whole = parts[0]
    whole.degraded[:] = [*cache_failures, *whole.degraded]
    if len(models) == 1:
        return whole
    for model, part in zip(models, parts, strict=True):
        for worker in part.workers:
            worker.model = model.name
    lines = [_line(model, part) for model, part in zip(models, parts, strict=True)]
    for part in parts[1:]:
        whole.workers.extend(part.workers)
        whole.degraded.extend(part.degraded)
        for field in _SUMS:
            setattr(whole, field, getattr(whole, field) + getattr(part, field))
        whole.store_available = whole.store_available and part.store_available
    whole.ready = any(line.ready for line in lines)
    whole.not_ready_reason = "" if whole.ready else "; ".join(f"{x.name}: {x.not_ready_reason}" for x in lines)
    whole.degraded.extend(f"model {line.name}: {line.not_ready_reason}" for line in lines if not line.ready)
    whole.models.extend(lines)
    return whole


def _line(model: ServedModel, status: inference_pb2.ClusterStatus) -> inference_pb2.ModelStatus:
    return inference_pb2.ModelStatus(
        name=model.name,
        aliases=model.settings.aliases,
        ready=status.ready,
        not_ready_reason=status.not_ready_reason,
        mode=status.mode,
        max_model_len=model.fleet.max_model_len,
        queue_len=status.queue_len,
        num_running=status.num_running,
    )
