"""The weights of one model over its workers: other ones for all of them, and workers that sleep."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from services.router.workers.link import WorkerLink
from shared.errors import DeadlineExceeded, Internal, InvalidRequest, NotFound, TandemError, WorkerLost
from shared.rpc.pb.tandem.v1 import worker_pb2
from shared.tasks import end_task, unbroken

logger = logging.getLogger(__name__)

CHECK, PAUSE = worker_pb2.WEIGHT_STEP_CHECK, worker_pb2.WEIGHT_STEP_PAUSE
UNLOAD, LOAD = worker_pb2.WEIGHT_STEP_UNLOAD, worker_pb2.WEIGHT_STEP_LOAD
RESUME = worker_pb2.WEIGHT_STEP_RESUME

TIMEOUT_S = 300.0
"""For running requests to end, where a call says nothing else."""
MAX_TIMEOUT_S = 86_400.0
CHECK_S = 120.0
"""For a worker to read headers and samples of a folder."""
LOAD_S = 3_600.0
"""For a worker to load weights, as `worker.startupTimeoutSeconds` of the chart."""
BRING_AGAIN_S = 1.0
"""Until weights are brought once more to a worker that did not take them; twice as long each time."""
MAX_BRING_AGAIN_S = 60.0

T = TypeVar("T")


class FleetWeights:
    """One change at a time, which runs to its end where its caller is gone. Runs on the event loop."""

    def __init__(self, workers: Callable[[], Iterable[WorkerLink]]) -> None:
        """`workers`: the links that there are, connected or not."""
        self._workers = workers
        self._changing = asyncio.Lock()
        self._updated: tuple[str, str] | None = None  # folder and fingerprint of this router's last update, …
        self._is_newest = True  # … which no other router's has followed
        self._bringing: dict[WorkerLink, asyncio.Task[None]] = {}

    async def update(self, folder: str, timeout_s: float = 0.0) -> tuple[str, list[str]]:
        """Every worker gets the weights of a folder: all are checked, then all paused, then all changed, then all
        resume. Where one cannot, all have what they had. Returns the fingerprint and the workers' names. Raises what
        the first one answers, WorkerLost, and InvalidRequest where the folder has other content on another host."""
        limit_s = checked_timeout(timeout_s)
        if not folder.startswith("/"):
            raise InvalidRequest(
                f"folder must be an absolute path on the workers' hosts, not {folder!r}", field="folder"
            )
        async with self._changing:
            return await unbroken(self._update(folder, limit_s))

    async def _update(self, folder: str, limit_s: float) -> tuple[str, list[str]]:
        workers = self._named(())
        found = await _all(workers, lambda worker: worker.calls.change_weights(CHECK, folder), CHECK_S)
        if len({answer.model_fingerprint for answer in found}) > 1:
            raise InvalidRequest(f"{folder} has not the same weights on all workers' hosts", field="folder")
        before = {worker.name: answer.folder for worker, answer in zip(workers, found, strict=True)}
        try:
            await _pause(workers, limit_s)
            loaded = await self._load(workers, folder, before)
        finally:
            await _resume(workers)
        self._updated, self._is_newest = (folder, loaded), True
        for worker in self._workers():  # one that came meanwhile, or started again
            if worker.connected:
                self.bring(worker, worker.model_fingerprint)
        return loaded, [worker.name for worker in workers]

    def may_bring(self) -> bool:
        """Whether a worker that starts with other weights can get those of the last update."""
        return self._newest is not None

    @property
    def _newest(self) -> tuple[str, str] | None:
        return self._updated if self._is_newest else None

    def seen(self, fingerprint: str) -> None:
        """A worker has weights of that fingerprint by an update: where none runs here, perhaps by another router's."""
        if self._updated is not None and not self._changing.locked():
            self._is_newest = fingerprint == self._updated[1]

    def bring(self, worker: WorkerLink, fingerprint: str) -> None:
        """A worker has come with weights of that fingerprint: where this router's update has brought others since, and
        no other router's again others, it gets them too."""
        if self._newest is not None and fingerprint != self._newest[1] and worker not in self._bringing:
            self._bringing[worker] = asyncio.create_task(self._bring(worker), name=f"weights-{worker.name}")

    async def _bring(self, worker: WorkerLink) -> None:
        """Gives a worker the weights of the last update; tries again until it has them, is gone, or got others by
        another router."""
        started_with, wait_s = worker.load.model_fingerprint, BRING_AGAIN_S
        try:
            while worker.connected and worker.load.model_fingerprint in ("", started_with):
                try:
                    async with self._changing:
                        if self._newest is not None and worker.connected:
                            await self._give(worker, self._newest[0])
                    return
                except TandemError as error:
                    logger.warning("worker %s does not get the weights of the last update: %s", worker.name, error)
                await asyncio.sleep(wait_s)
                wait_s = min(MAX_BRING_AGAIN_S, wait_s * 2)
        finally:
            self._bringing.pop(worker, None)

    async def _give(self, worker: WorkerLink, folder: str = "") -> None:
        """The weights of a folder, or those that it had. Raises as `update`."""
        try:
            await _pause([worker], TIMEOUT_S)
            await _all([worker], lambda worker: worker.calls.change_weights(LOAD, folder), LOAD_S)
        finally:
            await _resume([worker])

    async def close(self) -> None:
        """Ends what is under way."""
        for task in list(self._bringing.values()):
            await end_task(task)

    async def _load(self, workers: Sequence[WorkerLink], folder: str, before: dict[str, str]) -> str:
        """The fingerprint of all. Raises as `update`; all have then what they had."""
        answers = await _each(workers, lambda worker: worker.calls.change_weights(LOAD, folder), LOAD_S)
        failed = next((answer for answer in answers if isinstance(answer, BaseException)), None)
        fingerprints = {answer.model_fingerprint for answer in answers if not isinstance(answer, BaseException)}
        if failed is None and len(fingerprints) == 1:
            return str(fingerprints.pop())
        done = [
            worker for worker, answer in zip(workers, answers, strict=True) if not isinstance(answer, BaseException)
        ]
        back = await _each(done, lambda worker: worker.calls.change_weights(LOAD, before[worker.name]), LOAD_S)
        for worker, answer in zip(done, back, strict=True):
            if isinstance(answer, BaseException):
                logger.error("worker %s has weights that no other has: %s", worker.name, answer)
        raise (
            _typed(failed)
            if failed is not None
            else InvalidRequest(f"{folder} has not the same weights on all workers' hosts", field="folder")
        )

    async def sleep(self, names: Sequence[str] = (), timeout_s: float = 0.0) -> list[str]:
        """These workers, or all, free their weights and blocks; returns their names. Raises DeadlineExceeded where
        requests still run after the time, NotFound, WorkerLost, and what a worker answers; none takes more requests
        then than before."""
        limit_s = checked_timeout(timeout_s)
        async with self._changing:
            return await unbroken(self._sleep(names, limit_s))

    async def _sleep(self, names: Sequence[str], limit_s: float) -> list[str]:
        workers = self._named(names)
        try:
            await _pause(workers, limit_s)
            await _all(workers, lambda worker: worker.calls.change_weights(UNLOAD), CHECK_S)
        except BaseException:
            await _resume(workers)
            raise
        return [worker.name for worker in workers]

    async def wake(self, names: Sequence[str] = ()) -> list[str]:
        """These workers, or all connected ones that sleep, load what they had and take requests again; returns their
        names. Raises as `sleep`."""
        async with self._changing:
            return await unbroken(self._wake(names))

    async def _wake(self, names: Sequence[str]) -> list[str]:
        known = self._named(names) if names else [worker for worker in self._workers() if worker.connected]
        if not known:
            raise WorkerLost("no worker is connected", retry_after_s=1.0)
        workers = [worker for worker in known if worker.load.asleep]
        await _all(workers, self._give, None)
        return [worker.name for worker in workers]

    def asleep(self) -> list[str]:
        """Names of the workers that sleep."""
        return [worker.name for worker in self._workers() if worker.connected and worker.load.asleep]

    def _named(self, names: Sequence[str]) -> list[WorkerLink]:
        """These, or all without names. Raises NotFound, and WorkerLost where one is not connected or there is none."""
        known = {worker.name: worker for worker in self._workers()}
        if unknown := [name for name in names if name not in known]:
            raise NotFound(f"there is no worker {unknown[0]!r}", field="workers", value=unknown[0])
        found = [known[name] for name in dict.fromkeys(names)] if names else list(known.values())
        if not found:
            raise WorkerLost("no worker is connected", retry_after_s=1.0)
        if lost := [worker.name for worker in found if not worker.connected]:
            raise WorkerLost(f"worker {lost[0]} is not connected", retry_after_s=1.0)
        return found


