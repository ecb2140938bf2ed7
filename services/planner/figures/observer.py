"""From two readings of counters to one observation: differences, restarts of processes left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.planner.cluster.pods import Pod
from services.planner.figures.page import Page, share_above
from services.planner.figures.sources import RouterFigures
from services.planner.policy.observation import Observation, PoolCount
from services.router.placement.views import WorkerView
from shared.errors import (
    InvalidRequest,
    NotFound,
    Overloaded,
    PromptTooLong,
    QuotaExceeded,
    RequestRunning,
    Unauthenticated,
)
from shared.kv.groups import KVGroups
from shared.rpc.convert import groups_of, step_times_from_proto
from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2

TTFT = "gen_ai_server_time_to_first_token_seconds"
TPOT = "gen_ai_server_time_per_output_token_seconds"
BUSY = "tandem_engine_step_seconds_total"
PROMPTS, OUTPUTS = "tandem_request_prompt_tokens", "tandem_request_output_tokens"

_NO_LOAD = frozenset(
    f"outcome {error.code}"
    for error in (InvalidRequest, NotFound, PromptTooLong, QuotaExceeded, RequestRunning, Unauthenticated)
)
"""Requests that ended at the edge: no size of a pool would have served them."""

_DECODE = types_pb2.WORKER_ROLE_DECODE

Key = tuple[str, str, float]  # (process, what, histogram bound or 0)


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read at one moment; None: it could not be."""

    now_s: float
    """Monotonic."""
    epoch_s: float
    pods: Sequence[Pod]
    prefill_replicas: int
    decode_replicas: int
    routers: Sequence[RouterFigures] | None
    prefill_pages: Mapping[str, Page] | None


@dataclass(slots=True)
class Observer:
    """Keeps the counters of the reading before."""

    pools: tuple[str, str]
    """Names of the prefill and the decode pool; of an elastic one the second alone, the first is empty."""
    ttft_s: float
    tpot_s: float
    cold_start_s: float
    _last: dict[Key, float] = field(default_factory=dict)
    _in_flight: float | None = None
    _model: str = ""  # that the pools serve, where a router has several

    def observe(self, reading: Reading) -> Observation:
        """What happened since the call before. Where something did not answer only the sizes are known, and counters
        begin anew: a difference over the gap would be taken for that of one interval."""
        prefill = self._count(reading, self.pools[0], reading.prefill_replicas)
        decode = self._count(reading, self.pools[1], reading.decode_replicas)
        statuses = [router.status for router in reading.routers or ()]
        names = {pod.name for pod in reading.pods if pod.pool == self.pools[1]}
        # Every router sees all workers, those of other pools and models included.
        decoding = [one for one in statuses[0].workers if one.connected and one.role == _DECODE] if statuses else []
        workers = [one for one in decoding if one.worker.name in names]
        self._model = next((one.model for one in workers if one.model), self._model)
        is_unknown = not self._model and any(status.models for status in statuses)
        if not reading.routers or reading.prefill_pages is None or is_unknown:
            self._last, self._in_flight = {}, None
            return Observation(reading.now_s, prefill, decode)
        now = _counters(reading.routers, self._model, reading.prefill_pages)
        grown = {key: self._growth(key, value) for key, value in now.items()}
        first, self._last = not self._last, now
        lines = [_line(status, self._model) for status in statuses]
        queue_len = sum(line.queue_len for line in lines)
        in_flight = queue_len + sum(line.num_running for line in lines)
        before, self._in_flight = self._in_flight, in_flight
        if first or before is None:
            return Observation(reading.now_s, prefill, decode)
        outcomes = {key[1]: 0.0 for key in grown}
        for key, value in grown.items():
            outcomes[key[1]] += value if not key[1].startswith(("ttft", "tpot")) else 0.0
        refused = outcomes.get(f"outcome {Overloaded.code}", 0.0)
        ended = sum(value for name, value in outcomes.items() if name.startswith("outcome ") and name not in _NO_LOAD)
        late, answered = share_above(_buckets(grown, "ttft"), self.ttft_s)
        slow, finished = share_above(_buckets(grown, "tpot"), self.tpot_s)
        loads = [one.load for one in workers]
        num_sequences, kv_share = _decode_use(loads)
        num_decoding = sum(load.num_decoding for load in loads)
        return Observation(
            now_s=reading.now_s,
            prefill=prefill,
            decode=decode,
            num_arrived=max(0, round(ended + in_flight - before)),
            num_answered=round(answered),
            ttft_sum_s=outcomes.get("seconds to first", 0.0),
            num_late=round(late + refused),
            num_finished=round(finished),
            num_slow=round(slow),
            tpot_sum_s=outcomes.get("seconds a token", 0.0),
            queue_len=queue_len,
            prefill_busy_s=outcomes.get("busy", 0.0),
            num_sequences=num_sequences,
            decode_kv_share=kv_share,
            decode_steps=[step_times_from_proto(load.step_times) for load in loads if load.HasField("step_times")],
            decode_context=sum(load.num_context_tokens for load in loads) / num_decoding if num_decoding else 0.0,
            num_ended=round(outcomes.get("ended", 0.0)),
            num_prompt_tokens=round(outcomes.get("prompt tokens", 0.0)),
            num_cached_tokens=round(outcomes.get("cached tokens", 0.0)),
            num_output_tokens=round(outcomes.get("output tokens", 0.0)),
            workers=_views(workers),
            num_beside=sum(
                one.worker.name not in names and one.model in ("", self._model) and not one.load.draining
                for one in decoding
            ),
            groups=next((groups_of(one) for one in workers if one.block_size), KVGroups(16)),
        )

    def _growth(self, key: Key, value: float) -> float:
        """Since the reading before; a counter that has fallen began anew, one not seen before tells nothing yet."""
        last = self._last.get(key)
        if last is None:
            return 0.0
        return value - last if value >= last else value

    def _count(self, reading: Reading, pool: str, replicas: int) -> PoolCount:
        pods = [pod for pod in reading.pods if pod.component == "worker" and pod.pool == pool]
        alive = [pod for pod in pods if not pod.ending]
        ready = [pod for pod in alive if pod.ready and not pod.victim]
        return PoolCount(
            replicas=replicas,
            num_ready=len(ready),
            num_ending=len(pods) - len(alive),
            num_extra=max(0, len(alive) - replicas),
            num_cold=sum(reading.epoch_s - (pod.ready_since_s or 0.0) < self.cold_start_s for pod in ready),
            num_victims=sum(pod.victim for pod in alive),
        )


