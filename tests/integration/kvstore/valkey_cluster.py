"""A real Valkey cluster: three servers on free ports, no replicas, nothing on disk but their node tables."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.kvstore.embedded import find_valkey_server
from shared.parent_death import command_dying_with_parent
from tests.waiting import DEADLINE_S

NUM_NODES = 3
NUM_SLOTS = 16_384


class ValkeyCluster:
    """`start()` returns when every node says that the cluster is whole."""

    def __init__(self, folder: Path) -> None:
        self.ports = _free_ports(NUM_NODES)
        self._folder = folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return "redis://" + ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def admin(self, port: int) -> Redis:
        return Redis(port=port, protocol=2, driver_info=None)

    async def start(self) -> None:
        for port in self.ports:
            self.start_node(port)
        for i, port in enumerate(self.ports):
            await self.answering(port)
            async with self.admin(port) as node:
                first, end = NUM_SLOTS * i // NUM_NODES, NUM_SLOTS * (i + 1) // NUM_NODES
                await node.execute_command("CLUSTER", "ADDSLOTSRANGE", first, end - 1)  # type: ignore[no-untyped-call]
                await node.execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)  # type: ignore[no-untyped-call]
        async with self.admin(self.ports[0]) as node:
            for port in self.ports[1:]:
                await node.execute_command("CLUSTER", "MEET", "127.0.0.1", port)  # type: ignore[no-untyped-call]
        await self.whole()

    def start_node(self, port: int) -> None:
        folder = self._folder / str(port)
        folder.mkdir(exist_ok=True)
        options = {
            "port": port,
            "bind": "127.0.0.1",
            "cluster-enabled": "yes",
            "cluster-node-timeout": 2000,
            "save": "",
            "dir": folder,
            "logfile": folder / "log",
        }
        arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        self._processes[port] = subprocess.Popen(command_dying_with_parent([str(find_valkey_server()), *arguments]))

    def kill_node(self, port: int) -> None:
        process = self._processes.pop(port)
        process.kill()
        process.wait()

    async def answering(self, port: int) -> None:
        async with asyncio.timeout(DEADLINE_S), self.admin(port) as node:
            while True:
                try:
                    await node.ping()
                    return
                except (RedisError, OSError):
                    await asyncio.sleep(0.02)

    async def whole(self) -> None:
        for port in self.ports:
            async with asyncio.timeout(DEADLINE_S), self.admin(port) as node:
                while True:
                    info = await node.execute_command("CLUSTER", "INFO")  # type: ignore[no-untyped-call]
                    state = info if isinstance(info, dict) else dict(line.split(":") for line in info.decode().split())
                    if state["cluster_state"] == "ok" and int(state["cluster_known_nodes"]) == NUM_NODES:
                        break
                    await asyncio.sleep(0.02)

    def stop(self) -> None:
        for port in [*self._processes]:
            self.kill_node(port)


def _free_ports(num_ports: int) -> list[int]:
    """Free here, and 10,000 above for the cluster's own talk."""
    ports: list[int] = []
    while len(ports) < num_ports:
        with socket.socket() as data, socket.socket() as bus:
            data.bind(("127.0.0.1", 0))
            port = data.getsockname()[1]
            try:
                bus.bind(("127.0.0.1", port + 10_000))
            except (OverflowError, OSError):
                continue
            if port not in ports:
                ports.append(port)
    return ports
