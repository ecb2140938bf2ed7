"""Whether blocks for one receiver are packed: by the rate at which it has taken bytes so far. Pure policy."""

from __future__ import annotations

from shared.kv.packing import PackingRates

MEASURED_BYTES = 4 << 20
"""Bytes of blocks on their way without a pause, before they count as a measurement: fewer may only have filled the
buffers of sockets."""
_GAIN = 0.9
"""Packing begins where it takes less than this share of the time without, and ends where it takes longer."""


class LinkRate:
    """The link to one receiver as its sender sees it: bytes that were taken over the time in which some were on their
    way. It measures while blocks leave anyway, so it shows a slow receiver as a slow link, which packing helps no less.
    """

    def __init__(self) -> None:
        self.bytes_s: float | None = None
        """Measured rate of the link, bytes a second; None until enough was sent."""
        self._on_their_way = 0
        self._since_s = 0.0
        self._taken = 0
        self._packs = False

    def began(self, num_bytes: int, now_s: float) -> None:
        """Blocks begin to leave; `num_bytes`: of all of them, packed or not."""
        if not self._on_their_way:
            self._since_s, self._taken = now_s, 0
        self._on_their_way += num_bytes

    def ended(self, num_bytes: int, now_s: float, *, taken: bool) -> None:
        """Blocks of `num_bytes` bytes have left the link: they were taken, or not."""
        self._on_their_way -= num_bytes
        if not taken:
            return
        self._taken += num_bytes
        if self._taken >= MEASURED_BYTES and now_s > self._since_s:
            self.bytes_s = self._taken / (now_s - self._since_s)

    def packs(self, rates: PackingRates, unpack_bytes_s: float) -> bool:
        """Whether the next blocks are packed. `unpack_bytes_s`: the receiver's rate. As if nothing overlapped, although
        one part packs while the one before is on its way: so it is never slower."""
        if self.bytes_s is None or unpack_bytes_s <= 0:
            return False
        packed_s = rates.ratio / self.bytes_s + 1 / rates.pack_bytes_s + 1 / unpack_bytes_s
        self._packs = packed_s * self.bytes_s < (1.0 if self._packs else _GAIN)
        return self._packs
