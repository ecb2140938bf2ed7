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
    """Prompt tokens to compute on any worker: known prefix hits are subtracted."""
    arrived_s: float = 0.0
    deadline_s: float = math.inf
    """Deadline of its first token."""
    priority: int = 0
    """Higher goes first under the order `priority`."""
    tenant: str = "default"
    num_bytes: int = 0
    """Memory that it holds while it waits."""
