"""Which blocks are kept within a budget. Policy only: no block bytes are held here.

LRU eviction with admission on second use: while there is free budget, every block is admitted. Once the budget is
spent, a block replaces others only if it was offered before, within the window of remembered offers. So prompts that
are never repeated do not evict those that many share (the one-hit wonders of Maggs, Sitaraman, "Algorithmic nuggets in
content delivery", 2015).

A tenant at its quota evicts its own blocks, so its further blocks cost other tenants nothing. Below its quota, the
least recently used block of all tenants is evicted. A block belongs to the tenant that stored it. Pinned blocks are
admitted at their first offer and never evicted.

A block may be offered with a time for which it is *retained* after each use (`Keep`). Within what is evicted, blocks of
low priority and those whose time is over go first, then the others, then those retained. Retained ones are at most
MOST_RETAINED of the budget, and of their tenant's quota: of more, the least recently used is as the others.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from services.kvstore.tiers.accounts import Accounts, Quotas
from services.kvstore.tiers.order import PLAIN, EvictionOrder, Keep, Rank
from shared.errors import ConfigError

MOST_RETAINED = 75
"""Most that retained blocks take of a tier's budget, and of a tenant's quota. Percent."""
OFFERS_PER_BLOCK = 4
MIN_OFFERS = 1024
"""Offers remembered: OFFERS_PER_BLOCK for each block held, at least MIN_OFFERS."""


class BlockLru:
    """Hashes, their sizes and their tenants, the least recently used first."""

    def __init__(
        self,
        budget_bytes: int,
        quotas: Quotas | None = None,
        pin_budget_bytes: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Pins may name blocks of at most `pin_budget_bytes`, which is less than the budget. `clock`: seconds, which go
        on over a restart."""
        self.budget_bytes = budget_bytes
        """Most bytes of the blocks held."""
        self.used_bytes = 0
        """Bytes of the blocks held."""
        self.accounts = Accounts(quotas or Quotas())
        self.pins = PinSet(pin_budget_bytes)
        self._pinned_bytes = 0  # of the blocks held
        self._blocks: dict[bytes, tuple[int, str]] = {}  # size, tenant
        self._order = EvictionOrder()  # of those that can be evicted
        self._keeps: dict[bytes, Keep] = {}  # of the blocks held, where it is not PLAIN
        self._ends: dict[bytes, float] = {}  # of those retained: when their time is over
        self._due: list[tuple[float, bytes]] = []  # a heap of such times, also of those that were renewed
        self._clock = clock
        self.retained_bytes = 0
        self.num_hint_hits = 0
        """Reads of retained blocks that newer blocks would have evicted without retention."""
        self._added_bytes = 0  # since start
        self._used_at: dict[bytes, int] = {}  # of those retained: `_added_bytes` at their last use
        self._offered: dict[bytes, None] = {}  # not held, oldest offer first
        self._sealed: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}

    def __len__(self) -> int:
        """Blocks held."""
        return len(self._blocks)

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether it is held; changes nothing."""
        return block_hash in self._blocks

    def hashes(self, tenant: str | None = None) -> list[bytes]:
        """All blocks, or one tenant's: pinned ones, then the others, least recently used first."""
        pinned = [block_hash for block_hash in self._blocks if block_hash not in self._order]
        found = [*pinned, *self._order]
        return found if tenant is None else [name for name in found if self._blocks[name][1] == tenant]

    def tenant_of(self, block_hash: bytes) -> str:
        """The tenant that a block belongs to. Raises KeyError for one that is not held."""
        return self._blocks[block_hash][1]

    def size_of(self, block_hash: bytes) -> int:
        """Bytes of a block. Raises KeyError for one that is not held."""
        return self._blocks[block_hash][0]

    def keep_of(self, block_hash: bytes) -> Keep:
        """How long a block is wanted."""
        return self._keeps.get(block_hash, PLAIN)

    def wants(self, block_hash: bytes, num_bytes: int, tenant: str = "", keep: Keep = PLAIN) -> bool:
        """Whether the block should be sent here; records the offer. False if the block cannot fit, or is held already,
        which counts as a use. One to be retained is wanted at its first offer: it is said to come again."""
        if block_hash in self._blocks:
            self.use(block_hash, keep)
            return False
        if not self.can_fit(num_bytes, tenant):
            return False
        if block_hash in self.pins or keep.retain_s > 0:
            return True
        again = self._offered.pop(block_hash, self) is None
        self._offered[block_hash] = None
        while len(self._offered) > max(MIN_OFFERS, OFFERS_PER_BLOCK * len(self._blocks)):
            del self._offered[next(iter(self._offered))]
        return again or num_bytes <= min(self.budget_bytes - self.used_bytes, self.accounts.room(tenant))

    def can_fit(self, num_bytes: int, tenant: str) -> bool:
        """Whether a block of this size fits for the tenant once everything evictable is evicted."""
        quota = self.accounts.quotas.of(tenant)
        if quota and num_bytes > quota - self.accounts.pinned_bytes(tenant):
            return False
        return num_bytes <= self.budget_bytes - self._pinned_bytes

    def use(self, block_hash: bytes, keep: Keep | None = None) -> None:
        """Marks a held block as most recently used: its time begins anew. `keep`: what this use asks for, beside what
        earlier ones did; None: nothing."""
        self._take_out(block_hash)
        if keep is not None:
            self._want(block_hash, self.keep_of(block_hash).joined(keep))
        self._place(block_hash)

    def hit(self, block_hash: bytes) -> None:
        """A held block was read."""
        self._expire()
        used_at = self._used_at.get(block_hash)
        self.num_hint_hits += used_at is not None and self._added_bytes - used_at >= self.budget_bytes
        self.use(block_hash)
        self.accounts.of(self._blocks[block_hash][1]).num_hits += 1

    def victims(self, num_bytes: int, tenant: str = "") -> list[bytes]:
        """Blocks to evict so that `num_bytes` of the tenant fit; changes nothing. Raises ValueError if none do."""
        if not self.can_fit(num_bytes, tenant):
            raise ValueError(f"a block of {num_bytes} bytes never fits into {self.budget_bytes}")
        self._expire()
        found: dict[bytes, None] = {}
        freed = 0
        excess = num_bytes - self.accounts.room(tenant)
        if excess > 0:
            for block_hash in self.accounts.of(tenant).order:
                found[block_hash] = None
                freed += self._blocks[block_hash][0]
                if freed >= excess:
                    break
        excess = self.used_bytes + num_bytes - self.budget_bytes
        for block_hash in self._order:
            if freed >= excess:
                break
            if block_hash not in found:
                found[block_hash] = None
                freed += self._blocks[block_hash][0]
        return list(found)

    def add(
        self, block_hash: bytes, num_bytes: int, tenant: str = "", keep: Keep = PLAIN, used_at_s: float | None = None
    ) -> None:
        """Adds a block as the most recently used. `used_at_s`: when that was, by the clock; None: now. Raises
        ValueError unless it fits."""
        room = min(self.budget_bytes - self.used_bytes, self.accounts.room(tenant))
        if block_hash in self._blocks or num_bytes > room:
            raise ValueError("the block is held already, or does not fit")
        self._blocks[block_hash] = num_bytes, tenant
        self.used_bytes += num_bytes
        account = self.accounts.of(tenant)
        account.used_bytes += num_bytes
        account.num_blocks += 1
        self._added_bytes += num_bytes
        self._want(block_hash, keep)
        self._place(block_hash, used_at_s)
        self._offered.pop(block_hash, None)
        if self._evicted.pop(block_hash, self) is not None:
            self._sealed[block_hash] = None

    def evict(self, block_hash: bytes) -> None:
        """Removes a block because another needs its place."""
        self.accounts.of(self._blocks[block_hash][1]).num_evicted += 1
        self.drop(block_hash)

    def drop(self, block_hash: bytes) -> None:
        """Removes a block."""
        self._take_out(block_hash)
        num_bytes, tenant = self._blocks.pop(block_hash)
        self._keeps.pop(block_hash, None)
        self.used_bytes -= num_bytes
        account = self.accounts.of(tenant)
        account.used_bytes -= num_bytes
        account.num_blocks -= 1
        self.accounts.settle(tenant)
        if self._sealed.pop(block_hash, self) is not None:
            self._evicted[block_hash] = None

    def pin(self, name: str, block_hashes: Sequence[bytes], num_bytes: int, tenant: str) -> bool:
        """Pins these blocks, of `num_bytes` each, whether they are held yet or not. False, and nothing has changed,
        if they exceed the pins' budget or the tenant's quota."""
        quota = self.accounts.quotas.of(tenant)
        if not self.pins.fits(block_hashes, num_bytes, tenant, quota):
            return False
        self._repin(lambda: self.pins.add(name, block_hashes, num_bytes, tenant), block_hashes)
        return True

    def unpin(self, name: str) -> None:
        """Ends a pin, if there is one of that name; its blocks can be evicted, as most recently used."""
        self._repin(lambda: self.pins.remove(name), self.pins.hashes(name))

    def drain(self) -> tuple[list[bytes], list[bytes]]:
        """Hashes added and hashes removed since the last call, net."""
        sealed, evicted = list(self._sealed), list(self._evicted)
        self._sealed, self._evicted = {}, {}
        return sealed, evicted

    def _repin(self, change: Callable[[], None], block_hashes: Sequence[bytes]) -> None:
        held = [block_hash for block_hash in dict.fromkeys(block_hashes) if block_hash in self._blocks]
        for block_hash in held:
            self._take_out(block_hash)
        change()
        for block_hash in held:
            self._place(block_hash)

    def _want(self, block_hash: bytes, keep: Keep) -> None:
        if keep == PLAIN:
            self._keeps.pop(block_hash, None)
        else:
            self._keeps[block_hash] = keep

    def _place(self, block_hash: bytes, used_at_s: float | None = None) -> None:
        """Counts a held block as pinned, or puts it into the order of eviction."""
        num_bytes, tenant = self._blocks[block_hash]
        account = self.accounts.of(tenant)
        if block_hash in self.pins:
            self._pinned_bytes += num_bytes
            account.pinned_bytes += num_bytes
            return
        keep = self.keep_of(block_hash)
        if not keep.retain_s:
            self._push(block_hash, Rank.LOW if keep.is_low else Rank.PLAIN)
            return
        end = (self._clock() if used_at_s is None else used_at_s) + keep.retain_s
        self._ends[block_hash] = end
        self._used_at[block_hash] = self._added_bytes
        heappush(self._due, (end, block_hash))
        if len(self._due) > max(MIN_OFFERS, 4 * len(self._ends)):  # mostly of those that were renewed
            self._due = [(at, name) for name, at in self._ends.items()]
            heapify(self._due)
        self._push(block_hash, Rank.RETAINED)
        quota = self.accounts.quotas.of(tenant)
        if quota:
            while account.retained_bytes > quota * MOST_RETAINED // 100:
                self._demote(next(account.order.of(Rank.RETAINED)), Rank.PLAIN)
        while self.retained_bytes > self.budget_bytes * MOST_RETAINED // 100:
            self._demote(next(self._order.of(Rank.RETAINED)), Rank.PLAIN)

    def _expire(self) -> None:
        now = self._clock()
        while self._due and self._due[0][0] <= now:
            end, block_hash = heappop(self._due)
            if self._ends.get(block_hash) == end:
                self._demote(block_hash, Rank.LOW)

    def _demote(self, block_hash: bytes, rank: Rank) -> None:
        """Moves a block from the retained ones to a lower rank, until its next use."""
        self._take_out(block_hash)
        self._push(block_hash, rank)

    def _push(self, block_hash: bytes, rank: Rank) -> None:
        num_bytes, tenant = self._blocks[block_hash]
        account = self.accounts.of(tenant)
        self._order.push(block_hash, rank)
        account.order.push(block_hash, rank)
        if rank is Rank.RETAINED:
            self.retained_bytes += num_bytes
            account.retained_bytes += num_bytes

    def _take_out(self, block_hash: bytes) -> None:
        num_bytes, tenant = self._blocks[block_hash]
        account = self.accounts.of(tenant)
        rank = self._order.remove(block_hash)
        if rank is None:
            self._pinned_bytes -= num_bytes
            account.pinned_bytes -= num_bytes
            return
        account.order.remove(block_hash)
        if rank is Rank.RETAINED:
            self.retained_bytes -= num_bytes
            account.retained_bytes -= num_bytes
            del self._ends[block_hash], self._used_at[block_hash]


