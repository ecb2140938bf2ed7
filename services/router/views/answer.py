"""What an answer says of its own timings: the `tandem` member over HTTP, fields of the last message over gRPC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.router.dispatch.record import RequestRecord
from services.router.views.timings import ttft_split
from shared.rpc.pb.tandem.v1 import types_pb2


def tandem_member(record: RequestRecord, start: Mapping[str, Any] | None = None) -> dict[str, object]:
    """`{"tandem": {...}}`: where the time to the first token went, and which workers served; with what `start_member`
    gave where the chunk is also the choice's first."""
    return {
        "tandem": {
            **(start["tandem"] if start else {}),
            "ttft": {name: round(value, 3) for name, value in ttft_split(record)._asdict().items()},
            "prefill_worker": record.prefill_worker,
            "decode_worker": record.decode_worker,
        }
    }


def ttft_message(record: RequestRecord) -> types_pb2.TtftSplit:
    """Where the time to the first token went."""
    return types_pb2.TtftSplit(**ttft_split(record)._asdict())
