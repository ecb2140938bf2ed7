"""The minimum of HTTP/2 to read gRPC streams: a client so cheap that a benchmark measures the server, not the client.

`grpc.aio` takes about as long to read a message as the router to send it. This client supports only a gRPC server over
a local connection: it sets all windows to the maximum, sends headers literally (RFC 7541, 6.2.2) and never decodes any,
so a failed call shows only as an answer without its end. Frames are RFC 9113's.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import cast

from shared.address import Address

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_WINDOW = 2**31 - 1
INITIAL_WINDOW = 65_535
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_HEADER_TABLE_SIZE, _INITIAL_WINDOW_SIZE = 1, 4
_METHOD_POST, _SCHEME_HTTP = b"\x83", b"\x86"
_FRAME_HEAD, _MESSAGE_HEAD = 9, 5  # bytes


class Stream:
    """One call's streamed answer."""

    __slots__ = ("buffer", "ended", "on_message")

    def __init__(self, on_message: Callable[[bytes], None], ended: asyncio.Future[None]) -> None:
        self.on_message = on_message
        self.ended = ended
        self.buffer = b""

    def data(self, payload: bytes) -> None:
        """Passes on every complete message."""
        buffer, place = self.buffer + payload, 0
        while len(buffer) - place >= _MESSAGE_HEAD:
            end = place + _MESSAGE_HEAD + int.from_bytes(buffer[place + 1 : place + _MESSAGE_HEAD], "big")
            if end > len(buffer):
                break
            self.on_message(buffer[place + _MESSAGE_HEAD : end])
            place = end
        self.buffer = buffer[place:]


class Connection(asyncio.Protocol):
    """One connection to a gRPC server, with any number of concurrent calls."""

    def __init__(self, authority: str) -> None:
        self._authority = authority
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._streams: dict[int, Stream] = {}
        self._last_id = -1
        self._window = INITIAL_WINDOW  # bytes that the server accepts now
        self._unsent: deque[tuple[Stream, bytes, bytes]] = deque()

    @classmethod
    async def open(cls, address: str) -> Connection:
        """Connects to host:port."""
        server = Address.parse(address, "address", min_port=1)
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: cls(address), server.host, server.port
        )
        return connection

    def close(self) -> None:
        """Ends the connection and all calls on it."""
        if self._transport is not None:
            self._transport.close()

    async def call(self, path: str, message: bytes, on_message: Callable[[bytes], None]) -> None:
        """Sends one message; returns when the answer's stream has ended, successfully or not."""
        stream = Stream(on_message, asyncio.get_running_loop().create_future())
        head = _METHOD_POST + _SCHEME_HTTP + b"".join(
            _literal(name, value)
            for name, value in (
                (":path", path),
                (":authority", self._authority),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
            )
        )  # fmt: skip
        self._unsent.append((stream, head, b"\0" + struct.pack(">I", len(message)) + message))
        self._send()
        await stream.ended

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sets the windows to the maximum."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not a subclass of it
        settings = struct.pack(">HIHI", _HEADER_TABLE_SIZE, 0, _INITIAL_WINDOW_SIZE, MAX_WINDOW)
        window = struct.pack(">I", MAX_WINDOW - INITIAL_WINDOW)
        self._transport.write(PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, window))

    def data_received(self, data: bytes) -> None:
        """Handles every complete frame."""
        buffer, place = self._buffer + data, 0
        while len(buffer) - place >= _FRAME_HEAD:
            begin = place + _FRAME_HEAD
            end = begin + int.from_bytes(buffer[place : place + 3], "big")
            if end > len(buffer):
                break
            stream_id = int.from_bytes(buffer[place + 5 : begin], "big")
            self._on_frame(buffer[place + 3], buffer[place + 4], stream_id, buffer[begin:end])
            place = end
        self._buffer = buffer[place:]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # not needed
        """Ends all calls."""
        for stream_id in list(self._streams):
            self._end(stream_id)

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == _DATA:
            if (stream := self._streams.get(stream_id)) is not None:
                stream.data(payload)
        elif kind == _SETTINGS and not flags & _ACK:
            self._write(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._write(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE and not stream_id:
            self._window += int.from_bytes(payload, "big")
            self._send()
        elif kind == _GOAWAY:
            self.close()
        if kind == _RST_STREAM or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            self._end(stream_id)

    def _send(self) -> None:
        """Starts the calls that fit the server's window."""
        while self._unsent and len(self._unsent[0][2]) <= self._window:
            stream, head, message = self._unsent.popleft()
            self._window -= len(message)
            self._last_id += 2
            self._streams[self._last_id] = stream
            self._write(
                _frame(_HEADERS, _END_HEADERS, self._last_id, head) + _frame(_DATA, _END_STREAM, self._last_id, message)
            )

    def _end(self, stream_id: int) -> None:
        stream = self._streams.pop(stream_id, None)
        if stream is not None and not stream.ended.done():
            stream.ended.set_result(None)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


def _frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream_id) + payload


def _literal(name: str, value: str) -> bytes:
    """A header field without indexing; both parts are shorter than 127 bytes."""
    return b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
