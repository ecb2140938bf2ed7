"""The components that a preflight can check for."""

from __future__ import annotations

from enum import StrEnum


class Component(StrEnum):
    """A component that would run on the machine."""

    WORKER = "worker"
    ROUTER = "router"
    KVSTORE = "kvstore"
    ALL = "all"
    """All components, as `tandem serve` starts them."""
