"""`python -m loadtest.simulator.adapter_study`: many adapters over few slots, and the same with all resident.

Two cases in virtual time, with the router's real policy and the workers' real table of slots: adapters that are asked
for by Zipf's law, and one that nobody asked for which becomes much of the work at once.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Annotated

import numpy as np

from loadtest.rig.command_line import Option, Out, decimals, run
from loadtest.rig.markdown import table
from loadtest.rig.results import Result, write
from loadtest.schedule import zipf_shares
from loadtest.simulator.cli import FleetOptions, PlacementOptions, WorkerOptions, setup_of
from loadtest.simulator.fleet import WorkerSpec
from loadtest.simulator.load import Workload, at_rate, poisson
from loadtest.simulator.request import SimRequest
from loadtest.simulator.simulation import COLLOCATED, STATIC, Setup, play
from loadtest.simulator.worker import Worker
from loadtest.workloads.lengths import LogNormal
from services.router.placement.scorers import weights
from services.worker.adapters.slots import SlotTable

WARM_SHARE = 0.2
"""Share of the requests, the first ones, whose times are left out: their adapters are loaded for the first time."""
HOT = "hot"
MIN_ATTAINMENT = 0.95


@dataclass(frozen=True, slots=True)
class Case:
    """Requests, and an adapter for each."""

    setup: Setup
    policy: str
    rate: float
    adapters: Sequence[str]
    seed: int
    readers: int = 1
    copies: int = 0
    """Adapters of which each host keeps a copy."""
    copy_s: float = 0.0
    """Time to bring one of these into a slot."""

    def played(self, load_s: float, slots: int) -> tuple[list[SimRequest], int, int]:
        """The requests with their results, the loads, and those of them that were reads; `load_s`: of a read, 0: all
        are resident."""
        groups = [replace(group, worker=self._worker(group.worker, load_s, slots)) for group in self.setup.groups]
        workload = Workload(LogNormal(1024, 0.4), LogNormal(128, 0.4)).requests(len(self.adapters), self.seed)
        trace = at_rate(poisson(workload, self.seed), self.rate, len(self.adapters) / self.rate)
        workers: dict[str, Worker] = {}
        requests = play(trace, 1.0, self.policy, replace(self.setup, groups=groups), self.adapters, workers)
        pools = [worker.adapters for worker in workers.values()]
        return requests, sum(pool.num_loads for pool in pools), sum(pool.num_reads for pool in pools)

    def _worker(self, spec: WorkerSpec, load_s: float, slots: int) -> WorkerSpec:
        return replace(
            spec,
            adapter_load_s=load_s,
            adapter_slots=slots,
            adapter_readers=self.readers,
            adapter_copies=self.copies,
            adapter_copy_s=self.copy_s,
        )


def zipf(num_requests: int, num_adapters: int, exponent: float, seed: int) -> list[str]:
    """An adapter for each request; the n-th is asked for in proportion to 1 / n^exponent."""
    drawn = np.random.default_rng(seed).choice(num_adapters, num_requests, p=zipf_shares(num_adapters, exponent))
    return [f"a{number}" for number in drawn]


def least_loads(adapters: Sequence[str], num_slots: int) -> int:
    """Loads of one pool of all slots that knows the future, and throws out what is needed last (Belady, 1966): no
    assignment to workers has fewer."""
    ahead: dict[str, Iterator[int]] = {}
    places: defaultdict[str, list[int]] = defaultdict(list)
    for place, adapter in enumerate(adapters):
        places[adapter].append(place)
    ahead = {adapter: iter([*found[1:], len(adapters)]) for adapter, found in places.items()}
    held: dict[str, int] = {}
    last: list[tuple[int, str]] = []
    loads = 0
    for adapter in adapters:
        if adapter not in held:
            loads += 1
            if len(held) == num_slots:
                while True:
                    at, other = heapq.heappop(last)
                    if held.get(other) == -at:
                        del held[other]
                        break
        held[adapter] = next(ahead[adapter])
        heapq.heappush(last, (-held[adapter], adapter))
    return loads


def assigned_loads(adapters: Sequence[str], num_workers: int, num_slots: int) -> int:
    """Loads of the best assignment that knows each adapter's share of all requests, and no order: one worker for each,
    but as many as its share needs for one that is more than a worker's part; the workers have equal work, and throw out
    what they used least, as real ones do."""
    shares = Counter(adapters)
    work = [0.0] * num_workers
    homes: dict[str, list[int]] = {}
    for adapter, times in shares.most_common():
        copies = min(num_workers, -(-times * num_workers // len(adapters)))
        homes[adapter] = sorted(range(num_workers), key=work.__getitem__)[:copies]
        for home in homes[adapter]:
            work[home] += times / copies
    tables = [SlotTable(num_slots, num_slots) for _ in range(num_workers)]
    turns = {adapter: count() for adapter in homes}
    loads = 0
    for adapter in adapters:
        own = tables[homes[adapter][next(turns[adapter]) % len(homes[adapter])]]
        if adapter not in own:
            loads += 1
            own.make_room(adapter, 1)
            own.filled(adapter)
        own.pin(adapter)
        own.unpin(adapter)
    return loads


def ttft_s(requests: Sequence[SimRequest], quantile: float) -> float:
    """A quantile of TTFT, of the requests behind the warm-up that were served."""
    served = [request.ttft_s for request in requests[int(WARM_SHARE * len(requests)) :] if not request.refused]
    return float(np.quantile(served, quantile))


def attainment(requests: Sequence[SimRequest], setup: Setup, begin_s: float, end_s: float) -> float:
    """Share of the requests that arrived then and met both targets."""
    found = [setup.targets.met_by(request) for request in requests if begin_s <= request.at_s < end_s]
    return sum(found) / max(1, len(found))


def main(
    out: Out = None,
    adapters: Annotated[int, Option(help="in all")] = 200,
    slots: Annotated[int, Option(help="of each worker")] = 16,
    workers: Annotated[int, Option(help="of both roles; --prefill of them prefill alone")] = 8,
    prefill: Annotated[int, Option(help="prefill workers; 0 = every worker computes and answers")] = 0,
    exponent: Annotated[float, Option(help="of Zipf's law")] = 1.0,
    load_ms: Annotated[str, Option(help="of one adapter's read; several give several rows")] = "100 400",
    copies: Annotated[int, Option(help="adapters of which each worker's host keeps a copy")] = 0,
    copy_ms: Annotated[float, Option(help="from a copy into a slot")] = 20.0,
    rate: Annotated[float, Option(help="requests/s")] = 60.0,
    requests: Annotated[int, Option()] = 12_000,
    readers: Annotated[int, Option(help="adapters that a worker reads at once: one for 8 cores, up to 4")] = 2,
    hot_share: Annotated[float, Option(help="of the requests, from the half of the run on")] = 0.5,
    ttft: Annotated[float, Option(help="target, seconds")] = 1.0,
    tpot: Annotated[float, Option(help="target, seconds")] = 0.05,
    weight: Annotated[float, Option(help="of the scorer `adapter`")] = weights()["adapter"],
    model: Annotated[str, Option()] = "llama-3-8b",
    device: Annotated[str, Option()] = "H100",
    seed: Annotated[str, Option(help="several give several rows")] = "0",
) -> None:
    """Adapters by Zipf's law and a sudden hot one, in virtual time."""
    rows, results = [], []
    for one in seed.split():
        policy = STATIC if prefill else COLLOCATED
        fleet = FleetOptions(prefill=prefill, decode=workers - prefill, ttft_s=ttft, tpot_s=tpot, seed=int(one))
        options = WorkerOptions(model=model, device=device, gpus=1, paced=True)
        setup = setup_of(options, fleet, PlacementOptions(), policy)
        placement = setup.tandem.placement
        placement = replace(placement, weights={**placement.weights, "adapter": weight})
        setup = replace(setup, tandem=replace(setup.tandem, placement=placement))
        drawn = zipf(requests, adapters, exponent, int(one))
        case = Case(setup, policy, rate, drawn, int(one), readers, copies, copy_ms / 1e3)
        for row, found in _of_case(case, slots, workers, decimals(load_ms, "load_ms"), hot_share):
            rows.append([one, *row])
            results += found
    print(table(["seed", *_COLUMNS], rows))
    if out is not None:
        write(out, results)