def _line(status: inference_pb2.ClusterStatus, model: str) -> inference_pb2.ClusterStatus | inference_pb2.ModelStatus:
    """What a router says of the model; of all that it serves where it has no other one."""
    return next((line for line in status.models if line.name == model), status)


def _counters(routers: Sequence[RouterFigures], model: str, prefill: Mapping[str, Page]) -> dict[Key, float]:
    found: dict[Key, float] = {}
    for router in routers:
        page = router.page.by_model[model] if router.status.models and model else router.page
        for outcome, value in page.by_outcome.items():
            found[router.name, f"outcome {outcome}", 0.0] = value
        found[router.name, "seconds a token", 0.0] = page.sums[f"{TPOT}_sum"]
        found[router.name, "seconds to first", 0.0] = page.sums[f"{TTFT}_sum"]
        found[router.name, "ended", 0.0] = page.sums[f"{PROMPTS}_count"]
        found[router.name, "prompt tokens", 0.0] = page.sums[f"{PROMPTS}_sum"]
        found[router.name, "output tokens", 0.0] = page.sums[f"{OUTPUTS}_sum"]
        found[router.name, "cached tokens", 0.0] = page.num_cached_tokens
        for what, name in (("ttft", TTFT), ("tpot", TPOT)):
            for bound, value in page.buckets[name].items():
                found[router.name, what, bound] = value
    for worker, page in prefill.items():
        found[worker, "busy", 0.0] = page.sums[BUSY]
    return found


def _buckets(grown: Mapping[Key, float], what: str) -> dict[float, float]:
    buckets: dict[float, float] = {}
    for (_, kind, bound), value in grown.items():
        if kind == what:
            buckets[bound] = buckets.get(bound, 0.0) + value
    return buckets


def _decode_use(loads: Sequence[types_pb2.Load]) -> tuple[float, float]:
    """(sequences, share of blocks in use)."""
    total = sum(load.num_total_blocks for load in loads)
    used = total - sum(load.num_free_blocks for load in loads)
    return float(sum(load.num_running + load.num_waiting for load in loads)), used / total if total else 0.0


def _views(workers: Sequence[inference_pb2.WorkerStatus]) -> list[WorkerView]:
    """Views of the workers, as if they were idle."""
    return [
        WorkerView(
            one.worker.name,
            num_free_blocks=one.load.num_total_blocks,
            num_total_blocks=one.load.num_total_blocks,
            num_requests=0,
            max_num_seqs=one.max_num_seqs,
            num_queued_tokens=0,
            times=step_times_from_proto(one.load.step_times) if one.load.HasField("step_times") else None,
            max_step_tokens=one.max_num_batched_tokens,
        )
        for one in workers
    ]
