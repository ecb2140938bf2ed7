"""A trailer takes as many bytes as both sides reckon with, and damaged bytes are no trailer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import TransferFailed
from shared.kv.handoff.shipment import decode_trailer, encode_trailer, trailer_bytes
from shared.rpc.pb.tandem.v1 import types_pb2

MOST_U32 = (1 << 32) - 1
MOST_U64 = (1 << 64) - 1


def largest(num_blocks: int) -> types_pb2.HandoffTrailer:
    """Every field as long as it can be."""
    return types_pb2.HandoffTrailer(
        first_token=MOST_U32,
        num_computed_tokens=MOST_U32,
        block_indexes=[MOST_U32] * num_blocks,
        checksums=[MOST_U64] * num_blocks,
        aborted=True,
        finished=True,
    )


def framed(body: bytes, length: int | None = None) -> bytes:
    return (len(body) if length is None else length).to_bytes(4, "little") + body


@pytest.mark.parametrize("num_blocks", [0, 1, 2, 9, 10, 1000, 60_000])
def test_the_largest_trailer_fits_and_comes_back(num_blocks: int) -> None:
    trailer = largest(num_blocks)
    data = encode_trailer(trailer, num_blocks)
    assert len(data) == trailer_bytes(num_blocks)
    assert decode_trailer(data) == trailer


@given(st.integers(0, 30), st.integers(0, 30))
def test_the_size_follows_the_blocks_that_are_needed_not_those_that_were_sent(sent: int, spare: int) -> None:
    trailer = types_pb2.HandoffTrailer(first_token=7, block_indexes=range(sent), checksums=range(sent))
    data = encode_trailer(trailer, sent + spare)
    assert len(data) == trailer_bytes(sent + spare)
    assert decode_trailer(data) == trailer


def test_more_blocks_than_the_size_allows_are_a_bug_of_the_sender() -> None:
    with pytest.raises(AssertionError, match="for 1 blocks"):
        encode_trailer(largest(9), 1)


def test_a_block_has_thirteen_bytes() -> None:
    assert [trailer_bytes(n) for n in (0, 1, 100)] == [64, 77, 1364]


def test_a_trailer_may_fill_its_bytes_to_the_last_one() -> None:
    trailer = largest(3)
    assert decode_trailer(framed(trailer.SerializeToString())) == trailer


def test_a_length_beyond_what_arrived_is_refused() -> None:
    body = largest(3).SerializeToString()
    with pytest.raises(TransferFailed, match=f"claims {len(body) + 1} bytes, {len(body) + 4} arrived"):
        decode_trailer(framed(body, len(body) + 1))


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(TransferFailed, match="is not a HandoffTrailer"):
        decode_trailer(framed(b"\xff" * 20))


@pytest.mark.parametrize(("num_indexes", "num_checksums"), [(1, 0), (0, 1), (3, 2)])
def test_every_block_has_its_checksum(num_indexes: int, num_checksums: int) -> None:
    body = types_pb2.HandoffTrailer(block_indexes=range(num_indexes), checksums=range(num_checksums))
    with pytest.raises(TransferFailed, match="one checksum a block"):
        decode_trailer(framed(body.SerializeToString()))
