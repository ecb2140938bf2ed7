"""A request's placement as the API reports it."""

from __future__ import annotations

from services.router.placement.decision import Candidate, Decision, DecisionLog
from shared.errors import NotFound
from shared.rpc.pb.tandem.v1 import inference_pb2


def explanation(decisions: DecisionLog, request_id: str) -> inference_pb2.Explanation:
    """Every attempt's candidates and scores; raises NotFound (`request_id`) if it is unknown or forgotten."""
    attempts = decisions.of(request_id)
    if not attempts:
        raise NotFound(
            f"no placement of request {request_id!r} is remembered by this router", field="request_id", value=request_id
        )
    return inference_pb2.Explanation(request_id=request_id, attempts=[_attempt(decision) for decision in attempts])


def _attempt(decision: Decision) -> inference_pb2.PlacementDecision:
    choice = decision.choice
    return inference_pb2.PlacementDecision(
        attempt=decision.attempt,
        num_prompt_tokens=decision.num_prompt_tokens,
        queue_ms=decision.queue_s * 1e3,
        predicted_ttft_ms=choice.predicted_ttft_s * 1e3 if choice.predicted_ttft_s is not None else None,
        route=choice.route.value,
        decode_worker=choice.decode,
        prefill_worker=choice.prefill or "",
        decode_candidates=[_candidate(candidate) for candidate in choice.decodes],
        prefill_candidates=[_candidate(candidate) for candidate in choice.prefills],
    )


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
