"""Several nodes over one folder: what each finds, serves and loses when others store, evict, die and come back."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.kvstore.tiers import disk as disk_module
from services.kvstore.tiers import shared_disk
from services.kvstore.tiers.arena import HostArena
from services.kvstore.tiers.disk import HEADER_BYTES
from services.kvstore.tiers.order import Keep
from services.kvstore.tiers.shared_disk import FORGOTTEN_S, SharedDiskTier
from services.kvstore.tiers.stack import TierStack
from shared.errors import ConfigError, StoreUnavailable
from tests.unit.kvstore.tiers.blocks import BLOCK_BYTES, HASHES, block, put, read

ROOT = Path(__file__).parents[4]
FILE_BYTES = BLOCK_BYTES + HEADER_BYTES
Make = Callable[..., SharedDiskTier]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Starts a node's tier over the one folder."""
    made: list[SharedDiskTier] = []

    def start(name: str, num_blocks: int = 4) -> SharedDiskTier:
        tier = SharedDiskTier(tmp_path, name, num_blocks * FILE_BYTES, BLOCK_BYTES)
        tier.start()
        made.append(tier)
        return tier

    yield start
    for tier in made:
        tier.close()


def test_a_neighbours_block_is_found_served_and_not_stored_twice(make: Make) -> None:
    one, other = make("store-0"), make("store-1")
    put(one, 0)
    assert one.drain_events().sealed == [HASHES[0]]
    assert other.drain_events().sealed == []
    other.look()
    assert other.drain_events().sealed == [HASHES[0]]
    assert (other.holds(HASHES[0]), read(other, 0)) == (True, block(0))
    assert not other.wants(HASHES[0], BLOCK_BYTES)
    put(other, 0)
    assert (other.blocks.used_bytes, one.blocks.used_bytes, other.counters.num_stored) == (0, FILE_BYTES, 0)
    assert other.drain_events().sealed == []


def test_what_a_neighbour_evicts_is_gone_at_the_next_look_or_read(make: Make) -> None:
    one, other = make("store-0", num_blocks=2), make("store-1")
    put(one, 0)
    put(one, 1)
    other.look()
    assert sorted(other.drain_events().sealed) == sorted(HASHES[:2])
    put(one, 2)
    assert read(other, 0) is None
    assert (other.counters.num_bad, other.counters.num_misses) == (0, 1)
    assert other.drain_events().evicted == [HASHES[0]]
    put(one, 3)
    other.look()
    events = other.drain_events()
    assert (events.evicted, set(events.sealed)) == ([HASHES[1]], {*HASHES[2:4]})
    assert [read(other, number) for number in range(4)] == [None, None, block(2), block(3)]


def test_a_block_in_two_folders_leaves_the_index_with_the_last_of_them(make: Make) -> None:
    one, other = make("store-0", num_blocks=1), make("store-1", num_blocks=1)
    put(one, 0)
    put(other, 0)
    other.look()
    assert other.drain_events().sealed == [HASHES[0]]
    put(other, 1)
    events = other.drain_events()
    assert (events.sealed, events.evicted) == ([HASHES[1]], []), "the neighbour's is left"
    assert read(other, 0) == block(0)
    put(one, 2)
    other.look()
    events = other.drain_events()
    assert (events.sealed, events.evicted) == ([HASHES[2]], [HASHES[0]])


def test_a_node_that_is_gone_leaves_its_blocks_to_the_others_and_finds_them_again(make: Make) -> None:
    one, other = make("store-0"), make("store-1")
    for number in range(4):
        put(one, number)
        os.utime(one._path(HASHES[number]), ns=(number, number))
    other.look()
    one.close()
    other.look()
    assert [read(other, number) for number in range(4)] == [block(number) for number in range(4)]
    again = make("store-0", num_blocks=2)
    assert again.drain_events().sealed == [HASHES[2], HASHES[3]], "to its bound, the last used"
    assert again.blocks.used_bytes == 2 * FILE_BYTES
    other.look()
    assert [read(other, number) for number in range(4)] == [None, None, block(2), block(3)]


def test_a_nodes_folder_is_its_own(make: Make) -> None:
    make("store-0")
    with pytest.raises(ConfigError, match="another process") as caught:
        make("store-0")
    assert caught.value.field == "disk_folder"
    for name in ("", "..", "a/b", ".hidden", "x" * 129):
        with pytest.raises(ConfigError, match="name") as caught:
            make(name)
        assert caught.value.field == "name"


def test_a_damaged_block_of_a_neighbour_is_counted_and_not_served(make: Make) -> None:
    one, other = make("store-0"), make("store-1")
    put(one, 0)
    path = one._path(HASHES[0])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    other.look()
    assert read(other, 0) is None
    assert (other.counters.num_bad, path.exists()) == (1, True)
    assert not other.holds(HASHES[0])
    put(other, 0)
    assert read(other, 0) == block(0)
    assert read(one, 0) is None
    assert not path.exists(), "its own node drops it"


def test_a_faster_tier_gets_a_neighbours_block_as_its_tenants(make: Make) -> None:
    one, other = make("store-0"), make("store-1")
    data = memoryview(block(0))
    one.put(HASHES[0], data, disk_module.block_checksum(data), "a-tenant", Keep(60.0))
    other.look()
    arena = HostArena(4 * BLOCK_BYTES, BLOCK_BYTES)
    arena.start()
    stack = TierStack([arena, other])
    assert stack.read(HASHES[0], memoryview(bytearray(BLOCK_BYTES))) is not None
    assert (arena.blocks.tenant_of(HASHES[0]), arena.blocks.keep_of(HASHES[0])) == ("a-tenant", Keep(60.0))
    one._path(HASHES[0]).unlink()
    arena.drop(HASHES[0])
    assert stack.read(HASHES[0], memoryview(bytearray(BLOCK_BYTES))) is None
    arena.close()


