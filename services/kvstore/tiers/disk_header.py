"""The header of a block's file."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b

MAGIC = b"TANDEMKV"
FORMAT_VERSION = 2
MAX_TENANT_BYTES = 128
HEADER = struct.Struct(f"<8sIIQQ16s{MAX_TENANT_BYTES}s")
"""Magic, format version, zero, bytes of the block, checksum, hash, tenant; then blake2b of these, 16 bytes."""
HEADER_BYTES = HEADER.size + 16


@dataclass(frozen=True, slots=True)
class Header:
    """The header's fields, without the block's hash."""

    num_bytes: int
    checksum: int
    tenant: str

    def pack(self, block_hash: bytes) -> bytes:
        """`HEADER_BYTES` bytes."""
        fields = HEADER.pack(MAGIC, FORMAT_VERSION, 0, self.num_bytes, self.checksum, block_hash, self.tenant.encode())
        return fields + blake2b(fields, digest_size=16).digest()

    @classmethod
    def parse(cls, data: bytes, block_hash: bytes) -> Header | None:
        """None when `data` is no valid header of this block."""
        if len(data) != HEADER_BYTES or blake2b(data[: HEADER.size], digest_size=16).digest() != data[HEADER.size :]:
            return None
        magic, version, _, num_bytes, checksum, named, tenant = HEADER.unpack_from(data)
        if (magic, version, named) != (MAGIC, FORMAT_VERSION, block_hash):
            return None
        return cls(num_bytes, checksum, tenant.rstrip(b"\0").decode())
