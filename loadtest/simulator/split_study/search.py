"""The best static system for one load: climbs over the number of prefill workers, and over the chunk of one pool.

Of the splits, and of the chunks, the goodput is taken to have one height: each climb begins in the middle of what looks
likely, or where it ended at another load, and compares wide steps first. Neighbours are compared only of what is not
far behind the best found. Nothing more is tried where nearly all requests are in time. What was not tried is counted
in `Search.num_left_out`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from loadtest.simulator.outcome import Targets
from loadtest.simulator.simulation import COLLOCATED, STATIC
from loadtest.simulator.split_study.runs import Key, Runs
from loadtest.simulator.split_study.systems import CHUNKS, Pool, Run, System, run
from loadtest.workloads.trace import TraceRequest

ATTAINED = 0.9
"""A share of requests in time that counts as served."""
ALL = 0.995
"""A share of requests in time with which no other system is looked for."""
FIRST_CHUNK = 1024
WORTH = 0.9
"""Share of the best goodput found that a kind of system must have for its neighbours to be compared."""


@dataclass(slots=True)
class _Climb:
    values: Sequence[System]
    at: int
    step: int


class Search:
    """Runs systems over one load, each once."""

    def __init__(
        self,
        pool: Pool,
        targets: Targets,
        requests: Sequence[TraceRequest],
        known: Runs | None = None,
        key: Key | None = None,
    ) -> None:
        """`known` has runs of earlier searches; of this load those of `key`."""
        self._pool, self._targets, self._requests = pool, targets, requests
        self._known, self._key = known or Runs(), key or {}
        self.runs: dict[System, Run] = {}

    def run(self, system: System) -> Run:
        """What the system does with the load."""
        found = self.runs.get(system) or self._known.find(self._key, system)
        if found is None:
            found = run(system, self._pool, self._targets, self._requests)
            self._known.add(self._key, system, found)
        self.runs[system] = found
        return found

    def best(self, starts: Sequence[System] = ()) -> System:
        """The best static system that was found; `starts` are where the climbs begin, as known from another load."""
        climbs = self._climbs(starts)
        for climb in climbs:
            if self._move(climb):
                return self._top
        for climb in climbs:
            while climb.step > 1 and self._goodput(climb.values[climb.at]) >= WORTH * self._goodput(self._top):
                climb.step //= 2
                if self._move(climb):
                    return self._top
        return self._top

    def best_of(self, systems: Sequence[System]) -> System:
        """The best of these alone."""
        return max(systems, key=self._goodput)

    def best_known(self, seed: int) -> System | None:
        """The static system that had the best goodput with the same load of another seed; None where none is known."""
        key = {**self._key, "seed": seed}
        known = {system: run for system in self._all if (run := self._known.find(key, system)) is not None}
        return max(known, key=lambda system: known[system].goodput, default=None)

    def _climbs(self, starts: Sequence[System]) -> list[_Climb]:
        num_workers, is_known = len(self._pool.workers), bool(starts)
        known = {(start.policy, start.slow_first): start for start in starts}
        climbs = []
        for slow_first in self._orders:
            start = known.get((STATIC, slow_first))
            first = start.num_prefills if start is not None else self._likely_prefills()
            climbs.append(_Climb(self._splits(slow_first), first - 1, max(1, num_workers // (16 if is_known else 8))))
        start = known.get((COLLOCATED, False))
        chunk = start.chunk if start is not None else FIRST_CHUNK
        values = [System(COLLOCATED, chunk=chunk) for chunk in CHUNKS]
        climbs.append(_Climb(values, CHUNKS.index(chunk), 1 if is_known else 2))
        return climbs

    @property
    def _top(self) -> System:
        return max(self.fixed, key=self._goodput)

    def _goodput(self, system: System) -> float:
        return self.run(system).goodput

    @property
    def fixed(self) -> list[System]:
        """Systems that were run: splits, and one pool with chunks of a number of tokens. Chunks by time are a part of
        what mode auto is, and no static system."""
        return [system for system in self.runs if system.policy in (STATIC, COLLOCATED) and not system.paced]

    @property
    def num_left_out(self) -> int:
        """Static systems that were not run."""
        return len(self._all) - len(self.fixed)

    @property
    def _all(self) -> list[System]:
        """Every static system."""
        return [*chain.from_iterable(map(self._splits, self._orders)), *(System(COLLOCATED, chunk=c) for c in CHUNKS)]

    def _splits(self, slow_first: bool) -> list[System]:
        return [System(STATIC, number, slow_first=slow_first) for number in range(1, len(self._pool.workers))]

    @property
    def _orders(self) -> Sequence[bool]:
        """Values of `System.slow_first` that are tried."""
        return (False, True) if len({worker.times for worker in self._pool.workers}) > 1 else (False,)

    def starts(self) -> list[System]:
        """The best of each kind."""
        kinds = {(system.policy, system.slow_first) for system in self.fixed}
        return [
            max(
                (s for s in self.fixed if (s.policy, s.slow_first) == kind),
                key=lambda s: self.runs[s].goodput,
            )
            for kind in sorted(kinds)
        ]

    def _move(self, climb: _Climb) -> bool:
        """To the better place one step away until there is none; whether nearly all requests were in time."""
        climb.at = min(max(0, climb.at), len(climb.values) - 1)
        while True:
            if self.run(climb.values[climb.at]).share >= ALL:
                return True
            near = [place for place in (climb.at - climb.step, climb.at + climb.step) if 0 <= place < len(climb.values)]
            best = max([climb.at, *near], key=lambda place: self._goodput(climb.values[place]))
            if best == climb.at:
                return False
            climb.at = best

    def _likely_prefills(self) -> int:
        """The split at which both pools would be equally busy, by the step times of the middle worker."""
        workers, tpot_s = self._pool.workers, self._targets.tpot_s
        times = workers[len(workers) // 2].times
        count = len(self._requests)
        prompt_len = sum(request.num_prompt_tokens for request in self._requests) / count
        output_len = sum(request.num_output_tokens for request in self._requests) / count
        context, batch = prompt_len + output_len / 2, 1
        while batch < 256 and times.decode_step_s(batch + 1, round((batch + 1) * context)) <= tpot_s:
            batch += 1
        prefill_s = times.prompt_s(round(prompt_len))
        decode_s = output_len * times.decode_step_s(batch, round(batch * context)) / batch
        share = prefill_s / (prefill_s + decode_s)
        return min(len(workers) - 1, max(1, round(share * len(workers))))


def likely_rate(pool: Pool, targets: Targets, requests: Sequence[TraceRequest]) -> float:
    """Requests/s at which the workers would be busy if they did one thing at a time."""
    count = len(requests)
    prompt_len = sum(request.num_prompt_tokens for request in requests) / count
    output_len = sum(request.num_output_tokens for request in requests) / count
    context, rate = prompt_len + output_len / 2, 0.0
    for worker in pool.workers:
        times, batch = worker.times, 1
        while batch < 256 and times.decode_step_s(batch + 1, round((batch + 1) * context)) <= targets.tpot_s:
            batch += 1
        step_s = times.decode_step_s(batch, round(batch * context))
        rate += 1 / (times.prompt_s(round(prompt_len)) + output_len * step_s / batch)
    return rate


def capacity(
    pool: Pool,
    targets: Targets,
    requests_at: Callable[[float], Sequence[TraceRequest]],
    attained: float = ATTAINED,
    most_runs: int = 6,
    known: Runs | None = None,
    key_at: Callable[[float], Key] = lambda _: {},
) -> tuple[float, list[System]]:
    """(the rate up to which the best static system has that share in time, where its climbs ended)."""
    starts: list[System] = []
    is_known = False

    def share_at(rate: float) -> float:
        nonlocal starts, is_known
        search = Search(pool, targets, requests_at(rate), known, key_at(rate))
        best = search.best_of(starts) if is_known else search.best(starts)
        share = search.runs[best].share
        if not is_known:
            starts, is_known = search.starts(), share < ALL
        return share

    first = 0.8 * likely_rate(pool, targets, requests_at(1.0))
    return reach(share_at, first, attained, 1.3, 1.12, most_runs), starts


def reach(
    share_at: Callable[[float], float], first: float, attained: float, factor: float, within: float, most_runs: int
) -> float:
    """The rate up to which a share of the requests is in time: from the first rate by that factor until it lies between
    two, then halved until their ratio is below `within`. The highest one with the share that was tried; where
    none had it, the lowest that was tried."""
    rate = tried = first
    below = above = 0.0
    for _ in range(most_runs):
        tried = rate
        if share_at(rate) >= attained:
            below = rate
        else:
            above = rate
        if below and above and above / below < within:
            break
        rate = (below * above) ** 0.5 if below and above else rate * (factor if below else 1 / factor)
    return below or tried
