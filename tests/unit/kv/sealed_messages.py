"""What every seal's messages have in common."""

from __future__ import annotations

import pytest

from shared.errors import TransferFailed
from shared.kv.handoff.trailer import decode_trailer
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
