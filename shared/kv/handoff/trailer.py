"""The trailer that closes a hand-off, as bytes of a length that both sides know in advance.

A receive must be posted before its message arrives, so its size cannot depend on the content: a trailer for n
blocks always takes `trailer_bytes(n)`: a little-endian u32 length, the HandoffTrailer message, zeros.
"""

from __future__ import annotations

import struct

from google.protobuf.message import DecodeError

from shared.errors import TransferFailed
from shared.kv.fleet_key import TAG_BYTES, HandoffSeal
from shared.rpc.pb.tandem.v1 import types_pb2

_LENGTH = struct.Struct("<I")
_FIXED_BYTES = 64  # length prefix, scalar fields, tags and lengths of the two packed lists
_BYTES_PER_BLOCK = 5 + 8  # a varint index and a fixed64 checksum
_SEALED_BYTES_PER_BLOCK = 2 + TAG_BYTES  # a note's tag of a block


def trailer_bytes(num_blocks: int, *, sealed: bool = False) -> int:
    """Bytes of every trailer for a hand-off of at most `num_blocks` blocks, and the most of a note. `sealed`: where
    they carry tags."""
    tags = _SEALED_BYTES_PER_BLOCK * num_blocks + TAG_BYTES if sealed else 0
    return _FIXED_BYTES + _BYTES_PER_BLOCK * num_blocks + tags


def encode_note(note: types_pb2.HandoffTrailer, seal: HandoffSeal | None = None, number: int = 0) -> bytes:
    """A note for the receive of a trailer: as short as its content, which no receive minds. `number`: as for
    `encode_trailer`."""
    assert note.more, "a note says that more follows"
    return _encode(note, seal, number)


def encode_trailer(
    trailer: types_pb2.HandoffTrailer, num_blocks: int, seal: HandoffSeal | None = None, number: int = 0
) -> bytes:
    """The trailer padded to `trailer_bytes(num_blocks)`. With a `seal` it is tagged as the hand-off's message of this
    number: notes and trailer count from 0 on."""
    data = _encode(trailer, seal, number)
    size = trailer_bytes(num_blocks, sealed=seal is not None)
    assert len(data) <= size, f"a trailer of {len(data)} bytes for {num_blocks} blocks"
    return data.ljust(size, b"\0")


def decode_trailer(data: bytes, seal: HandoffSeal | None = None, number: int = 0) -> types_pb2.HandoffTrailer:
    """Inverse of `encode_trailer` and `encode_note`. Raises TransferFailed on bytes that are neither, and with a `seal`
    on a message that it has not tagged with this number."""
    (length,) = _LENGTH.unpack_from(data)
    if length > len(data) - _LENGTH.size - (TAG_BYTES if seal is not None else 0):
        raise TransferFailed(f"trailer claims {length} bytes, {len(data)} arrived")
    body = data[_LENGTH.size : _LENGTH.size + length]
    if seal is not None:
        seal.check_message(number, body, data[_LENGTH.size + length :][:TAG_BYTES])
    try:
        trailer = types_pb2.HandoffTrailer.FromString(body)
    except DecodeError as error:
        raise TransferFailed("the trailer is not a HandoffTrailer") from error
    if len(trailer.block_indexes) != len(trailer.checksums):
        raise TransferFailed("the trailer has not one checksum a block")
    if seal is not None and trailer.more and len(trailer.block_tags) != len(trailer.block_indexes):
        raise TransferFailed("the note has not one tag a block", field="block_tags")
    return trailer


def _encode(message: types_pb2.HandoffTrailer, seal: HandoffSeal | None, number: int) -> bytes:
    body = message.SerializeToString()
    tag = seal.message_tag(number, body) if seal is not None else b""
    return _LENGTH.pack(len(body)) + body + tag
