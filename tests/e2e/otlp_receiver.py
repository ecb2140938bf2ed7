"""An OTLP receiver: `python -m tests.e2e.otlp_receiver FILE` takes exports by gRPC and by HTTP and appends each span to
FILE as a JSON line. It prints its two ports. It imports no part of Tandem."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def _lines(request: ExportTraceServiceRequest, headers: dict[str, str]) -> str:
    lines = ""
    for group in request.resource_spans:
        resource = {pair.key: _value(pair.value) for pair in group.resource.attributes}
        for scope in group.instrumentation_library_spans:
            for span in scope.spans:
                found = {
                    "name": span.name,
                    "service": resource["service.name"],
                    "instance": resource["service.instance.id"],
                    "trace": span.trace_id.hex(),
                    "id": span.span_id.hex(),
                    "parent": span.parent_span_id.hex(),
                    "began": span.start_time_unix_nano / 1e9,
                    "ended": span.end_time_unix_nano / 1e9,
                    "kind": span.kind,
                    "attributes": {pair.key: _value(pair.value) for pair in span.attributes},
                    "events": [(event.name, event.time_unix_nano / 1e9) for event in span.events],
                    "links": [link.span_id.hex() for link in span.links],
                    "error": span.status.message if span.status.code == 2 else None,
                    "headers": headers,
                }
                lines += json.dumps(found) + "\n"
    return lines


async def _serve(path: Path) -> None:
    writing = threading.Lock()

    def take(request: ExportTraceServiceRequest, headers: dict[str, str]) -> None:
        with writing, path.open("a") as file:
            file.write(_lines(request, headers))

    async def export(request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
        take(request, {key: value for key, value in context.invocation_metadata() if isinstance(value, str)})
        return ExportTraceServiceResponse()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            is_right = self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            if is_right:
                take(ExportTraceServiceRequest.FromString(body), {k.lower(): v for k, v in self.headers.items()})
            self.send_response(200 if is_right else 400)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing: the test looks at the file."""

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(
        export, ExportTraceServiceRequest.FromString, ExportTraceServiceResponse.SerializeToString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Export": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    http = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    print(port, http.server_port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
