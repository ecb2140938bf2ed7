"""What is kept of a request that has ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from services.router.attribution.blocked import Waits
from services.router.request import RequestSummary


class Outcome(Enum):
    """How it ended for the router's core."""

    FINISHED = "finished"
    CUT = "cut"
    """The client left, or a stop string ended the answer."""
    REFUSED = "refused"
    """For want of capacity."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Ended:
    """One request. Times are of `time.perf_counter()`, seconds."""

    request_id: str
    tenant: str
    outcome: Outcome
    arrived_s: float
    ended_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    """Without those of an earlier call."""
    summary: RequestSummary
    """The client's side may still add to it: `delivered_at`."""
    first_token_s: float = 0.0
    """0: none came."""
    ttft_target_s: float = 0.0
    """Its own; 0 = the router's."""
    waits: Waits = field(default_factory=dict)
    """Time in the queue's head's shadow, by what the head waited for."""
    num_attempts: int = 1
    num_failures: int = 0
    """Attempts that failed; the others before the last one were refused by a worker that was full."""
    state: str = "finished"
    """Where it was before it ended early: a value of RequestState."""
    error: str = ""
    """The error's code."""

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token; None where none came."""
        return self.first_token_s - self.arrived_s if self.first_token_s else None

    @property
    def delivered_s(self) -> float:
        """When the client had taken all; while it still reads, when the last token was there for it."""
        return max(self.summary.delivered_at, self.last_token_s)

    @property
    def last_token_s(self) -> float:
        """When the last token came from the workers."""
        return self.summary.last_token_at or self.ended_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, until the client had taken the last one; None below two tokens."""
        if not self.first_token_s or self.num_output_tokens < 2:
            return None
        return (self.delivered_s - self.first_token_s) / (self.num_output_tokens - 1)
