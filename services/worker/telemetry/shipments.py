"""What hand-offs cost their sender, and the part of it that nothing else was done in."""

from __future__ import annotations

from dataclasses import dataclass, field

FINISHED, FAILED = "finished", "failed"


@dataclass(slots=True)
class ShipmentCounters:
    """Sums since start over hand-offs that were not cancelled. One thread adds, any may read."""

    num_ended: dict[str, int] = field(default_factory=lambda: {FINISHED: 0, FAILED: 0})
    total_s: float = 0.0
    """From a hand-off's first block to its trailer's arrival."""
    exposed_s: float = 0.0
    """The part behind the first token: it is not hidden by computing, and the request waits for it."""

    def ended(self, total_s: float, exposed_s: float, *, failed: bool) -> None:
        """Adds a hand-off that has ended; its times count only if it was completed."""
        self.num_ended[FAILED if failed else FINISHED] += 1
        if not failed:
            self.total_s += total_s
            self.exposed_s += exposed_s
