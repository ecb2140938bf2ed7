"""host:port: the one parser of server addresses, and of lists of named servers."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import AddressValueError, IPv6Address

from shared.errors import ConfigError

MAX_PORT = 65_535


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address; `str` gives the text that `parse` reads, with an IPv6 host in brackets."""

    host: str
    """A name or an IP address, without brackets."""
    port: int
    """0: any free port, for a listening server."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, field: str, *, default_port: int | None = None, min_port: int = 0) -> Address:
        """`host:port` or `[IPv6]:port`; the port may be omitted if there is a default.

        Raises ConfigError naming `field`. `min_port=1` refuses port 0, which no client can connect to.
        """
        host, port = _split(text)
        if port is None and default_port is not None:
            port = str(default_port)
        bracketed = host.startswith("[")
        if port is None or not host or not (_is_ipv6(host) if bracketed else _is_name(host)):
            hint = " (write an IPv6 address in brackets)" if text.count(":") > 1 or "[" in text else ""
            raise ConfigError(f"{field}: {text!r} is not host:port{hint}", field=field, value=text)
        if not (port.isascii() and port.isdigit() and len(port) <= 5 and min_port <= int(port) <= MAX_PORT):
            raise ConfigError(
                f"{field}: {text!r} is not host:port with a port of {min_port} to {MAX_PORT}",
                field=field,
                value=text,
                limit=MAX_PORT,
            )
        return cls(host[1:-1] if bracketed else host, int(port))


def parse_named(text: str, field: str, *, unnamed: bool = False) -> dict[str, str]:
    """`a=host:1,b=host:2` as host:port by name, in the order of the text; {} for an empty text.

    With `unnamed`, an entry without a name gets its address as name. Raises ConfigError naming `field`.
    """
    found: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, equals, address = entry.partition("=") if "=" in entry else ("", "", entry)
        if not name and (equals or not unnamed):
            expected = "neither host:port nor name=host:port" if unnamed else "not name=host:port"
            raise ConfigError(f"{field}: {entry!r} is {expected}", field=field, value=entry)
        address = str(Address.parse(address, field, min_port=1))
        name = name or address
        if name in found:
            raise ConfigError(f"{field}: {name!r} is named twice", field=field, value=name)
        found[name] = address
    return found


def _split(text: str) -> tuple[str, str | None]:
    """Host and port as written; None if there is no port."""
    end_of_host = text.rfind("]") + 1
    host, colon, port = text[end_of_host:].rpartition(":")
    if not colon:
        return text, None
    return text[:end_of_host] + host, port


def _is_ipv6(host: str) -> bool:
    try:
        IPv6Address(host[1:-1])
    except AddressValueError:
        return False
    return host.endswith("]")


def _is_name(host: str) -> bool:
    labels = host.removesuffix(".").split(".")  # what looks names up raises UnicodeError for others
    return host == host.strip() and not set(":[]/=") & set(host) and all(0 < len(label) < 64 for label in labels)
