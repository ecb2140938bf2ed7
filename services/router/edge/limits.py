"""Limits on what one client may send, hold and be sent: `edge.limits`, a part of the router's settings."""

from __future__ import annotations

from pydantic import Field

from shared.settings.group import SettingGroup


class LimitSettings(SettingGroup):
    """Bounds that hold before a request reaches the queue."""

    max_chars_per_token: int = Field(default=16, ge=1, le=1024)
    """A text longer than this times the served context is refused before it is tokenized. Characters; where the
    vocabulary's longest token is shorter, that counts. English has about 4.5 characters a token."""

    tokenizer_threads: int = Field(default=2, ge=1, le=64)
    """Long texts that are tokenized at the same time; others wait for a thread."""

    max_json_values: int = Field(default=131_072, ge=1024, le=1 << 24)
    """Most values in the lists of an HTTP body. A prompt of token ids may always be as long as the served context."""

    max_json_members: int = Field(default=16_384, ge=64, le=1 << 22)
    """Most arrays, objects and members of objects in an HTTP body: a chat message takes 3."""

    max_header_bytes: int = Field(default=32_768, ge=1024, le=1 << 20)
    """Longest head of an HTTP request, bytes: target and header fields."""

    max_headers: int = Field(default=128, ge=8, le=4096)
    """Most header fields of an HTTP request."""

    header_timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """Time in which the head of an HTTP request must arrive, from the connection or the head's first byte. Seconds."""

    body_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Time in which an HTTP request's body must arrive, seconds."""

    write_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """A client that reads nothing of its answer for this long is cut off, and its requests are cancelled. Seconds."""

    send_buffer_bytes: int = Field(default=262_144, ge=4096, le=1 << 26)
    """Kernel's buffer of unread answers of one HTTP connection, bytes."""

    max_connections: int = Field(default=4096, ge=1, le=1 << 20)
    """Most open HTTP connections; one more is answered with 429."""

    max_connections_per_client: int = Field(default=1024, ge=0, le=1 << 20)
    """Most open HTTP connections from one address; 0 = no such limit, as behind a proxy."""

    discard_bytes: int = Field(default=64 << 20, ge=0, le=1 << 34)
    """Most bytes of a refused request that are read and dropped so that its client can read the answer."""

    discard_timeout_s: float = Field(default=10.0, gt=0, le=600)
    """Longest time for that, seconds."""

    max_grpc_message_bytes: int = Field(default=1 << 20, ge=4096, le=1 << 30)
    """Longest gRPC request, bytes; a longer one gets RESOURCE_EXHAUSTED."""

    max_grpc_streams: int = Field(default=1024, ge=1, le=1 << 20)
    """Most calls at once on one gRPC connection; a client's library lets further ones wait."""

    max_grpc_calls: int = Field(default=4096, ge=1, le=1 << 20)
    """Most gRPC calls at once in all; one more gets RESOURCE_EXHAUSTED."""

    requests_per_minute: int = Field(default=0, ge=0, le=10_000_000)
    """Requests a minute of each API key, and of each tenant that has keys of its own; 0 = no limit. Beyond it they get
    429 with `Retry-After`. Where there are no keys, each tenant that `x-tenant` names has this. Each router counts by
    itself."""

    tokens_per_minute: int = Field(default=0, ge=0, le=10_000_000_000)
    """Likewise, tokens of prompts and answers; 0 = no limit. A request that runs is never cut off for it."""
