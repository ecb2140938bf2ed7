"""What both clients share: the routers that they ask, key, TLS, and the answers of one call."""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import grpc

from shared.errors import Cancelled
from tandem.answer import Answer
from tandem.connection import CHANNEL_OPTIONS, ChannelOptions, ClientTls, key_metadata
from tandem.conversation import Conversation
from tandem.failures import RouterLost, typed
from tandem.options import Options, Prompt, deadline_of, metadata_of, requests_of
from tandem.router_choice import Targets

ChannelT = TypeVar("ChannelT")

_CLOSED = "the client is closed"


class Caller(ABC, Generic[ChannelT]):
    """Base of the clients: everything but the calls."""

    def __init__(
        self,
        targets: Sequence[str],
        *,
        api_key: str = "",
        tls: ClientTls | None = None,
        retry_for_s: float = 30.0,
        rng: random.Random | None = None,
    ) -> None:
        """`targets`: host:port of the routers' gRPC APIs. `retry_for_s`: an answer is given up after so long without
        a new token from a failure on, within its own deadline. Raises ConfigError. Connects at the first call."""
        self._rng = rng if rng is not None else random.Random()
        self._targets = Targets(targets, self._rng)
        self.key = key_metadata(api_key)
        """The metadata that every call carries."""
        self._credentials = tls.credentials() if tls is not None else None
        self._options: ChannelOptions = tls.channel_options if tls is not None else CHANNEL_OPTIONS
        self._retry_for_s = retry_for_s
        self._lock = threading.Lock()
        self._channels: dict[str, ChannelT] = {}
        self._closed = False

    @staticmethod
    @abstractmethod
    def _opened(target: str, credentials: grpc.ChannelCredentials | None, options: ChannelOptions) -> ChannelT:
        """A new connection; without credentials, without TLS."""

    def channel(self, target: str) -> ChannelT:
        """The connection to a target. Raises Cancelled once the client is closed."""
        with self._lock:
            if self._closed:
                raise Cancelled(_CLOSED)
            if target not in self._channels:
                self._channels[target] = self._opened(target, self._credentials, self._options)
            return self._channels[target]

    @contextmanager
    def while_open(self) -> Iterator[None]:
        """What calls raise because the client is closed under them becomes Cancelled."""
        try:
            yield
        except Exception as error:
            if self._closed and not isinstance(error, Cancelled):
                raise Cancelled(_CLOSED) from error
            raise

    def _leave(self) -> Sequence[ChannelT]:
        """All connections, for the caller to end; there are no new ones from now on."""
        with self._lock:
            self._closed = True
            channels, self._channels = self._channels, {}
        return tuple(channels.values())

    def _metadata(self, options: Options) -> tuple[tuple[str, str], ...]:
        """The metadata of a call. Raises InvalidRequest for what it cannot carry."""
        return self.key + metadata_of(options)

    def _lost(self, error: grpc.RpcError, target: str) -> RouterLost:
        """What a unary call to `target` failed with, so that another router is asked. Raises what a router reported."""
        failure = typed(error, target, answered=False)
        if not isinstance(failure, RouterLost):
            raise failure from error
        self._targets.failed(target)
        return failure

    def _conversations(self, prompt: Prompt, n: int, options: Options, resume: Answer | None) -> list[Conversation]:
        """One for each choice of an answer, in order. Raises InvalidRequest for what cannot be sent."""
        return [
            Conversation(
                request,
                self._targets,
                self._rng,
                timeout_s=deadline_of(options.get("timeout_s")),
                retry_for_s=self._retry_for_s,
                index=index,
                resume=resume,
            )
            for index, request in enumerate(requests_of(prompt, n, options, resume))
        ]


class Answers:
    """Base of what streams them."""

    def __init__(self, conversations: Sequence[Conversation]) -> None:
        self._conversations = conversations

    @property
    def answers(self) -> list[Answer]:
        """The part of each answer that came until now; it stays after an error."""
        return [conversation.answer for conversation in self._conversations]

    @property
    def answer(self) -> Answer:
        """The first, or only, of `answers`."""
        return self._conversations[0].answer
