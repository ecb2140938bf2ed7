"""A call's line in the access log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.router.dispatch.record import RequestRecord
from services.router.views.timings import tpot_s, ttft_s


def access_fields(
    named: Mapping[str, object], records: Sequence[RequestRecord], duration_s: float
) -> dict[str, object]:
    """What a line says beside method, path and status; what is not known is left out. `named`: what is known of the
    call itself; `records`: of its requests."""
    found = dict(named)
    answers = [record for record in records if record.ask.request_id]
    if answers:
        found |= _answered(answers)
    outcomes = {record.reason.value if record.reason is not None else record.outcome for record in records}
    return {
        **{name: value for name, value in found.items() if value != ""},
        "e2e_ms": round(duration_s * 1e3, 1),
        **({"finish": ",".join(sorted(outcomes))} if outcomes else {}),
    }


def _answered(records: Sequence[RequestRecord]) -> dict[str, object]:
    """Sums over a call's answers; TTFT is that of the first token of all, TPOT the mean."""
    begun = [ttft for record in records if (ttft := ttft_s(record)) is not None]
    paces = [tpot for record in records if (tpot := tpot_s(record)) is not None]
    prompts = {record.ask.prompt: record.ask.num_prompt_tokens for record in records}
    return {
        "tokens_in": sum(prompts.values()),
        "tokens_out": sum(record.num_given_tokens for record in records),
        "cached": sum(record.num_cached_tokens for record in records),
        "ttft_ms": round(1e3 * min(begun), 1) if begun else "",
        "tpot_ms": round(1e3 * sum(paces) / len(paces), 2) if paces else "",
        "prefill": records[0].prefill_worker,
        "decode": records[0].decode_worker,
    }
