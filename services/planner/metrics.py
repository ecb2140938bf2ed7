"""The planner's metrics: what it sees, what it wants, what it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.planner.policy.budget import Pair
from shared.telemetry.metrics import Observed, counter, gauge


@dataclass(slots=True)
class PlannerState:
    """Counts since the start, and the newest figures."""

    leads: bool = False
    failing: bool = False
    """The last look at the cluster was incomplete."""
    target: Pair = field(default_factory=lambda: Pair(0, 0))
    replicas: Pair = field(default_factory=lambda: Pair(0, 0))
    num_gpus: int = 0
    is_elastic: bool = False
    num_ticks: int = 0
    num_changes: dict[str, int] = field(default_factory=dict)
    num_failures: dict[str, int] = field(default_factory=dict)

    def by_pool(self, pair: Pair) -> Mapping[str, float]:
        """Sizes by the pools' roles."""
        return {"auto": pair.decode} if self.is_elastic else {"prefill": pair.prefill, "decode": pair.decode}


METRICS: tuple[Observed[PlannerState], ...] = (
    Observed(gauge("tandem_planner_leader", "1 while this planner leads, else 0."), lambda state: state.leads),
    Observed(
        gauge("tandem_planner_failing", "1 while routers, workers or the API server do not answer it, else 0."),
        lambda state: state.failing,
    ),
    Observed(
        gauge(
            "tandem_planner_target_workers",
            "Workers that it has decided on, by pool: prefill and decode, or auto.",
            "pool",
        ),
        lambda state: state.by_pool(state.target),
    ),
    Observed(
        gauge(
            "tandem_planner_replicas",
            "Workers that the Deployments are asked for, by pool: prefill and decode, or auto.",
            "pool",
        ),
        lambda state: state.by_pool(state.replicas),
    ),
    Observed(
        gauge("tandem_planner_gpus", "GPUs that the pools hold, Pods that start or end included."),
        lambda state: state.num_gpus,
    ),
    Observed(counter("tandem_planner_ticks_total", "Looks at the fleet."), lambda state: state.num_ticks),
    Observed(
        counter("tandem_planner_changes_total", "Decisions that changed a pool's size, by pool.", "pool"),
        lambda state: {**dict.fromkeys(state.by_pool(state.target), 0), **state.num_changes},
    ),
    Observed(
        counter("tandem_planner_failures_total", "Calls that failed, by the error's code.", "code"),
        lambda state: state.num_failures,
    ),
)
"""All metrics of a planner."""
