"""The fleet's secret on the transfer plane: who knows it may name addresses and send blocks.

Every key in use is derived from it, one a purpose; a hand-off's from its ticket, which is drawn at random and serves
once. So what was sealed for one hand-off is refused by every other.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from shared.errors import ConfigError, TransferFailed
from shared.kv.multilinear import ExactSum, MultilinearHash, exact_sum

MIN_KEY_BYTES = 16
TAG_BYTES = 16

_ADDRESS, _HANDOFF, _BLOCKS, _PEER = b"address", b"handoff", b"blocks", b"peer"


class FleetKey:
    """Secrets never appear in its repr."""

    def __init__(self, secret: bytes, total: ExactSum = exact_sum) -> None:
        """`total`: see `MultilinearHash`. Raises ConfigError (`fleet_key`) for a short secret."""
        if len(secret) < MIN_KEY_BYTES:
            raise ConfigError(
                f"fleet_key has {len(secret)} bytes, at least {MIN_KEY_BYTES} are needed",
                field="fleet_key",
                limit=MIN_KEY_BYTES,
            )
        self._root = hashlib.blake2b(secret, digest_size=32, person=b"tandem fleet").digest()
        self._total = total
        self._hash: tuple[int, MultilinearHash] | None = None

    @classmethod
    def of(cls, secret: str) -> FleetKey | None:
        """A setting's; None where it is empty. Raises ConfigError."""
        return cls(secret.encode()) if secret else None

    def use(self, total: ExactSum) -> None:
        """Hashes blocks with this one from now on; hand-offs that have begun keep theirs."""
        self._total, self._hash = total, None

    def __repr__(self) -> str:
        return "FleetKey()"

    def sign_address(self, address: bytes) -> bytes:
        """16 bytes that only this fleet can make."""
        return hashlib.blake2b(address, key=self._derive(_ADDRESS), digest_size=TAG_BYTES).digest()

    def token(self) -> str:
        """What a process of the fleet shows to another one; it tells nothing about the secret."""
        return self._derive(_PEER).hex()

    def seal(self, ticket: int, block_bytes: int) -> HandoffSeal:
        """Of one hand-off."""
        if self._hash is None or self._hash[0] != block_bytes:
            self._hash = block_bytes, MultilinearHash(self._derive(_BLOCKS), block_bytes, self._total)
        return HandoffSeal(self._derive(_HANDOFF + ticket.to_bytes(8, "little")), self._hash[1])

    def _derive(self, purpose: bytes) -> bytes:
        return hashlib.blake2b(purpose, key=self._root, digest_size=32).digest()


def token_of(key: FleetKey | None) -> str:
    """The key's token, empty without a key."""
    return key.token() if key is not None else ""


class HandoffSeal:
    """Tags of one hand-off's blocks and messages, 16 bytes each; both sides have one. `repr` shows no secret."""

    def __init__(self, key: bytes, block_hash: MultilinearHash) -> None:
        self._key = key
        self._hash = block_hash

    def __repr__(self) -> str:
        return "HandoffSeal()"

    def block_tags(self, blocks: Sequence[tuple[int, memoryview]]) -> list[bytes]:
        """Of (block index, its bytes); reads every byte, so call it where that may take its time."""
        return [self._tag(b"B", index, self._hash.of(memory)) for index, memory in blocks]

    def message_tag(self, number: int, body: bytes) -> bytes:
        """Of the hand-off's note or trailer with this number, from 0 on."""
        return self._tag(b"M", number, body)

    def check_message(self, number: int, body: bytes, tag: bytes) -> None:
        """Raises TransferFailed for a message of another hand-off, another number, or another sender."""
        if not hmac.compare_digest(self.message_tag(number, body), tag):
            raise TransferFailed("a message of the hand-off is not from a worker of this fleet", field="tag")

    def _tag(self, kind: bytes, number: int, content: bytes) -> bytes:
        data = kind + number.to_bytes(8, "little") + content
        return hashlib.blake2b(data, key=self._key, digest_size=TAG_BYTES).digest()
