"""The trailer that closes a hand-off, as bytes of a length that both sides know in advance.

A receive must be posted before its message arrives, so its size cannot depend on the content: a trailer for n
blocks always takes `trailer_bytes(n)`: a little-endian u32 length, the HandoffTrailer message, zeros.
"""

from __future__ import annotations

import struct

from google.protobuf.message import DecodeError

from shared.errors import TransferFailed
from shared.rpc.pb.tandem.v1 import types_pb2

_LENGTH = struct.Struct("<I")
_FIXED_BYTES = 64  # length prefix, scalar fields, tags and lengths of the two packed lists
_BYTES_PER_BLOCK = 5 + 8  # a varint index and a fixed64 checksum


def trailer_bytes(num_blocks: int) -> int:
    """Bytes of every trailer for a hand-off of at most `num_blocks` blocks."""
    return _FIXED_BYTES + _BYTES_PER_BLOCK * num_blocks


def encode_note(note: types_pb2.HandoffTrailer) -> bytes:
    """A note for the receive of a trailer: as short as its content, which no receive minds."""
    assert note.more, "a note says that more follows"
    body = note.SerializeToString()
    return _LENGTH.pack(len(body)) + body


def encode_trailer(trailer: types_pb2.HandoffTrailer, num_blocks: int) -> bytes:
    """The trailer padded to `trailer_bytes(num_blocks)`."""
    body = trailer.SerializeToString()
    size = trailer_bytes(num_blocks)
    assert _LENGTH.size + len(body) <= size, f"a trailer of {len(body)} bytes for {num_blocks} blocks"
    return (_LENGTH.pack(len(body)) + body).ljust(size, b"\0")


def decode_trailer(data: bytes) -> types_pb2.HandoffTrailer:
    """Inverse of `encode_trailer`; raises TransferFailed on bytes that are no trailer."""
    (length,) = _LENGTH.unpack_from(data)
    if length > len(data) - _LENGTH.size:
        raise TransferFailed(f"trailer claims {length} bytes, {len(data)} arrived")
    try:
        trailer = types_pb2.HandoffTrailer.FromString(data[_LENGTH.size : _LENGTH.size + length])
    except DecodeError as error:
        raise TransferFailed("the trailer is not a HandoffTrailer") from error
    if len(trailer.block_indexes) != len(trailer.checksums):
        raise TransferFailed("the trailer has not one checksum a block")
    return trailer
