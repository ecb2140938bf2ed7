"""What the admission queue knows of an entry."""

from __future__ import annotations

import math
from dataclasses import dataclass

BYTES_PER_TOKEN = 40
"""Memory of one waiting prompt token in this process: a tuple's slot and an int."""


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """One request on its way into the queue. Times are seconds of one clock."""

    request_id: str
    num_tokens: int
    """Prompt tokens to compute wherever it goes: known prefix hits are taken off."""
    arrived_s: float = 0.0
    deadline_s: float = math.inf
    """When its first token is due."""
    priority: int = 0
    """Higher goes first, under the priority order."""
    tenant: str = "default"
    num_bytes: int = 0
    """Memory that it holds while it waits."""
