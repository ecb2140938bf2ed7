"""Where the transfer plane listens: in a local cluster on loopback alone."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from services.local.cluster import cluster_environment
from tests.integration.kv.conftest import FarProcess
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])


async def listening(process: FarProcess) -> set[str]:
    async with process.connected() as far, asyncio.timeout(DEADLINE_S):
        await far("address")
        found = psutil.Process(process.pid).net_connections("tcp")
        return {connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN}


async def test_a_local_clusters_processes_listen_on_loopback_alone() -> None:
    process = FarProcess(None, environment=cluster_environment(loopback=True))
    try:
        assert await listening(process) <= {"127.0.0.1", "::1"}
    finally:
        process.end(killed=True)


async def test_elsewhere_they_listen_where_other_hosts_reach_them() -> None:
    """Else the test above would show nothing."""
    if not [name for name in psutil.net_if_addrs() if name != "lo"]:
        pytest.skip("this machine has no interface but loopback")
    process = FarProcess(None)
    try:
        assert await listening(process) - {"127.0.0.1", "::1"}
    finally:
        process.end(killed=True)
