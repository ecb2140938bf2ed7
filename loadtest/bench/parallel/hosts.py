"""What a step's messages take between ranks of two hosts, over TCP on loopback, beside ranks of one host.

`python -m loadtest.bench.parallel.hosts RANK REPEATS DESCRIPTORS [STORE TOKEN]` is one rank of two, a stage each.
DESCRIPTORS are inherited, comma-separated; with a store each rank is on a host of its own. Rank 0 prints a JSON object:
median seconds of a plan that the other rank answers, and of hidden states of a token that it does.
"""

from __future__ import annotations

import json
import sys
from statistics import median

import torch

from loadtest.rig.measure import median_ratio, median_s, turns
from loadtest.rig.processes import run_ranks
from loadtest.rig.results import Result
from shared.collectives import one_host, several_hosts
from shared.collectives.broadcast import broadcast_bytes
from shared.collectives.one_host import shared_memories
from shared.collectives.rank_links import RankLinks, Ways
from shared.collectives.several_hosts import MeetingPlace, StoreServer
from shared.kernels.cpu.build import choose
from shared.kernels.cpu.library import load
from shared.sizes import size as shown

PLAN_BYTES = 2048
HIDDEN_SIZE = 2048
_NAMES = {
    "plan": f"plan of {shown(PLAN_BYTES)} to the next stage, and an answer",
    "hidden": f"hidden states of a token, {HIDDEN_SIZE} in fp32, and an answer",
}


def measure_hosts(pairs: int, repeats: int) -> list[Result]:
    """Each message's median over `pairs` runs of both, in turns; the limit is one host's."""
    runs: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    for _, hosts in turns((1, 2), pairs):
        runs[hosts].append(_run(hosts, repeats))
    results = []
    for what, name in _NAMES.items():
        one, two = ([run[what] for run in found] for found in runs.values())
        alone, over = median(one), median(two)
        ratio = median_ratio(one, two)
        results.append(Result(f"{name}, two hosts", over * 1e6, "us", alone * 1e6, alone / over, "one host", ratio))
    return results


def _run(hosts: int, repeats: int) -> dict[str, float]:
    """Seconds. Raises Internal where a rank fails."""
    store = StoreServer("127.0.0.1") if hosts > 1 else None
    descriptors = [] if store else shared_memories(load(choose()[1]), Ways(1, 2))
    place = [store.address, store.token] if store else []
    try:
        arguments = [repeats, ",".join(map(str, descriptors)), *place]
        return dict(run_ranks("loadtest.bench.parallel.hosts", 2, arguments, descriptors))
    finally:
        if store is not None:
            store.close()


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

    def exchange(what: str) -> None:
        _plan(links) if what == "plan" else _hidden(links)
        links.everyone.gather(torch.zeros(1))

    found = {what: median_s(lambda what=what: exchange(what), int(repeats), warmup=0) for what in _NAMES}  # type: ignore[misc]
    if rank == "0":
        print(json.dumps(found), flush=True)
    links.close()


def _plan(links: RankLinks) -> None:
    broadcast_bytes(links.everyone, bytes(PLAN_BYTES) if links.everyone.rank == 0 else None)


def _hidden(links: RankLinks) -> None:
    pair = links.ahead or links.behind
    assert pair is not None
    pair.broadcast(torch.zeros(1, HIDDEN_SIZE))


if __name__ == "__main__":
    main()
