"""A simulated prefill worker: chunks under a token budget, blocks shipped while the next chunk computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from loadtest.simulator.fleet import Report, Reporter, World
from loadtest.simulator.request import SimRequest
from shared.sizing.step_time import StepWork


@dataclass(frozen=True, slots=True)
class PrefillCalls:
    """Callbacks for a prompt."""

    on_start: Callable[[SimRequest], None]
    """Its first chunk begins."""
    on_first_token: Callable[[SimRequest, float, float], None]
    """(request, time, seconds since it arrived here)."""
    on_shipped: Callable[[SimRequest], None]
    """All blocks have arrived at the decode worker."""


@dataclass(slots=True)
class _Prompt:
    request: SimRequest
    calls: PrefillCalls
    num_held: int
    """Tokens that the decode worker holds: they are not shipped."""
    num_computed: int = 0
    came_s: float = 0.0


class PrefillWorker:
    """First come, first served; a prompt's cached prefix is taken when its first chunk begins."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.spec = world.spec
        self._clock, self._times = world.clock, self.spec.times
        self.cache = world.prefix_cache(name, self.spec)
        self.reports = Reporter(world.clock, self.spec, self)
        self._waiting: deque[_Prompt] = deque()
        self._started: deque[_Prompt] = deque()
        self._num_queued_tokens = 0
        self._busy = False
        self._link_free_s = 0.0
        self.busy_s = 0.0
        """Time of its steps so far, the running one included."""

    def report(self) -> Report:
        """See `Reported`."""
        return Report(self.cache.num_free, len(self._waiting) + len(self._started), self._num_queued_tokens)

    def submit(self, request: SimRequest, num_held: int, calls: PrefillCalls) -> None:
        """Takes a prompt of which the decode worker holds the first `num_held` tokens."""
        item = _Prompt(request, calls, num_held, came_s=self._clock.now_s)
        item.num_computed = self.cache.num_hit_tokens(request.runs, request.num_prompt_tokens)
        self._num_queued_tokens += request.num_prompt_tokens - item.num_computed
        self._waiting.append(item)
        self.reports.changed()
        if not self._busy:
            self._next_step()

    def _next_step(self) -> None:
        """Fills a step's budget: prompts in progress, then new ones while there are blocks for them."""
        budget, work = self.spec.chunk_tokens, StepWork()
        plan: list[tuple[_Prompt, int]] = []
        for item in self._started:
            budget, work = self._add(item, budget, work, plan)
        while budget > 0 and self._waiting and self._start(self._waiting[0]):
            item = self._waiting.popleft()
            self._started.append(item)
            budget, work = self._add(item, budget, work, plan)
        self._busy = bool(plan)
        if plan:
            step_s = self._times.step_s(work)
            self.busy_s += step_s
            self._clock.after(step_s, self._step_done, plan)

    def _add(self, item: _Prompt, budget: int, work: StepWork, plan: list[tuple[_Prompt, int]]) -> tuple[int, StepWork]:
        count = min(budget, item.request.num_prompt_tokens - item.num_computed)
        if count > 0:
            plan.append((item, count))
            work = work.with_chunk(count, item.num_computed)
        return budget - count, work

    def _start(self, item: _Prompt) -> bool:
        request = item.request
        num_cached = self.cache.num_hit_tokens(request.runs, request.num_prompt_tokens)
        if not self.cache.acquire(request.runs, request.num_prompt_tokens, 0):
            return False
        self._num_queued_tokens += item.num_computed - num_cached  # the estimate at its arrival may be out of date
        item.num_computed = request.num_cached_tokens = num_cached
        request.started = True
        self._ship(max(0, num_cached - item.num_held))
        item.calls.on_start(request)
        return True

    def _step_done(self, plan: list[tuple[_Prompt, int]]) -> None:
        for item, count in plan:
            item.num_computed += count
            self._num_queued_tokens -= count
            self._ship(min(count, max(0, item.num_computed - item.num_held)))
            if item.num_computed >= item.request.num_prompt_tokens:
                self._prompt_done(item)
        self.reports.changed()
        self._next_step()

    def _prompt_done(self, item: _Prompt) -> None:
        self._started.remove(item)
        self.cache.seal(item.request.runs)
        now_s = self._clock.now_s
        item.calls.on_first_token(item.request, now_s, now_s - item.came_s)
        self._clock.at(self._link_free_s, self._shipped, item)

    def _shipped(self, item: _Prompt) -> None:
        self.cache.release(item.request.runs, 0)
        item.calls.on_shipped(item.request)
        self.reports.changed()
        if not self._busy and self._waiting:
            self._next_step()

    def _ship(self, num_tokens: int) -> None:
        """Sends over one link, one message after the other, during computation."""
        seconds = num_tokens * self.spec.kv_bytes_per_token / self.spec.link
        self._link_free_s = max(self._link_free_s, self._clock.now_s) + seconds