def check_budget(field: str, budget_bytes: int, block_bytes: int) -> None:
    """Raises ConfigError when not even one block fits."""
    if budget_bytes < block_bytes:
        raise ConfigError(
            f"{field} is {budget_bytes} bytes, one block takes {block_bytes}", field=field, limit=block_bytes
        )


def check_quotas(field: str, quotas: Quotas, block_bytes: int) -> None:
    """Raises ConfigError naming the quota into which not even one block fits."""
    named = {f"tenant_quotas.{tenant}.{field}": quota for tenant, quota in quotas.named.items()}
    for name, quota in {f"tenant_quota.{field}": quotas.default, **named}.items():
        if quota:
            check_budget(name, quota, block_bytes)


@dataclass(frozen=True, slots=True)
class _Named:
    block_hashes: tuple[bytes, ...]
    num_bytes: int  # of each
    tenant: str


class PinSet:
    """Pins of one tier. A block in several pins counts once, with the size in its first pin."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        """Bytes of the pinned blocks, held or not."""
        self._named: dict[str, _Named] = {}
        self._counts: Counter[bytes] = Counter()
        self._sizes: dict[bytes, int] = {}

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether a pin names the block."""
        return block_hash in self._counts

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the pins, oldest first."""
        return tuple(self._named)

    def hashes(self, name: str) -> tuple[bytes, ...]:
        """A pin's blocks; empty if there is no such pin."""
        return self._named[name].block_hashes if name in self._named else ()

    def fits(self, block_hashes: Sequence[bytes], num_bytes: int, tenant: str, quota: int) -> bool:
        """Whether another pin of these blocks fits the budget, and the tenant's pins its quota (0 = none)."""
        new_bytes = num_bytes * len({name for name in block_hashes if name not in self._counts})
        own = [pin for pin in self._named.values() if pin.tenant == tenant]
        own_hashes = {block_hash: pin.num_bytes for pin in own for block_hash in pin.block_hashes}
        own_hashes |= dict.fromkeys(block_hashes, num_bytes)
        return self.used_bytes + new_bytes <= self.budget_bytes and (not quota or sum(own_hashes.values()) <= quota)

    def add(self, name: str, block_hashes: Sequence[bytes], num_bytes: int, tenant: str) -> None:
        """Pins blocks under a name that no other pin has."""
        assert name not in self._named, name
        unique = tuple(dict.fromkeys(block_hashes))
        self._named[name] = _Named(unique, num_bytes, tenant)
        for block_hash in unique:
            if block_hash not in self._counts:
                self._sizes[block_hash] = num_bytes
                self.used_bytes += num_bytes
            self._counts[block_hash] += 1

    def remove(self, name: str) -> None:
        """Ends a pin; unknown names are ignored."""
        pin = self._named.pop(name, None)
        for block_hash in pin.block_hashes if pin is not None else ():
            self._counts[block_hash] -= 1
            if not self._counts[block_hash]:
                del self._counts[block_hash]
                self.used_bytes -= self._sizes.pop(block_hash)
