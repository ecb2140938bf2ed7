"""A run's folder: `summary.json`, `requests.jsonl`, `report.html`; written completely or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadtest.records import Failure, FailureCause, Reply, RequestRecord, TtftSplit
from loadtest.rig.results import write_text
from shared.errors import ConfigError

SUMMARY = "summary.json"
REQUESTS = "requests.jsonl"
SWEEP = "sweep.json"
REPORT = "report.html"


def prepare_folder(path: Path) -> None:
    """Makes the folder; raises ConfigError (`out`) if that fails or it already has results."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out: cannot make the folder {path}: {error.strerror}", field="out") from error
    for name in (SUMMARY, SWEEP):
        if (path / name).exists():
            raise ConfigError(f"out: {path} already holds {name}; name another folder", field="out")


def write_requests(path: Path, records: Sequence[RequestRecord]) -> None:
    """One JSON object a request, in the order of sending."""
    write_text(path, "".join(json.dumps(record_json(record), ensure_ascii=False) + "\n" for record in records))


def record_json(record: RequestRecord) -> dict[str, Any]:
    """A record as plain values; without the answer's token ids, but with their times and counts."""
    reply = record.reply
    return {
        "index": record.index,
        "request_id": record.request_id,
        "conversation": record.conversation,
        "turn": record.turn,
        "model": record.model,
        "num_prompt_tokens": record.num_prompt_tokens,
        "max_tokens": record.max_tokens,
        "due_s": _rounded(record.due_s),
        "sent_s": _rounded(reply.sent_s),
        "closed_s": _rounded(reply.closed_s),
        "token_times_s": [round(at_s, 6) for at_s in reply.token_times_s],
        "token_counts": reply.token_counts,
        "counts_exact": reply.counts_exact,
        "usage": {
            "prompt": reply.num_prompt_tokens,
            "output": reply.num_output_tokens,
            "cached": reply.num_cached_tokens,
        },
        "finish_reason": reply.finish_reason,
        "prefill_worker": reply.prefill_worker,
        "decode_worker": reply.decode_worker,
        "ttft_split": None if reply.split is None else {k: round(v, 3) for k, v in asdict(reply.split).items()},
        "failure": None
        if record.failure is None
        else {"cause": record.failure.cause.value, "kind": record.failure.kind, "message": record.failure.message},
    }


def read_requests(path: Path) -> list[RequestRecord]:
    """What `write_requests` wrote; raises ConfigError. Answers are without token ids, and times are rounded."""
    try:
        with path.open() as lines:
            return [_record_of(json.loads(line)) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read the requests of a load test from {path}: {error}", field="run") from error


def _record_of(row: Mapping[str, Any]) -> RequestRecord:
    """The record of which `record_json` made this."""
    usage, split, failure = row["usage"], row["ttft_split"], row["failure"]
    reply = Reply(
        sent_s=row["sent_s"],
        token_times_s=row["token_times_s"],
        token_counts=row["token_counts"],
        closed_s=row["closed_s"],
        num_prompt_tokens=usage["prompt"],
        num_output_tokens=usage["output"],
        num_cached_tokens=usage["cached"],
        counts_exact=row["counts_exact"],
        split=None if split is None else TtftSplit(**split),
        finish_reason=row["finish_reason"],
        prefill_worker=row["prefill_worker"],
        decode_worker=row["decode_worker"],
    )
    return RequestRecord(
        row["index"],
        row["request_id"],
        row["num_prompt_tokens"],
        row["max_tokens"],
        row["due_s"],
        row["conversation"],
        row["turn"],
        row["model"],
        reply,
        None if failure is None else Failure(FailureCause(failure["cause"]), failure["message"], failure["kind"]),
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
