"""Messages of proto/tandem/v1/group.proto over one TCP connection, with signs of life."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

BEAT_S = 0.5
SILENCE_S = 15.0
"""Silence after which the other side is lost, seconds. Counted in this side's own beats: a process that was paused
itself reads the pending messages first."""
MOST_BYTES = 64 << 10
"""Longest frame, bytes; a peer that is not authenticated yet may claim any length."""
_LENGTH_BYTES = 4

Sent = TypeVar("Sent", bound=Message)
Received = TypeVar("Received", bound=Message)


class BrokenConnection(ConnectionError):
    """The connection ended, or what came over it is no frame."""


class Frames(Generic[Sent, Received]):
    """One side's. `receive` and `send` until both know each other, then `messages`, while the other side lives."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        received: type[Received],
        beat: Sent,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._reader, self._writer = reader, writer
        self._received = received
        self._beat = beat
        self._silence_s = silence_s
        self._silent_s = 0.0
        if (connection := writer.get_extra_info("socket")) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def own_host(self) -> str:
        """The address of this host that the connection has."""
        return str(self._writer.get_extra_info("sockname")[0])

    def send(self, frame: Sent) -> None:
        """Returns at once; what a connection that has ended was to carry is dropped."""
        if self._writer.is_closing():  # some loops' transports raise
            return
        content = frame.SerializeToString()
        self._writer.write(len(content).to_bytes(_LENGTH_BYTES, "big") + content)

    async def receive(self) -> Received:
        """The next frame. Raises BrokenConnection."""
        content = await self._read()
        frame = self._received()
        try:
            frame.ParseFromString(content)
        except DecodeError as error:
            raise BrokenConnection(f"what arrived is no {self._received.__name__}") from error
        return frame

    async def messages(self) -> AsyncGenerator[Message, None]:
        """What each frame holds, signs of life left out, until the other side ends the connection or is silent."""
        beats = asyncio.create_task(self._keep_beating())
        try:
            while True:
                frame = await self.receive()
                self._silent_s = 0.0
                kind = frame.WhichOneof("content")
                if kind not in (None, "beat"):
                    yield getattr(frame, kind)
        except ConnectionError:
            return
        finally:
            beats.cancel()

    async def close(self) -> None:
        """Closes the connection behind what was sent. Twice is fine."""
        self._writer.close()
        try:
            with suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await self._writer.wait_closed()
        finally:
            self._writer.transport.abort()

    async def _keep_beating(self) -> None:
        while self._silent_s < self._silence_s:
            self.send(self._beat)
            await asyncio.sleep(BEAT_S)
            self._silent_s += BEAT_S
        self._writer.transport.abort()

    async def _read(self) -> bytes:
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
            if length > MOST_BYTES:
                raise BrokenConnection(f"a frame of {length} bytes, the most are {MOST_BYTES}")
            return await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise BrokenConnection("the connection has ended") from error
