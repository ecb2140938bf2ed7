"""The picker's gRPC face: one stream a request of the gateway's."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc

from services.router.picker.ext_proc_messages import (
    ECHOED,
    body_response,
    destination,
    headers_of,
    headers_response,
    immediate,
    subset_value,
    trailers_response,
)
from services.router.picker.picker import Picker, subset_of
from shared.errors import InvalidRequest, TandemError

logger = logging.getLogger(__name__)

SERVICE_NAME = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVENESS, READINESS = "liveness", "readiness"
"""Names of the endpoint picker protocol for health checks."""
TOO_LARGE_STATUS = 413


class ExternalProcessor(external_processor_pb2_grpc.ExternalProcessorServicer):  # type: ignore[misc]  # has no types
    """Answers with the routers at a request's headers, and lets bodies pass as they come: none is held here."""

    def __init__(self, picker: Picker, max_body_bytes: int, count: Callable[[str], None]) -> None:
        """`count` gets each outcome: picked, or the code of the error that the client gets."""
        self._picker = picker
        self._max_body_bytes = max_body_bytes
        self._count = count

    def register(self, server: grpc.aio.Server) -> None:
        """Adds it to a server."""
        external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(self, server)

    async def Process(  # noqa: N802 - gRPC's name
        self,
        request_iterator: AsyncIterator[ext_proc.ProcessingRequest],
        _: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[ext_proc.ProcessingResponse]:
        """One response a request, until an immediate one ends it."""
        exchange = _Exchange(self._picker, self._max_body_bytes)
        async for request in request_iterator:
            try:
                response = exchange.answer(request)
            except TandemError as error:
                self._count(error.code)
                status = TOO_LARGE_STATUS if isinstance(error, _TooLargeError) else error.http_status
                yield immediate(error, status)
                return
            if exchange.has_just_picked:
                self._count("picked")
            if response is not None:
                yield response


class _TooLargeError(InvalidRequest):
    """The body is longer than a router would read."""


class _Exchange:
    """One HTTP request and its answer."""

    def __init__(self, picker: Picker, max_body_bytes: int) -> None:
        self._picker = picker
        self._max_body_bytes = max_body_bytes
        self._num_body_bytes = 0
        # A proxy that does not say its modes is taken for one in the mode that the picker protocol demands.
        self._echoes_request = self._echoes_response = True
        self.has_just_picked = False

    def answer(self, request: ext_proc.ProcessingRequest) -> ext_proc.ProcessingResponse | None:
        """None for a message of a kind that is not known. Raises TandemError: what the client gets."""
        self.has_just_picked = False
        if request.HasField("protocol_config"):
            self._echoes_request = request.protocol_config.request_body_mode in ECHOED
            self._echoes_response = request.protocol_config.response_body_mode in ECHOED
        kind = request.WhichOneof("request")
        if kind == "request_headers":
            return self._pick(request)
        if kind == "request_body":
            self._count_body(len(request.request_body.body))
            return body_response(kind, request.request_body, echo=self._echoes_request)
        if kind == "response_headers":
            return headers_response(kind)
        if kind == "response_body":
            return body_response(kind, request.response_body, echo=self._echoes_response)
        if kind in ("request_trailers", "response_trailers"):
            return trailers_response(kind)
        return None

    def _pick(self, request: ext_proc.ProcessingRequest) -> ext_proc.ProcessingResponse:
        headers = headers_of(request.request_headers.headers)
        length = headers.get("content-length", "")
        if length.isascii() and length.isdecimal():
            self._check_size(int(length))
        endpoints = self._picker.pick(headers, subset_of(subset_value(request)))
        self.has_just_picked = True
        mutation, metadata = destination(endpoints)
        logger.debug("request %s goes to %s", headers.get("x-request-id", ""), endpoints)
        return headers_response("request_headers", mutation, metadata)

    def _count_body(self, num_bytes: int) -> None:
        self._num_body_bytes += num_bytes
        self._check_size(self._num_body_bytes)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_body_bytes:
            raise _TooLargeError(
                f"the body is longer than {self._max_body_bytes} bytes", field="body", limit=self._max_body_bytes
            )
