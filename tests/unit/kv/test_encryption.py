"""Encrypted blocks and messages: who has no key reads nothing, and each is taken in its own place alone, once."""

from __future__ import annotations

import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError, TransferFailed
from shared.kv import encryption
from shared.kv.encryption import EncryptingSeal, SpareBuffers
from shared.kv.fleet_key import FleetKey
from shared.kv.handoff.shipment import decode_trailer, encode_note, encode_trailer, trailer_bytes
from shared.kv.seal import Purpose
from shared.rpc.pb.tandem.v1 import types_pb2
from tests.unit.kv.sealed_messages import assert_taken_once, assert_the_longest_fit

SECRET = b"hunter2hunter2hunter2"
BLOCK_BYTES = 4096
PLAIN = random.Random(1).randbytes(BLOCK_BYTES)
CIPHERS = ("aes-gcm", "chacha20-poly1305")

pytestmark = pytest.mark.parametrize("cipher", CIPHERS)


def key(cipher: str, secret: bytes = SECRET) -> FleetKey:
    """Another process's each time: it has a salt of its own."""
    return FleetKey(secret, encryption=cipher)


def seal(cipher: str, purpose=Purpose.HANDOFF, ticket: int = 5, secret: bytes = SECRET):
    return key(cipher, secret).seal(purpose, ticket, BLOCK_BYTES)


def opened(by, index: int, wire: bytes, tag: bytes) -> bytes | None:
    memory = bytearray(wire)
    return bytes(memory) if all(by.open_blocks([(index, memoryview(memory), tag)])) else None


def test_what_crosses_is_no_plain_text_and_opens_at_the_other_side(cipher):
    (block,) = seal(cipher).close_blocks([(3, memoryview(PLAIN))])
    assert block.wire.nbytes == BLOCK_BYTES
    assert len(block.tag) == EncryptingSeal.tag_bytes
    assert not any(PLAIN[at : at + 4] in bytes(block.wire) for at in range(0, BLOCK_BYTES, 4))
    assert opened(seal(cipher), 3, bytes(block.wire), block.tag) == PLAIN


def test_a_block_is_refused_in_every_other_place(cipher):
    (block,) = seal(cipher).close_blocks([(3, memoryview(PLAIN))])
    other = CIPHERS[1 - CIPHERS.index(cipher)]
    places = [
        (seal(cipher), 4),
        (seal(cipher, ticket=6), 3),
        (seal(cipher, purpose=Purpose.FETCH), 3),
        (seal(cipher, purpose=Purpose.OFFER), 3),
        (seal(cipher, secret=SECRET + b"!"), 3),
        (seal(other), 3),
    ]
    assert [opened(by, index, bytes(block.wire), block.tag) for by, index in places] == [None] * len(places)


@given(data=st.data())
def test_every_changed_bit_is_found(cipher, data):
    (block,) = seal(cipher).close_blocks([(3, memoryview(PLAIN))])
    both = bytearray(bytes(block.wire) + block.tag)
    bit = data.draw(st.integers(0, 8 * len(both) - 1))
    both[bit // 8] ^= 1 << bit % 8
    assert opened(seal(cipher), 3, bytes(both[:BLOCK_BYTES]), bytes(both[BLOCK_BYTES:])) is None


def test_a_tag_of_another_length_is_refused(cipher):
    (block,) = seal(cipher).close_blocks([(3, memoryview(PLAIN))])
    for tag in (b"", block.tag[:-1], block.tag + b"x", bytes(16)):
        assert opened(seal(cipher), 3, bytes(block.wire), tag) is None


def test_no_nonce_comes_twice_over_threads_seals_and_purposes(cipher):
    owner = key(cipher)
    seals = [owner.seal(purpose, ticket, BLOCK_BYTES) for purpose in Purpose for ticket in range(4)]
    with ThreadPoolExecutor(8) as threads:
        made = list(
            threads.map(
                lambda number: seals[number % len(seals)].close_blocks([(0, memoryview(PLAIN))] * 5), range(200)
            )
        )
    nonces = [block.tag[:24] for blocks in made for block in blocks]
    assert len(set(nonces)) == len(nonces) == 1000
    for number, blocks in enumerate(made[:24]):
        assert opened(seals[number % len(seals)], 0, bytes(blocks[4].wire), blocks[4].tag) == PLAIN


def test_a_sender_takes_a_new_salt_before_its_counter_is_too_long(cipher, monkeypatch):
    monkeypatch.setattr(encryption, "MAX_NONCES", 3)
    sender = seal(cipher)
    tags = [sender.close_blocks([(0, memoryview(PLAIN))])[0].tag for _ in range(7)]
    assert [int.from_bytes(tag[16:24], "little") for tag in tags] == [0, 1, 2, 0, 1, 2, 0]
    assert len({tag[:16] for tag in tags}) == 3


def test_a_forked_process_has_a_salt_of_its_own(cipher, monkeypatch):
    sender = seal(cipher)
    (before,) = sender.close_blocks([(0, memoryview(PLAIN))])
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)
    (after,) = sender.close_blocks([(0, memoryview(PLAIN))])
    assert before.tag[:16] != after.tag[:16]


def test_messages_are_secret_and_taken_once_in_their_place(cipher):
    near, far = seal(cipher), seal(cipher)
    note = types_pb2.HandoffTrailer(
        more=True, block_indexes=[1], checksums=[0x1122334455667788], block_tags=[bytes(near.tag_bytes)]
    )
    data = encode_note(note, near, 1)
    assert len(data) <= trailer_bytes(1, near)
    assert (0x1122334455667788).to_bytes(8, "little") not in data
    assert_taken_once(data, note, far, 1)
    with pytest.raises(TransferFailed):
        decode_trailer(encode_trailer(types_pb2.HandoffTrailer(first_token=1), 9), far, 0)


def test_the_longest_messages_fit_the_receive(cipher):
    assert_the_longest_fit(seal(cipher))


def test_it_is_refused_without_a_fleet_key(cipher):
    with pytest.raises(ConfigError, match=cipher) as refused:
        FleetKey.of("", cipher)
    assert refused.value.field == "block_encryption"


def test_a_missing_package_is_named_at_the_start(cipher, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(ConfigError, match="package cryptography") as refused:
        FleetKey.of(SECRET.decode(), cipher)
    assert refused.value.field == "block_encryption"


def test_secrets_show_nowhere(cipher):
    owner = key(cipher)
    for shown in (owner, owner._cipher, owner.seal(Purpose.FETCH, 1, BLOCK_BYTES)):
        assert repr(shown) == f"{type(shown).__name__}()"


def test_buffers_are_used_again_within_a_bound(cipher, monkeypatch):
    monkeypatch.setattr(encryption, "MAX_SPARE_BYTES", 100)
    spare = SpareBuffers()
    first, second = spare.take(60), spare.take(60)
    spare.give_back(first)
    spare.give_back(second)
    assert spare.take(50) is not first
    assert spare.take(60) is first
    assert spare.take(60) is not second
