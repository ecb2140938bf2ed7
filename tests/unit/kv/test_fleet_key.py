"""Tags of the transfer plane: who does not know the key cannot make one, and one serves one message alone."""

from __future__ import annotations

import random

import numpy as np
import pytest

from shared.errors import ConfigError, TransferFailed
from shared.kernels.cpu.multilinear import fastest_sum
from shared.kv.fleet_key import FleetKey
from shared.kv.handoff.shipment import decode_trailer, encode_note, encode_trailer, trailer_bytes
from shared.kv.multilinear import MultilinearHash, exact_sum
from shared.kv.seal import MAC_BYTES, Purpose
from shared.rpc.pb.tandem.v1 import types_pb2
from tests.unit.kv.sealed_messages import assert_taken_once, assert_the_longest_fit

SECRET = "hunter2hunter2hunter2"
BLOCK_BYTES = 264


def block(seed: int = 0, num_bytes: int = BLOCK_BYTES) -> bytearray:
    return bytearray(random.Random(seed).randbytes(num_bytes))


@pytest.mark.parametrize("num_words", [1, 3, 4, 33, 4095, 4097, 9000])
def test_every_exact_sum_is_the_sum(num_words):
    random.seed(num_words)
    ends = [0, 1, (1 << 64) - 1]
    words = [random.choice([random.getrandbits(64), *ends]) for _ in range(num_words)]
    keys = [random.choice([random.getrandbits(64), *ends]) for _ in range(num_words)]
    expected = sum(a * b for a, b in zip(words, keys, strict=True))
    arrays = np.array(words, np.uint64), np.array(keys, np.uint64)
    assert exact_sum(*arrays) == expected
    native = fastest_sum()
    if native is not None:
        assert native(*arrays) == expected


def test_the_largest_sum_does_not_overflow():
    most = np.full(10_000, (1 << 64) - 1, np.uint64)
    expected = 10_000 * ((1 << 64) - 1) ** 2
    assert exact_sum(most, most) == expected
    native = fastest_sum()
    if native is not None:
        assert native(most, most) == expected


def test_every_bit_of_a_block_changes_its_hash():
    hashing, memory = MultilinearHash(b"key", BLOCK_BYTES), block()
    seen = {*hashing.of([memoryview(memory)])}
    for bit in range(8 * BLOCK_BYTES):
        memory[bit // 8] ^= 1 << bit % 8
        seen.update(hashing.of([memoryview(memory)]))
        memory[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 8 * BLOCK_BYTES + 1


def test_a_tag_depends_on_key_ticket_index_and_bytes():
    memory = memoryview(block())

    def tag(secret=SECRET, purpose=Purpose.HANDOFF, ticket=5, index=3, content=memory) -> bytes:
        (made,) = FleetKey(secret.encode()).seal(purpose, ticket, BLOCK_BYTES).close_blocks([(index, content)])
        assert (len(made.tag), made.wire) == (MAC_BYTES, content)
        return made.tag

    assert tag() == tag()
    others = [tag(secret=SECRET + "3"), tag(ticket=6), tag(index=4), tag(content=memoryview(block(1)))]
    of_purposes = [tag(purpose=purpose) for purpose in Purpose]  # the first one's among them
    assert len({tag(), *others, *of_purposes}) == len(others) + len(of_purposes)


def test_keys_for_blocks_are_made_once_a_size(monkeypatch):
    made = []

    def making(key: bytes, block_bytes: int, total) -> MultilinearHash:
        made.append(block_bytes)
        return MultilinearHash(key, block_bytes, total)

    monkeypatch.setattr("shared.kv.fleet_key.MultilinearHash", making)
    key = FleetKey(SECRET.encode())
    for ticket in range(3):  # a prefill worker whose blocks are converted: its own, and those that it hands off
        key.seal(Purpose.FETCH, ticket, 2 * BLOCK_BYTES)
        key.seal(Purpose.HANDOFF, ticket, BLOCK_BYTES)
    assert made == [2 * BLOCK_BYTES, BLOCK_BYTES]


def test_a_message_is_taken_once_and_in_its_place():
    seal = FleetKey(SECRET.encode()).seal(Purpose.HANDOFF, 5, BLOCK_BYTES)
    note = types_pb2.HandoffTrailer(more=True, block_indexes=[1], checksums=[9], block_tags=[bytes(MAC_BYTES)])
    data = encode_note(note, seal, 1)
    assert len(data) <= trailer_bytes(1, seal)
    assert_taken_once(data, note, seal, 1)


def test_a_message_without_a_tag_is_refused_by_who_has_a_key():
    seal = FleetKey(SECRET.encode()).seal(Purpose.HANDOFF, 5, BLOCK_BYTES)
    with pytest.raises(TransferFailed):
        decode_trailer(encode_trailer(types_pb2.HandoffTrailer(first_token=1), 4), seal, 0)


def test_a_note_without_the_tags_of_its_blocks_is_refused():
    seal = FleetKey(SECRET.encode()).seal(Purpose.HANDOFF, 5, BLOCK_BYTES)
    note = types_pb2.HandoffTrailer(more=True, block_indexes=[1], checksums=[9])
    with pytest.raises(TransferFailed) as refused:
        decode_trailer(encode_note(note, seal, 0), seal, 0)
    assert refused.value.details["field"] == "block_tags"


def test_the_longest_messages_fit_the_receive():
    assert_the_longest_fit(FleetKey(SECRET.encode()).seal(Purpose.HANDOFF, 5, BLOCK_BYTES))


def test_secrets_show_nowhere():
    key = FleetKey(SECRET.encode())
    for shown in (repr(key), str(key), repr(key.seal(Purpose.OFFER, 1, BLOCK_BYTES)), f"{[key]}"):
        assert SECRET not in shown
        assert key._root.hex() not in shown
    assert SECRET not in key.token()


def test_a_short_secret_is_refused_without_being_quoted():
    with pytest.raises(ConfigError) as refused:
        FleetKey.of("short!")
    assert (refused.value.field, refused.value.details["limit"]) == ("fleet_key", 16)
    assert "short!" not in str(refused.value)
    assert FleetKey.of("") is None
