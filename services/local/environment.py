"""What the processes of a local cluster get by their environment: what nobody else on the machine should read."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

KEY_BYTES = 32


def cluster_environment() -> Mapping[str, str]:
    """For every process of one cluster, also where it is started again: a fleet key of its own, and UCX on loopback,
    since nobody else is to reach it. Unlike flags, an environment shows to its own user alone."""
    key = secrets.token_hex(KEY_BYTES)
    return {
        "TANDEM_WORKER_FLEET_KEY": key,
        "TANDEM_KVSTORE_FLEET_KEY": key,
        "TANDEM_ROUTER_FLEET_KEY": key,
        "UCX_NET_DEVICES": "lo",
    }
