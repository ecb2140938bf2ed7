"""The launcher's side of shared/process.py: parses a child's lines on stdout into typed events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.errors import Internal, TandemError, error_classes


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a process's start."""

    fraction: float  # in [0, 1]
    text: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The process is serving."""

    address: str
    endpoints: Mapping[str, str] = field(default_factory=dict)
    """Further addresses by name, such as the router's `http` and `grpc`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The process's answer to one `ChildProcess.ask`."""

    value: object
    """A JSON value."""


Event = Progress | Ready | Answer | TandemError


def parse_event(line: bytes) -> Event | None:
    """The event in `line`; None for anything else, such as a library's output."""
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
            endpoints = {name: str(value) for name, value in fields.items() if name not in ("event", "address")}
            return Ready(address, endpoints)
        case {"event": "answer", "value": value}:
            return Answer(value)
        case {"event": "error", "kind": str(kind), "message": str(message)}:
            setting = fields.get("field")
            cls = error_classes().get(kind, Internal)
            return cls(message, field=setting if isinstance(setting, str) else None)
        case _:
            return None
