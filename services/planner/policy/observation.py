"""What the planner sees of the fleet at one moment, as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.router.placement.views import WorkerView
from shared.kv.groups import KVGroups
from shared.sizing.step_time import StepTimes


@dataclass(frozen=True, slots=True)
class PoolCount:
    """The workers of one pool.

    0 ≤ num_cold ≤ num_ready. `replicas` is what was asked for; pods that end come on top of it.
    """

    replicas: int
    num_ready: int
    """Serving, not draining."""
    num_ending: int = 0
    """Pods that are being deleted but hold their GPUs still."""
    num_extra: int = 0
    """Pods beyond `replicas` that are not being deleted yet."""
    num_cold: int = 0
    """Ready workers that became so less than `cold_start_s` ago."""
    num_victims: int = 0
    """Pods that were chosen to go and are not being deleted yet."""

    @property
    def num_staying(self) -> int:
        """The size that was decided on, as the cluster tells it: replicas without those that are chosen to go."""
        return self.replicas - max(0, self.num_victims - self.num_extra)

    @property
    def num_held(self) -> int:
        """Workers whose GPUs are taken, or will be without another decision."""
        return self.replicas + self.num_extra + self.num_ending


@dataclass(frozen=True, slots=True)
class Observation:
    """The fleet now, and what happened since the observation before (`Δ`). Times in seconds. An elastic
    pool is `decode`.

    None: not known, for example because a router did not answer. Nothing is learnt from it then.
    """

    now_s: float
    prefill: PoolCount
    decode: PoolCount
    num_arrived: int | None = None
    """Δ requests that came, refused ones included."""
    num_answered: int = 0
    """Δ requests that got their first token."""
    ttft_sum_s: float = 0.0
    """Δ the sum of their TTFTs."""
    num_late: int = 0
    """Δ requests whose first token came after the target, or that were refused for overload."""
    num_finished: int = 0
    """Δ requests that ended with a TPOT."""
    num_slow: int = 0
    """Δ of these, those above the TPOT target."""
    tpot_sum_s: float = 0.0
    """Δ the sum of their TPOTs."""
    queue_len: int = 0
    """Requests that wait in the routers now."""
    prefill_busy_s: float = 0.0
    """Δ seconds in which prefill workers computed, summed over them."""
    num_sequences: float = 0.0
    """Sequences on decode workers now."""
    decode_kv_share: float = 0.0
    """Share of the ready decode workers' blocks that is in use now."""
    decode_steps: Sequence[StepTimes] = ()
    """What decode workers have fitted to their steps; empty where none reports any."""
    decode_context: float = 0.0
    """Mean tokens of the sequences that decode on those workers now."""
    num_ended: int = 0
    """Δ requests that finished; of these are the next three."""
    num_prompt_tokens: int = 0
    """Δ"""
    num_cached_tokens: int = 0
    """Δ of the prompts' tokens, those that no worker had to compute."""
    num_output_tokens: int = 0
    """Δ"""
    workers: Sequence[WorkerView] = ()
    """The workers of the decode pool, as placement would see them; without their present load."""
    num_beside: int = 0
    """Workers of other pools that decode for the same requests."""
    groups: KVGroups = field(default_factory=lambda: KVGroups(16))
    """Groups of their KV."""
