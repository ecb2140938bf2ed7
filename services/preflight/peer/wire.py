"""Messages between the two preflights: one JSON object a line, over TCP. The blocks themselves travel over UCX.

    {"op": "hello", "address": hex}            ->  {"time": …, "address": hex, "version": …}
    {"op": "time"}                             ->  {"time": …}
    {"op": "receive", "ticket": …, "count": …} ->  {"ready": true}, and when all has come {"done": true}
    {"op": "send", "ticket": …, "count": …}    ->  {"done": true} when all has been taken

An `{"error": …}` may come in place of any answer. Blocks have BLOCK_BYTES.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from shared.errors import TransferFailed

BLOCK_BYTES = 2 << 20
"""A block of 16 tokens of Llama-3-8B in 16 bits."""
MAX_COUNT = 64
MAX_LINE_BYTES = 64 << 10
STEP_TIMEOUT_S = 30.0
"""For one answer: 128 MiB pass in it even at 5 MB/s."""


class Line:
    """A connection that carries JSON objects. All methods raise TransferFailed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Owns both."""
        self._reader = reader
        self._writer = writer

    async def ask(self, **message: object) -> dict[str, Any]:
        """Sends, and returns the answer."""
        await self.send(**message)
        return await self.read()

    async def send(self, **message: object) -> None:
        """Sends one object."""
        try:
            self._writer.write(json.dumps(message).encode() + b"\n")
            await self._writer.drain()
        except OSError as error:
            raise TransferFailed(f"the other side is gone: {error}") from error

    async def read(self) -> dict[str, Any]:
        """The next object; an `error` in it is raised."""
        try:
            async with asyncio.timeout(STEP_TIMEOUT_S):
                text = await self._reader.readline()
        except TimeoutError as error:
            raise TransferFailed(f"no answer within {STEP_TIMEOUT_S:g} s") from error
        except (OSError, ValueError) as error:  # ValueError: a line beyond the limit
            raise TransferFailed(f"the other side does not speak this protocol: {error}") from error
        if not text:
            raise TransferFailed("the other side closed the connection")
        try:
            message = json.loads(text)
        except ValueError as error:
            raise TransferFailed("the other side is no preflight of Tandem") from error
        if not isinstance(message, dict):
            raise TransferFailed("the other side is no preflight of Tandem")
        if "error" in message:
            raise TransferFailed(f"the other side: {message['error']}")
        return message

    def close(self) -> None:
        """Ends the connection."""
        self._writer.close()


def field(message: dict[str, Any], name: str, limit: int) -> int:
    """An integer of 0 to `limit`. Raises TransferFailed."""
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
        raise TransferFailed(f"{name} must be an integer of 0 to {limit}")
    return value


def address_in(message: dict[str, Any]) -> bytes:
    """The transfer address. Raises TransferFailed."""
    try:
        return bytes.fromhex(message["address"])
    except (KeyError, TypeError, ValueError) as error:
        raise TransferFailed("address must be hexadecimal digits") from error
