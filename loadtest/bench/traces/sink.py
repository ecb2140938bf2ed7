"""`python -m loadtest.bench.traces.sink [FILE]`: an OpenTelemetry collector that keeps nothing, or appends what it
gets to FILE: requests one behind the other, which is how protobuf joins them, so the file is one
ExportTraceServiceRequest.

A process as in shared/process.py: its ready event names the address of its OTLP/gRPC port.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from shared.process import run_process

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


class Sink:
    """Implements `shared.process.Service`."""

    endpoints: Mapping[str, str] = {}

    def __init__(self, out: Path | None) -> None:
        self.address = ""
        self._out = out
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listens on any free port."""
        server = grpc.aio.server()
        handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(self._take)  # bytes, both
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Export": handler}),))
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self._server = server

    async def close(self) -> None:
        """Ends the server."""
        if self._server is not None:
            await self._server.stop(0.0)

    async def _take(self, request: bytes, _context: Any) -> bytes:
        if self._out is not None:
            with self._out.open("ab") as file:
                file.write(request)
        return b""


async def _start() -> Sink:
    sink = Sink(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    await sink.start()
    return sink


if __name__ == "__main__":
    sys.exit(run_process("sink", _start))
