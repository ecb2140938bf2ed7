"""Addresses are checked before anything starts, and a reserved one is the child's alone."""

from __future__ import annotations

import socket

import pytest

from services.local.places import check_free, reserved_address
from shared.errors import ConfigError
from shared.rpc.server import RpcServer


def test_a_taken_port_is_found_before_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        with pytest.raises(ConfigError, match="in use") as caught:
            check_free(f"127.0.0.1:{other.getsockname()[1]}", "grpc")
        assert caught.value.field == "grpc"


def test_an_unknown_host_is_found_before_the_start() -> None:
    with pytest.raises(ConfigError, match="not a host"):
        check_free("no such host:0", "http")


async def test_a_reserved_address_goes_to_the_server_that_names_it_and_to_nobody_else() -> None:
    with reserved_address() as address:
        port = int(address.rpartition(":")[2])
        others = [socket.create_server(("127.0.0.1", 0)) for _ in range(200)]
        assert port not in {other.getsockname()[1] for other in others}
        for other in others:
            other.close()
        server = RpcServer(address, lambda _: None, ())
        await server.start()
        assert server.address == address
        await server.stop()
