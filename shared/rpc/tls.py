"""TLS of a listener, and mutual TLS between services: files in PEM, read when a service starts."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc
from pydantic import BaseModel, ConfigDict

from shared.errors import ConfigError


class Tls(BaseModel):
    """Certificate, key and authority. Without a certificate everything is in plain text."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    cert: Path | None = None
    """Certificate chain in PEM, with the names and addresses by which others reach this service; none = no TLS."""
    key: Path | None = None
    """Private key of `cert`, PEM without a password."""
    ca: Path | None = None
    """Authority in PEM that the other side's certificate must be signed by."""

    @property
    def enabled(self) -> bool:
        """Whether there is a certificate."""
        return self.cert is not None

    def check(self, setting: str, *, mutual: bool) -> None:
        """Raises ConfigError for a file that is missing or does not fit; `mutual`: all three or none are needed."""
        given = {name for name, file in (("cert", self.cert), ("key", self.key), ("ca", self.ca)) if file is not None}
        needed = {"cert", "key", "ca"} if mutual else {"cert", "key"}
        if given and (missing := sorted(needed - given)):
            field = f"{setting}.{missing[0]}"
            raise ConfigError(f"setting {field} is missing: TLS here needs {', '.join(sorted(needed))}", field=field)
        if self.cert is None or self.key is None:
            return
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            # A key with a password must not ask for it on a terminal.
            context.load_cert_chain(self.cert, self.key, password="")
        except (OSError, ssl.SSLError) as error:
            field = f"{setting}.cert"
            raise ConfigError(f"settings {field} and key: {_reason(error)}", field=field) from error
        if self.ca is not None:
            try:
                context.load_verify_locations(self.ca)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"setting {setting}.ca: {_reason(error)}", field=f"{setting}.ca") from error

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """For a gRPC server, which asks its clients for certificates where `ca` is set; None without TLS. After
        `check`."""
        if self.cert is None or self.key is None:
            return None
        pair = (self.key.read_bytes(), self.cert.read_bytes())
        ca = self.ca.read_bytes() if self.ca is not None else None
        return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """For channels to other services; None without TLS. After `check`."""
        if self.cert is None or self.key is None or self.ca is None:
            return None
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), self.key.read_bytes(), self.cert.read_bytes())


class NamedCredentials(grpc.ChannelCredentials):
    """Credentials of a channel to a service whose certificate has `server_name`, whatever its address is."""

    def __init__(self, credentials: grpc.ChannelCredentials, server_name: str) -> None:
        """The same credentials, with a name for `channel` to expect."""
        super().__init__(credentials._credentials)  # type: ignore[attr-defined]  # which its types do not name
        self.server_name = server_name


class ServiceTls(Tls):
    """Mutual TLS of one service with the others."""

    server_name: str = ""
    """Name that every service's certificate has, expected in place of the address by which it is reached, such as that
    of a Pod. Empty = the address."""

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """As `Tls`, with the name to expect."""
        credentials = super().channel_credentials()
        if credentials is None or not self.server_name:
            return credentials
        return NamedCredentials(credentials, self.server_name)


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"not a usable PEM file ({error.reason or error})"
    return f"{error.strerror}"
