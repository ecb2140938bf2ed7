"""The disk tier's own: restarts, crashes in mid-write, damage of every byte, disks that are full or read-only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from services.kvstore.tiers.checksum import block_checksum
from services.kvstore.tiers.disk import HEADER_BYTES, DiskTier
from shared.errors import ConfigError, StoreUnavailable
from tests.examples import examples
from tests.unit.kvstore.tiers.blocks import BLOCK_BYTES, HASHES, block, put, read

ROOT = Path(__file__).parents[4]
FILE_BYTES = BLOCK_BYTES + HEADER_BYTES


def started(folder: Path, num_blocks: int = 8) -> DiskTier:
    tier = DiskTier(folder, num_blocks * FILE_BYTES, BLOCK_BYTES)
    tier.start()
    return tier


def test_a_restart_keeps_blocks_and_their_order_and_tells_the_index(tmp_path: Path) -> None:
    tier = started(tmp_path)
    for number in range(4):
        put(tier, number)
        os.utime(tier._path(HASHES[number]), ns=(number, number))
    read(tier, 0)
    tier.close()
    (tmp_path / HASHES[5].hex()[:2]).mkdir(exist_ok=True)
    unfinished = tier._path(HASHES[5]).with_suffix(".tmp")
    unfinished.write_bytes(b"half")
    (unfinished.parent / "README").write_text("not ours")
    tier = started(tmp_path, num_blocks=3)
    assert tier.drain_events().sealed == [HASHES[2], HASHES[3], HASHES[0]]
    assert not unfinished.exists()
    assert (unfinished.parent / "README").exists()
    assert [read(tier, number) for number in (0, 1, 2, 3)] == [block(0), None, block(2), block(3)]
    tier.close()


@given(bit=st.integers(0, 8 * FILE_BYTES - 1))
@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_bit_anywhere_in_a_file_is_found(tmp_path: Path, bit: int) -> None:
    tier = started(tmp_path)
    try:
        put(tier, 0)
        path = tier._path(HASHES[0])
        data = bytearray(path.read_bytes())
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        assert read(tier, 0) is None
        assert (tier.counters.num_bad, tier.blocks.used_bytes, path.exists()) == (1, 0, False)
        put(tier, 0)
        assert read(tier, 0) == block(0)
    finally:
        tier.close()


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES, HEADER_BYTES + 8, FILE_BYTES - 1, FILE_BYTES + 1])
def test_a_file_of_another_length_is_found(tmp_path: Path, size: int) -> None:
    """What a power cut may leave of a file that was never synced."""
    tier = started(tmp_path)
    put(tier, 0)
    tier.close()
    path = tier._path(HASHES[0])
    path.write_bytes((path.read_bytes() + b"x")[:size])
    tier = started(tmp_path)
    assert read(tier, 0) is None
    assert (tier.counters.num_bad, tier.blocks.used_bytes) == (1, 0)
    tier.close()


def test_another_blocks_file_is_not_taken_for_this_one(tmp_path: Path) -> None:
    tier = started(tmp_path)
    put(tier, 0)
    put(tier, 1)
    tier._path(HASHES[0]).write_bytes(tier._path(HASHES[1]).read_bytes())
    assert (read(tier, 0), read(tier, 1)) == (None, block(1))
    tier.close()


def test_a_process_killed_in_mid_write_leaves_only_whole_blocks(tmp_path: Path) -> None:
    """The writer stops half-way through its third block, after the header and some of the bytes, and is killed."""
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from services.kvstore.tiers import disk\n"
        "from tests.unit.kvstore.tiers.blocks import put\n"
        "tier = disk.DiskTier(Path(sys.argv[1]), 1 << 20, 512)\n"
        "tier.start()\n"
        "put(tier, 0); put(tier, 1)\n"
        "def half(file, data):\n"
        "    file.write(data[: len(data) // 2])\n"
        "    if len(data) > 64: os.kill(os.getpid(), signal.SIGKILL)\n"
        "disk.write_all = half\n"
        "put(tier, 2)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=False)
    assert ended.returncode == -9
    assert len(list(tmp_path.glob("??/*.tmp"))) == 1
    tier = started(tmp_path)
    assert [read(tier, number) for number in range(3)] == [block(0), block(1), None]
    assert tier.counters.num_bad == 0
    assert list(tmp_path.glob("??/*.tmp")) == []
    tier.close()


def test_a_disk_that_is_full_is_told_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = started(tmp_path)
    put(tier, 0)

    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("services.kvstore.tiers.disk.write_all", full)
    with pytest.raises(StoreUnavailable, match="No space left"):
        put(tier, 1)
    monkeypatch.undo()
    assert list(tmp_path.glob("??/*.tmp")) == []
    assert (read(tier, 0), read(tier, 1), tier.blocks.used_bytes) == (block(0), None, FILE_BYTES)
    put(tier, 1)
    assert read(tier, 1) == block(1)
    tier.close()


def test_a_disk_that_cannot_be_read_is_no_miss(tmp_path: Path) -> None:
    tier = started(tmp_path)
    put(tier, 0)
    path = tier._path(HASHES[0])
    path.unlink()
    path.mkdir()
    with pytest.raises(StoreUnavailable, match="directory"):
        read(tier, 0)
    assert tier.counters.num_misses == 0
    tier.close()


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    tier = started(tmp_path)
    with pytest.raises(ConfigError, match="another process") as caught:
        started(tmp_path)
    assert caught.value.field == "disk_folder"
    tier.close()
    started(tmp_path).close()


def test_a_folder_that_cannot_be_made_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:
        started(tmp_path / "file")
    assert caught.value.field == "disk_folder"


def test_a_tier_that_was_not_started_says_so(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, FILE_BYTES, BLOCK_BYTES)
    data = memoryview(block(0))
    with pytest.raises(StoreUnavailable, match="not started"):
        tier.put(HASHES[0], data, block_checksum(data))


@pytest.mark.parametrize("name", ["ab12.kv", f"{HASHES[0].hex()}ab.kv", f"{HASHES[0].hex()}.txt", "no hash.kv"])
def test_a_file_that_is_no_block_by_its_name_is_left_alone(tmp_path: Path, name: str) -> None:
    started(tmp_path).close()
    (tmp_path / "ab").mkdir()
    other = tmp_path / "ab" / name
    other.write_bytes(b"somebody else's")
    tier = started(tmp_path)
    assert (tier.counters.num_bad, other.read_bytes()) == (0, b"somebody else's")
    tier.close()
