"""The policy's constants: those that operators set, with bounds and help, and those that follow from measurements."""

from __future__ import annotations

from pydantic import Field

from shared.settings.group import CheckedGroup, SettingGroup


class PoolLimits(SettingGroup):
    """What one pool may be."""

    min_workers: int = Field(default=1, ge=1, le=10_000)
    """Fewest workers."""
    max_workers: int = Field(default=100, ge=1, le=10_000)
    """Most workers."""
    gpus_per_worker: int = Field(default=1, ge=1, le=1024)
    """GPUs of one worker, as gpu_budget counts them."""


class PolicySettings(SettingGroup):
    """What operators set: targets, budget and the times of their cluster."""

    gpu_budget: int = Field(default=64, ge=1, le=1_000_000)
    """Most GPUs of both pools together; Pods that start or end count."""
    ttft_s: float = Field(default=1.0, gt=0, le=3600)
    """Target for the time to the first token. Seconds; take a boundary of the histogram
    gen_ai_server_time_to_first_token_seconds, between two of them the share is interpolated."""
    tpot_s: float = Field(default=0.05, gt=0, le=60)
    """Target for the time per output token. Seconds."""
    attainment: float = Field(default=0.95, ge=0.5, le=0.999)
    """Share of the requests that should meet both."""
    decode_sequences: float = Field(default=64.0, gt=0, le=100_000)
    """Sequences that a decode worker runs within the TPOT target, as `tandem fit` says; observations correct it."""
    start_s: float = Field(default=120.0, ge=0, le=7200)
    """Time from the decision to a worker that serves: how far the forecast looks. Seconds."""
    down_window_s: float = Field(default=120.0, ge=0, le=86_400)
    """A pool shrinks only to the largest size that it needed during this time. Seconds."""
    headroom: float = Field(default=1.2, ge=1, le=10)
    """An elastic pool has the fewest workers that, split as suits the demand best, could serve this many times the
    forecast."""
    band: float = Field(default=0.08, ge=0, le=1)
    """Share of spare demand that must fit before a pool shrinks; half of it must be missing before it grows."""


class PlannerConfig(PolicySettings, CheckedGroup):
    """All constants of one planner."""

    prefill: PoolLimits = PoolLimits()
    decode: PoolLimits = PoolLimits()
    is_elastic: bool = False
    """One pool whose workers do both: it is `decode`, and there is no `prefill`."""
    kv_share: float = 0.85
    """Share of a decode worker's blocks that may be in use."""
    variation: float = 3.0
    """Squared coefficient of variation of the prompts' work."""
    smoothing_s: float = 90.0
    """Time constant of the measured request rate."""
    work_smoothing_s: float = 600.0
    """Time constant of the work a request brings."""
    cold_start_s: float = 60.0
    """A worker's first seconds, whose latencies are not learnt from."""
    direction_s: float = 300.0
    """Least time between two changes of direction of a pool."""
    recover_s: float = 60.0
    """Time in which a queue that has built up should be worked off."""
