"""Run by test_partitions.py in namespaces of its own: a cut between a prefill and a decode worker that is not healed.

What takes another way does so because nothing advances, as the sender's log says; no time-out has to pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from loadtest.chaos.cluster import ChaosCluster
from loadtest.chaos.network import Network, enter
from loadtest.chaos.phases import num_held, whole
from loadtest.chaos.streams import Streams, prompts
from services.local.cluster import LocalCluster
from services.local.spec import ClusterSpec
from tests.e2e.running import DEADLINE_S, DEMO

RATE = "20mbit"
"""To the decode worker: slow enough that a cut finds a block on its way."""
NUM_STREAMS = 3


@contextlib.asynccontextmanager
async def cluster(folder: Path, num_prefill: int) -> AsyncIterator[ChaosCluster]:
    """One decode worker; each part in a network of its own."""
    spec = ClusterSpec(
        model=DEMO, num_prefill=num_prefill, dtype="fp32", num_kv_blocks=600, prefix_fetch="never",
        http="127.0.0.1:0", grpc="127.0.0.1:0", state_dir=folder,
    )  # fmt: skip
    network = Network()
    network.open()
    async with LocalCluster(spec, places=network) as local:
        chaos = ChaosCluster(local, network)
        try:
            assert await chaos.until(whole, DEADLINE_S) is not None
            yield chaos
        finally:
            await chaos.close()


async def answers(chaos: ChaosCluster, salt: str, cut: Sequence[str] = ()) -> list[list[int]]:
    """Of all streams; while the first blocks are on their way to the decode worker, `cut` is cut off from it."""
    before = await received(chaos)
    streams = Streams(chaos.targets, prompts(NUM_STREAMS), salt, resuming=False)
    streams.start()
    if cut:
        assert await chaos.until(lambda status: bytes_received(status) > before, DEADLINE_S, poll_s=0.003) is not None
        chaos.network.cut([(name, "decode-0") for name in cut], both_ways=True)
    await streams.wait(DEADLINE_S)
    assert not [stream.error for stream in streams.all if stream.error]
    assert await chaos.until(lambda status: num_held(status) == 0, DEADLINE_S) is not None
    return [stream.tokens for stream in streams.all]


def bytes_received(status) -> int:
    """By the decode worker, since its start."""
    return sum(w.load.kv_bytes_received for w in status.workers if w.worker.name == "decode-0")


async def received(chaos: ChaosCluster) -> int:
    """As `bytes_received`, now."""
    status = await chaos.until(lambda _: True, DEADLINE_S)
    assert status is not None
    return bytes_received(status)


def was_noticed(chaos: ChaosCluster, name: str) -> bool:
    """Whether the prefill worker has found that what it sends does not arrive."""
    return "nothing of what was sent" in chaos.local.children[name].log_path.read_text()


def slow_down(network: Network) -> None:
    """What the decode worker receives from any part."""
    device = f"part{network.address('decode-0').split('.')[2]}"
    rate = ["tbf", "rate", RATE, "burst", "32kb", "latency", "400ms"]
    subprocess.run(["tc", "qdisc", "add", "dev", device, "root", *rate], check=True)


async def in_mid_message(folder: Path) -> None:
    """Another prefill worker serves, and in the end the decode worker by itself; all while the cut lasts."""
    async with cluster(folder, num_prefill=2) as chaos:
        expected = await answers(chaos, "calm")
        slow_down(chaos.network)
        assert await answers(chaos, "slow") == expected
        assert not any(was_noticed(chaos, name) for name in ("prefill-0", "prefill-1")), "slow is not cut"
        assert await answers(chaos, "cut", cut=["prefill-0", "prefill-1"]) == expected
        assert was_noticed(chaos, "prefill-0") or was_noticed(chaos, "prefill-1")
        assert "lost until" not in chaos.local.children["decode-0"].log_path.read_text()


async def before_any_connection(folder: Path) -> None:
    """UCX's connection is never made. Afterwards the pair is tried anew, and hand-offs pass again."""
    async with cluster(folder, num_prefill=1) as chaos:
        chaos.network.cut([("prefill-0", "decode-0")], both_ways=False)
        first = await answers(chaos, "cut")
        assert was_noticed(chaos, "prefill-0")
        assert await received(chaos) == 0
        chaos.network.heal()
        async with asyncio.timeout(DEADLINE_S):
            number = 0
            while not await received(chaos):
                assert await answers(chaos, f"healed-{number}") == first
                number += 1


async def main(folder: Path) -> None:
    """Raises AssertionError where anything is otherwise."""
    await in_mid_message(folder / "mid")
    await before_any_connection(folder / "before")


if __name__ == "__main__":
    enter("tests.chaos.lasting_cut")
    asyncio.run(main(Path(sys.argv[1])))
