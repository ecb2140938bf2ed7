"""Runs trials one after another on one cluster, and on a fresh one after a trial that left something behind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import grpc.aio

from loadtest.chaos.adapters import LATE, LOAD, NAMES, UNLOAD, write_adapters
from loadtest.chaos.cluster import HANG_S, POLL_S, WHOLE_TIMEOUT_S, ChaosCluster, chaos_cluster
from loadtest.chaos.phases import reached
from loadtest.chaos.streams import ANSWER_TIMEOUT_S, Stream, Streams, ask, prompts, undisturbed
from loadtest.chaos.trial import CONTROL, LASTING_CUT, PARTITIONS, Outcome, Trial, judge
from loadtest.chaos.victims import PEERS, Status, cut_pairs, may_be, one_pair, parts_of
from services.local.supervisor import MAX_DEATHS, WINDOW_S
from shared.errors import Internal
from shared.failpoints import ADAPTER_READ

PARTITION_S = 10.0
"""Longer than a router waits before it gives a worker up, and a worker a router."""
DEADLY = ("SIGKILL", "drain")


async def strike(trial: Trial, cluster: ChaosCluster, status: Status) -> None:
    """Lets the fault happen, to the parts that `status` shows as the victim's; returns at its end where it has one."""
    if trial.fault == LASTING_CUT:
        assert cluster.network is not None, "as for partitions"
        cluster.network.cut([one_pair(trial.victim, status)], both_ways=True)
        return
    if trial.fault in PARTITIONS:
        await _partition(trial, cluster, status)
        return
    pids = [cluster.pid(part) for part in parts_of(trial.victim, status)]
    if trial.fault == "SIGKILL":
        _signal(pids, signal.SIGKILL)
    elif trial.fault == "drain":
        _signal(pids, signal.SIGTERM)
    elif trial.fault == "hung-engine":
        _signal(pids, signal.SIGUSR1)
        await asyncio.sleep(HANG_S)
    else:
        _signal(pids, signal.SIGSTOP)
        try:
            await asyncio.sleep(float(trial.fault.removeprefix("SIGSTOP-").removesuffix("s")))
        finally:
            _signal(pids, signal.SIGCONT)


async def _partition(trial: Trial, cluster: ChaosCluster, status: Status) -> None:
    assert cluster.network is not None, "partitions are tried where each part has a network of its own"
    cluster.network.cut(cut_pairs(trial.victim, status), both_ways=trial.fault == "two-way-partition")
    try:
        await asyncio.sleep(PARTITION_S)
    finally:
        cluster.network.heal()


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it was killed meanwhile
            os.kill(pid, number)


_MARGIN_S = 5.0
"""A part dies a moment after its signal."""


