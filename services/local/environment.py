"""The environment of a local cluster's processes: secrets, which other users of the machine must not read."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

KEY_BYTES = 32


def cluster_environment(*, loopback: bool) -> Mapping[str, str]:
    """For every process of one cluster, also where it is started again: a fleet key of its own and, where all are on
    `loopback`, UCX there alone, since no other host needs to reach it. Unlike flags, an environment shows to its own
    user alone."""
    key = secrets.token_hex(KEY_BYTES)
    keys = {f"TANDEM_{service}_FLEET_KEY": key for service in ("WORKER", "KVSTORE", "ROUTER")}
    return {**keys, "UCX_NET_DEVICES": "lo"} if loopback else keys
