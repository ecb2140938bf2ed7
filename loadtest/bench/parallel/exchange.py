"""`python -m loadtest.bench.parallel.exchange RANK REPEATS DESCRIPTORS [STORE TOKEN]`: one rank of two, a stage each.

DESCRIPTORS are inherited, comma-separated; with a store each rank is on a host of its own. Rank 0 prints a JSON object:
median seconds of a plan that the other rank answers, and of hidden states of a token that it does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from shared.collectives import one_host, several_hosts
from shared.collectives.messages import broadcast_bytes
from shared.collectives.rank_links import RankLinks, Ways
from shared.collectives.several_hosts import MeetingPlace
from shared.kernels.cpu.build import choose
from shared.kernels.cpu.launch import load

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


if __name__ == "__main__":
    main()
