"""The picker as the router runs it: the watch of the routers, and a gRPC server of its own."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable

import grpc

from services.router.edge.scheduling import SchedulingHints
from services.router.edge.settings import EdgeSettings
from services.router.edge.tenants.auth import ApiKeys
from services.router.picker.endpoints import EndpointWatch, tls_context
from services.router.picker.ext_proc import LIVENESS, READINESS, SERVICE_NAME, ExternalProcessor
from services.router.picker.picker import Picker
from services.router.picker.settings import PickerSettings
from shared.errors import ConfigError
from shared.rpc.server import RpcServer

VALID_FOR = datetime.timedelta(days=3650)
NAME = "tandem-endpoint-picker"
"""The certificate's."""


def self_signed_credentials() -> grpc.ServerCredentials:
    """TLS of a gRPC server, by a new key and a self-signed certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # for clocks behind ours
        .not_valid_after(now + VALID_FOR)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return grpc.ssl_server_credentials([(pem, certificate.public_bytes(serialization.Encoding.PEM))])


PROBE_INTERVAL_S = 1.0
"""Between two probes of the routers' /readyz. Seconds."""
MESSAGE_SLACK_BYTES = 1 << 20
"""Room of a message beside the body, for headers, metadata and attributes. Bytes."""


class PickerServer:
    """`start()` returns once it serves; health says so once all routers have been looked at. `close()` twice is
    fine."""

    def __init__(
        self,
        settings: PickerSettings,
        edge: EdgeSettings,
        check_room: Callable[[SchedulingHints], None],
        own_port: Callable[[], int],
        count: Callable[[str], None],
    ) -> None:
        """For the arguments see `Picker` and `ExternalProcessor`. Raises ConfigError."""
        settings.tls.check("picker.tls", mutual=False)
        if settings.self_signed and settings.tls.enabled:
            raise ConfigError("picker.self_signed and picker.tls exclude each other", field="picker.self_signed")
        self._watch = EndpointWatch.of(settings.endpoints, PROBE_INTERVAL_S, tls_context(edge.tls))
        picker = Picker(self._watch, ApiKeys.of(edge), check_room, own_port, settings.max_endpoints)
        self._rpc = RpcServer(
            settings.bind,
            ExternalProcessor(picker, edge.max_body_bytes, count).register,
            (SERVICE_NAME, READINESS),
            options=(("grpc.max_receive_message_length", edge.max_body_bytes + MESSAGE_SLACK_BYTES),),
            max_calls=edge.limits.max_grpc_calls,
            credentials=self_signed_credentials() if settings.self_signed else settings.tls.server_credentials(),
        )
        self._ready: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """host:port, once started."""
        return self._rpc.address

    async def start(self) -> None:
        """Raises ConfigError where the port is taken."""
        await self._rpc.start()
        # Without it readiness would be a name that is not known until the first look is over.
        await self._rpc.set_serving(False)
        await self._rpc.set_health(LIVENESS, serving=True)
        self._watch.start()
        self._ready = asyncio.create_task(self._serve_once_looked(), name="picker-ready")

    async def close(self, grace_s: float = 1.0) -> None:
        """Exchanges under way have `grace_s` seconds."""
        if self._ready is not None:
            self._ready.cancel()
            await asyncio.gather(self._ready, return_exceptions=True)
            self._ready = None
        await self._rpc.set_serving(False)
        await self._rpc.stop(grace_s)
        await self._watch.close()

    async def _serve_once_looked(self) -> None:
        await self._watch.looked.wait()
        await self._rpc.set_serving(True)
