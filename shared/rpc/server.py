"""Starting gRPC servers the same way everywhere: health, reflection, message limits, keepalive, typed port errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from shared.address import Address
from shared.errors import ConfigError
from shared.rpc.tls import NamedCredentials, as_they_are

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
KEEPALIVE_MS = 2_000
"""Between two pings of a silent connection."""
PING_TIMEOUT_MS = 6_000
"""For the answer. Longer than a router's `give_up_after_s`: the heartbeats of sessions come first, and a process that
was stopped for a few seconds keeps its connections."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Workers and stores are reached directly, whatever proxy the environment names for the world outside.
    ("grpc.enable_http_proxy", 0),
    # A silent host (power, cable) shows no FIN: pings find it within KEEPALIVE_MS + PING_TIMEOUT_MS. Without the second
    # of the two time-outs gRPC waits for the answer to any ping for a minute.
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted worker is found again within seconds, not after gRPC's default backoff of minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.keepalive_permit_without_calls", 1),
    # With SO_REUSEPORT a second server on a taken port would silently share it.
    ("grpc.so_reuseport", 0),
)


class GenericHandlers:
    """Where generated code registers a service: as a generic handler, and not once more by the names of its methods.

    With methods registered by name gRPC's server keeps a task for each of them, and waits anew for all of these tasks
    with every call that comes: half as much Python again as it runs for a call otherwise.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Adds a service."""
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, object]) -> None:
        """Adds nothing: these are the methods of the generic handler."""


class RpcServer:
    """One gRPC server with health and reflection. `start()` returns once it serves; `stop()` twice is fine."""

    def __init__(
        self,
        bind: str,
        register: Callable[[grpc.aio.Server], None],
        service_names: Sequence[str],
        *,
        options: Sequence[tuple[str, int]] = (),
        max_calls: int | None = None,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        """`bind` is host:port, port 0 = any free one; `register` adds the servicers; names are full proto names.
        `options` replace those of SERVER_OPTIONS; calls beyond `max_calls` at once get RESOURCE_EXHAUSTED.
        With `credentials` it speaks TLS alone."""
        self._bind = bind
        self._options = tuple({**dict(SERVER_OPTIONS), **dict(options)}.items())
        self._max_calls = max_calls
        self._credentials = credentials
        self._register = register
        self._service_names = tuple(service_names)
        self._server: grpc.aio.Server | None = None
        self._health: HealthServicer | None = None
        self.address = ""
        """host:port that the server listens on, once started."""
        self.serving = False
        """What the health service answers for the server as a whole."""

    async def start(self) -> None:
        """Binds and serves; raises ConfigError (field `bind`) when the port is taken or the host unknown."""
        server = grpc.aio.server(options=self._options, maximum_concurrent_rpcs=self._max_calls)
        generic = cast("grpc.aio.Server", GenericHandlers(server))
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, generic)
        self._register(generic)
        names = (*self._service_names, reflection.SERVICE_NAME, "grpc.health.v1.Health")
        reflection.enable_server_reflection(names, generic)
        try:
            if self._credentials is None:
                port = server.add_insecure_port(self._bind)
            else:
                port = server.add_secure_port(self._bind, self._credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {self._bind}: the port is in use or the address is not this machine's",
                field="bind",
                value=self._bind,
            ) from error
        await server.start()
        self._server = server
        self.address = str(replace(Address.parse(self._bind, "bind"), port=port))

    async def set_serving(self, serving: bool) -> None:
        """What the health service answers for the server as a whole and for each service."""
        if self._health is None:
            return
        self.serving = serving
        for name in ("", *self._service_names):
            await self.set_health(name, serving=serving)

    async def set_health(self, name: str, *, serving: bool) -> None:
        """What the health service answers for one name, which need not be a service's. After `start`."""
        assert self._health is not None, "not started"
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(name, status)

    async def stop(self, grace_s: float = 1.0) -> None:
        """Refuses new calls at once, gives running ones `grace_s` seconds, then ends them."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(grace_s)


def channel(address: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """A client channel with the keepalive, limits and reconnect backoff that the servers expect; with `credentials` it
    speaks TLS alone."""
    credentials = as_they_are(credentials)
    if isinstance(credentials, NamedCredentials):
        expected = (("grpc.ssl_target_name_override", credentials.server_name),)
        return grpc.aio.secure_channel(address, credentials, options=(*CHANNEL_OPTIONS, *expected))
    if credentials is not None:
        return grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
