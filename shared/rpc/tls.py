"""TLS of a listener, and mutual TLS between services, by files in PEM.

Files are read again when they change: the next connection, in either direction, gets the new certificate, and open ones
stay as they are.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar, cast

import grpc

from shared.errors import ConfigError
from shared.settings.group import SettingGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Tls(SettingGroup):
    """Certificate, key and authority. Without a certificate everything is in plain text."""

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
        if not self.enabled:
            return None
        current = Reread(self, self._server_configuration)

        def changed() -> grpc.ServerCertificateConfiguration | None:
            # gRPC calls this from a thread of its own at each new connection; None = as before.
            before = current.value
            return None if current.fresh() is before else current.value

        # The stubs leave out that a fetcher may return None.
        fetcher = cast("Callable[[], grpc.ServerCertificateConfiguration]", changed)
        return grpc.dynamic_ssl_server_credentials(
            current.value, fetcher, require_client_authentication=self.ca is not None
        )

    def _server_configuration(self) -> grpc.ServerCertificateConfiguration:
        assert self.cert is not None
        assert self.key is not None
        pair = (self.key.read_bytes(), self.cert.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], self.ca.read_bytes() if self.ca is not None else None)

    def server_context(self) -> ssl.SSLContext:
        """For an HTTP server, which asks its clients for certificates where `ca` is set. After `check`, with TLS."""
        current = Reread(self, self._server_context)

        def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = current.fresh()

        context = self._server_context()
        context.sni_callback = choose  # called at each handshake, also where the client names no server
        return context

    def _server_context(self) -> ssl.SSLContext:
        assert self.cert is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert, self.key, password="")
        if self.ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.ca)
        return context

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """For a `Connection` to another service, which follows the files; None without TLS. After `check`."""
        if self.cert is None or self.key is None or self.ca is None:
            return None
        return FollowedCredentials(Reread(self, self._channel_credentials))

    def _channel_credentials(self) -> grpc.ChannelCredentials:
        assert self.cert is not None
        assert self.key is not None
        assert self.ca is not None
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), self.key.read_bytes(), self.cert.read_bytes())


class Reread(Generic[T]):
    """What is made of the files of a `Tls`, made anew when one of them has changed."""

    def __init__(self, tls: Tls, make: Callable[[], T]) -> None:
        """`make` reads the files; raises what it raises."""
        self._tls, self._make = tls, make
        self._stamps = self._refused = self._stat()
        self.value = make()
        """The value that was made last."""

    def fresh(self) -> T:
        """What the files give as they are now; as they were before where the new ones do not fit each other, as in the
        middle of a change. Costs a look at each file's date, and reads them where it is another."""
        try:
            stamps = self._stat()
            if stamps in (self._stamps, self._refused):
                return self.value
            self._refused = stamps  # until they prove good: each change is looked at once
            self._tls.check("tls", mutual=False)
            value = self._make()
            if self._stat() == stamps:  # else they are being written: the next connection looks again
                self._stamps, self.value = stamps, value
                logger.info("%s has changed: new connections use it", self._tls.cert)
        except (OSError, ValueError, ConfigError) as error:
            logger.warning("%s has changed and cannot be used, the certificate before stays: %s", self._tls.cert, error)
        return self.value

    def _stat(self) -> tuple[tuple[int, int, int], ...]:
        found = [file.stat() for file in (self._tls.cert, self._tls.key, self._tls.ca) if file is not None]
        return tuple((each.st_ino, each.st_mtime_ns, each.st_size) for each in found)


class FollowedCredentials(grpc.ChannelCredentials):
    """Credentials of channels, by files that may change: see `as_they_are`."""

    def __init__(self, current: Reread[grpc.ChannelCredentials]) -> None:
        super().__init__(current.value._credentials)  # type: ignore[attr-defined]  # which its types do not name
        self.current = current


def as_they_are(credentials: grpc.ChannelCredentials | None) -> grpc.ChannelCredentials | None:
    """Credentials for a channel that is opened now: of the files as they are. The same object while they stay."""
    return credentials.current.fresh() if isinstance(credentials, FollowedCredentials) else credentials


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

    def _channel_credentials(self) -> grpc.ChannelCredentials:
        credentials = super()._channel_credentials()
        return NamedCredentials(credentials, self.server_name) if self.server_name else credentials


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"not a usable PEM file ({error.reason or error})"
    return f"{error.strerror}"
