"""The fleet's secret on the transfer plane: its holders may name addresses and send blocks.

Every key in use is derived from it, one a purpose. A ticket's seal serves that ticket alone, which is drawn at random
and used once. So what was sealed for one hand-off is refused by every other.
"""

from __future__ import annotations

import hashlib

from shared.errors import ConfigError
from shared.kv.encryption import CLASSES, EncryptingSeal, FleetCipher
from shared.kv.encryption_modes import Encryption
from shared.kv.multilinear import ExactSum, MultilinearHash, exact_sum
from shared.kv.seal import MAC_BYTES, Purpose, Seal, TagSeal

MIN_KEY_BYTES = 16

_ADDRESS, _BLOCKS, _CIPHER, _PEER, _GROUP = b"address", b"blocks", b"cipher", b"peer", b"group"


class FleetKey:
    """Secrets never appear in its repr."""

    def __init__(self, secret: bytes, total: ExactSum = exact_sum, encryption: Encryption = "none") -> None:
        """`total`: see `MultilinearHash`. Raises ConfigError for a short secret (`fleet_key`), and for an encryption
        that cannot be had (`block_encryption`)."""
        if len(secret) < MIN_KEY_BYTES:
            raise ConfigError(
                f"fleet_key has {len(secret)} bytes, at least {MIN_KEY_BYTES} are needed",
                field="fleet_key",
                limit=MIN_KEY_BYTES,
            )
        self._root = hashlib.blake2b(secret, digest_size=32, person=b"tandem fleet").digest()
        self._total = total
        self._hashes: dict[int, MultilinearHash] = {}  # by block size: of the pool, as handed off, of weights
        self.encryption: Encryption = encryption
        """Encryption of all blocks and messages, the same in the whole fleet."""
        self._cipher = FleetCipher(self._derive(_CIPHER), encryption) if encryption in CLASSES else None

    @classmethod
    def of(cls, secret: str, encryption: Encryption = "none") -> FleetKey | None:
        """A setting's; None where it is empty. Raises ConfigError, also for an encryption without a secret."""
        if secret:
            return cls(secret.encode(), encryption=encryption)
        if encryption != "none":
            raise ConfigError(
                f"block_encryption is {encryption}, but there is no fleet_key to derive its keys from",
                field="block_encryption",
            )
        return None

    def use(self, total: ExactSum | None) -> None:
        """Hashes blocks with this one from now on, where there is one; seals that are in use keep theirs."""
        if total is not None:
            self._total, self._hashes = total, {}

    def __repr__(self) -> str:
        return "FleetKey()"

    def sign_address(self, address: bytes) -> bytes:
        """16 bytes that only this fleet can make."""
        return hashlib.blake2b(address, key=self._derive(_ADDRESS), digest_size=MAC_BYTES).digest()

    def token(self) -> str:
        """What a process of the fleet shows to another one; it tells nothing about the secret."""
        return self._derive(_PEER).hex()

    def prove(self, challenge: bytes) -> bytes:
        """32 bytes that only this fleet can make: for the hosts of one worker's group, as they meet."""
        return hashlib.blake2b(challenge, key=self._derive(_GROUP), digest_size=32).digest()

    def seal(self, purpose: Purpose, ticket: int, block_bytes: int) -> Seal:
        """The seal of one ticket, whose blocks have this size."""
        if self._cipher is not None:
            return EncryptingSeal(self._cipher, purpose, ticket)
        block_hash = self._hashes.get(block_bytes)
        if block_hash is None:  # its keys take milliseconds
            block_hash = MultilinearHash(self._derive(_BLOCKS), block_bytes, self._total)
            self._hashes[block_bytes] = block_hash
        return TagSeal(self._derive(purpose.value + ticket.to_bytes(8, "little")), block_hash)

    def _derive(self, purpose: bytes) -> bytes:
        return hashlib.blake2b(purpose, key=self._root, digest_size=32).digest()


def token_of(key: FleetKey | None) -> str:
    """The key's token, empty without a key."""
    return key.token() if key is not None else ""


def encryption_of(key: FleetKey | None) -> Encryption:
    """How blocks are encrypted."""
    return key.encryption if key is not None else "none"


def seal_of(key: FleetKey | None, purpose: Purpose, ticket: int, block_bytes: int) -> Seal | None:
    """The key's seal, None without a key."""
    return key.seal(purpose, ticket, block_bytes) if key is not None else None
