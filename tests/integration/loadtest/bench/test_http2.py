"""The benchmark's own reader of gRPC streams, against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from loadtest.bench.router.http2 import Connection

DEADLINE_S = 60.0


async def serve(request: bytes, context: grpc.aio.ServicerContext) -> None:
    """As many messages as the request has bytes, each as long as all before it and more; "fail" breaks the answer."""
    if request.startswith(b"fail"):
        await context.write(b"some")
        await context.abort(grpc.StatusCode.INTERNAL, "broken")
    for number in range(len(request)):
        await context.write(bytes([number % 256]) * (number * number))


@pytest.fixture
async def connection() -> AsyncIterator[Connection]:
    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(serve, None, None)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Stream", {"Read": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    opened = await Connection.open(f"127.0.0.1:{port}")
    yield opened
    opened.close()
    await server.stop(0)


async def read(connection: Connection, request: bytes) -> list[bytes]:
    messages: list[bytes] = []
    async with asyncio.timeout(DEADLINE_S):
        await connection.call("/test.Stream/Read", request, messages.append)
    return messages


async def test_messages_of_any_length_come_whole_and_in_order(connection: Connection) -> None:
    expected = [bytes([number % 256]) * (number * number) for number in range(300)]
    assert await read(connection, b"x" * 300) == expected


async def test_many_calls_at_once_wait_for_the_servers_window(connection: Connection) -> None:
    answers = await asyncio.gather(*(read(connection, b"fail" + bytes(1_000)) for _ in range(300)))
    assert answers == [[b"some"]] * 300


async def test_a_call_that_fails_ends_with_what_came_before(connection: Connection) -> None:
    assert await read(connection, b"fail") == [b"some"]
    assert await read(connection, b"ab") == [b"", b"\x01"]


async def test_a_server_that_goes_ends_its_calls(connection: Connection) -> None:
    reading = asyncio.create_task(read(connection, b"x" * 2_000))
    await asyncio.sleep(0)
    connection.close()
    assert len(await reading) < 2_000
