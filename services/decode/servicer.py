"""The gRPC face of a decode worker, and its start."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from services.decode.worker import DecodeWorker
from services.worker.service import start_worker
from services.worker.session_server import SessionServer
from services.worker.settings import WorkerSettings
from shared.process import Service
from shared.rpc.pb.tandem.v1 import decode_pb2, decode_pb2_grpc


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """The gRPC face of the worker."""

    def __init__(self, sessions: SessionServer[decode_pb2.DecodeCommand, decode_pb2.DecodeEvent]) -> None:
        self._sessions = sessions

    async def Session(  # type: ignore[override]  # noqa: N802 - gRPC's name; grpc.aio also takes a coroutine
        self,
        request_iterator: AsyncIterator[decode_pb2.DecodeCommand],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """See proto/tandem/v1/decode.proto."""
        await self._sessions.serve(context)


async def start(settings: WorkerSettings) -> Service:
    """Starts the worker that the settings describe."""
    return await start_worker(
        settings,
        DecodeWorker,
        lambda server, sessions: decode_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(sessions), server),
        "tandem.v1.DecodeService",
    )
