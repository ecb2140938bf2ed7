"""What placement knows of the fleet and of a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as the router sees it now, for one request."""

    name: str
    num_free_blocks: int
    num_total_blocks: int
    num_requests: int
    """Running or waiting there, this router's commitments included."""
    max_num_seqs: int
    num_queued_tokens: int
    """Prompt tokens it still has to compute."""
    num_hit_tokens: int = 0
    """Of the request's prompt, how many tokens lie in its pool."""
    accepting: bool = True
    """Connected, not draining, and not just found full."""


@dataclass(frozen=True, slots=True)
class Need:
    """What one request asks of a worker."""

    num_tokens: int
    """Prompt, and what a retried request had already produced."""
    block_size: int

    @property
    def num_blocks(self) -> int:
        """Blocks for the tokens known now and one more."""
        return -(-(self.num_tokens + 1) // self.block_size)
