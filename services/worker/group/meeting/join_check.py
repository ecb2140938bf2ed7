"""Admission to a group's rendezvous: a host needs the same release, the fleet's key and a free index.

Both sides prove that they know the key, by a code over the member's hello and the leader's nonce. So neither a recorded
meeting nor one with another leader is of use, and the key itself never travels.
"""

from __future__ import annotations

import hmac
import importlib.metadata
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch

from shared.errors import ConfigError, TandemError, Unauthenticated
from shared.kv.fleet_key import FleetKey
from shared.rpc.pb.tandem.v1 import group_pb2

PROTOCOL = 1
"""Version of the meeting's messages, and of what ranks of one group exchange."""
NONCE_BYTES = 32
HANDSHAKE_S = 10.0
"""From a member's connection until it has joined."""

Side = Literal["leader", "member"]


def own_build() -> str:
    """What must be the same on all hosts: the release, PROTOCOL of what ranks exchange, and torch's."""
    return f"tandem {importlib.metadata.version('tandem-llm')}, group {PROTOCOL}, torch {torch.__version__}"


def prove(key: FleetKey | None, side: Side, hello: group_pb2.MemberHello, leader_nonce: bytes) -> bytes:
    """One side's proof that it knows the key; empty without one."""
    if key is None:
        return b""
    return key.prove(b"\0".join((side.encode(), hello.SerializeToString(deterministic=True), leader_nonce)))


def check_proof(
    key: FleetKey | None, side: Side, hello: group_pb2.MemberHello, leader_nonce: bytes, shown: bytes
) -> None:
    """Raises Unauthenticated where that side does not know the key."""
    if not hmac.compare_digest(prove(key, side, hello, leader_nonce), shown):
        raise Unauthenticated(f"the group's {side} does not have this host's fleet_key", field="fleet_key")


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Settings that must be equal on all hosts of a group."""

    num_hosts: int
    tensor: int
    pipeline: int

    def check(self, hello: group_pb2.MemberHello, present: Collection[int]) -> None:
        """Raises ConfigError for a member that is not of this group, with both values; `present`: indices that are
        taken."""
        for field, own, theirs in (
            ("build", own_build(), hello.build),
            ("group_hosts", self.num_hosts, hello.num_hosts),
            ("tp", self.tensor, hello.tp),
            ("pp", self.pipeline, hello.pp),
        ):
            if own != theirs:
                raise ConfigError(f"{field} is {theirs} on host {hello.host_index}, {own} on the leader's", field=field)
        if not 0 < hello.host_index < self.num_hosts:
            raise _bad_index(f"is {hello.host_index}, and members are 1 to {self.num_hosts - 1}")
        if hello.host_index in present:
            raise _bad_index(f"{hello.host_index} is taken: another host of this group has it")
        if len(hello.nonce) != NONCE_BYTES:
            raise Unauthenticated(f"a nonce of {len(hello.nonce)} bytes, not {NONCE_BYTES}", field="fleet_key")


def _bad_index(reason: str) -> TandemError:
    return ConfigError(f"group_host_index {reason}", field="group_host_index")