def checked_timeout(timeout_s: float) -> float:
    """Raises InvalidRequest."""
    if not 0 <= timeout_s <= MAX_TIMEOUT_S:
        raise InvalidRequest(
            f"timeout_s must be 0 to {MAX_TIMEOUT_S:g}, not {timeout_s:g}", field="timeout_s", limit=MAX_TIMEOUT_S
        )
    return timeout_s or TIMEOUT_S


async def _limited(worker: WorkerLink, work: Awaitable[T], timeout_s: float | None) -> T:
    """Raises DeadlineExceeded."""
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError:
        raise DeadlineExceeded(f"worker {worker.name} did not answer within {timeout_s:g} s", limit=timeout_s) from None


async def _each(
    workers: Sequence[WorkerLink], work: Callable[[WorkerLink], Awaitable[T]], timeout_s: float | None
) -> list[T | BaseException]:
    """Each one's result or error, in order. No time-out: `work` has its own."""
    return await asyncio.gather(
        *(_limited(worker, work(worker), timeout_s) for worker in workers), return_exceptions=True
    )


async def _all(
    workers: Sequence[WorkerLink], work: Callable[[WorkerLink], Awaitable[T]], timeout_s: float | None
) -> list[T]:
    """Raises the first error, once all have answered."""
    answers = await _each(workers, work, timeout_s)
    results: list[T] = []
    for answer in answers:
        if isinstance(answer, BaseException):
            raise _typed(answer)
        results.append(answer)
    return results


async def _pause(workers: Sequence[WorkerLink], limit_s: float) -> None:
    """Raises the first error at once: those that still wait for their requests are not waited for, a `_resume` ends
    that."""
    try:
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                pausing = worker.calls.change_weights(PAUSE, timeout_s=limit_s)
                group.create_task(_limited(worker, pausing, limit_s + CHECK_S))
    except BaseExceptionGroup as errors:
        raise _typed(errors.exceptions[0]) from None


async def _resume(workers: Sequence[WorkerLink]) -> None:
    """Raises nothing: one that does not answer is gone, or resumes when it is done with what it does."""
    await _each(workers, lambda worker: worker.calls.change_weights(RESUME), CHECK_S)


def _typed(error: BaseException) -> BaseException:
    is_known = isinstance(error, TandemError | asyncio.CancelledError)
    return error if is_known else Internal(f"{type(error).__name__}: {error}")
