"""Addresses of the parts of a local cluster, and the network that each part runs in."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Protocol

from shared.address import Address
from shared.errors import ConfigError


def check_free(address: str, field: str) -> None:
    """Raises ConfigError naming `field` where nothing can listen on `address`; port 0 always passes."""
    asked = Address.parse(address, field)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(asked.host, asked.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"{field}: {asked.host!r} is not a host that is known here", field=field) from error
    with closing(socket.socket(family, kind, protocol)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(where)
            probe.listen()
        except OSError as error:
            raise taken(address, field, error) from error


def taken(address: str, field: str, error: OSError) -> ConfigError:
    """The error for an address on which nothing can listen."""
    return ConfigError(f"cannot listen on {address} ({field}): {error.strerror}", field=field, value=address)


@contextmanager
def reserved_address(bind: str = "127.0.0.1:0") -> Iterator[str]:
    """`bind` as host:port, with a free port where it names none, reserved for a child until the block ends.

    The port is bound but does not listen: the kernel gives it to no process that asks for any free port, while a
    child that asks for exactly this one gets it (both sockets allow reuse, as gRPC's do). So a child's address can be
    passed to others before the child is up, and is still its own when it is started again. Raises OSError.
    """
    asked = Address.parse(bind, "bind")
    family, kind, protocol, _, where = socket.getaddrinfo(asked.host, asked.port, type=socket.SOCK_STREAM)[0]
    with closing(socket.socket(family, kind, protocol)) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(where)
        yield str(replace(asked, port=held.getsockname()[1]))


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
