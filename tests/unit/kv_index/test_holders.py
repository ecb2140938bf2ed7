"""The words of the index: they agree with the proto, survive the wire, and refuse hashes that are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidRequest
from shared.identity import WorkerRole
from shared.kv.transfer import TRAILER_INDEX
from shared.kv_index.client import match_from_proto, match_to_proto
from shared.kv_index.holders import MAX_HASHES, Holder, PrefixMatch, Tier, hashes_of, join_hashes, split_hashes
from shared.rpc.pb.tandem.v1 import kvstore_pb2

holders = st.builds(
    Holder,
    st.text(min_size=1, max_size=3),
    st.integers(1, 2**64 - 1),
    st.sampled_from(WorkerRole),
    st.sampled_from(Tier),
)


def test_tiers_have_the_numbers_of_the_proto() -> None:
    known = {"TIER_" + tier.name: tier.value for tier in Tier}
    assert known == {name: number for name, number in kvstore_pb2.Tier.items() if number != 0}


@given(st.lists(holders, min_size=1, max_size=5, unique=True), st.data())
def test_a_match_survives_the_wire(fleet: list[Holder], data: st.DataObject) -> None:
    blocks = data.draw(st.lists(st.lists(st.sampled_from(fleet), min_size=1, max_size=5, unique=True)))
    match = PrefixMatch(tuple(tuple(block) for block in blocks))
    message = match_to_proto(match)
    assert len(message.holders) == len({holder for block in blocks for holder in block})
    assert match_from_proto(kvstore_pb2.MatchResponse.FromString(message.SerializeToString()), len(blocks)) == match


def test_neighbours_with_the_same_holders_take_no_room() -> None:
    holder = Holder("prefill-0", 2**64 - 1, WorkerRole.PREFILL, Tier.DEVICE)
    assert len(match_to_proto(PrefixMatch(((holder,),) * 512)).SerializeToString()) < 64


@pytest.mark.parametrize(
    ("holders", "num_blocks"), [([0], 0), ([], 1), ([1], 1), ([0], 4)], ids=["empty", "nobody", "unknown", "too long"]
)
def test_an_answer_that_is_none_is_refused(holders: list[int], num_blocks: int) -> None:
    message = match_to_proto(PrefixMatch(((Holder("w", 1, WorkerRole.PREFILL, Tier.DEVICE),),)))
    message.blocks[0].CopyFrom(kvstore_pb2.BlockHolders(holders=holders, num_blocks=num_blocks))
    with pytest.raises((ValueError, IndexError)):
        match_from_proto(message, 3)


def test_an_answer_of_runs_that_are_too_long_together_is_refused() -> None:
    first, other = (Holder(name, 1, WorkerRole.PREFILL, Tier.DEVICE) for name in "ab")
    match = PrefixMatch(((first,), (first,), (other,), (other,)))
    assert match_from_proto(match_to_proto(match), 4) == match
    with pytest.raises(ValueError, match="more than the 3 requested blocks"):
        match_from_proto(match_to_proto(match), 3)


@pytest.mark.parametrize("hashes", [[b""], [bytes(15)], [bytes(15), bytes(17)], [bytes(32)]])
def test_hashes_of_another_length_are_refused(hashes: list[bytes]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        join_hashes(hashes)
    assert caught.value.details == {"field": "block_hashes", "limit": 16}


def test_hashes_are_joined_in_order() -> None:
    assert join_hashes([]) == b""
    assert join_hashes([b"a" * 16, b"b" * 16]) == b"a" * 16 + b"b" * 16


def request_of(num_hashes: int) -> kvstore_pb2.MatchRequest:
    return kvstore_pb2.MatchRequest(block_hashes=bytes(16 * num_hashes))


def test_a_request_has_as_many_hashes_as_its_receiver_can_index() -> None:
    assert len(hashes_of(request_of(MAX_HASHES))) == 16 * MAX_HASHES
    assert split_hashes(request_of(TRAILER_INDEX)) == [bytes(16)] * TRAILER_INDEX
    for read, num_hashes in ((hashes_of, MAX_HASHES + 1), (split_hashes, TRAILER_INDEX + 1)):
        with pytest.raises(InvalidRequest) as caught:
            read(request_of(num_hashes))
        assert caught.value.details == {"field": "block_hashes", "limit": num_hashes - 1}


def test_a_part_of_a_hash_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="33 bytes"):
        hashes_of(kvstore_pb2.MatchRequest(block_hashes=bytes(33)))
