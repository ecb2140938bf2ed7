"""Recording switched off: every place that counts for the metrics page alone does nothing."""

from __future__ import annotations

from services.router.edge.access import Access
from services.router.metrics import RouterMetrics
from shared.engine.step_counters import StepCounters
from shared.telemetry.buckets import BucketCounts


def _nothing(*_: object, **__: object) -> None:
    return


def silence_router() -> None:
    """This process's router counts nothing from now on."""
    for name in ("ended", "refused", "retried", "migrated", "placed", "picked"):
        setattr(RouterMetrics, name, _nothing)
    setattr(BucketCounts, "add", _nothing)  # noqa: B010 - not an assignment that mypy should bless
    for name in ("http_ended", "http_refused", "grpc_ended"):
        setattr(Access, name, _nothing)


class SilentSteps(StepCounters):
    """Of an engine that counts no steps."""

    def add(
        self, num_computed_tokens: int, num_output_tokens: int, duration_s: float, num_prefill_tokens: int = 0
    ) -> None:
        """Nothing."""
