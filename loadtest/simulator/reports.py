"""A simulated worker's reports of its load to the routers."""

from __future__ import annotations

import math

from loadtest.simulator.adapters import SimAdapters
from loadtest.simulator.engine import Engine
from loadtest.simulator.fleet import Report, WorkerSpec, World


class Reports:
    """Sends a report when something changes, but no sooner than an interval after the last one."""

    def __init__(self, world: World, name: str, spec: WorkerSpec, engine: Engine, adapters: SimAdapters) -> None:
        self._world, self._name, self._spec, self._engine, self._adapters = world, name, spec, engine, adapters
        self._clock = world.clock
        self._due_s = math.inf
        self._last_s = -math.inf
        self._adapters_due = False

    def now(self) -> Report:
        """The worker's state."""
        self._engine.settle()
        scheduler, work = self._engine.scheduler, self._engine.scheduler.sequences.work
        return Report(
            num_free_blocks=max(0, scheduler.pool.num_free - scheduler.num_growth_blocks),
            num_running=scheduler.sequences.num_running,
            num_waiting=scheduler.sequences.num_waiting,
            num_queued_tokens=work.num_queued_tokens,
            num_queued_pairs=work.num_queued_pairs,
            decoding=work.decoding,
            promised=work.promised,
            least_slack_s=scheduler.least_slack_s(work.decoding),
            adapters=self._adapters.listed() if self._adapters_due else None,
            loading_adapters=self._adapters.loading,
            adapter_room=self._adapters.room,
            step_times=scheduler.step_fit.times if self._world.reports_times else None,
            step_kinds=scheduler.step_fit.kinds,
        )

    def plan(self, delay_s: float) -> None:
        """The next one is due that many seconds after the last one, or at once where they have passed."""
        due_s = max(self._clock.now_s, self._last_s + delay_s)
        if due_s < self._due_s:
            self._due_s = due_s
            self._clock.at(due_s, self._send, due_s)

    def adapters_changed(self) -> None:
        """The next one lists the adapters."""
        self._adapters_due = True
        self.plan(self._spec.report_s)

    def _send(self, due_s: float) -> None:
        if due_s != self._due_s:
            return  # an earlier one took its place
        self._due_s, self._last_s = math.inf, due_s
        report = self.now()
        self._adapters_due = False
        for listener in self._world.listeners:
            self._clock.after(self._spec.message_s, listener.on_report, self._name, report)
        if self._engine.is_decoding:
            self.plan(self._spec.decoding_report_s)
