"""What a step's messages take between ranks of two hosts, over TCP on loopback, beside ranks of one host.

`python -m loadtest.bench.parallel.hosts RANK REPEATS DESCRIPTORS [STORE TOKEN]` is one rank of two, a stage each.
DESCRIPTORS are inherited, comma-separated; with a store each rank is on a host of its own. Rank 0 prints a JSON object:
median seconds of a plan that the other rank answers, and of hidden states of a token that it does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from loadtest.rig.results import Result
from shared.collectives import one_host, several_hosts
from shared.collectives.messages import broadcast_bytes
from shared.collectives.one_host import shared_memories
from shared.collectives.rank_links import RankLinks, Ways
from shared.collectives.several_hosts import MeetingPlace, StoreServer
from shared.errors import Internal
from shared.kernels.cpu.build import choose
from shared.kernels.cpu.launch import load
from shared.sizes import size as shown

PLAN_BYTES = 2048
HIDDEN_SIZE = 2048


def _plan(links: RankLinks) -> None:
    broadcast_bytes(links.everyone, bytes(PLAN_BYTES) if links.everyone.rank == 0 else None)


def _hidden(links: RankLinks) -> None:
    pair = links.ahead or links.behind
    assert pair is not None
    pair.broadcast(torch.zeros(1, HIDDEN_SIZE))


def _seconds(links: RankLinks, what: Callable[[RankLinks], None], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = perf_counter()
        what(links)
        links.everyone.gather(torch.zeros(1))
        times.append(perf_counter() - begin)
    return median(times)


def main() -> None:
    """Joins, measures both, leaves."""
    rank, repeats, descriptors, *place = sys.argv[1:]
    torch.set_num_threads(1)
    inherited = [int(each) for each in filter(None, descriptors.split(","))]
    library, ways = load(choose()[1]), Ways(1, 2, hosts=2 if place else 1)
    if place:
        at = MeetingPlace(place[0], place[1], place[0].rpartition(":")[0])
        links = several_hosts.join(library, inherited, int(rank), ways, at)
    else:
        links = one_host.join(library, inherited, int(rank), ways)
    found = {what.__name__.lstrip("_"): _seconds(links, what, int(repeats)) for what in (_plan, _hidden)}
    if rank == "0":
        print(json.dumps(found), flush=True)
    links.close()


_NAMES = {
    "plan": f"plan of {shown(PLAN_BYTES)} to the next stage, and an answer",
    "hidden": f"hidden states of a token, {HIDDEN_SIZE} in fp32, and an answer",
}


def measure_hosts(pairs: int, repeats: int) -> list[Result]:
    """Each message's median over `pairs` runs of both, one after the other; the limit is one host's."""
    runs = [(_run(1, repeats), _run(2, repeats)) for _ in range(pairs)]
    results = []
    for what, name in _NAMES.items():
        alone, over = (median(run[number][what] for run in runs) for number in range(2))
        ratio = median(one[what] / two[what] for one, two in runs)
        results.append(Result(f"{name}, two hosts", over * 1e6, "us", alone * 1e6, alone / over, "one host", ratio))
    return results


def _run(hosts: int, repeats: int) -> dict[str, float]:
    """Seconds. Raises Internal where a rank fails."""
    store = StoreServer("127.0.0.1") if hosts > 1 else None
    descriptors = [] if store else shared_memories(load(choose()[1]), Ways(1, 2))
    place = [store.address, store.token] if store else []
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "loadtest.bench.parallel.hosts", str(rank), str(repeats)),
                *(",".join(map(str, descriptors)), *place),
            ],
            pass_fds=descriptors,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    for descriptor in descriptors:
        os.close(descriptor)
    printed = ranks[0].communicate()[0]
    statuses = [rank.wait() for rank in ranks]
    if store is not None:
        store.close()
    if any(statuses):
        raise Internal(f"a rank of two failed to exchange messages over {hosts} hosts")
    return dict(json.loads(printed))


if __name__ == "__main__":
    main()
