"""A worker's adapters: loads beside its steps, requests that wait for theirs, names that change their meaning."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.worker.adapters.adapter_pool import MAX_NAMELESS, AdapterPool
from services.worker.adapters.router_adapters import RouterAdapters
from services.worker.adapters.slots import SlotTable
from shared.errors import Draining, InvalidRequest, ModelLoadError, NotFound, Overloaded
from shared.kernels.lora.step import HostCopy, LoadedAdapter
from shared.rpc.pb.tandem.v1 import types_pb2
from tests.waiting import DEADLINE_S, until


class Rig:
    """A pool whose folders are what the test says; a read of a folder in `held` waits until it is taken out."""

    def __init__(self, num_slots: int, root: Path, host_bytes: int) -> None:
        self.contents: dict[str, str] = {}  # folder name -> digest
        self.sizes: dict[str, int] = {}  # by digest, of 100 bytes in all; 1 for others
        self.gates: dict[str, threading.Event] = {}
        self.reads: list[str] = []
        self.placed: dict[int, str | None] = {}
        self.copied: list[str] = []
        self.pool = AdapterPool(self.read, self.place, SlotTable(num_slots, 100), (root,), host_bytes=host_bytes)

    def read(self, folder: Path) -> LoadedAdapter:
        self.reads.append(folder.name)
        if (gate := self.gates.get(folder.name)) is not None:
            assert gate.wait(DEADLINE_S)
        digest = self.contents[folder.name]
        if digest == "broken":
            raise ModelLoadError(f"{folder.name} is damaged")
        packed: Any = SimpleNamespace(nbytes=self.sizes.get(digest, 1), digest=digest)
        return LoadedAdapter(digest, 4, packed, packed.nbytes, HostCopy(1, lambda: self.copy(packed)))

    def copy(self, packed: Any) -> Any:
        self.copied.append(packed.digest)
        return packed

    def place(self, slot: int, packed: Any) -> None:
        self.placed[slot] = None if packed is None else packed.digest

    async def add(self, name: str, digest: str) -> None:
        self.contents[name] = digest
        await self.pool.add(name, Path("/adapters") / name)


@asynccontextmanager
async def rig(num_slots: int = 2, root: Path = Path("/adapters"), host_bytes: int = 0) -> AsyncIterator[Rig]:
    made = Rig(num_slots, root, host_bytes)
    try:
        yield made
    finally:
        for gate in made.gates.values():
            gate.set()
        await made.pool.close()


async def test_a_resident_adapter_is_held_at_once_and_another_one_takes_its_slot_when_it_is_released() -> None:
    async with rig(num_slots=1) as r:
        await r.add("a", "A")
        await r.add("b", "B")
        assert r.placed == {1: "B"}, "nothing was used: the newest stays"
        lease = r.pool.hold("B")
        assert lease.slot == 1
        waiting = r.pool.hold("A")
        assert waiting.slot == 0
        task = asyncio.create_task(waiting.ready())
        await until(lambda: "A" in r.pool._loads)
        assert r.reads == ["a", "b"], "there is no room: nothing is read yet"
        lease.release()
        lease.release()
        async with asyncio.timeout(DEADLINE_S):
            assert await task == 1
        assert r.placed == {1: "A"}
        assert r.pool.resident == {"A"}
        assert waiting.waited_s > 0


async def test_a_request_that_leaves_while_it_waits_wakes_up_and_takes_nothing() -> None:
    async with rig(num_slots=1) as r:
        await r.add("a", "A")
        await r.add("b", "B")
        held = r.pool.hold("B")
        gone, stays = r.pool.hold("A"), r.pool.hold("A")
        task = asyncio.create_task(gone.ready())
        await asyncio.sleep(0)
        gone.release()
        async with asyncio.timeout(DEADLINE_S):
            assert await task == 0
        held.release()
        async with asyncio.timeout(DEADLINE_S):
            assert await stays.ready() == 1
        stays.release()
        assert r.pool._slots.num_pins("A") == 0


async def test_where_all_that_waited_have_left_no_load_begins_and_the_next_request_begins_one() -> None:
    async with rig(num_slots=1) as r:
        await r.add("a", "A")
        await r.add("b", "B")
        held, gone = r.pool.hold("B"), r.pool.hold("A")
        await asyncio.sleep(0)
        gone.release()
        await until(lambda: not r.pool._loads)
        again = r.pool.hold("A")
        held.release()
        async with asyncio.timeout(DEADLINE_S):
            assert await again.ready() == 1
        assert r.reads == ["a", "b", "a"]


async def test_the_event_loop_runs_while_a_folder_is_read_and_others_with_theirs_there_pass() -> None:
    async with rig(num_slots=2) as r:
        await r.add("a", "A")
        await r.add("b", "B")
        await r.add("c", "C")  # takes the place of a
        r.gates["a"] = threading.Event()
        waiting = r.pool.hold("A")
        await until(lambda: r.reads[-1] == "a")
        for _ in range(20):
            lease = r.pool.hold("C")
            assert lease.slot
            lease.release()
            await asyncio.sleep(0)
        assert waiting.slot == 0
        r.gates["a"].set()
        async with asyncio.timeout(DEADLINE_S):
            assert await waiting.ready()


async def test_a_load_that_fails_fails_those_that_wait_and_gives_its_slot_back() -> None:
    async with rig(num_slots=1) as r:
        await r.add("a", "A")
        await r.add("b", "B")
        for content, match in (("broken", "damaged"), ("other", "another adapter")):
            r.contents["a"] = content
            lease = r.pool.hold("A")
            with pytest.raises(ModelLoadError, match=match):
                async with asyncio.timeout(DEADLINE_S):
                    await lease.ready()
            lease.release()
        r.contents["a"] = "A"
        async with asyncio.timeout(DEADLINE_S):
            assert await r.pool.hold("A").ready() == 1
        with pytest.raises(Overloaded, match="not known"):
            r.pool.hold("C")


async def test_a_name_with_a_new_meaning_leaves_the_old_adapter_to_those_that_have_it() -> None:
    async with rig() as r:
        await r.add("a", "A")
        running = r.pool.hold("A")
        await r.add("a", "A2")
        assert r.pool.names == {"a": "A2"}
        late = r.pool.hold("A")  # was placed before the change
        assert late.slot == running.slot
        assert {(name, known.digest) for name, known in r.pool.known()} == {("a", "A2"), ("", "A")}
        running.release()
        late.release()


async def test_an_unloaded_adapter_leaves_its_slot_when_the_last_request_ends() -> None:
    async with rig() as r:
        await r.add("a", "A")
        running = r.pool.hold("A")
        r.pool.remove("a")
        assert r.placed == {1: "A"}
        with pytest.raises(NotFound):
            r.pool.remove("a")
        running.release()
        await until(lambda: r.placed == {1: None})
        late = r.pool.hold("A")  # began under the name, on a worker that was lost meanwhile
        async with asyncio.timeout(DEADLINE_S):
            assert await late.ready() == 1
        late.release()
        await until(lambda: r.placed == {1: None})


async def test_of_those_without_a_name_the_last_ones_are_known() -> None:
    async with rig() as r:
        for number in range(MAX_NAMELESS + 3):
            await r.add("a", f"A{number}")
        r.pool.remove("a")
        assert len(r.pool.known()) == MAX_NAMELESS
        with pytest.raises(Overloaded):
            r.pool.hold("A0")
        r.contents["a"] = "A3"
        lease = r.pool.hold("A3")
        async with asyncio.timeout(DEADLINE_S):
            await lease.ready()
        lease.release()


async def test_what_was_read_has_no_name_until_it_gets_one() -> None:
    async with rig() as r:
        r.contents |= {"x": "X", "y": "Y"}
        known = await r.pool.stage(Path("/adapters/x"))
        assert r.pool.known() == [("", known)]
        assert r.pool.name("n", "X") == known
        with pytest.raises(NotFound):
            r.pool.name("m", "X")
        await r.pool.stage(Path("/adapters/y"))
        r.pool.unstage("Y")
        assert [name for name, _ in r.pool.known()] == ["n"]


async def test_only_folders_in_the_roots_are_allowed_links_followed(tmp_path: Path) -> None:
    root = tmp_path / "allowed"
    (root / "a").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (root / "link").symlink_to(tmp_path / "secret")
    async with rig(root=root) as r:
        assert r.pool.allowed(str(root / "a")) == root / "a"
        outside = [tmp_path / "secret", root / ".." / "secret", root / "link", "a", "", "\0", "/", f"{root}x"]
        for folder in outside:
            with pytest.raises(InvalidRequest, match="lora_path"):
                r.pool.allowed(str(folder))
    assert r.reads == []


async def test_a_pool_that_rests_has_nothing_in_slots_and_reads_again_once_it_wakes() -> None:
    async with rig() as r:
        await r.add("a", "A")
        r.gates["b"] = threading.Event()
        r.contents["b"] = "B"
        reading = asyncio.create_task(r.pool.add("b", Path("/adapters/b")))
        await until(lambda: r.reads[-1:] == ["b"])
        resting = asyncio.create_task(r.pool.rest())
        await asyncio.sleep(0)
        r.gates.pop("b").set()
        await resting
        with pytest.raises(Draining, match="no weights"):
            await reading
        assert (r.pool.resident, set(r.placed.values())) == (frozenset(), {None})
        with pytest.raises(Draining, match="no weights"):
            await r.pool.add("b", Path("/adapters/b"))
        with pytest.raises(Draining, match="no weights"):
            await r.pool.hold("A").ready()
        r.pool.wake()
        lease = r.pool.hold("A")
        assert r.placed[await lease.ready()] == "A"
        lease.release()
        await r.pool.rest()
        assert r.pool.names == {"a": "A"}, "what is known stays so"


async def use(r: Rig, digest: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        lease = r.pool.hold(digest)
        assert r.placed[await lease.ready()] == digest
    lease.release()


async def test_what_has_lost_its_slot_comes_back_by_its_copy_while_another_folder_is_read() -> None:
    async with rig(num_slots=2, host_bytes=3) as r:
        await r.add("a", "A")
        await r.add("b", "B")
        await r.add("c", "C")  # takes the slot of A
        assert set(r.pool.on_host) == {"A", "B", "C"}
        await use(r, "A")
        assert (r.reads, r.copied) == (["a", "b", "c"], ["A"])
        assert (r.pool.num_loads, r.pool.num_copied) == (1, 1)
        assert r.pool.host_bytes == 3
        r.gates["d"], r.contents["d"] = threading.Event(), "D"
        reading = asyncio.create_task(r.pool.add("d", Path("/adapters/d")))
        await until(lambda: r.reads[-1] == "d")
        await use(r, "B")
        await use(r, "C")
        assert not reading.done(), "copies wait for no read"
        r.gates["d"].set()
        await reading


async def test_copies_keep_to_their_memory_and_those_that_are_used_most_stay() -> None:
    async with rig(num_slots=1, host_bytes=2) as r:
        await r.add("a", "A")
        await r.add("b", "B")
        for _ in range(3):
            await use(r, "A")
            await use(r, "B")
        await r.add("c", "C")  # was never used
        assert (set(r.pool.on_host), r.pool.host_bytes) == ({"A", "B"}, 2)
        num_reads = len(r.reads)
        await use(r, "A")
        await use(r, "C")
        await use(r, "B")
        assert r.reads[num_reads:] == ["c"]


async def test_no_copy_is_kept_of_what_was_unloaded_nor_while_there_are_no_weights() -> None:
    async with rig(num_slots=1, host_bytes=5) as r:
        await r.add("a", "A")
        await r.add("b", "B")
        r.pool.remove("a")
        assert set(r.pool.on_host) == {"B"}
        await r.pool.rest()
        assert not r.pool.on_host
        r.pool.wake()
        await use(r, "B")
        assert r.reads == ["a", "b", "b"]
        assert r.copied == []


async def test_room_is_what_no_request_holds() -> None:
    async with rig(num_slots=2) as r:
        await r.add("a", "A")
        assert r.pool.num_spare == 2
        held = r.pool.hold("A")
        assert r.pool.num_spare == 1
        await r.add("b", "B")
        also = r.pool.hold("B")
        assert r.pool.num_spare == 0
        for lease in (held, also):
            lease.release()
        assert r.pool.num_spare == 2


async def test_there_is_room_for_as_many_as_fit_that_are_as_large_as_the_largest() -> None:
    async with rig(num_slots=8) as r:
        r.sizes = {"A": 40, "B": 30}
        await r.add("a", "A")
        assert r.pool.num_spare == 2
        await r.add("b", "B")
        held = [r.pool.hold("B")]
        assert r.pool.num_spare == 1
        held.append(r.pool.hold("A"))
        assert r.pool.num_spare == 0
        for lease in held:
            lease.release()
        assert r.pool.num_spare == 2


async def test_there_is_no_room_while_a_load_waits_for_some() -> None:
    async with rig(num_slots=8) as r:
        r.sizes = {"A": 80, "B": 40}
        for digest in "ABC":
            await r.add(digest.lower(), digest)
        leases = [r.pool.hold("B"), r.pool.hold("A")]
        await until(lambda: not r.pool._freed.is_set() and r.pool._turn.locked())
        assert r.pool.num_spare == 0
        leases[0].release()
        async with asyncio.timeout(DEADLINE_S):
            await leases[1].ready()


async def test_routers_hear_that_an_adapter_comes_into_its_slot_and_not_that_one_waits_for_room() -> None:
    async with rig(num_slots=1) as r:
        adapters = RouterAdapters(r.pool, "w")

        def changed() -> None:
            adapters.are_due = True

        r.pool.on_change = changed
        for digest in "ABC":
            await r.add(digest.lower(), digest)

        def reported() -> dict[str, tuple[bool, bool]] | None:
            load = types_pb2.Load()
            adapters.report(load)
            seen = {item.digest: (item.loading, item.resident) for item in load.adapters.adapters}
            return seen if load.HasField("adapters") else None

        assert reported() == {"A": (False, False), "B": (False, False), "C": (False, True)}
        r.gates["a"] = threading.Event()
        leases = [r.pool.hold("A"), r.pool.hold("B")]
        await until(lambda: len(r.reads) == 4)
        assert reported() == {"A": (True, False), "B": (False, False), "C": (False, False)}
        r.gates["a"].set()
        async with asyncio.timeout(DEADLINE_S):
            await leases[0].ready()
        await until(lambda: adapters.are_due)
        assert reported() == {"A": (False, True), "B": (False, False), "C": (False, False)}


async def test_adapters_in_slots_are_counted_by_whether_a_request_uses_them() -> None:
    async with rig(num_slots=3) as r:
        for name in ("a", "b", "c"):
            await r.add(name, name.upper())
        assert r.pool.num_ready() == {"used": 0, "unused": 3}
        leases = [r.pool.hold("A"), r.pool.hold("A")]
        assert r.pool.num_ready() == {"used": 1, "unused": 2}
        for lease in leases:
            lease.release()
