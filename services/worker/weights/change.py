"""A worker's weights while it runs: others in their place, none while it sleeps, and the same again.

Every change goes by way of none: the engine ends, weights and pool are freed, and an engine starts over what is read
next. So no two sets of weights are in memory at once, and nothing computed with the old ones is left to be found.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from services.worker.adapters.adapter_pool import AdapterPool
from services.worker.host import EngineHost, let_go, release_memory
from services.worker.session import Session
from services.worker.telemetry.load_report import LoadReporter
from shared.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    ModelLoadError,
    TandemError,
)
from shared.fingerprints import headed_fingerprint
from shared.kernels.pool_view import dtype_name
from shared.model.families.registry import load_config
from shared.model.text.texts_digest import texts_digest
from shared.model.weights.checkpoint import Checkpoint
from shared.model.weights.head_checkpoint import check_head
from shared.model.weights.loader import fingerprint
from shared.model.weights.plan import WeightPlan
from shared.rpc.errors import to_proto
from shared.rpc.pb.tandem.v1 import worker_pb2

logger = logging.getLogger(__name__)

BLOCKS_S = 10.0
"""For blocks that others are sent of this pool, once no request runs here. Seconds."""
_POLL_S = 0.01

CHECK, PAUSE = worker_pb2.WEIGHT_STEP_CHECK, worker_pb2.WEIGHT_STEP_PAUSE
UNLOAD, LOAD = worker_pb2.WEIGHT_STEP_UNLOAD, worker_pb2.WEIGHT_STEP_LOAD
RESUME = worker_pb2.WEIGHT_STEP_RESUME


class Changed(Protocol):
    """The part of a worker that a change of weights calls."""

    host: EngineHost
    load: LoadReporter
    adapters: AdapterPool | None
    idle: asyncio.Event
    died: asyncio.Event

    async def flush_cache(self) -> int:
        """Forgets all cached blocks, in the index too."""
        ...

    def on_engine_changed(self) -> None:
        """Another engine runs: it does not know the targets yet."""
        ...


class WeightChanges:
    """Takes the steps of changes, one at a time, and answers each. Runs on the event loop."""

    def __init__(self, worker: Changed) -> None:
        self._worker = worker
        self._changing = asyncio.Lock()
        self._paused_by: Session | None = None
        self._pausing: dict[Session, asyncio.Future[str]] = {}  # that wait for requests to end, or to begin that

    async def change(self, session: Session, command: worker_pb2.ChangeWeights) -> None:
        """Takes a step and sends its answer; raises nothing."""
        answer = worker_pb2.WeightsChanged(call=command.call)
        host = self._worker.host
        if command.step == RESUME:
            self._end_pause(session)
        taking = asyncio.ensure_future(self._take_alone(session, command))
        if command.step == PAUSE:
            self._pausing[session] = taking
        try:
            await asyncio.wait((taking,))
            answer.model_fingerprint = taking.result()
            answer.folder = str(host.folder.absolute())
        except asyncio.CancelledError:
            if not taking.cancelled():  # this process ends
                taking.cancel()
                raise
            answer.error.CopyFrom(to_proto(Cancelled("the router has ended the pause")))
        except TandemError as error:
            answer.error.CopyFrom(to_proto(error))
        except Exception as error:
            logger.exception("a change of the weights")
            answer.error.CopyFrom(to_proto(Internal(f"{type(error).__name__}: {error}")))
        finally:
            if self._pausing.get(session) is taking:
                del self._pausing[session]
        session.send(weights_changed=answer)
        if (by := self._paused_by) is not None and by.closed:
            self.left(by)

    async def _take_alone(self, session: Session, command: worker_pb2.ChangeWeights) -> str:
        async with self._changing:
            return await self._take(session, command)

    def left(self, session: Session) -> None:
        """The router that paused this worker is lost, and no other one would resume it."""
        self._end_pause(session)
        if self._paused_by is session and not self._changing.locked() and not self._worker.load.asleep:
            logger.warning("router %s left this worker paused: it resumes", session.router_name)
            self._resume()

    def _end_pause(self, session: Session) -> None:
        """Cancels the pause that this router waits for, which answers with the reason."""
        if (pausing := self._pausing.get(session)) is not None:
            pausing.cancel()

    async def _take(self, session: Session, command: worker_pb2.ChangeWeights) -> str:
        """The fingerprint that the answer has. Raises TandemError."""
        host, load = self._worker.host, self._worker.load
        folder = Path(command.folder) if command.folder else host.folder
        if not folder.is_absolute():
            raise InvalidRequest(f"folder must be absolute, not {command.folder!r}", field="folder")
        _check_changeable(host)
        if command.step == CHECK:
            try:
                return await asyncio.to_thread(check_folder, host, folder)
            except (ModelLoadError, ConfigError) as error:  # the caller named it, and this worker is none the worse
                raise InvalidRequest(error.message, **{**error.details, "field": "folder"}) from error
        if command.step == PAUSE:
            await self._pause(session, command.timeout_s)
        elif command.step == RESUME:
            self._resume()
        elif not load.paused:
            raise InvalidRequest("only a paused worker loads or unloads weights", field="step")
        elif command.step == UNLOAD:
            await self._unload()
            load.asleep = True
            load.flush()
            logger.info("asleep: weights and pool are freed")
        elif command.step == LOAD:
            await self._load(folder)
        else:
            raise InvalidRequest(f"unknown step {command.step}", field="step")
        return host.model.fingerprint

    async def _pause(self, session: Session, timeout_s: float) -> None:
        load = self._worker.load
        if load.asleep:
            self._paused_by = session
            return
        load.paused, self._paused_by = True, session
        load.flush()
        try:
            await _within(timeout_s, self._worker.idle.wait, "requests still run")
            await _within(BLOCKS_S, self._all_free, "blocks are still being sent or received")
        except BaseException:
            self._resume()
            raise

    async def _all_free(self) -> None:
        """Returns once no sequence has a block of the pool, and nothing is cached in it."""
        while True:
            await self._worker.flush_cache()
            engine = self._worker.load.engine
            if engine is None or engine.num_free_blocks == engine.num_total_blocks:
                return
            await asyncio.sleep(_POLL_S)

    async def _load(self, folder: Path) -> None:
        """Raises ModelLoadError, ConfigError; the worker has then what it had, asleep where it was."""
        host, load = self._worker.host, self._worker.load
        before, was_asleep = host.model.fingerprint, load.asleep
        await asyncio.to_thread(check_folder, host, folder)
        if not was_asleep:
            await self._unload()
        failed: Exception | None = None
        try:
            await host.reload(folder)
        except Exception as error:
            failed = error
        if failed is not None:  # not while it is handled: that would keep what was read of the new weights
            logger.warning("weights of %s cannot be loaded: %s", folder, failed)
            let_go(failed)
            await asyncio.to_thread(release_memory)
            if not was_asleep:
                await self._load_again()
            if isinstance(failed, TandemError):
                raise failed
            raise ModelLoadError(
                f"{folder} cannot be loaded: {type(failed).__name__}: {failed}", field="folder"
            ) from failed
        self._has_weights()
        load.asleep = False
        if host.model.fingerprint != before:
            load.model_fingerprint = host.model.fingerprint
        load.flush()
        logger.info("weights of %s, fingerprint %s", folder, host.model.fingerprint)

    async def _load_again(self) -> None:
        host = self._worker.host
        try:
            await host.reload(host.folder)
        except Exception:
            logger.critical("nor can those of before: this process ends", exc_info=True)
            self._worker.died.set()
            raise
        self._has_weights()

    async def _unload(self) -> None:
        if self._worker.adapters is not None:
            await self._worker.adapters.rest()
        await self._worker.host.unload()

    def _has_weights(self) -> None:
        self._worker.on_engine_changed()
        if self._worker.adapters is not None:
            self._worker.adapters.wake()

    def _resume(self) -> None:
        """A worker that sleeps stays paused."""
        self._paused_by = None
        load = self._worker.load
        load.paused = load.asleep
        load.flush()


async def _within(timeout_s: float, work: Callable[[], Awaitable[object]], what: str) -> None:
    """Raises DeadlineExceeded."""
    try:
        async with asyncio.timeout(timeout_s):
            await work()
    except TimeoutError:
        raise DeadlineExceeded(
            f"{what} after {timeout_s:g} s: the weights stay", field="timeout_s", limit=timeout_s
        ) from None


def _check_changeable(host: EngineHost) -> None:
    """Raises InvalidRequest for a worker whose weights stay for its life."""
    settings = host.settings
    if settings.group_hosts > 1:
        raise InvalidRequest(
            f"worker {settings.name} is on several hosts: its weights cannot be changed yet",
            field="group_hosts",
            limit=1,
        )
    if settings.degrees.num_ranks > 1 and settings.is_on_gpu:
        raise InvalidRequest(
            f"worker {settings.name} is on several GPUs: its weights cannot be changed yet", field="device", limit=1
        )


def check_folder(host: EngineHost, folder: Path) -> str:
    """The fingerprint that its weights would have, but for deterministic mode's part. Blocking; reads headers and
    samples. Raises ModelLoadError, which names the first tensor that does not fit, and ConfigError."""
    model, settings = host.model, host.settings
    with Checkpoint.of(folder) as checkpoint:
        has_own_head = model.has_head and not model.head_identity
        WeightPlan.make(checkpoint, model.config, settings.quantization, has_head=has_own_head)
        if has_own_head:
            check_head(checkpoint, model.config)
    if load_config(folder) != model.config:
        raise ModelLoadError(f"config.json of {folder} is of another model", field="folder", file="config.json")
    if model.texts_digest and texts_digest(folder) != model.texts_digest:
        raise ModelLoadError(
            f"config.json and tokenizer.json of {folder} must be those of the model that is served",
            field="folder",
            file="tokenizer.json",
        )
    identity = fingerprint(folder, dtype_name(model.dtype), settings.quantization)
    return headed_fingerprint(identity, model.head_identity) if model.has_head else identity
