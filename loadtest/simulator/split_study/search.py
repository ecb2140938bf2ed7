"""The best fixed system for one load: two climbs, over the number of prefill workers and over the chunk of one pool.

Of the splits, and of the chunks, the goodput is taken to have one height: each climb begins in the middle of what looks
likely, compares wide steps first, then neighbours, and ends where no neighbour is better, or where nearly all requests
are in time. What it did not try is what `Search.num_left_out` counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loadtest.simulator.outcome import Targets
from loadtest.simulator.simulation import COLLOCATED, STATIC
from loadtest.simulator.split_study.systems import CHUNKS, Pool, Run, System, run
from loadtest.workloads.trace import TraceRequest

ALL = 0.995
"""A share of requests in time with which no other system is looked for."""
FIRST_CHUNK = 1024


class Search:
    """Runs systems over one load, each once."""

    def __init__(self, pool: Pool, targets: Targets, requests: Sequence[TraceRequest]) -> None:
        self._pool, self._targets, self._requests = pool, targets, requests
        self.runs: dict[System, Run] = {}

    def run(self, system: System) -> Run:
        """What the system does with the load."""
        found = self.runs.get(system)
        if found is None:
            found = self.runs[system] = run(system, self._pool, self._targets, self._requests)
        return found

    def best(self, starts: Sequence[System] = ()) -> System:
        """The best fixed system that was found; `starts` are where the climbs begin, as known from another load."""
        num_workers = len(self._pool.workers)
        splits, chunk = [system for system in starts if system.policy == STATIC], FIRST_CHUNK
        for system in starts:
            if system.policy == COLLOCATED and not system.paced:
                chunk = system.chunk
        climbs: list[Callable[[], bool]] = []
        for slow_first in self._orders:
            first = next((s.num_prefills for s in splits if s.slow_first == slow_first), self._likely_prefills())
            values = [System(STATIC, number, slow_first=slow_first) for number in range(1, num_workers)]
            climbs.append(lambda values=values, first=first: self._climb(values, first - 1, num_workers // 8))  # type: ignore[misc]
        chunks = [System(COLLOCATED, chunk=chunk) for chunk in CHUNKS]
        climbs.append(lambda: self._climb(chunks, CHUNKS.index(chunk), 2))
        climbs.append(lambda: self._climb([System(COLLOCATED, paced=True)], 0, 1))
        for climb in climbs:
            if climb():
                break
        return max(self.fixed, key=lambda system: self.runs[system].goodput)

    @property
    def fixed(self) -> list[System]:
        """Those that were run."""
        return [system for system in self.runs if system.policy in (STATIC, COLLOCATED)]

    @property
    def num_left_out(self) -> int:
        """Fixed systems that were not run."""
        return len(self._orders) * (len(self._pool.workers) - 1) + len(CHUNKS) + 1 - len(self.fixed)

    @property
    def _orders(self) -> Sequence[bool]:
        """Of `System.slow_first`."""
        return (False, True) if len({worker.times for worker in self._pool.workers}) > 1 else (False,)

    def starts(self) -> list[System]:
        """The best of each kind."""
        kinds = {(system.policy, system.paced, system.slow_first) for system in self.fixed}
        return [
            max(
                (s for s in self.fixed if (s.policy, s.paced, s.slow_first) == kind),
                key=lambda s: self.runs[s].goodput,
            )
            for kind in sorted(kinds)
        ]

    def _climb(self, values: Sequence[System], at: int, step: int) -> bool:
        """Moves to the better neighbour until there is none; whether it ended because nearly all were in time."""
        at, step = min(max(0, at), len(values) - 1), max(1, step)
        while True:
            if self.run(values[at]).share >= ALL:
                return True
            near = [place for place in (at - step, at + step) if 0 <= place < len(values)]
            best = max([at, *near], key=lambda place: self.run(values[place]).goodput)
            if best != at:
                at = best
            elif step > 1:
                step //= 2
            else:
                return False

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
    attained: float = 0.9,
    most_runs: int = 6,
) -> tuple[float, list[System]]:
    """(the rate up to which the best fixed system has that share in time, where its climbs ended)."""
    rate = 0.8 * likely_rate(pool, targets, requests_at(1.0))
    below = above = 0.0
    starts: list[System] = []
    for _ in range(most_runs):
        search = Search(pool, targets, requests_at(rate))
        best = search.best(starts)
        starts = search.starts()
        if search.runs[best].share >= attained:
            below = rate
        else:
            above = rate
        if below and above and above / below < 1.12:
            break
        rate = (below * above) ** 0.5 if below and above else rate * (1.3 if below else 1 / 1.3)
    return below or rate, starts
