"""Lists and watches Pods as plain JSON: the client's models cost a router's event loop a millisecond for each Pod."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientResponse
from kubernetes.aio.client import ApiClient, CoreV1Api

from shared.kubernetes.access import ClusterAccess, refusal, typed_errors

LIST_TIMEOUT_S = 30.0
SLACK_S = 15.0
"""Seconds after its deadline at which a watch is ended here, where the server has not ended it."""

Pod = Mapping[str, Any]
"""A Pod as the API server's JSON has it."""


class Expired(Exception):
    """410: the server no longer keeps the resource version that the call starts from."""


@dataclass(frozen=True, slots=True)
class PodEvent:
    """One line of a watch."""

    pod: Pod | None
    """None: only the version has moved on, or the watch has just begun."""
    version: str
    deleted: bool = False


class Pods:
    """The Pods of one namespace that a label selector names.

    Both calls raise Expired, ClusterForbids (401, 403) and ClusterUnavailable for everything else that goes wrong.
    """

    def __init__(self, api: ApiClient, access: ClusterAccess, selector: str) -> None:
        """`api` is a connection of `access`."""
        self._list = CoreV1Api(api).list_namespaced_pod_without_preload_content
        self._namespace = access.namespace
        self._selector = selector

    async def list(self, page: int) -> tuple[list[Pod], str]:
        """All Pods, at most `page` in one call, and their version."""
        pods: list[Pod] = []
        go_on: str | None = None
        with typed_errors():
            while True:
                response = await self._list(
                    self._namespace,
                    label_selector=self._selector,
                    limit=page,
                    _continue=go_on,
                    _request_timeout=LIST_TIMEOUT_S,
                )
                async with response:
                    content = await response.read()
                    _check(response.status, content)
                # In a thread: 500 Pods take 50 ms.
                answer = await asyncio.to_thread(json.loads, content)
                pods += answer.get("items") or ()
                go_on = answer["metadata"].get("continue")
                if not go_on:
                    return pods, answer["metadata"]["resourceVersion"]

    async def watch(self, version: str, duration_s: int) -> AsyncGenerator[PodEvent, None]:
        """What changed after that version, as it happens; first an event without a Pod when the server has accepted.
        Ends after about `duration_s`."""
        with typed_errors():
            response = await self._list(
                self._namespace,
                label_selector=self._selector,
                watch=True,
                allow_watch_bookmarks=True,
                resource_version=version,
                timeout_seconds=duration_s,
                _request_timeout=duration_s + SLACK_S,
            )
            async with response:
                try:
                    if response.status != 200:
                        _check(response.status, await response.read())
                    yield PodEvent(None, version)
                    async for line in response.content:
                        yield _event(line)
                finally:
                    _end_connection(response)


def _end_connection(response: ClientResponse) -> None:
    """Ends the connection of an answer that was not read to its end. aiohttp forgets it and lets TLS say goodbye in the
    background, which nothing waits for: it would outlive the session, and the event loop too."""
    connection = response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()


def _event(line: bytes) -> PodEvent:
    content = json.loads(line)
    kind, thing = content["type"], content["object"]
    if kind == "ERROR":
        _check(thing["code"], line)
    version = thing["metadata"]["resourceVersion"]
    return PodEvent(None if kind == "BOOKMARK" else thing, version, kind == "DELETED")


def _check(status: int, content: bytes) -> None:
    """Raises for what is no success; `content` is a Status object, bare or in an event."""
    if 200 <= status < 300:
        return
    if status == 410:
        raise Expired
    raise refusal(status, content)
