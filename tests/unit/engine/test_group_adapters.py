"""What a group's ranks tell each other of adapters: all have read the same, or it is refused and nothing is kept."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.collectives.rank_links import Ways
from shared.engine.group.rank_adapters import AdapterFollower, GroupAdapters, _read, _Request
from shared.engine.runner.device_link import DeviceLink
from shared.errors import ModelLoadError, RankLost, TransferFailed
from shared.kernels.lora.step import HostCopy, PackedAdapter
from shared.model.adapters.adapter import Adapter
from tests.unit.collectives.in_threads import joined, needs_library

pytestmark = needs_library

FOLDER = Path("/adapters/one")


class _Lora:
    nbytes = 10


@dataclass
class Reader:
    """In a decoder's place: what a rank finds in the folder."""

    digest: str = "same"
    failure: Exception | None = None
    folders: list[Path] = field(default_factory=list)

    def read_adapter(self, folder: Path, **_: object) -> Adapter:
        self.folders.append(folder)
        if self.failure is not None:
            raise self.failure
        return Adapter(self.digest, 4, ())

    def host_copy(self, _: Adapter, packed: PackedAdapter) -> HostCopy:
        return HostCopy(20, lambda: packed)

    def pack_adapter(self, _: Adapter) -> PackedAdapter:
        return PackedAdapter((_Lora(),))


@contextmanager
def group(*readers: Any) -> Iterator[tuple[GroupAdapters, list[AdapterFollower]]]:
    with joined(Ways(len(readers), 1, has_adapters=True)) as links:
        assert links[0].adapters is not None
        leader = GroupAdapters(links[0].adapters, readers[0])
        pairs = zip(links[1:], readers[1:], strict=True)
        followers = [AdapterFollower(link, reader, DeviceLink(torch.device("cpu"))) for link, reader in pairs]
        for follower in followers:
            follower.start()
        yield leader, followers
        leader.close()
        leader.close()
        for follower in followers:
            follower.join()


def test_every_rank_has_its_part_once_and_what_is_not_placed_is_dropped() -> None:
    with group(*(Reader() for _ in range(3))) as (leader, followers):
        first = leader.read(FOLDER, 8, 100)
        assert (first.digest, first.rank, first.num_bytes, first.packed.number) == ("same", 4, 30, 1)
        second = leader.read(FOLDER, 8, 100)
        for follower in followers:
            assert follower.take(1).nbytes == 10
            with pytest.raises(TransferFailed, match="adapter 1 is to be placed"):
                follower.take(1)
        del second
        gc.collect()
        third = leader.read(FOLDER, 8, 100)
        for follower in followers:
            with pytest.raises(TransferFailed):
                follower.take(2)
            follower.take(third.packed.number)
    with pytest.raises(RankLost, match="has ended"):
        leader.read(FOLDER, 8, 100)


def test_every_rank_lays_its_part_out_again_while_the_leaders_copy_is_kept() -> None:
    with group(*(Reader() for _ in range(3))) as (leader, followers):
        first = leader.read(FOLDER, 8, 100, keeps_copy=True)
        assert first.copy is not None
        assert first.copy.num_bytes == 60
        for follower in followers:
            follower.take(first.packed.number)
        again = first.copy.lay_out()
        assert again.number == first.packed.number + 1
        for follower in followers:
            assert follower.take(again.number).nbytes == 10
        assert [len(follower._copies) for follower in followers] == [1, 1]
        del first
        gc.collect()
        assert leader.read(FOLDER, 8, 100).copy is None
        assert [len(follower._copies) for follower in followers] == [0, 0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"failure": ModelLoadError("it is damaged")}, "rank 1 of this worker's group: it is damaged"),
        ({"failure": MemoryError("ж" * 400)}, "rank 1 of this worker's group: MemoryError: жж"),
        ({"digest": "another"}, "holds another adapter where rank 1"),
    ],
    ids=["damaged", "no memory", "another"],
)
def test_what_a_follower_cannot_read_is_refused_and_the_next_load_is_not(changed: dict[str, Any], message: str) -> None:
    ranks = [Reader(), Reader(**changed)]
    with group(*ranks) as (leader, followers):
        with pytest.raises(ModelLoadError, match=message):
            leader.read(FOLDER, 8, 100)
        ranks[1].failure, ranks[1].digest = None, "same"
        found = leader.read(FOLDER, 8, 100)
        followers[0].take(found.packed.number)
        with pytest.raises(TransferFailed):
            followers[0].take(1)


def test_what_the_leader_cannot_read_is_its_own_error() -> None:
    ranks = [Reader(failure=ModelLoadError("no such adapter", field="lora_path")), Reader()]
    with group(*ranks) as (leader, _):
        with pytest.raises(ModelLoadError, match=r"^no such adapter") as caught:
            leader.read(FOLDER, 8, 100)
        assert caught.value is ranks[0].failure
        ranks[0].failure = None
        assert leader.read(FOLDER, 8, 100).packed.number == 2


@pytest.mark.parametrize("which", ["folder", "file"])
def test_a_follower_opens_nothing_that_a_link_of_its_own_host_leads_to(tmp_path: Path, which: str) -> None:
    (tmp_path / "secret").mkdir()
    folder, names = tmp_path / "adapter", ("adapter_config.json", "adapter_model.safetensors")
    if which == "folder":
        folder.symlink_to(tmp_path / "secret")
    else:
        folder.mkdir()
        (folder / names[1]).symlink_to(tmp_path / "secret" / names[1])
    reader: Any = Reader()
    on_leader = tuple(str(folder / name) for name in names)
    own, answer, failure = _read(reader, _Request(1, str(folder), 8, 100, on_leader, ()), from_leader=True)
    assert (own, reader.folders) == (None, [])
    assert "a link on this host" in answer.error
    assert isinstance(failure, ModelLoadError)
