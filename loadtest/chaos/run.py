"""Runs trials one after another on one cluster, and on a fresh one after a trial that left something behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from loadtest.chaos.cluster import ChaosCluster, chaos_cluster, strike
from loadtest.chaos.phases import num_held, reached, whole
from loadtest.chaos.streams import Stream, Streams, prompts
from loadtest.chaos.trial import CONTROL, Outcome, Trial, judge
from shared.errors import Internal

NUM_STREAMS = 24
ANSWER_TIMEOUT_S = 120.0
PHASE_TIMEOUT_S = 30.0
WHOLE_TIMEOUT_S = 60.0
FREE_TIMEOUT_S = 10.0
"""Blocks that are held this long after the last answer are leaked, whatever a time-out would do later."""


class Chaos:
    """Trials over clusters of one model."""

    def __init__(self, model: Path, folder: Path, *, resuming: bool, num_streams: int = NUM_STREAMS) -> None:
        """`folder` takes the logs, a folder a cluster."""
        self._model = model
        self._folder = folder
        self._resuming = resuming
        self._texts = prompts(num_streams)
        self._calm: Sequence[Stream] = ()
        self._num_trials = 0

    async def run(self, todo: Sequence[Trial], on_outcome: Callable[[Outcome], None]) -> None:
        """`on_outcome` is called after each trial."""
        left: Iterator[Trial] = iter(todo)
        pending = next(left, None)
        number = 0
        while pending is not None:
            number += 1
            async with chaos_cluster(self._model, self._folder / f"cluster-{number}") as cluster:
                await cluster.until(whole, WHOLE_TIMEOUT_S)
                if not self._calm:
                    self._calm = await self._undisturbed(cluster)
                intact = True
                while pending is not None and intact:
                    outcome, intact = await self._try(pending, cluster)
                    on_outcome(outcome)
                    pending = next(left, None)

    def _streams(self, cluster: ChaosCluster) -> Streams:
        self._num_trials += 1
        salt = f"trial-{self._num_trials}"  # nothing is cached of the trials before
        return Streams(cluster.local.grpc, self._texts, salt, resuming=self._resuming)

    async def _undisturbed(self, cluster: ChaosCluster) -> Sequence[Stream]:
        """The answers without a fault, twice. Raises Internal where they fail or differ: nothing can be compared."""
        runs = []
        for _ in range(2):
            streams = self._streams(cluster)
            streams.start()
            await streams.wait(ANSWER_TIMEOUT_S)
            runs.append(streams.all)
        if errors := {stream.error for streams in runs for stream in streams if stream.error}:
            raise Internal(f"undisturbed streams fail: {', '.join(sorted(errors))}")
        if any(first.tokens != second.tokens for first, second in zip(*runs, strict=True)):
            raise Internal("undisturbed streams differ from run to run")
        return runs[1]

    async def _try(self, trial: Trial, cluster: ChaosCluster) -> tuple[Outcome, bool]:
        """The outcome, and whether the cluster is as it was: what is left behind must not count for the next trial."""
        notes = []
        before = await cluster.until(whole, WHOLE_TIMEOUT_S)
        assert before is not None, "trials begin with a whole cluster"
        cluster.local.take_changes()
        streams = self._streams(cluster)
        streams.start()
        status = await cluster.until(reached(trial.phase, before, streams), PHASE_TIMEOUT_S)
        if status is None:
            notes.append("the phase did not come")
        if status is None or trial == CONTROL:
            striking = asyncio.create_task(asyncio.sleep(0))
        else:
            striking = asyncio.create_task(strike(trial.fault, cluster.pid(trial.victim, status)))
            await asyncio.sleep(0)  # it strikes
            if not streams.num_open:
                notes.append("all had ended before the fault")
        await streams.wait(ANSWER_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            await striking
        leaked, intact = await self._after(cluster, notes)
        return judge(trial, streams.all, self._calm, leaked, "; ".join(notes)), intact

    async def _after(self, cluster: ChaosCluster, notes: list[str]) -> tuple[int, bool]:
        """Blocks that stay held, and whether nothing is and every part is back; adds to the notes what is not."""
        intact = await cluster.until(whole, WHOLE_TIMEOUT_S) is not None
        if not intact:
            status = await cluster.status()
            given_up = cluster.given_up()
            reason = "; ".join(status.degraded) if status is not None else "the router does not answer"
            notes.append(f"not whole after {WHOLE_TIMEOUT_S:g} s: {given_up or reason}")
        if await cluster.until(lambda status: num_held(status) == 0, FREE_TIMEOUT_S) is not None:
            return 0, intact
        status = await cluster.status()
        return (num_held(status) if status is not None else 0), False
