"""Streams of matches whose clients leave."""

from __future__ import annotations

import asyncio
import contextlib

import grpc.aio

from services.kvstore.servicer import Context, MatchStreams
from shared.rpc.pb.tandem.v1 import kvstore_pb2, kvstore_pb2_grpc
from tests.waiting import DEADLINE_S


async def test_an_answer_whose_client_has_left_is_dropped() -> None:
    asked = asyncio.Event()
    ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

    async def match(_call: kvstore_pb2.MatchCall) -> kvstore_pb2.MatchResponse:
        asked.set()
        with contextlib.suppress(asyncio.CancelledError):  # as redis-py may, that swallows one that comes too late
            await asyncio.Event().wait()
        return kvstore_pb2.MatchResponse()

    class Store(kvstore_pb2_grpc.KVStoreServiceServicer):
        async def MatchStream(self, _calls: object, context: Context) -> None:  # type: ignore[override]  # noqa: N802
            try:
                await MatchStreams(match).serve(context)
            except BaseException as error:
                ended.set_result(error)
                raise
            ended.set_result(None)

    server = grpc.aio.server()
    kvstore_pb2_grpc.add_KVStoreServiceServicer_to_server(Store(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(DEADLINE_S):
        stream = kvstore_pb2_grpc.KVStoreServiceStub(channel).MatchStream()
        await stream.write(kvstore_pb2.MatchCall(request=kvstore_pb2.MatchRequest()))
        await asked.wait()
        stream.cancel()
        assert isinstance(await ended, asyncio.CancelledError)
    await server.stop(None)
