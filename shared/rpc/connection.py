"""A service's connection to another one, with the certificates that its files hold now."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

from shared.rpc.server import channel
from shared.rpc.tls import as_they_are
from shared.tasks import end_task

GRACE_S = 60.0
"""Seconds for the calls on a channel that another one has replaced."""


class Connection:
    """A channel that is opened at its first use, and anew once the certificate files have changed: a certificate that
    expires would else end the connections of a service that runs for longer. For one event loop."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        """`address` is host:port. Opens nothing yet."""
        self._address = address
        self._credentials = credentials
        self._opened_with: grpc.ChannelCredentials | None = None
        self._channel: grpc.aio.Channel | None = None
        self._replaced: dict[asyncio.Task[None], grpc.aio.Channel] = {}  # by the task that closes it

    def channel(self) -> grpc.aio.Channel:
        """For a new call. Where this opens another channel, calls on the one before have GRACE_S to end."""
        credentials = as_they_are(self._credentials)
        if self._channel is None or credentials is not self._opened_with:
            if self._channel is not None:
                closing = asyncio.create_task(self._channel.close(GRACE_S))
                self._replaced[closing] = self._channel
                closing.add_done_callback(self._replaced.pop)
            self._channel, self._opened_with = channel(self._address, credentials), credentials
        return self._channel

    async def close(self) -> None:
        """Ends all calls; twice is fine, and a further `channel` opens anew."""
        left = [*self._replaced.values(), *([self._channel] if self._channel is not None else [])]
        self._channel = None
        for closing in list(self._replaced):
            await end_task(closing)
        for each in left:
            await each.close()
