"""What the planner knows of the release's Pods and Deployments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from shared.address import Address
from shared.kubernetes.pod_fields import named_ports, ready_condition

COMPONENT = "app.kubernetes.io/component"
INSTANCE = "app.kubernetes.io/instance"
POOL = "tandem-llm.io/pool"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""Annotation by which a ReplicaSet that shrinks deletes Pods, those with the least number first."""
VICTIM_COST = "-1000"
FIRST_VICTIM_COST = "-2000"
"""Of one that has nothing left to do, while others that are to go have: a ReplicaSet must not take those for it."""
DRAINED_SINCE = "tandem-llm.io/draining-since"
"""Seconds since the epoch at which a planner began to drain the Pod: a later leader continues the drain."""


@dataclass(frozen=True, slots=True)
class Pod:
    """One Pod."""

    name: str
    component: str
    pool: str
    """Pool of a worker, else empty."""
    ip: str
    ports: Mapping[str, int]
    """Container ports by name."""
    ready_since_s: float | None
    """Seconds since the epoch; None: not ready."""
    ending: bool
    drained_since_s: float | None
    started: bool = False
    """Its containers have started: one that drains has, and is not ready."""

    @property
    def ready(self) -> bool:
        """It serves, and is not being deleted."""
        return self.ready_since_s is not None and not self.ending

    @property
    def victim(self) -> bool:
        """A planner has chosen it to go."""
        return self.drained_since_s is not None and not self.ending

    def address(self, port: str) -> str:
        """host:port, empty while it has none."""
        if not self.ip or port not in self.ports:
            return ""
        return str(Address(self.ip, self.ports[port]))


def pod_of(content: Mapping[str, Any]) -> Pod | None:
    """From the API server's JSON; None for one that has ended, which holds nothing any more."""
    meta, status = content["metadata"], content.get("status") or {}
    if status.get("phase") in ("Succeeded", "Failed"):
        return None
    labels, notes = meta.get("labels") or {}, meta.get("annotations") or {}
    ready = ready_condition(content)
    return Pod(
        name=meta["name"],
        component=labels.get(COMPONENT, ""),
        pool=labels.get(POOL, ""),
        ip=status.get("podIP") or "",
        ports=named_ports(content),
        ready_since_s=_epoch_s(ready.get("lastTransitionTime")) if ready is not None else None,
        ending=bool(meta.get("deletionTimestamp")),
        drained_since_s=_number(notes.get(DRAINED_SINCE)),
        started=any(container.get("started") for container in status.get("containerStatuses") or ()),
    )


def _epoch_s(text: str | None) -> float:
    return datetime.fromisoformat(text).timestamp() if text else 0.0


def _number(text: str | None) -> float | None:
    """An annotation that another client has spoilt counts as drained long ago."""
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        return 0.0
