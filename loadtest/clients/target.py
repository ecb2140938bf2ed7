"""`--target`: the server and its protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args
from urllib.parse import urlsplit

from shared.address import Address
from shared.errors import ConfigError

Scheme = Literal["grpc", "http", "https"]
_DEFAULT_PORTS: dict[Scheme, int] = {"grpc": 50051, "http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Target:
    """A server's address."""

    scheme: Scheme
    host: str
    port: int
    path: str = ""  # prefix of /v1/…, without a trailing slash; HTTP only

    def __str__(self) -> str:
        return f"{self.scheme}://{self.address}{self.path}"

    @property
    def address(self) -> str:
        """host:port, an IPv6 host in brackets."""
        return str(Address(self.host, self.port))


def parse_target(text: str) -> Target:
    """`grpc://host:port`, `http://host:port[/path]` or https; raises ConfigError (`target`)."""
    problem = f"target={text}: expected grpc://HOST:PORT or http://HOST:PORT"
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError as error:
        raise ConfigError(f"{problem} ({error})", field="target", value=text) from error
    if url.scheme not in get_args(Scheme) or not url.hostname:
        raise ConfigError(problem, field="target", value=text)
    scheme = cast(Scheme, url.scheme)
    path = url.path.rstrip("/").removesuffix("/v1")  # accepts the base URL of an OpenAI client
    if path and scheme == "grpc":
        raise ConfigError(f"target={text}: a gRPC target has no path", field="target", value=text)
    return Target(scheme, url.hostname, port or _DEFAULT_PORTS[scheme], path)
