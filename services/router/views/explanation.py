"""Running requests and their placements as the API reports them."""

from __future__ import annotations

import math
import time
from collections import OrderedDict

from services.router.dispatch.active_request import ActiveRequest
from services.router.dispatch.record import RequestEvent, RequestRecord
from services.router.placement.decision import Candidate, Choice, Pair
from services.router.views.moves import MoveAccount, move_accounts
from shared.errors import NotFound
from shared.rpc.pb.tandem.v1 import inference_pb2


class Explained:
    """Records of the requests that were placed lately, by id, bounded: their choices keep all candidates."""

    def __init__(self, limit: int) -> None:
        """Keeps those of `limit` requests; 0 keeps none."""
        self._limit = limit
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: RequestRecord) -> None:
        """Takes one that was placed; the request that was placed longest ago loses its candidates."""
        self._records[record.ask.request_id] = record
        self._records.move_to_end(record.ask.request_id)
        if len(self._records) > self._limit:
            _, oldest = self._records.popitem(last=False)
            oldest.choices = [choice.summary for choice in oldest.choices]

    def find(self, request_id: str) -> RequestRecord | None:
        """None if it is unknown or forgotten."""
        return self._records.get(request_id)


def explanation(record: RequestRecord | None, request_id: str, tenant: str = "") -> inference_pb2.Explanation:
    """Every attempt's candidates and scores; raises NotFound (`request_id`) where there is no record, or another
    tenant's. `tenant`: the one that asks; empty: a caller that may see the requests of all."""
    if record is None or tenant not in ("", record.ask.tenant):
        raise NotFound(
            f"no placement of request {request_id!r} is remembered by this router", field="request_id", value=request_id
        )
    queues_s = _queues_s(record)
    return inference_pb2.Explanation(
        request_id=request_id,
        attempts=[
            _attempt(number, record.ask.num_prompt_tokens, queue_s, choice)
            for number, (queue_s, choice) in enumerate(zip(queues_s, record.choices, strict=False), start=1)
        ],
        moves=[_move(record, account) for account in move_accounts(record)],
    )


def _move(record: RequestRecord, account: MoveAccount) -> inference_pb2.AnswerMove:
    note, outcome = account.note, account.outcome
    return inference_pb2.AnswerMove(
        source=note.source,
        target=note.target,
        cause=note.cause.value,
        outcome=outcome.value if outcome is not None else "",
        at_ms=(account.began_at - record.ask.arrived_at) * 1e3,
        took_ms=(account.ended_at - account.began_at) * 1e3 if outcome is not None else 0.0,
        error=account.error,
    )


def _queues_s(record: RequestRecord) -> list[float]:
    """Time in the admission queue before each choice."""
    found, matched = [], 0.0
    for entry in record.entries:
        if entry.event is RequestEvent.MATCHED:
            matched = entry.at
        elif entry.event is RequestEvent.CHOOSING:
            found.append(entry.at - matched)
    return found


def _attempt(number: int, num_prompt_tokens: int, queue_s: float, choice: Choice) -> inference_pb2.PlacementDecision:
    return inference_pb2.PlacementDecision(
        attempt=number,
        num_prompt_tokens=num_prompt_tokens,
        queue_ms=queue_s * 1e3,
        predicted_ttft_ms=None if choice.predicted_ttft_s is None else _known_ms(choice.predicted_ttft_s),
        route=choice.route.value,
        decode_worker=choice.decode,
        prefill_worker=choice.prefill or "",
        decode_candidates=[_candidate(candidate) for candidate in choice.decodes],
        prefill_candidates=[_candidate(candidate) for candidate in choice.prefills],
        pairs=[_pair(pair) for pair in choice.pairs],
    )


def _pair(pair: Pair) -> inference_pb2.PlacementPair:
    return inference_pb2.PlacementPair(
        decode_worker=pair.decode,
        prefill_worker=pair.prefill,
        ttft_ms=_known_ms(pair.ttft_s),
        tpot_ms=_known_ms(pair.tpot_s),
        in_time=pair.in_time,
        score=pair.score,
    )


def _known_ms(predicted_s: float) -> float | None:
    return predicted_s * 1e3 if math.isfinite(predicted_s) else None


def _candidate(candidate: Candidate) -> inference_pb2.PlacementCandidate:
    return inference_pb2.PlacementCandidate(
        worker=candidate.name,
        score=candidate.score,
        parts=[inference_pb2.ScorePart(scorer=name, score=value) for name, value in candidate.parts],
        num_queued_tokens=candidate.num_queued_tokens,
        num_free_blocks=candidate.num_free_blocks,
        num_requests=candidate.num_requests,
        num_hit_tokens=candidate.num_hit_tokens,
    )


def request_info(active: ActiveRequest | None, request_id: str, tenant: str = "") -> inference_pb2.RequestInfo:
    """Raises NotFound (`request_id`) for a request that neither waits nor runs here, or is another tenant's; `tenant`
    as in `explanation`."""
    if active is None or tenant not in ("", active.request.tenant):
        raise NotFound(
            f"request {request_id!r} neither waits nor runs at this router", field="request_id", value=request_id
        )
    return inference_pb2.RequestInfo(
        request_id=request_id,
        state=active.state.value,
        num_prompt_tokens=active.request.num_prompt_tokens,
        num_output_tokens=len(active.produced),
        num_attempts=active.num_attempts,
        age_s=time.perf_counter() - active.request.arrived_at,
        prefill_worker=active.record.prefill_worker,
        decode_worker=active.record.decode_worker,
    )
