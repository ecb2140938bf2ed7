"""Run by test_partitions.py in namespaces of its own: KV blocks pass through the network, and a cut stops them."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

from loadtest.chaos.cluster import ChaosCluster, chaos_cluster
from loadtest.chaos.network import Network, enter
from loadtest.chaos.phases import whole
from loadtest.chaos.streams import Streams, prompts
from tests.e2e.running import DEMO
from tests.waiting import DEADLINE_S

LISTEN = """
import socket
server = socket.create_server((HOST, 5000))
print("listening", flush=True)
while True:
    connection, _ = server.accept()
    connection.sendall(b"heard")
    connection.close()
"""
ASK = "import socket, sys; sys.exit(socket.create_connection((HOST, 5000), timeout=WAIT).recv(9) != b'heard')"


async def cuts() -> None:
    """One way stops the answers too, for TCP needs both; we ourselves reach everything."""
    network = Network()
    network.open()
    host = repr(network.address("b"))
    program = [sys.executable, "-c", LISTEN.replace("HOST", host)]
    server = await asyncio.create_subprocess_exec(*network.command("b", program), stdout=asyncio.subprocess.PIPE)
    try:
        assert server.stdout is not None
        await asyncio.wait_for(server.stdout.readline(), DEADLINE_S)

        async def reaches(wait_s: float = DEADLINE_S) -> bool:
            ask = ASK.replace("HOST", host).replace("WAIT", str(wait_s))
            command = network.command("a", [sys.executable, "-c", ask])
            asking = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
            return await asking.wait() == 0

        assert await reaches()
        for pair, both_ways in ((("a", "b"), False), (("b", "a"), False), (("a", "b"), True)):
            network.cut([pair], both_ways=both_ways)
            assert not await reaches(wait_s=1.0)
            with socket.create_connection((network.address("b"), 5000), timeout=DEADLINE_S) as ours:
                assert ours.recv(9) == b"heard"
            network.heal()
            assert await reaches()
    finally:
        server.kill()
        await server.wait()
        network.close()


async def crosses(cluster: ChaosCluster) -> None:
    """At least the blocks that the decode workers say they took have left the prefill workers by their networks."""
    assert cluster.network is not None
    assert await cluster.until(whole, DEADLINE_S) is not None
    pool = ("prefill-0", "prefill-1")
    before = sum(cluster.network.num_forwarded_bytes(part) for part in pool)
    streams = Streams(cluster.targets, prompts(4), "crossing", resuming=False)
    streams.start()
    await streams.wait(DEADLINE_S)
    assert not [stream.error for stream in streams.all if stream.error]
    status = await cluster.until(lambda status: all(not w.num_requests for w in status.workers), DEADLINE_S)
    assert status is not None
    taken = sum(w.load.kv_bytes_received for w in status.workers if w.worker.name.startswith("decode"))
    sent = sum(cluster.network.num_forwarded_bytes(part) for part in pool) - before
    assert sent > taken > 0, (sent, taken)


async def main(folder: Path) -> None:
    """Raises AssertionError where anything is otherwise."""
    await cuts()
    async with chaos_cluster(DEMO, folder, networked=True) as cluster:
        await crosses(cluster)


if __name__ == "__main__":
    enter("tests.chaos.crossing")
    asyncio.run(main(Path(sys.argv[1])))
