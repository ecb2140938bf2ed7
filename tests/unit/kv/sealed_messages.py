"""What every seal's messages have in common."""

from __future__ import annotations

import pytest

from shared.errors import TransferFailed
from shared.kv.handoff.shipment import decode_trailer, encode_note, encode_trailer, trailer_bytes
from shared.rpc.pb.tandem.v1 import types_pb2


def assert_taken_once(data: bytes, note: types_pb2.HandoffTrailer, seal, number: int) -> None:
    """`data` is `note` as message `number`, is neither the one before nor the one after, and no byte may change."""
    assert decode_trailer(data, seal, number) == note
    for other in (number - 1, number + 1):
        with pytest.raises(TransferFailed, match="not from a worker"):
            decode_trailer(data, seal, other)
    for place in range(4, len(data)):
        changed = bytearray(data)
        changed[place] ^= 1
        with pytest.raises(TransferFailed):
            decode_trailer(bytes(changed), seal, number)


def assert_the_longest_fit(seal) -> None:
    """A note and a trailer with every field as long as it can be."""
    count = 4000
    lists = {"block_indexes": range(60_000, 60_000 + count), "checksums": [(1 << 64) - 1] * count}
    tags = [bytes([255] * seal.tag_bytes)] * count
    note = types_pb2.HandoffTrailer(more=True, block_tags=tags, **lists)
    assert len(encode_note(note, seal, 7)) <= trailer_bytes(count, seal)
    trailer = types_pb2.HandoffTrailer(
        first_token=(1 << 32) - 1, num_computed_tokens=(1 << 32) - 1, finished=True, block_tags=tags, **lists
    )
    assert len(encode_trailer(trailer, count, seal, 8)) == trailer_bytes(count, seal)
