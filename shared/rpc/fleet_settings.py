"""Settings by which a fleet's services trust each other."""

from __future__ import annotations

from pydantic import SecretStr

from shared.rpc.tls import ServiceTls
from shared.settings.group import SettingGroup


class FleetSettings(SettingGroup):
    """Settings of every service that calls another or is called by one."""

    tls: ServiceTls = ServiceTls()
    """Mutual TLS of the gRPC calls between services: cert, key and ca, in all of them or in none. It does not cover the
    blocks, which travel over UCX: see fleet_key."""
    fleet_key: SecretStr = SecretStr("")
    """Secret of the fleet, 16 bytes or more, the same in all of its services; best given by the environment. With one,
    blocks are sent to addresses alone that the fleet has signed and taken with its tags alone, and only
    the fleet's services may fetch blocks, flush caches or drain a worker. Empty = none of that."""