@pytest.mark.parametrize(
    ("gone_for_s", "runs", "left"), [(FORGOTTEN_S + 60, False, 0), (60, False, 1), (FORGOTTEN_S + 60, True, 1)]
)
def test_what_a_node_left_long_ago_is_deleted_and_no_other(
    make: Make, gone_for_s: float, runs: bool, left: int
) -> None:
    one, other = make("store-0"), make("store-1")
    put(one, 0)
    if not runs:
        one.close()
    lock = one.folder / "lock"
    at = lock.stat().st_mtime - gone_for_s
    os.utime(lock, (at, at))
    other.look()
    assert len(list(one.folder.glob("??/*.kv"))) == left
    assert other.holds(HASHES[0]) == bool(left)
    if not runs:
        again = make("store-0")
        assert len(again.blocks) == left
        put(again, 1)
        assert read(again, 1) == block(1)


def test_what_may_not_be_deleted_hides_no_other_nodes_blocks(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    old, other, one = make("store-0"), make("store-1"), make("store-2")
    put(old, 0)
    old.close()
    at = (old.folder / "lock").stat().st_mtime - FORGOTTEN_S - 60
    os.utime(old.folder / "lock", (at, at))

    def refuse(_: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(shared_disk, "_clear", refuse)
    put(other, 1)
    one.look()
    assert (one.holds(HASHES[0]), one.holds(HASHES[1])) == (True, True)


def test_a_file_system_whose_locks_need_an_open_writer_is_locked_too(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS answers, where flock is a lock of a range of bytes."""
    flock = fcntl.flock

    def as_nfs(file: object, how: int) -> None:
        if how & fcntl.LOCK_EX and not file.writable():  # type: ignore[attr-defined]
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", as_nfs)
    put(make("store-0"), 0)
    with pytest.raises(ConfigError, match="another process"):
        make("store-0")


def test_a_file_that_another_host_deleted_is_gone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = make("store-0"), make("store-1")
    put(one, 0)
    other.look()
    path_open = Path.open

    def stale(path: Path, *how: object, **more: object) -> object:
        if path.suffix == ".kv":
            raise OSError(errno.ESTALE, "Stale file handle")
        return path_open(path, *how, **more)  # type: ignore[arg-type, call-overload]

    monkeypatch.setattr(Path, "open", stale)
    assert read(other, 0) is None
    assert not other.holds(HASHES[0])


def test_a_folder_that_cannot_be_listed_is_no_miss(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = make("store-0"), make("store-1")
    put(one, 0)
    other.look()

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(other._neighbours, "look", fail)
    stack = TierStack([other])
    stack.look(other)
    assert isinstance(stack.failed[other.tier], StoreUnavailable)
    assert other.holds(HASHES[0])
    monkeypatch.undo()
    stack.look(other)
    assert not stack.failed


WRITER = """
import os, signal, sys
from pathlib import Path
from services.kvstore.tiers import disk
from services.kvstore.tiers.shared_disk import SharedDiskTier
from tests.unit.kvstore.tiers.blocks import BLOCK_BYTES, block, put, read
folder, name, dies_at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
tier = SharedDiskTier(folder, name, 2 * (BLOCK_BYTES + disk.HEADER_BYTES), BLOCK_BYTES)
tier.start()
written, write_all = 0, disk.write_all
def half(file, data):
    global written
    written += 1
    if written == dies_at:
        file.write(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    write_all(file, data)
disk.write_all = half
for turn in range(300):
    number = (turn * 7 + len(name)) % 12
    put(tier, number)
    for asked in range(12):
        assert read(tier, asked) in (None, block(asked))
    assert tier.counters.num_bad == 0
    assert tier.blocks.used_bytes <= tier.blocks.budget_bytes
    tier.look()
    tier.drain_events()
tier.close()
"""


def test_nodes_that_store_read_evict_and_are_killed_at_once_damage_nothing(tmp_path: Path, make: Make) -> None:
    """Four processes over one folder, which has room for fewer blocks than they store; two are killed in
    mid-write, of a header and of a block."""
    names = {"store-0": 0, "store-11": 0, "store-222": 5, "store-3333": 6}
    writers = {
        name: subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), name, str(dies_at)], cwd=ROOT)
        for name, dies_at in names.items()
    }
    ended = {name: writer.wait(timeout=240) for name, writer in writers.items()}
    assert ended == {name: -signal.SIGKILL if dies_at else 0 for name, dies_at in names.items()}
    left = {name: list((tmp_path / name).glob("??/*.tmp")) for name in names}
    assert {name for name, files in left.items() if files} == {"store-222", "store-3333"}
    tiers = [make(name) for name in names]
    for tier in tiers:
        tier.look()
        assert tier.counters.num_bad == 0
        assert tier.blocks.used_bytes <= 2 * FILE_BYTES
        assert not list(tier.folder.glob("??/*.tmp"))
    held = {number for number in range(12) if tiers[0].holds(HASHES[number])}
    assert held
    for tier in tiers:
        assert {number for number in range(12) if read(tier, number) == block(number)} == held