class Deaths:
    """Deaths of one cluster's parts."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = defaultdict(list)

    def note(self, parts: Iterable[str]) -> None:
        """Notes that these parts die now."""
        for part in parts:
            self._times[part].append(time.monotonic())

    async def wait(self, parts: Iterable[str]) -> None:
        """Until one more death of any of these would not be its last."""
        for part in parts:
            times = self._times[part]
            if len(times) >= MAX_DEATHS - 1:
                oldest = times[1 - MAX_DEATHS]
                await asyncio.sleep(max(0.0, oldest + WINDOW_S + _MARGIN_S - time.monotonic()))


NUM_STREAMS = 24
PHASE_TIMEOUT_S = 30.0
BASE = ("",)
"""Models of the streams in trials without adapters: the base model alone."""
WITHOUT_LATE = ("", *NAMES)
"""Models that the streams ask for in turn: the base model and all adapters but LATE."""
WITH_LATE = ("", *NAMES, LATE)
"""Models that the streams ask for in turn, LATE among them."""
FETCHERS = ("prefill-1", "decode-1")
"""In trials of the fetch peer these get the prompts."""


class Chaos:
    """Trials over clusters of one model."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        resuming: bool,
        num_streams: int = NUM_STREAMS,
        speculation: str = "off",
    ) -> None:
        """`folder` takes the logs, a folder a cluster; `speculation`: the workers'."""
        self._model = model
        self._folder = folder
        self._resuming = resuming
        self._speculation = speculation
        self._texts = prompts(num_streams)
        self._calm: dict[tuple[str, ...], Sequence[Stream]] = {}  # by the streams' models
        self._adapters = folder.absolute() / "adapters"
        self._num_trials = 0
        self._num_clusters = 0

    async def run(self, todo: Sequence[Trial], on_outcome: Callable[[Outcome, float], None]) -> None:
        """`on_outcome` is called after each trial, with the seconds that it took."""
        for kind, group in itertools.groupby(todo, key=lambda trial: (trial.needs_network, trial.has_adapters)):
            networked, has_adapters = kind
            if has_adapters:
                write_adapters(self._model, self._adapters)
            left = iter(group)
            pending = next(left, None)
            while pending is not None:
                self._num_clusters += 1
                folder = self._folder / f"cluster-{self._num_clusters}"
                async with chaos_cluster(
                    self._model,
                    folder,
                    networked=networked,
                    speculation=self._speculation,
                    adapters=self._adapters if has_adapters else None,
                ) as cluster:
                    pending = await self._try_on(cluster, pending, left, on_outcome)

    async def _try_on(
        self, cluster: ChaosCluster, first: Trial, left: Iterator[Trial], on_outcome: Callable[[Outcome, float], None]
    ) -> Trial | None:
        """Trials until one leaves something behind; the next one, None where there is none."""
        await cluster.until_whole()
        if _models(first) not in self._calm:
            if first.has_adapters:
                await self._load_late(cluster)
            for models in (WITHOUT_LATE, WITH_LATE) if first.has_adapters else (BASE,):
                self._calm[models] = await self._undisturbed(cluster, models)
            if first.has_adapters:
                await cluster.unload_adapter(LATE)
        pending: Trial | None = first
        intact, deaths = True, Deaths()
        while pending is not None and intact:
            begun = time.monotonic()
            outcome, intact = await self._try(pending, cluster, deaths)
            on_outcome(outcome, time.monotonic() - begun)
            pending = next(left, None)
        return pending

    def _salt(self) -> str:
        """A cache salt that no trial before had, so that nothing of it is cached."""
        self._num_trials += 1
        return f"trial-{self._num_trials}"

    async def _load_late(self, cluster: ChaosCluster) -> None:
        """Returns when both routers know it."""
        await cluster.load_adapter(LATE, self._adapters / LATE)
        if not await cluster.until_adapters(len(NAMES) + 1):
            raise Internal(f"not every router knows adapter {LATE}")

    async def _undisturbed(self, cluster: ChaosCluster, models: Sequence[str]) -> Sequence[Stream]:
        """The answers without a fault, twice. Raises Internal where they fail or differ: nothing can be compared."""
        first, second = [await undisturbed(cluster.targets, self._texts, self._salt(), models) for _ in range(2)]
        if any(one.tokens != other.tokens for one, other in zip(first, second, strict=True)):
            raise Internal("undisturbed streams differ from run to run")
        return second

    async def _try(self, trial: Trial, cluster: ChaosCluster, deaths: Deaths) -> tuple[Outcome, bool]:
        """The outcome, and whether the cluster is as it was: what is left behind must not count for the next trial."""
        notes: list[str] = []
        before = await cluster.until_whole()
        assert before is not None, "trials begin with a whole cluster"
        if trial.fault in DEADLY:
            await deaths.wait(may_be(trial.victim))
        cluster.local.take_changes()
        models = _models(trial)
        if trial.phase == UNLOAD:
            await self._load_late(cluster)
        streams = Streams(cluster.targets, self._texts, self._salt(), resuming=self._resuming, models=models)
        fetches = "peer" in trial.victim
        if fetches:
            await self._place_prefixes(cluster, streams.salt)
            before = await cluster.until(lambda _: True, WHOLE_TIMEOUT_S) or before
        streams.start()
        status = await cluster.until(reached(trial.phase, before, streams), PHASE_TIMEOUT_S, poll_s=POLL_S)
        if status is None:
            notes.append("the phase did not come")
        call = None
        if status is not None and trial.phase in (LOAD, UNLOAD):
            call = await self._begin_call(trial, cluster, status)
        striking = asyncio.create_task(self._strike(trial, cluster, status, deaths))
        await asyncio.sleep(0)  # it strikes
        if status is not None and not streams.num_open:
            notes.append("all had ended before the fault")
        await streams.wait(ANSWER_TIMEOUT_S)
        await striking
        if fetches:
            await cluster.undrain_peers(WHOLE_TIMEOUT_S)
            notes += await _fetch_notes(cluster, before, trial)
        leaked, intact = await self._after(cluster, notes)
        if trial.has_adapters:
            notes += await self._adapter_notes(trial, cluster, call)
            intact &= not notes
        if trial.fault == LASTING_CUT and cluster.network is not None:
            cluster.network.heal()
        return judge(trial, streams.all, self._calm[models], leaked, "; ".join(notes)), intact

    async def _begin_call(self, trial: Trial, cluster: ChaosCluster, status: Status) -> asyncio.Task[None]:
        """A load that the victim is in the middle of, or an unload that goes out together with the fault."""
        if trial.phase == UNLOAD:
            return asyncio.create_task(cluster.unload_adapter(LATE))
        victims = parts_of(trial.victim, status)
        logs = [cluster.local.children[part].log_path for part in victims]
        seen = [log.stat().st_size for log in logs]
        _signal([cluster.pid(part) for part in victims], signal.SIGUSR1)
        call = asyncio.create_task(cluster.load_adapter(LATE, self._adapters / LATE))
        deadline = time.monotonic() + PHASE_TIMEOUT_S
        while not all(f"failpoint {ADAPTER_READ}" in _behind(*each) for each in zip(logs, seen, strict=True)):
            if time.monotonic() > deadline:
                raise Internal(f"{', '.join(victims)} did not begin to read an adapter")
            await asyncio.sleep(POLL_S)
        return call

    async def _adapter_notes(self, trial: Trial, cluster: ChaosCluster, call: asyncio.Task[None] | None) -> list[str]:
        """What is not as the call's answer says, and what workers keep for no request; the name is gone in the end."""
        notes = []
        refusal = None
        if call is not None:
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await call
            except grpc.aio.AioRpcError as error:
                refusal = error
            except TimeoutError:
                notes.append(f"the {trial.phase} was not answered")
        if refusal is not None and (trial.phase == UNLOAD or refusal.code() is not grpc.StatusCode.UNAVAILABLE):
            notes.append(f"the {trial.phase} failed: {refusal.code().name} {refusal.details()}")
        is_named = trial.phase == LOAD and refusal is None
        if not await cluster.until_adapters(len(NAMES) + is_named):
            notes.append(f"not every worker has {len(NAMES) + is_named} adapters")
        place = WITH_LATE.index(LATE)
        known = self._calm[WITH_LATE][place].tokens
        for router in range(len(cluster.targets)):
            target, text = cluster.targets[router], self._texts[place]
            (answer,) = await ask([target], [text], "late", resuming=False, models=(LATE,))
            if is_named and answer.tokens != known:
                notes.append(f"adapter {LATE} gives another answer at router {router}: {answer.error}")
            elif not is_named and not answer.error.startswith("NOT_FOUND"):
                notes.append(f"adapter {LATE} is still known to router {router}: {answer.error}")
        if is_named:
            await cluster.unload_adapter(LATE)
        if not await cluster.until_unused():
            notes.append("a worker keeps an adapter for a request that has ended")
        return notes

    async def _strike(self, trial: Trial, cluster: ChaosCluster, status: Status | None, deaths: Deaths) -> None:
        if status is None or trial == CONTROL:
            return
        if trial.fault in DEADLY:
            deaths.note(parts_of(trial.victim, status))
        await strike(trial, cluster, status)

    async def _place_prefixes(self, cluster: ChaosCluster, salt: str) -> None:
        """The first halves of the streams' prompts are cached by the peers alone, which get no prompts from then on."""
        await cluster.drain(*FETCHERS)
        halves = [text[: len(text) // 2] for text in self._texts]
        warming = Streams(cluster.targets, halves, salt, resuming=self._resuming, answer_len=1)
        warming.start()
        await warming.wait(ANSWER_TIMEOUT_S)
        await cluster.drain(*FETCHERS, undo=True)
        await cluster.drain(*PEERS)

    async def _after(self, cluster: ChaosCluster, notes: list[str]) -> tuple[int, bool]:
        """Blocks that stay held, and whether nothing is and every part is back; adds to the notes what is not."""
        intact = await cluster.until_whole() is not None
        if not intact:
            statuses = await cluster.statuses()
            given_up = cluster.given_up()
            answered = [status for status in statuses if status is not None]
            silent = ["a router does not answer"] if len(answered) < len(statuses) else []
            reason = "; ".join(dict.fromkeys([*silent, *(what for status in answered for what in status.degraded)]))
            notes.append(f"not whole after {WHOLE_TIMEOUT_S:g} s: {given_up or reason}")
        leaked = await cluster.num_leaked()
        return max(0, leaked), intact and not leaked


def _models(trial: Trial) -> tuple[str, ...]:
    """What the streams ask for in turn."""
    if not trial.has_adapters:
        return BASE
    return WITH_LATE if trial.phase == UNLOAD else WITHOUT_LATE


def _behind(log: Path, begin: int) -> str:
    with log.open(errors="replace") as file:
        file.seek(begin)
        return file.read()


async def _fetch_notes(cluster: ChaosCluster, before: Status, trial: Trial) -> list[str]:
    """A trial of the fetch peer in which nothing was fetched has tried nothing."""
    now = await cluster.until(lambda _: True, WHOLE_TIMEOUT_S)
    if now is None:
        return []
    old = {worker.worker.name: worker.load for worker in before.workers}
    tokens = sum(
        worker.load.num_peer_hit_tokens - old[worker.worker.name].num_peer_hit_tokens
        for worker in now.workers
        if worker.worker.name in FETCHERS
    )
    return [] if tokens > 0 or trial.phase == "queued" else ["nothing was fetched from a peer"]