_COLUMNS = (
    "read, ms", "p99 TTFT all resident, ms", "with loads, ms", "ratio", "refused", "loads", "of these reads",
    "loads over assignment", "over the future", "hot, 0 to 10 s", "10 to 20 s",
)  # fmt: skip


def _of_case(
    case: Case, slots: int, workers: int, loads_ms: Sequence[float], hot_share: float
) -> Iterator[tuple[list[str], list[Result]]]:
    """A row for each time of a read, and its results."""
    plain, _, _ = case.played(0.0, slots)
    known = assigned_loads(case.adapters, workers, slots)
    least = least_loads(case.adapters, workers * slots)
    for load_s in (each / 1e3 for each in loads_ms):
        found, loads, reads = case.played(load_s, slots)
        p99, base = ttft_s(found, 0.99), ttft_s(plain, 0.99)
        begin_s = found[len(found) // 2].at_s
        hot = replace(case, adapters=_with_hot(case.adapters, hot_share, case.seed))
        sudden, _, _ = hot.played(load_s, slots)
        first, after = (attainment(sudden, case.setup, begin_s + at_s, begin_s + at_s + 10) for at_s in (0, 10))
        refused = sum(request.refused for request in found) / len(found)
        row = [f"{1e3 * load_s:.0f}", f"{1e3 * base:.0f}", f"{1e3 * p99:.0f}", f"{p99 / base:.2f}", f"{refused:.1%}"]
        row += [f"{loads}", f"{reads}", f"{loads / known:.2f}", f"{loads / least:.2f}", f"{first:.1%}", f"{after:.1%}"]
        name = f"seed {case.seed}, read of {1e3 * load_s:.0f} ms"
        yield (
            row,
            [
                Result(f"{name}: p99 TTFT over all resident", p99 / base, "x", 1.5, 1.5 / max(p99 / base, 1e-9)),
                Result(
                    f"{name}: loads over the best assignment by shares", loads / known, "x", 1.2, 1.2 * known / loads
                ),
                Result(f"{name}: loads over one pool that knows the future", loads / least, "x"),
                Result(
                    f"{name}: attainment in the first 10 s of a hot adapter", first, "", MIN_ATTAINMENT, first / 0.95
                ),
            ],
        )


def _with_hot(adapters: Sequence[str], share: float, seed: int) -> list[str]:
    drawn = np.random.default_rng(seed + 1).random(len(adapters)) < share
    half = len(adapters) // 2
    return [HOT if number >= half and drawn[number] else adapter for number, adapter in enumerate(adapters)]


if __name__ == "__main__":
    run(main, name="python -m loadtest.simulator.adapter_study")
