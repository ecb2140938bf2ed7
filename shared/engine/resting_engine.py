"""What stands for an engine while a worker has no weights: it has no blocks and takes no sequences."""

from __future__ import annotations

from collections.abc import Callable

from shared.engine.messages import (
    AdoptBlocks,
    BlocksAdopted,
    BlocksHeld,
    CacheFlushed,
    CloseSession,
    Command,
    Event,
    FetchPrepared,
    FlushCache,
    HoldBlocks,
    PrepareFetch,
)
from shared.engine.runner.block_access import BlockAccess
from shared.engine.step_counters import StepCounters
from shared.errors import Draining


class RestingEngine:
    """Answers what has an answer, and drops everything else. No thread; `emit` is called from within `submit`."""

    def __init__(self, emit: Callable[[Event], None], steps: StepCounters) -> None:
        """`steps`: of the engine before, which the next one continues."""
        self._emit = emit
        self.steps = steps
        steps.waiting = True  # it has no work, and does not hang

    @property
    def blocks(self) -> BlockAccess:
        """Raises Draining: there are none."""
        raise Draining("the worker has no weights just now")

    def submit(self, command: Command) -> None:
        """As that of `Engine`."""
        match command:
            case HoldBlocks(key):
                self._emit(BlocksHeld(key, ()))
            case PrepareFetch(key):
                self._emit(FetchPrepared(key, ()))
            case AdoptBlocks(key):
                self._emit(BlocksAdopted(key, ()))
            case FlushCache(key) | CloseSession(key):
                self._emit(CacheFlushed(key, 0))

    def close(self) -> None:
        """Does nothing: no thread runs."""
