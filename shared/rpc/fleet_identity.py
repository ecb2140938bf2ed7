"""Authentication between services: by certificate, or by a token from the fleet's key."""

from __future__ import annotations

import hmac
from typing import Any

import grpc.aio

from shared.errors import Unauthenticated

METADATA_KEY = "tandem-fleet-token"


def fleet_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """What a client of the fleet sends with a guarded call; nothing without a token."""
    return ((METADATA_KEY, token),) if token else ()


class FleetGuard:
    """Admits calls from processes of the fleet. In a fleet without key and certificates all calls are admitted."""

    def __init__(self, token: str = "") -> None:
        """`token`: `FleetKey.token()`; empty = the fleet has no key."""
        self._token = token

    def __repr__(self) -> str:
        return "FleetGuard()"

    def check(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Raises Unauthenticated for a caller with neither the token nor a client certificate."""
        if not self._token or context.peer_identities():
            return
        metadata = dict(context.invocation_metadata() or ())
        shown = metadata.get(METADATA_KEY, "")
        if not hmac.compare_digest(str(shown).encode(), self._token.encode()):
            raise Unauthenticated("only services with the fleet's key may call this", field="fleet_key")
