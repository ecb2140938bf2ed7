"""Addresses and CPUs of the parts of a local cluster."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

from services.local.addresses import reserved_address

INDEX = "valkey"
"""The part's name of the server behind the index."""


class Places(Protocol):
    """A place for each part by its name. A part that is started again has the same place."""

    on_loopback: bool
    """Whether all places are on this host's loopback."""

    def reserve_index(self) -> str:
        """As `reserve`, for the server behind the index; empty: it listens on a unix socket alone."""

    def reserve(self, part: str, bind: str = "127.0.0.1:0") -> str:
        """host:port for the part, kept for it until `close()`: `bind`, with a port where it names none, or an address
        of the part's place in its stead. Raises OSError where `bind` is taken."""

    def command(self, part: str, command: Sequence[str]) -> Sequence[str]:
        """Runs the part at its place. The process that this starts becomes the part itself: same pid."""

    def close(self) -> None:
        """Gives the addresses back. Twice is fine."""


class ThisHost:
    """Every part in the launcher's own network. Implements `Places`."""

    on_loopback = True

    def __init__(self) -> None:
        self._reserved = ExitStack()

    def reserve_index(self) -> str:
        """See `Places`."""
        return ""

    def reserve(self, part: str, bind: str = "127.0.0.1:0") -> str:  # noqa: ARG002 - one place for all
        """See `Places`."""
        return self._reserved.enter_context(reserved_address(bind))

    def command(self, part: str, command: Sequence[str]) -> Sequence[str]:  # noqa: ARG002
        """See `Places`."""
        return command

    def close(self) -> None:
        """See `Places`."""
        self._reserved.close()
