"""Encryption of blocks and messages on the transfer plane: AES-256-GCM or ChaCha20-Poly1305, by `cryptography`.

Keys: HKDF-SHA256 of the fleet's root; one for each cipher, purpose and sender, whose salt is 16 random bytes that it
draws for itself. Two senders have the same key with a probability of 2^-64 even after 2^32 starts in one fleet.

Nonces: only the sender that drew the salt encrypts under its keys, and each nonce is the next of one counter over all
of them: no nonce comes twice under a key. The sender draws a new salt, and so new keys, after 2^32 nonces (which bounds
what AES-GCM encrypts under one key), and where it finds itself in a forked process, whose counter is also its parent's.

Place: ticket, and block index or message number, are associated data. What was encrypted for one place is refused in
any other. A ticket is drawn at random by the receiver and serves once, so nothing can be replayed into its own place.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from shared.errors import ConfigError
from shared.kv.block_memory import BlockMemory, host_bytes
from shared.kv.encryption_modes import Encryption
from shared.kv.seal import MAC_BYTES, Purpose, SealedBlock, forged_message

CLASSES = {"aes-gcm": "AESGCM", "chacha20-poly1305": "ChaCha20Poly1305"}
"""Names in `cryptography.hazmat.primitives.ciphers.aead`."""

KEY_BYTES = 32
SALT_BYTES = 16
MAX_NONCES = 1 << 32
"""Most nonces under one salt."""
MAX_SENDERS = 256
"""Most senders whose keys are kept; those of others are derived again, in some 10 µs."""
MAX_SPARE_BYTES = 64 << 20
"""Most bytes of buffers kept for the next blocks: memory that is new to the process costs as much time as to encrypt
it."""

_STEP_BYTES = 16 << 10
"""Sizes of larger buffers are multiples of this."""
_COUNT = struct.Struct("<Q")
_PLACE = struct.Struct("<cQQ")  # b"B"lock or b"M"essage, ticket, index or number
_NONCE_PREFIX = bytes(4)
_HEAD_BYTES = SALT_BYTES + _COUNT.size


class FleetCipher:
    """One process's: its salt and counter, and the keys of those from which it receives. For any thread."""

    def __init__(self, root: bytes, name: Encryption) -> None:
        """`root`: 32 secret bytes. Raises ConfigError (`block_encryption`) where the package is missing."""
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import aead
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        except ImportError as error:
            raise ConfigError(
                f"block_encryption is {name}, but the package cryptography cannot be loaded: {error}",
                field="block_encryption",
            ) from error
        self.invalid: type[Exception] = InvalidTag

        def key(purpose: Purpose, salt: bytes) -> Any:
            info = b"tandem " + name.encode() + b" " + purpose.value
            return getattr(aead, CLASSES[name])(HKDF(SHA256(), KEY_BYTES, salt, info).derive(root))

        self.key = lru_cache(MAX_SENDERS)(key)
        """The AEAD of (purpose, sender's salt)."""
        self.spare = SpareBuffers()
        self._lock = threading.Lock()
        self._process, self._count, self._salt = 0, 0, b""

    def __repr__(self) -> str:
        return "FleetCipher()"

    def next_nonce(self) -> tuple[bytes, int]:
        """This sender's salt, and a number that it has not had under it."""
        with self._lock:
            if self._process != os.getpid() or self._count == MAX_NONCES:
                self._process, self._count, self._salt = os.getpid(), 0, os.urandom(SALT_BYTES)
            self._count += 1
            return self._salt, self._count - 1


