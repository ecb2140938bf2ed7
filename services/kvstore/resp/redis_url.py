"""Where Redis is and how to log in: a parsed `redis_url`."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from shared.address import MAX_PORT, Address
from shared.errors import ConfigError

SCHEMES = ("redis", "rediss", "unix")
DEFAULT_PORT = 6379
CREDENTIAL_OPTIONS = ("username", "password", "db")
TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server: host and port, or the path of a unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        """As error messages show it."""
        return self.path or f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Login:
    """How every connection logs in. `repr` does not show the password."""

    username: str
    password: str
    db: int
    tls: ssl.SSLContext | None

    def __repr__(self) -> str:
        """Without the password."""
        return f"Login({self.username!r}, db={self.db}, tls={self.tls is not None})"


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A parsed URL: `redis://[user[:password]@]host[:port][,host[:port]…][/db][?option=value…]`, `rediss://` for TLS,
    `unix://[user:password@]/path`. Several hosts are nodes of one cluster; one that answers is enough."""

    redacted: str
    """scheme://hosts/db, without credentials and options."""
    endpoints: tuple[Endpoint, ...]
    login: Login

    @classmethod
    def parse(cls, url: str, password: str = "") -> RedisAddress:
        """`password` logs in where the URL names none. Raises ConfigError (field redis_url, or redis_password where
        both name one) that shows no credentials; reads the TLS files that the URL names."""
        try:
            parts = urlsplit(url)
        except ValueError:  # its text may have the password
            raise ConfigError(
                "redis_url is no URL: [ and ] in a user or a password are written %5B and %5D", field="redis_url"
            ) from None
        if parts.scheme not in SCHEMES:
            raise ConfigError(
                f"redis_url must start with {' or '.join(f'{scheme}://' for scheme in SCHEMES)}", field="redis_url"
            )
        credentials, _, hosts = parts.netloc.rpartition("@")
        options = _options(parts.query, parts.scheme)
        username, _, own_password = credentials.partition(":")
        own_password = options.get("password") or unquote(own_password)
        if password and own_password:
            raise ConfigError("redis_password is set, and redis_url names a password too", field="redis_password")
        if parts.scheme == "unix":
            endpoints: tuple[Endpoint, ...] = (Endpoint(path=unquote(hosts + parts.path)),)
            db = options.get("db", "0")
        else:
            endpoints = tuple(_endpoint(host, number) for number, host in enumerate(hosts.split(","), 1))
            db = options.get("db") or parts.path.strip("/") or "0"
        if not db.isdecimal():
            raise ConfigError("redis_url names a database that is no number", field="redis_url")
        login = Login(
            username=options.get("username") or unquote(username),
            password=password or own_password,
            db=int(db),
            tls=_tls(options) if parts.scheme == "rediss" else None,
        )
        return cls(f"{parts.scheme}://{hosts}{parts.path}", endpoints, login)


def _endpoint(text: str, number: int) -> Endpoint:
    """The `number`-th server, counted from 1. The error does not repeat the text: if a password has an unescaped
    "/", the text is a part of that password."""
    try:
        address = Address.parse(
            text if text and not text.startswith(":") else f"localhost{text}",
            "redis_url",
            default_port=DEFAULT_PORT,
            min_port=1,
        )
        address.host.encode("idna")  # as the connection will
    except (ConfigError, UnicodeError):
        raise ConfigError(
            f"redis_url: server {number} is not host or host:port with a port of 1 to {MAX_PORT}",
            field="redis_url",
            limit=MAX_PORT,
        ) from None
    return Endpoint(address.host, address.port)


def _options(query: str, scheme: str) -> dict[str, str]:
    known = CREDENTIAL_OPTIONS + (TLS_OPTIONS if scheme == "rediss" else ())
    options = dict(parse_qsl(query))
    for name in options:
        if name not in known:
            raise ConfigError(
                f"redis_url has an option {name!r}; with {scheme}:// there are {', '.join(known)}", field="redis_url"
            )
    return options


def _tls(options: dict[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
        if "ssl_certfile" in options:
            context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"redis_url: the TLS files cannot be used: {error}", field="redis_url") from error
    if options.get("ssl_check_hostname", "true").lower() in ("false", "no", "0"):
        context.check_hostname = False
    if options.get("ssl_cert_reqs", "required") == "none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
