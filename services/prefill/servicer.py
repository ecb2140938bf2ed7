"""The gRPC face of a prefill worker, and its start."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from services.prefill.worker import PrefillWorker
from services.worker.service import start_worker
from services.worker.session_server import SessionServer
from services.worker.settings import WorkerSettings
from shared.process import Service
from shared.rpc.pb.tandem.v1 import prefill_pb2, prefill_pb2_grpc


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """The gRPC face of the worker."""

    def __init__(self, sessions: SessionServer[prefill_pb2.PrefillCommand, prefill_pb2.PrefillEvent]) -> None:
        self._sessions = sessions

    async def Session(  # type: ignore[override]  # noqa: N802 - gRPC's name; grpc.aio also takes a coroutine
        self,
        request_iterator: AsyncIterator[prefill_pb2.PrefillCommand],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """See proto/tandem/v1/prefill.proto."""
        await self._sessions.serve(context)


async def start(settings: WorkerSettings) -> Service:
    """Starts the worker that the settings describe."""
    return await start_worker(
        settings,
        PrefillWorker,
        lambda server, sessions: prefill_pb2_grpc.add_PrefillServiceServicer_to_server(
            PrefillServicer(sessions), server
        ),
        "tandem.v1.PrefillService",
    )
