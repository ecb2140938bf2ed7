"""Ended requests, written down."""

from __future__ import annotations

from services.router.attribution.ended import Ended, Outcome
from services.router.request import RequestSummary, TtftSplit


def ended(outcome: Outcome = Outcome.FINISHED, **fields: object) -> Ended:
    """A request that arrived at 100 s: 100 ms to its first token, then 10 ms a token for 11 tokens."""
    split = dict.fromkeys(TtftSplit.__dataclass_fields__, 0.0) | {"prefill_compute_ms": 100.0, "ttft_ms": 100.0}
    split |= {name: fields.pop(name) for name in list(fields) if name in split}
    summary = {"last_token_at": 100.2, "decode_ms": 100.0, "delivered_at": 100.2}
    summary |= {name: fields.pop(name) for name in list(fields) if name in RequestSummary.__dataclass_fields__}
    known = {
        "request_id": "r", "tenant": "t", "arrived_s": 100.0, "ended_s": 100.2, "num_prompt_tokens": 8,
        "num_output_tokens": 11, "first_token_s": 100.0 + split["ttft_ms"] / 1e3,
    }  # fmt: skip
    return Ended(outcome=outcome, summary=RequestSummary(ttft=TtftSplit(**split), **summary), **{**known, **fields})
