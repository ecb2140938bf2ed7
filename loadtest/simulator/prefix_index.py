"""The fleet's index: the holders of each run."""

from __future__ import annotations

from collections.abc import Sequence

from services.router.placement.views import NO_HITS, PrefixHits


class PrefixIndex:
    """Exact and up to date; a block may still be evicted before a request reaches it, as in reality."""

    def __init__(self, run_len: int) -> None:
        self._run_len = run_len
        # Not sets: their order differs between processes, and ties are broken in this order.
        self._holders: dict[int, dict[str, None]] = {}

    def add(self, run: int, worker: str) -> None:
        """The worker holds the run."""
        self._holders.setdefault(run, {})[worker] = None

    def remove(self, run: int, worker: str) -> None:
        """The worker no longer holds the run."""
        holders = self._holders[run]
        holders.pop(worker, None)
        if not holders:
            del self._holders[run]

    def match(self, runs: Sequence[int], num_prompt_tokens: int) -> PrefixHits:
        """By worker, how many of the prompt's leading tokens it holds."""
        local: dict[str, int] = {}
        holding = list(self._holders.get(runs[0], ()))
        if not holding:
            return NO_HITS
        num_tokens = 0
        for run in runs:
            holders = self._holders.get(run, {})
            for worker in holding:
                if worker not in holders:
                    local[worker] = num_tokens
            holding = [worker for worker in holding if worker in holders]
            if not holding:
                break
            num_tokens = min(num_tokens + self._run_len, num_prompt_tokens)
        for worker in holding:
            local[worker] = num_tokens
        return PrefixHits.of(local)
