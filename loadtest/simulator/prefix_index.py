"""Prompts' blocks by their hashes, and which worker holds which prefix."""

from __future__ import annotations

from collections.abc import Sequence

from services.router.placement.views import NO_HITS, PrefixHits
from shared.kv.hashing import HASH_BYTES
from shared.kv.pool import PoolEvents


class PrefixIndex:
    """Exact and up to date; a block may still be evicted before a request reaches it, as in reality.

    It counts in runs, which are what a trace's hash ids stand for: a worker holds a run while it holds the run's last
    full block. Pools evict the end of a prompt before its beginning, so the rest is there too.
    """

    def __init__(self, run_len: int, block_size: int) -> None:
        """`run_len` tokens is a multiple of `block_size`."""
        self.run_len, self.block_size = run_len, block_size
        self._run_blocks = run_len // block_size
        self._hashes: dict[int, list[bytes]] = {}  # by run, of all its blocks
        self._run_of: dict[bytes, int] = {}  # by the hash of a run's last block
        # Not sets: their order differs between processes, and ties are broken in this order.
        self._holders: dict[int, dict[str, None]] = {}

    def hashes(self, runs: Sequence[int], num_prompt_tokens: int) -> list[bytes]:
        """Hashes of the full blocks of a prompt whose runs are these, the last one maybe shorter."""
        found: list[bytes] = []
        num_full = num_prompt_tokens // self.block_size
        for run in runs:
            blocks = self._hashes.get(run)
            if blocks is None:
                first = -1 - (run << 32)
                blocks = self._hashes[run] = [
                    (first - index).to_bytes(HASH_BYTES, signed=True) for index in range(self._run_blocks)
                ]
            blocks = blocks[: num_full - len(found)]
            if not blocks:
                break
            self._run_of[blocks[-1]] = run
            found += blocks
        return found

    def own_hashes(self, number: int, num_prompt_tokens: int) -> list[bytes]:
        """Hashes of the full blocks of a prompt, the `number`-th one, that shares nothing with others."""
        first = number << 32
        return [(first + index).to_bytes(HASH_BYTES) for index in range(num_prompt_tokens // self.block_size)]

    def update(self, worker: str, events: PoolEvents) -> None:
        """Changes of a worker's pool."""
        run_of, holders_of = self._run_of, self._holders
        for block in events.sealed:
            run = run_of.get(block)
            if run is not None:
                holders_of.setdefault(run, {})[worker] = None
        for block in events.evicted:
            run = run_of.get(block)
            if run is not None and (holders := holders_of.get(run)):
                holders.pop(worker, None)
                if not holders:
                    del holders_of[run]

    def match(self, runs: Sequence[int], num_prompt_tokens: int) -> PrefixHits:
        """By worker, how many of the prompt's leading tokens it holds."""
        local: dict[str, int] = {}
        holding = list(self._holders.get(runs[0], ())) if runs else []
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
            num_tokens = min(num_tokens + self.run_len, num_prompt_tokens // self.block_size * self.block_size)
        for worker in holding:
            local[worker] = num_tokens
        return PrefixHits.of(local)
