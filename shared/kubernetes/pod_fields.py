"""Reads a Pod as the API server's JSON has it. Imports nothing of the client, which is large."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]


def ready_condition(pod: Json) -> Json | None:
    """The condition of a ready Pod; None while it is not ready."""
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition["type"] == "Ready" and condition["status"] == "True":
            found: Json = condition
            return found
    return None


def named_ports(pod: Json) -> dict[str, int]:
    """The ports of all its containers that have a name; of two by one name the first."""
    ports: dict[str, int] = {}
    for container in pod["spec"]["containers"]:
        for port in container.get("ports") or ():
            if "name" in port:
                ports.setdefault(port["name"], int(port["containerPort"]))
    return ports
