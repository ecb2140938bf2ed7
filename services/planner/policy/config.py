"""The policy's constants."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What one pool may be."""

    min_workers: int = 1
    max_workers: int = 1000
    gpus_per_worker: int = 1


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Targets, budget and time constants; the settings of `services/planner/settings.py` say what each is for."""

    prefill: PoolLimits = PoolLimits()
    decode: PoolLimits = PoolLimits()
    gpu_budget: int = 64
    """GPUs of both pools together, pods that start or end included."""
    ttft_s: float = 1.0
    tpot_s: float = 0.05
    attainment: float = 0.95
    """Share of the requests that should meet both targets."""
    decode_sequences: float = 64.0
    """Sequences that a decode worker runs within the TPOT target; corrected by what is observed."""
    kv_share: float = 0.85
    """Share of a decode worker's blocks that may be in use."""
    variation: float = 3.0
    """Squared coefficient of variation of the prompts' work."""
    smoothing_s: float = 90.0
    """Time constant of the measured request rate."""
    work_smoothing_s: float = 600.0
    """Time constant of the work a request brings."""
    start_s: float = 120.0
    """From the decision to a worker that serves: the horizon of the forecast."""
    cold_start_s: float = 60.0
    """A worker's first seconds, whose latencies are not learnt from."""
    down_window_s: float = 120.0
    """A pool shrinks only to the largest size that it needed during this time."""
    direction_s: float = 300.0
    """Least time between two changes of direction of a pool."""
    band: float = 0.08
    """Share of spare demand that must fit before a pool shrinks; half of it must be missing before it grows."""
    recover_s: float = 60.0
    """Time in which a queue that has built up should be worked off."""
