"""A worker's blocks: a finite budget, reference counts, an LRU list of unreferenced blocks, findable once sealed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from services.router.placement.views import NO_HITS, PrefixHits


class PrefixCache:
    """Like the engine's block pool, in runs of blocks: one id for up to `run_len` tokens of a prompt.

    `on_sealed(run)` and `on_evicted(run)` report to the index. Blocks that no prompt can share are only counted.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        run_len: int,
        on_sealed: Callable[[int], None],
        on_evicted: Callable[[int], None],
    ) -> None:
        """`run_len` tokens is a multiple of `block_size`."""
        self.num_blocks = num_blocks
        self.num_used = 0
        """Blocks in use by running requests."""
        self._block_size, self._run_len = block_size, run_len
        self._on_sealed, self._on_evicted = on_sealed, on_evicted
        self._sizes: dict[int, int] = {}
        self._refs: dict[int, int] = {}
        self._sealed: set[int] = set()
        self._unused: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._num_unused = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be taken: empty ones and those of the LRU list."""
        return self.num_blocks - self.num_used

    def num_hit_tokens(self, runs: Sequence[int], num_prompt_tokens: int) -> int:
        """Leading tokens of the prompt held here; at least the last token is left to compute."""
        count = 0
        for run in runs:
            if run not in self._sealed:
                break
            count += 1
        return min(count * self._run_len, num_prompt_tokens - 1)

    def num_missing(self, runs: Sequence[int], num_prompt_tokens: int, num_more_tokens: int) -> int:
        """Blocks of the LRU list and of the empty ones that `acquire` would take."""
        refs = self._refs
        missing = sum(self._run_blocks(i, num_prompt_tokens) for i, run in enumerate(runs) if run not in refs)
        return missing + -(-num_more_tokens // self._block_size)

    def acquire(self, runs: Sequence[int], num_prompt_tokens: int, num_more_tokens: int) -> bool:
        """Takes the prompt's runs and room for more tokens, evicting the least recently used; False without room."""
        if self.num_missing(runs, num_prompt_tokens, num_more_tokens) > self.num_free:
            return False
        for i, run in enumerate(runs):
            count = self._refs.get(run, 0)
            self._refs[run] = count + 1
            if count:
                continue
            if run in self._unused:
                del self._unused[run]
                self._num_unused -= self._sizes[run]
            else:
                self._sizes[run] = self._run_blocks(i, num_prompt_tokens)
            self.num_used += self._sizes[run]
        self.num_used += -(-num_more_tokens // self._block_size)
        while self.num_used + self._num_unused > self.num_blocks:
            victim, _ = self._unused.popitem(last=False)
            self._num_unused -= self._sizes.pop(victim)
            self._sealed.discard(victim)
            self._on_evicted(victim)
        return True

    def seal(self, runs: Sequence[int]) -> None:
        """Makes the runs findable: their KV is complete."""
        for run in runs:
            if run not in self._sealed and run in self._sizes:
                self._sealed.add(run)
                self._on_sealed(run)

    def release(self, runs: Sequence[int], num_more_tokens: int) -> None:
        """Gives back what `acquire` took; the end of a prompt is evicted before its beginning."""
        self.num_used -= -(-num_more_tokens // self._block_size)
        for run in reversed(runs):
            count = self._refs[run] - 1
            if count:
                self._refs[run] = count
                continue
            del self._refs[run]
            self.num_used -= self._sizes[run]
            if run in self._sealed:
                self._unused[run] = None
                self._num_unused += self._sizes[run]
            else:
                del self._sizes[run]

    def clear(self) -> None:
        """Evicts all that is not in use."""
        for run in self._unused:
            del self._sizes[run]
            self._sealed.discard(run)
            self._on_evicted(run)
        self._unused.clear()
        self._num_unused = 0

    def _run_blocks(self, index: int, num_prompt_tokens: int) -> int:
        num_tokens = min(self._run_len, num_prompt_tokens - index * self._run_len)
        return -(-num_tokens // self._block_size)


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
