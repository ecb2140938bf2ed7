"""What a preflight is for."""

from __future__ import annotations

from enum import StrEnum


class Component(StrEnum):
    """What would run on the machine."""

    WORKER = "worker"
    ROUTER = "router"
    KVSTORE = "kvstore"
    ALL = "all"
    """All of them, as `tandem up` starts them."""