class EncryptingSeal:
    """Implements `Seal`. A tag is 40 bytes: sender's salt, number of the nonce, the cipher's own tag.

    What it costs beside a hand-off without copies: the sender encrypts into a buffer, so each block on its way takes
    another block of memory; the receiver copies what arrived aside and decrypts it into its place.
    """

    tag_bytes = _HEAD_BYTES + MAC_BYTES

    def __init__(self, cipher: FleetCipher, purpose: Purpose, ticket: int) -> None:
        self._cipher = cipher
        self._purpose = purpose
        self._ticket = ticket

    def __repr__(self) -> str:
        return "EncryptingSeal()"

    def close_blocks(self, blocks: Sequence[tuple[int, BlockMemory]]) -> list[SealedBlock]:
        """See `Seal`, for blocks in host memory; each block's `wire` is a buffer of its own."""
        return [self._close_block(index, host_bytes(memory)) for index, memory in blocks]

    def give_back(self, block: SealedBlock) -> None:
        """See `Seal`."""
        buffer = host_bytes(block.wire).obj
        assert isinstance(buffer, bytearray)
        self._cipher.spare.give_back(buffer)

    def open_blocks(self, blocks: Sequence[tuple[int, BlockMemory, bytes]]) -> list[bool]:
        """See `Seal`, for blocks in host memory."""
        return [self._open_block(index, host_bytes(memory), tag) for index, memory, tag in blocks]

    def _open_block(self, index: int, memory: memoryview, tag: bytes) -> bool:
        if len(tag) != self.tag_bytes:
            return False
        num_bytes = memory.nbytes
        buffer = self._cipher.spare.take(num_bytes + MAC_BYTES)
        aside = memoryview(buffer)[: num_bytes + MAC_BYTES]
        aside[:num_bytes], aside[num_bytes:] = memory.cast("B"), tag[_HEAD_BYTES:]
        try:
            self._aead(tag).decrypt_into(_nonce(tag), aside, self._place(b"B", index), memory.cast("B"))
        except self._cipher.invalid:
            return False
        finally:
            self._cipher.spare.give_back(buffer)
        return True

    def close_message(self, number: int, body: bytes) -> bytes:
        """See `Seal`."""
        head = self._head()
        return bytes(self._aead(head).encrypt(_nonce(head), body, self._place(b"M", number)) + head)

    def open_message(self, number: int, data: bytes) -> bytes:
        """See `Seal`."""
        content, head = data[:-_HEAD_BYTES], data[-_HEAD_BYTES:]
        if len(data) < self.tag_bytes:
            raise forged_message()
        try:
            return bytes(self._aead(head).decrypt(_nonce(head), content, self._place(b"M", number)))
        except self._cipher.invalid:
            raise forged_message() from None

    def _close_block(self, index: int, memory: memoryview) -> SealedBlock:
        head, num_bytes = self._head(), memory.nbytes
        buffer = self._cipher.spare.take(num_bytes + MAC_BYTES)
        made = memoryview(buffer)[: num_bytes + MAC_BYTES]
        self._aead(head).encrypt_into(_nonce(head), memory.cast("B"), self._place(b"B", index), made)
        return SealedBlock(made[:num_bytes], head + bytes(made[num_bytes:]))

    def _head(self) -> bytes:
        salt, count = self._cipher.next_nonce()
        return salt + _COUNT.pack(count)

    def _aead(self, head: bytes) -> Any:
        return self._cipher.key(self._purpose, head[:SALT_BYTES])

    def _place(self, kind: bytes, number: int) -> bytes:
        return _PLACE.pack(kind, self._ticket, number)


def _nonce(head: bytes) -> bytes:
    return _NONCE_PREFIX + head[SALT_BYTES:_HEAD_BYTES]


class SpareBuffers:
    """Buffers for the next blocks, all of one size or a few. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[bytearray] = []
        self._free_bytes = 0

    def take(self, num_bytes: int) -> bytearray:
        """A buffer of at least this size, with any content: packed blocks differ by a little."""
        if num_bytes > _STEP_BYTES:
            num_bytes = -(-num_bytes // _STEP_BYTES) * _STEP_BYTES
        with self._lock:
            for place, buffer in enumerate(self._free):
                if len(buffer) == num_bytes:
                    self._free_bytes -= num_bytes
                    return self._free.pop(place)
        return bytearray(num_bytes)

    def give_back(self, buffer: bytearray) -> None:
        """Returns a buffer that is not in use any more."""
        with self._lock:
            if self._free_bytes + len(buffer) <= MAX_SPARE_BYTES:
                self._free.append(buffer)
                self._free_bytes += len(buffer)
