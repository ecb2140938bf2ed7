"""A simulated decode worker.

Its steps are not simulated one by one. With a batch of B sequences and C tokens of KV, step i takes a + i · b seconds
(a: weights, batch and KV; b: the KV that B new tokens add), so m steps take m · a + b · m (m − 1) / 2. Only steps at
which the batch changes are events. While the worker prefills a prompt itself, every step is one.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from loadtest.simulator.fleet import Report, Reporter, World
from loadtest.simulator.request import SimRequest
from shared.sizing.step_time import StepWork

Done = Callable[[SimRequest], None]


@dataclass(slots=True)
class _Prompt:
    """A prompt that this worker computes itself."""

    request: SimRequest
    num_computed: int
    began_s: float
    on_first_token: Callable[[SimRequest, float, float], None]
    on_done: Done


class DecodeWorker:
    """Reserve → join → tokens, or prefill here and tokens. Blocks for the whole answer are reserved at the start."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.spec = world.decode_spec
        self._clock, self._times = world.clock, self.spec.times
        self.cache = world.prefix_cache(name, self.spec)
        self.reports = Reporter(world.clock, self.spec, self)
        self.num_requests = 0
        self._reservations: deque[tuple[SimRequest, Callable[[], None]]] = deque()  # reservations that wait for room
        self._joining: list[tuple[SimRequest, Done]] = []
        self._prompts: deque[_Prompt] = deque()
        self._running: list[tuple[int, int, SimRequest, Done]] = []  # heap: (last step, tie, request, callback)
        self._num_kv_tokens = 0
        self._step = 0
        self._synced_s = 0.0  # end of a step, from which later times are computed
        self._ticket = 0  # number of the next planned event: older ones are void
        self._chunking = False  # the running step computes a chunk and the batch
        self._num_joined = 0

    def report(self) -> Report:
        """See `Reported`."""
        queued = sum(item.request.num_prompt_tokens - item.num_computed for item in self._prompts)
        return Report(self.cache.num_free, self.num_requests, queued)

    # --- commands

    def try_reserve(self, request: SimRequest) -> bool:
        """Takes blocks and a batch slot for the request; False if there is no room."""
        if self.num_requests >= self.spec.max_num_seqs or not self.cache.acquire(
            request.runs, request.num_prompt_tokens, request.num_output_tokens
        ):
            return False
        self.num_requests += 1
        self.reports.changed()
        return True

    def reserve(self, request: SimRequest, then: Callable[[], None]) -> None:
        """Like `try_reserve`, but waits in a queue for room; then calls `then`."""
        self._reservations.append((request, then))
        self._serve_reservations()

    def join(self, request: SimRequest, on_done: Done) -> None:
        """The blocks of a reserved request have arrived."""
        self.cache.seal(request.runs)
        if request.num_output_tokens <= 1:
            self._finish(request, on_done)
            return
        self._joining.append((request, on_done))
        self._interrupt()

    def prefill_here(
        self, request: SimRequest, on_first_token: Callable[[SimRequest, float, float], None], on_done: Done
    ) -> None:
        """Computes the prompt of a reserved request together with the batch.

        `on_first_token` gets the time and how long the computation took, seconds.
        """
        request.num_cached_tokens = self.cache.num_hit_tokens(request.runs, request.num_prompt_tokens)
        request.started = True
        self._prompts.append(_Prompt(request, request.num_cached_tokens, self._clock.now_s, on_first_token, on_done))
        self._interrupt()

    # --- steps

    def _interrupt(self) -> None:
        """Plans an event at the end of the running step."""
        if self._chunking:
            return  # every step is an event already
        if not self._running:
            self._boundary(self._ticket, 0)
            return
        num_steps = self._steps_until(self._clock.now_s)
        first_last = self._running[0][0] - self._step
        self._plan(min(num_steps, first_last))

    def _boundary(self, ticket: int, num_steps: int) -> None:
        """The batch after `num_steps` more steps: some sequences leave, some join, the next event is planned."""
        if ticket != self._ticket:
            return
        self._advance(num_steps)
        if self._chunking:
            self._chunking = False
            self._after_chunk()
        while self._running and self._running[0][0] <= self._step:
            _, _, request, on_done = heapq.heappop(self._running)
            self._num_kv_tokens -= request.num_prompt_tokens + request.num_output_tokens
            self._finish(request, on_done)
        for request, on_done in self._joining:
            self._enter(request, on_done)
        self._joining.clear()
        if self._prompts:
            self._chunking = True
            self._plan(1)
        elif self._running:
            self._plan(self._running[0][0] - self._step)
        else:
            self._ticket += 1

    def _enter(self, request: SimRequest, on_done: Done) -> None:
        last = self._step + request.num_output_tokens - 1
        self._num_joined += 1
        heapq.heappush(self._running, (last, self._num_joined, request, on_done))
        self._num_kv_tokens += request.num_prompt_tokens + 1

    def _plan(self, num_steps: int) -> None:
        self._ticket += 1
        self._clock.at(self._synced_s + self._duration_s(num_steps), self._boundary, self._ticket, num_steps)

    def _duration_s(self, num_steps: int) -> float:
        batch = len(self._running)
        if self._chunking:
            work = StepWork(batch, self._num_kv_tokens)
            return self._times.step_s(work.with_chunk(self._chunk_len(), self._prompts[0].num_computed))
        first_s = self._times.decode_step_s(batch, self._num_kv_tokens)
        return num_steps * first_s + self._times.growth_s(batch) * num_steps * (num_steps - 1) / 2

    def _steps_until(self, time_s: float) -> int:
        """Number of steps up to the first one that ends at `time_s` or later."""
        batch = len(self._running)
        first_s = self._times.decode_step_s(batch, self._num_kv_tokens)
        half = self._times.growth_s(batch) / 2
        elapsed_s = time_s - self._synced_s
        if half <= 0:
            return max(1, math.ceil(elapsed_s / first_s - 1e-9))
        b = first_s - half
        return max(1, math.ceil((math.sqrt(b * b + 4 * half * elapsed_s) - b) / (2 * half) - 1e-9))

    def _advance(self, num_steps: int) -> None:
        self._synced_s = self._clock.now_s
        self._step += num_steps
        self._num_kv_tokens += num_steps * len(self._running)

    def _chunk_len(self) -> int:
        item = self._prompts[0]
        return min(self.spec.here_chunk_tokens, item.request.num_prompt_tokens - item.num_computed)

    def _after_chunk(self) -> None:
        item = self._prompts[0]
        item.num_computed += self._chunk_len()
        self.reports.changed()
        if item.num_computed < item.request.num_prompt_tokens:
            return
        self._prompts.popleft()
        self.cache.seal(item.request.runs)
        now_s = self._clock.now_s
        item.on_first_token(item.request, now_s, now_s - item.began_s)
        if item.request.num_output_tokens <= 1:
            self._finish(item.request, item.on_done)
        else:
            self._joining.append((item.request, item.on_done))

    def _finish(self, request: SimRequest, on_done: Done) -> None:
        request.finished_s = self._clock.now_s + self.spec.message_s
        self.cache.release(request.runs, request.num_output_tokens)
        self.num_requests -= 1
        self.reports.changed()
        on_done(request)
        self._serve_reservations()

    def _serve_reservations(self) -> None:
        while self._reservations and self.try_reserve(self._reservations[0][0]):
            self._reservations.popleft()[1]()
