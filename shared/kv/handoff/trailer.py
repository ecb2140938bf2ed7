"""The trailer that closes a hand-off, as bytes of a length that both sides know in advance.

A receive must be posted before its message arrives, so its size cannot depend on the content: a trailer for n
blocks always takes `trailer_bytes(n)`: a little-endian u32 length, the HandoffTrailer message, zeros.
"""

from __future__ import annotations

import struct

from google.protobuf.message import DecodeError

from shared.errors import TransferFailed
from shared.kv.seal import Seal
from shared.rpc.pb.tandem.v1 import types_pb2

_LENGTH = struct.Struct("<I")
_FIXED_BYTES = 64  # length prefix, scalar fields, tags and lengths of the two packed lists
_BYTES_PER_BLOCK = 5 + 8  # a varint index and a fixed64 checksum
_TAG_FRAME_BYTES = 2  # before each block's tag


def trailer_bytes(num_blocks: int, seal: Seal | None = None) -> int:
    """Bytes of every trailer for a hand-off of at most `num_blocks` blocks, and the most of a note."""
    tags = (_TAG_FRAME_BYTES + seal.tag_bytes) * num_blocks + seal.tag_bytes if seal is not None else 0
    return _FIXED_BYTES + _BYTES_PER_BLOCK * num_blocks + tags


def encode_note(note: types_pb2.HandoffTrailer, seal: Seal | None = None, number: int = 0) -> bytes:
    """A note for the receive of a trailer: as short as its content, which no receive minds. `number`: as for
    `encode_trailer`."""
    assert note.more, "a note says that more follows"
    return _encode(note, seal, number)


def encode_trailer(
    trailer: types_pb2.HandoffTrailer, num_blocks: int, seal: Seal | None = None, number: int = 0
) -> bytes:
    """The trailer padded to `trailer_bytes(num_blocks)`. With a `seal` it is sealed as the hand-off's message of this
    number: notes and trailer count from 0 on."""
    data = _encode(trailer, seal, number)
    size = trailer_bytes(num_blocks, seal)
    assert len(data) <= size, f"a trailer of {len(data)} bytes for {num_blocks} blocks"
    return data.ljust(size, b"\0")


def decode_trailer(data: bytes, seal: Seal | None = None, number: int = 0) -> types_pb2.HandoffTrailer:
    """Inverse of `encode_trailer` and `encode_note`. Raises TransferFailed on bytes that are neither, and with a `seal`
    on a message that it has not sealed with this number."""
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length + (seal.tag_bytes if seal is not None else 0)
    if end > len(data):
        raise TransferFailed(f"trailer claims {length} bytes, {len(data)} arrived")
    body = data[_LENGTH.size : end]
    if seal is not None:
        body = seal.open_message(number, body)
    try:
        trailer = types_pb2.HandoffTrailer.FromString(body)
    except DecodeError as error:
        raise TransferFailed("the trailer is not a HandoffTrailer") from error
    if len(trailer.block_indexes) != len(trailer.checksums):
        raise TransferFailed("the trailer has not one checksum a block")
    tagged = bool(trailer.block_tags) or (seal is not None and trailer.more)
    if tagged and len(trailer.block_tags) != len(trailer.checksums):
        raise TransferFailed("the message has not one tag a block", field="block_tags")
    return trailer


def _encode(message: types_pb2.HandoffTrailer, seal: Seal | None, number: int) -> bytes:
    body = message.SerializeToString()
    return _LENGTH.pack(len(body)) + (body if seal is None else seal.close_message(number, body))
