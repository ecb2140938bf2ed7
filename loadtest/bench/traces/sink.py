"""`python -m loadtest.bench.traces.sink`: an OpenTelemetry collector that counts what it gets and keeps nothing.

A process as in shared/process.py: its ready event names the address of its OTLP/gRPC port.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import grpc
import grpc.aio

from shared.process import run_process

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


class Sink:
    """Implements `shared.process.Service`."""

    endpoints: Mapping[str, str] = {}

    def __init__(self) -> None:
        self.address = ""
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listens on any free port."""
        server = grpc.aio.server()
        handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(_take)  # bytes in, bytes out
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Export": handler}),))
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self._server = server

    async def close(self) -> None:
        """Ends the server."""
        if self._server is not None:
            await self._server.stop(0.0)


async def _take(_request: bytes, _context: Any) -> bytes:
    return b""


async def _start() -> Sink:
    sink = Sink()
    await sink.start()
    return sink


if __name__ == "__main__":
    sys.exit(run_process("sink", _start))
