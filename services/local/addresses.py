"""host:port addresses on this machine: checked before anything slow starts, and reserved."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

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
            raise ConfigError(
                f"cannot listen on {address} ({field}): {error.strerror}", field=field, value=address
            ) from error


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
