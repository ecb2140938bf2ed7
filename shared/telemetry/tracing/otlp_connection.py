"""The connection to an OpenTelemetry collector: gRPC, or HTTP with protobuf bodies."""

from __future__ import annotations

import asyncio
import http.client
import ssl
from typing import Protocol
from urllib.parse import unquote, urlsplit

import grpc
import grpc.aio

from shared.errors import ConfigError
from shared.telemetry.tracing.settings import TracesSettings

EXPORT_TIMEOUT_S = 5.0
_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_PATH = "/v1/traces"


class CollectorError(Exception):
    """An export did not succeed; the message says why."""


class Collector(Protocol):
    """Takes serialized ExportTraceServiceRequests, one at a time."""

    async def export(self, request: bytes) -> None:
        """Returns once the collector has it. Raises CollectorError, within EXPORT_TIMEOUT_S."""

    async def close(self) -> None:
        """Ends the connection; idempotent."""


def collector_of(settings: TracesSettings) -> Collector:
    """The one that the settings name; connects on first use. Raises ConfigError for a certificate that cannot be
    read."""
    return HttpCollector(settings) if settings.speaks_http else GrpcCollector(settings)


class GrpcCollector:
    """Over a channel that reconnects by itself."""

    def __init__(self, settings: TracesSettings) -> None:
        parts = urlsplit(settings.endpoint)
        is_secure = parts.scheme == "https"
        self._target = f"{_host(parts.hostname)}:{parts.port or (443 if is_secure else 4317)}"
        self._metadata = tuple((name.lower(), value) for name, value in _headers(settings).items())
        self._credentials = grpc.ssl_channel_credentials(_authorities(settings)) if is_secure else None
        self._channel: grpc.aio.Channel | None = None

    async def export(self, request: bytes) -> None:
        """See `Collector`."""
        if self._channel is None:
            credentials = self._credentials
            self._channel = (
                grpc.aio.insecure_channel(self._target)
                if credentials is None
                else grpc.aio.secure_channel(self._target, credentials)
            )
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(_EXPORT)  # bytes in, bytes out
        try:
            await call(request, timeout=EXPORT_TIMEOUT_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise CollectorError(f"{error.code().name}: {error.details()}") from error

    async def close(self) -> None:
        """See `Collector`."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


class HttpCollector:
    """A connection for each export, in a thread: exports are at most one a second."""

    def __init__(self, settings: TracesSettings) -> None:
        parts = urlsplit(settings.endpoint)
        self._is_secure = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._is_secure else 80)
        self._path = parts.path if parts.path.strip("/") else _PATH
        self._headers = {**_headers(settings), "content-type": "application/x-protobuf"}
        authorities = _authorities(settings)
        self._tls = None
        if self._is_secure:
            self._tls = ssl.create_default_context(cadata=authorities.decode() if authorities else None)

    async def export(self, request: bytes) -> None:
        """See `Collector`."""
        await asyncio.to_thread(self._post, request)

    async def close(self) -> None:
        """See `Collector`."""

    def _post(self, body: bytes) -> None:
        connection = (
            http.client.HTTPSConnection(self._host, self._port, timeout=EXPORT_TIMEOUT_S, context=self._tls)
            if self._is_secure
            else http.client.HTTPConnection(self._host, self._port, timeout=EXPORT_TIMEOUT_S)
        )
        try:
            connection.request("POST", self._path, body, self._headers)
            response = connection.getresponse()
            response.read()
        except (OSError, http.client.HTTPException) as error:
            raise CollectorError(str(error) or type(error).__name__) from error
        finally:
            connection.close()
        if response.status >= 300:
            raise CollectorError(f"HTTP {response.status} {response.reason}")


def _host(name: str | None) -> str:
    return f"[{name}]" if name and ":" in name else name or ""


def _headers(settings: TracesSettings) -> dict[str, str]:
    pairs = (item.partition("=") for item in settings.headers.get_secret_value().split(",") if item)
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs}


def _authorities(settings: TracesSettings) -> bytes | None:
    if settings.certificate is None:
        return None
    try:
        return settings.certificate.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"traces.certificate: cannot read {settings.certificate}: {error.strerror}", field="traces.certificate"
        ) from error
