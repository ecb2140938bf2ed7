"""Clients of clusters that a benchmark starts by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from loadtest.clients.base import Client
from loadtest.clients.connect import make_client
from loadtest.clients.target import parse_target
from loadtest.rig.cluster import print_logs
from services.local.cluster import LocalCluster


@asynccontextmanager
async def started(clusters: Sequence[LocalCluster]) -> AsyncIterator[list[Client]]:
    """A client of each, once all serve; prints their logs where that or what comes then fails."""
    try:
        async with AsyncExitStack() as stack:
            async with asyncio.TaskGroup() as starting:
                for cluster in clusters:
                    starting.create_task(stack.enter_async_context(cluster))
            clients = []
            for cluster in clusters:
                client = make_client(parse_target(f"grpc://{cluster.grpc}"))
                await client.start()
                stack.push_async_callback(client.close)
                clients.append(client)
            yield clients
    except Exception as error:
        for cluster in clusters:
            print_logs(cluster)
        if isinstance(error, ExceptionGroup):
            raise error.exceptions[0] from error
        raise
