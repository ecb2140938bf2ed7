"""host:port addresses on this machine: checked before anything slow starts, and reserved."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

from shared.errors import ConfigError


def split_address(address: str, field: str) -> tuple[str, int]:
    """("127.0.0.1", 8000) of "127.0.0.1:8000"; raises ConfigError naming `field`."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(
            f"{field} must be host:port with a port of 0 to 65535, got {address!r}",
            field=field,
            value=address,
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def check_free(address: str, field: str) -> None:
    """Raises ConfigError naming `field` where nothing can listen on `address`; port 0 always passes."""
    host, port = split_address(address, field)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"{field}: {host!r} is not a host that is known here", field=field) from error
    with closing(socket.socket(family, kind, protocol)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(where)
            probe.listen()
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {address} ({field}): {error.strerror}", field=field, value=address
            ) from error


@contextmanager
def reserved_address() -> Iterator[str]:
    """A free 127.0.0.1:port, reserved for a child until the block ends.

    The port is bound but does not listen: the kernel gives it to no process that asks for any free port, while a
    child that asks for exactly this one gets it (both sockets allow reuse, as gRPC's do). So a child's address can be
    passed to others before the child is up.
    """
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"
