"""The interface through which the engine runs its steps."""

from __future__ import annotations

from typing import Protocol

from shared.engine.plan import StepPlan, StepResult
from shared.engine.runner.block_access import BlockAccess


class LaunchedStep(Protocol):
    """A step that was handed to the device."""

    def result(self) -> StepResult:
        """Waits until the step is done; called once, in the order of the launches."""


class StepRunner(Protocol):
    """Computes planned steps over one KV pool. Called by the engine thread alone."""

    @property
    def is_async(self) -> bool:
        """True where `launch` returns before the step is computed."""

    @property
    def blocks(self) -> BlockAccess:
        """The pool as the transfer plane sees it."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Begins a step. One more may be launched before this one's result is taken."""

    def checksums(self, block_ids: list[int]) -> list[int]:
        """Checksums of these blocks as they are now; no step in flight may write to them."""
