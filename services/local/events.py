"""What a child process says on stdout, one JSON object a line (see shared/process.py), as typed values."""

from __future__ import annotations

import json
from dataclasses import dataclass

from shared.errors import Internal, TandemError, error_classes


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a process's start has come."""

    fraction: float  # in [0, 1]
    text: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The process serves."""

    address: str
    http: str = ""  # the router's OpenAI API
    grpc: str = ""  # the router's InferenceService
    metrics: str = ""  # its Prometheus page


Event = Progress | Ready | TandemError


def parse_event(line: bytes) -> Event | None:
    """The event that `line` holds; None for anything else, such as what a library printed."""
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    match fields:
        case {"event": "progress", "fraction": int() | float() as fraction, "text": str(text)}:
            return Progress(min(max(float(fraction), 0.0), 1.0), text)
        case {"event": "ready", "address": str(address)}:
            http, grpc, metrics = (str(fields.get(name, "")) for name in ("http", "grpc", "metrics"))
            return Ready(address, http, grpc, metrics)
        case {"event": "error", "kind": str(kind), "message": str(message)}:
            field = fields.get("field")
            cls = error_classes().get(kind, Internal)
            return cls(message, field=field if isinstance(field, str) else None)
        case _:
            return None
