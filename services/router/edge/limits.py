"""Limits on what one client may send, hold and be sent: `edge.limits`, a part of the router's settings."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from shared.settings.group import SettingGroup


class LimitSettings(SettingGroup):
    """Bounds that hold before a request reaches the queue."""

    tokenizer_threads: int = Field(default=2, ge=1, le=64)
    """Long texts that are tokenized at the same time; others wait for a thread."""

    max_header_bytes: int = Field(default=32_768, ge=1024, le=1 << 20)
    """Longest head of an HTTP request, bytes: target and header fields."""

    body_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Time in which an HTTP request's body must arrive, seconds."""

    write_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """A client that reads nothing of its answer for this long is cut off, and its requests are cancelled. Seconds."""

    max_connections: int = Field(default=4096, ge=1, le=1 << 20)
    """Most open HTTP connections; one more is answered with 429."""

    max_connections_per_client: int = Field(default=1024, ge=0, le=1 << 20)
    """Most open HTTP connections from one address; 0 = no such limit, as behind a proxy."""

    max_grpc_message_bytes: int = Field(default=1 << 20, ge=4096, le=1 << 30)
    """Longest gRPC request, bytes; a longer one gets RESOURCE_EXHAUSTED."""

    max_grpc_calls: int = Field(default=4096, ge=1, le=1 << 20)
    """Most gRPC calls at once in all; one more gets RESOURCE_EXHAUSTED."""

    requests_per_minute: int = Field(default=0, ge=0, le=10_000_000)
    """Requests a minute of each API key, and of each tenant that has keys of its own; 0 = no limit. Beyond it they get
    429 with `Retry-After`. Where there are no keys, each tenant that `x-tenant` names has this. Each router counts by
    itself."""

    tokens_per_minute: int = Field(default=0, ge=0, le=10_000_000_000)
    """As `requests_per_minute`, for tokens of prompts and answers; 0 = no limit. A request that runs is never cut off
    for it."""

    # Those that need no setting.

    max_chars_per_token: ClassVar[int] = 16
    """A text longer than this times the served context is refused before it is tokenized. Characters; where the
    vocabulary's longest token is shorter, that counts. English has about 4.5 characters a token."""

    max_json_values: ClassVar[int] = 131_072
    """Most values in the lists of an HTTP body. A prompt of token ids may always be as long as the served context."""

    max_json_members: ClassVar[int] = 16_384
    """Most arrays, objects and members of objects in an HTTP body: a chat message takes 3."""

    max_headers: ClassVar[int] = 128
    """Most header fields of an HTTP request."""

    header_timeout_s: ClassVar[float] = 10.0
    """Time in which the head of an HTTP request must arrive, from the connection or the head's first byte. Seconds."""

    send_buffer_bytes: ClassVar[int] = 262_144
    """Kernel's buffer of unread answers of one HTTP connection, bytes."""

    discard_bytes: ClassVar[int] = 64 << 20
    """Most bytes of a refused request that are read and dropped so that its client can read the answer."""

    discard_timeout_s: ClassVar[float] = 10.0
    """Longest time for that, seconds."""

    max_grpc_streams: ClassVar[int] = 1024
    """Most calls at once on one gRPC connection; a client's library lets further ones wait."""
