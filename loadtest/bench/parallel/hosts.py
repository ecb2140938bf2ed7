"""What a step's messages take between ranks of two hosts, over TCP on loopback, beside ranks of one host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from statistics import median

from loadtest.bench.parallel.exchange import HIDDEN_SIZE, PLAN_BYTES
from loadtest.figures import Result
from shared.collectives.one_host import shared_memories
from shared.collectives.rank_links import Ways
from shared.collectives.several_hosts import StoreServer
from shared.errors import Internal
from shared.kernels.cpu.build import choose
from shared.kernels.cpu.launch import load
from shared.sizes import size as shown

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
                *(sys.executable, "-m", "loadtest.bench.parallel.exchange", str(rank), str(repeats)),
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
