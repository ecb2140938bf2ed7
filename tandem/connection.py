"""How a client's channels are opened: TLS, key, and how soon a silent router is noticed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from shared.errors import ConfigError

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

ChannelOptions = Sequence[tuple[str, str | int]]

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    # A router that hangs, or whose host is gone, is given up after about 5 s; a shorter stall is only a pause.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    # The calls are tried anew by this package alone, which knows what came already.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # also the time-out of one connection attempt
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


@dataclass(frozen=True, slots=True)
class ClientTls:
    """TLS to the routers, files in PEM."""

    ca: Path | str | None = None
    """The authority that signed the routers' certificates; none = the system's."""
    cert: Path | str | None = None
    """The client's own certificate, where the routers ask for one; see `key`."""
    key: Path | str | None = None
    """The private key of `cert`."""
    server_name: str = ""
    """Name that the routers' certificates have, expected in place of the address; empty = the address."""

    @property
    def channel_options(self) -> ChannelOptions:
        """CHANNEL_OPTIONS, with the name to expect."""
        named = (("grpc.ssl_target_name_override", self.server_name),) if self.server_name else ()
        return (*CHANNEL_OPTIONS, *named)

    def credentials(self) -> grpc.ChannelCredentials:
        """For channels. Raises ConfigError (`tls`) for a file that cannot be read, or a certificate without a key."""
        if (self.cert is None) != (self.key is None):
            raise ConfigError("tls: cert and key go together", field="tls")
        try:
            files = (self.ca, self.key, self.cert)
            ca, key, cert = (None if file is None else Path(file).read_bytes() for file in files)
        except OSError as error:
            raise ConfigError(f"tls: {error.filename}: {error.strerror}", field="tls") from error
        return grpc.ssl_channel_credentials(ca, key, cert)


def key_metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    """The API key's entry; none for an empty one. Raises ConfigError (`api_key`)."""
    if not api_key:
        return ()
    if not api_key.isascii() or not api_key.isprintable():
        raise ConfigError("api_key must be printable ASCII", field="api_key")
    return (("authorization", f"Bearer {api_key}"),)
