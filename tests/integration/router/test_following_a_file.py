"""Workers come and go at run time, by a file, while requests of others run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import yaml

from services.router.dispatch.prefix_lookup import PrefixLookup
from services.router.workers.file_discovery import FileDiscovery
from shared.errors import WorkerLost
from shared.identity import WorkerRole
from shared.kv_index.holders import Holder, PrefixMatch, Tier
from shared.rpc.convert import layout_to_proto
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from tests.integration.router.router_under_test import (
    PROMPT,
    STOP,
    Router,
    decode_worker,
    prefill_worker,
    read,
    to_submit,
)


class FollowingRouter(Router):
    """Its workers are those of a file, which `name` replaces."""

    def __init__(self, folder, prefills, decodes, **config) -> None:
        super().__init__(prefills, decodes, **config)
        self._path = folder / "workers.yaml"

    def _discovery(self):
        self.name(*self._prefills, *self._decodes)
        return FileDiscovery(self._path, interval_s=0.01)

    def name(self, *workers, labels=None) -> None:
        """From now on these are the workers."""
        entries = [
            {
                "name": worker.name,
                "role": "prefill" if worker.role == types_pb2.WORKER_ROLE_PREFILL else "decode",
                "address": worker.address,
                "label": (labels or {}).get(worker.name, ""),
            }
            for worker in workers
        ]
        self.write(yaml.safe_dump({"workers": entries}))

    def write(self, text: str) -> None:
        beside = self._path.with_suffix(".new")
        beside.write_text(text)
        beside.replace(self._path)

    async def __aenter__(self):
        await super().__aenter__()
        await self.connected(*self.workers)
        return self

    async def connected(self, *names) -> None:
        """Waits until the fleet has sessions with these workers, and knows no others."""
        await self.until(
            lambda: (
                {link.name for link in self.fleet.links} == set(names)
                and all(link.connected for link in self.fleet.links)
            )
        )

    async def add(self, worker):
        """A worker that is up, and not in the file yet."""
        await worker.start()
        self.workers[f"{worker.name} at {worker.address}"] = worker
        return worker

    async def gone(self, worker) -> None:
        """Waits until a removed worker has no session of this router any more."""
        await self.until(lambda: not self.fleet.retiring and worker.context.done())


async def begin(prefill, decode, token=11) -> str:
    """A request's first token; its id on the workers."""
    submit = await to_submit(prefill, decode)
    await prefill.first_token(submit.request_id, token)
    return submit.request_id


async def test_a_worker_added_at_run_time_serves(tmp_path):
    prefill = prefill_worker()
    async with FollowingRouter(tmp_path, [prefill], [], collocated=False) as router:
        assert router.dispatcher.not_ready_reason() == "no decode worker is known"
        decode = await router.add(decode_worker())
        router.name(prefill, decode)
        await router.connected("p0", "d0")
        assert router.dispatcher.not_ready_reason() == ""
        running = router.submit()
        wire_id = await begin(prefill, decode)
        await decode.step(wire_id, 12, finish=STOP)
        assert await read(running) == [11, 12]


async def test_a_router_that_knows_no_worker_says_which_role_is_missing_and_why(tmp_path):
    async with FollowingRouter(tmp_path, [], [], collocated=False) as router:
        router.write("workers: [")
        await router.until(lambda: "YAML" in router.fleet.discovery_failure)
        reason = router.dispatcher.not_ready_reason()
        assert reason.startswith(f"no decode worker is known (workers file {tmp_path}/workers.yaml: is not valid YAML")
        decode = await router.add(decode_worker())
        router.name(decode)
        await router.connected("d0")
        assert router.dispatcher.not_ready_reason() == "no prefill worker is known"


async def test_a_removed_worker_finishes_its_stream_and_gets_nothing_new(tmp_path):
    prefill, old, new = prefill_worker(), decode_worker("d0"), decode_worker("d1")
    async with FollowingRouter(tmp_path, [prefill], [old]) as router:
        first = router.submit("first")
        wire_id = await begin(prefill, old)
        router.name(prefill, await router.add(new))
        await router.connected("p0", "d1")
        assert [link.name for link in router.fleet.retiring] == ["d0"]
        assert "d0" not in router.fleet.decode_pool
        second = router.submit("second")
        submit = await to_submit(prefill, new)
        await prefill.first_token(submit.request_id, 21)
        await old.step(wire_id, 12)
        await new.step(submit.request_id, 22, finish=STOP)
        assert await read(second) == [21, 22]
        assert not old.context.done()
        await old.step(wire_id, 13, finish=STOP)
        assert await read(first) == [11, 12, 13]
        await router.gone(old)
        assert old.commands.empty()
        assert not new.context.done()
        assert router.metrics.outcomes == ["finished", "finished"]


async def test_an_idle_worker_that_is_removed_is_left_at_once(tmp_path):
    prefill, decode, idle = prefill_worker(), decode_worker("d0"), decode_worker("d1")
    async with FollowingRouter(tmp_path, [prefill], [decode, idle]) as router:
        router.name(prefill, decode)
        await router.gone(idle)
        assert [link.name for link in router.fleet.links] == ["p0", "d0"]


async def test_a_removed_worker_hears_of_a_cancel_before_it_is_left(tmp_path):
    prefill, old, new = prefill_worker(), decode_worker("d0"), decode_worker("d1")
    async with FollowingRouter(tmp_path, [prefill], [old, new]) as router:
        running = router.submit()
        await router.until(lambda: running.num_attempts == 1)
        chosen, other = (
            (old, new) if not old.commands.empty() or router.fleet.decodes["d0"].num_requests else (new, old)
        )
        wire_id = await begin(prefill, chosen)
        router.name(prefill, other)
        await router.connected("p0", other.name)
        await running.aclose()
        cancel = await chosen.expect(types_pb2.Cancel)
        assert cancel.request_id == wire_id
        await router.gone(chosen)


async def test_a_removed_worker_that_dies_is_a_lost_worker_and_no_token_is_repeated(tmp_path):
    prefill, old, new = prefill_worker(), decode_worker("d0"), decode_worker("d1")
    async with FollowingRouter(tmp_path, [prefill], [old]) as router:
        running = router.submit()
        await begin(prefill, old)
        router.name(prefill, await router.add(new))
        await router.connected("p0", "d1")
        await old.stop()
        reserve = await new.expect(worker_pb2.Reserve)
        assert reserve.token_ids[-1] == 11
        await prefill.expect(types_pb2.Cancel)
        await new.reserved(reserve.request_id)
        submit = await prefill.expect(worker_pb2.Submit)
        await prefill.first_token(submit.request_id, 12, finish=STOP)
        assert await read(running) == [11, 12]
        assert router.metrics.outcomes == [f"retried {WorkerLost.code}", "finished"]
        await router.until(lambda: not router.fleet.retiring)


async def test_a_name_that_moves_to_another_address_is_another_worker(tmp_path):
    prefill, old, new = prefill_worker(), decode_worker("d0"), decode_worker("d0")
    async with FollowingRouter(tmp_path, [prefill], [old]) as router:
        first = router.submit("first")
        wire_id = await begin(prefill, old)
        router.name(prefill, await router.add(new))
        await router.until(
            lambda: router.fleet.decodes["d0"].address == new.address and "d0" in router.fleet.decode_pool
        )
        await old.report(num_free_blocks=1, num_total_blocks=100, routers=["a", "b"])
        await old.step(wire_id, 12, finish=STOP)
        assert await read(first) == [11, 12]
        await router.gone(old)
        assert router.fleet.decode_pool.get("d0").num_free_blocks == 100
        assert not router.fleet.shared
        second = router.submit("second")
        wire_id = await begin(prefill, new)
        await new.step(wire_id, 12, finish=STOP)
        assert await read(second) == [11, 12]


async def test_a_changed_label_reaches_placement_and_no_running_request(tmp_path):
    prefill, decode = prefill_worker(), decode_worker()
    async with FollowingRouter(tmp_path, [prefill], [decode]) as router:
        running = router.submit()
        wire_id = await begin(prefill, decode)
        first_session = decode.context
        router.name(prefill, decode, labels={"d0": "zone-a/rack-1"})
        await router.until(lambda: (view := router.fleet.decode_pool.get("d0")) and view.label == ("zone-a", "rack-1"))
        second_session, decode.context = decode.context, first_session
        await decode.step(wire_id, 12, finish=STOP)
        assert await read(running) == [11, 12]
        await router.gone(decode)
        assert not second_session.done()


async def test_a_bad_file_changes_nothing(tmp_path):
    prefill, decode = prefill_worker(), decode_worker()
    async with FollowingRouter(tmp_path, [prefill], [decode]) as router:
        first = router.submit("first")
        wire_id = await begin(prefill, decode)
        router.write("workers: [{name: d9}]")
        await router.until(lambda: router.fleet.discovery_failure)
        assert "workers.0.role: Field required" in router.fleet.discovery_failure
        assert router.dispatcher.not_ready_reason() == ""
        await decode.step(wire_id, 12, finish=STOP)
        assert await read(first) == [11, 12]
        second = router.submit("second")
        wire_id = await begin(prefill, decode)
        await decode.step(wire_id, 12, finish=STOP)
        assert await read(second) == [11, 12]
        router.name(prefill, decode)
        await router.until(lambda: not router.fleet.discovery_failure)
        assert not router.fleet.retiring


async def test_a_worker_that_never_answered_can_be_removed(tmp_path):
    prefill, decode, silent = prefill_worker(), decode_worker("d0"), decode_worker("d1")
    silent.address = "127.0.0.1:9"
    async with FollowingRouter(tmp_path, [prefill], [decode]) as router:
        router.name(prefill, decode, silent)
        await router.until(lambda: "d1" in router.fleet.decodes and router.fleet.decodes["d1"].mismatch)
        router.name(prefill, decode)
        await router.connected("p0", "d0")
        await router.until(lambda: not router.fleet.retiring)


async def test_a_worker_of_another_model_waits_until_removed_workers_have_finished(tmp_path):
    """Else a request that is placed anew would go on with another model's tokens."""
    old, new = decode_worker("d0"), decode_worker("d1", fingerprint="other")
    async with FollowingRouter(tmp_path, [], [old]) as router:
        running = router.submit()
        reserve = await old.expect(worker_pb2.Reserve)
        router.name(await router.add(new))
        await router.until(lambda: "d1" in router.fleet.decodes and router.fleet.decodes["d1"].mismatch)
        assert "serves model other" in router.fleet.decodes["d1"].mismatch
        await old.step(reserve.request_id, 11, finish=STOP)
        assert await read(running) == [11]
        await router.connected("d1")
        assert router.fleet.model_fingerprint == "other"


def keeping(worker, **layout):
    """The worker, whose KV it says is so."""

    def welcome(made=worker._welcome):
        said = made()
        said.layout.MergeFrom(types_pb2.BlockLayout(**layout))
        return said

    worker._welcome = welcome
    return worker


@pytest.mark.parametrize(("field", "value"), [("dtype", "int8"), ("dtype", "float8_e4m3fn"), ("block_size", 64)])
async def test_a_worker_whose_blocks_are_laid_out_otherwise_is_not_used_and_both_are_named(tmp_path, field, value):
    wide, narrow = decode_worker("d0"), keeping(decode_worker("d1"), **{field: value})
    async with FollowingRouter(tmp_path, [], [wide]) as router:
        ours = getattr(layout_to_proto(router.fleet.layout), field)
        router.name(wide, await router.add(narrow))
        await router.until(lambda: "d1" in router.fleet.decodes and router.fleet.decodes["d1"].mismatch)
        assert router.fleet.decodes["d1"].mismatch.endswith(f"differ: {field} {ours} here, {value} there")
        assert not router.fleet.decodes["d1"].connected


@pytest.mark.parametrize("prefill_first", [False, True])
async def test_workers_that_convert_prompts_take_each_other_and_no_others(tmp_path, prefill_first):
    """Prompts go to prefill workers alone, and wait for one."""
    prefill = keeping(prefill_worker(), dtype="bfloat16", sent_dtype="int8")
    decode = keeping(decode_worker(), dtype="int8", source_dtype="bfloat16")
    first, second = (prefill, decode) if prefill_first else (decode, prefill)
    of_roles = ([first], []) if prefill_first else ([], [first])
    async with FollowingRouter(tmp_path, *of_roles, collocated=False) as router:
        plain = [keeping(decode_worker("d1"), dtype="int8"), keeping(prefill_worker("p1"), dtype="bfloat16")]
        router.name(first, *[await router.add(worker) for worker in (*plain, second)])
        await router.until(lambda: len([link for link in router.fleet.links if link.connected]) == 2)
        assert {link.name for link in router.fleet.links if link.connected} == {"p0", "d0"}
        await router.until(lambda: all(link.mismatch for link in router.fleet.links if not link.connected))
        said = {link.name: link.mismatch for link in router.fleet.links if not link.connected}
        assert said["d1"].endswith("differ: dtype int8<bfloat16 here, int8 there")
        assert said["p1"].endswith("differ: dtype int8<bfloat16 here, bfloat16 there")
        roots = {router.fleet.hash_root("", 9, holder=role) for role in (WorkerRole.PREFILL, WorkerRole.DECODE)}
        assert len(roots) == 2
        running = router.submit()
        wire_id = await begin(prefill, decode)
        await decode.step(wire_id, 12, finish=STOP)
        assert await read(running) == [11, 12]
        router.name(decode)
        await router.gone(prefill)
        assert router.fleet.converts
        assert not router.fleet.lacks_prefill
        waiting = router.submit("second")
        await decode.report(num_free_blocks=100, num_total_blocks=100)
        router.name(prefill, decode)
        await router.connected("p0", "d0")
        wire_id = await begin(prefill, decode)
        await decode.step(wire_id, 12, finish=STOP)
        assert await read(waiting) == [11, 12]


async def test_a_collocated_router_takes_no_worker_whose_prompts_others_convert(tmp_path):
    decode = keeping(decode_worker(), dtype="int8", source_dtype="bfloat16")
    other = decode_worker("d9")
    async with FollowingRouter(tmp_path, [], [other]) as router:
        router.name(other, await router.add(decode))
        await router.until(lambda: "d0" in router.fleet.decodes and router.fleet.decodes["d0"].mismatch)
        assert "its KV is int8<bfloat16, prompts that prefill workers convert" in router.fleet.decodes["d0"].mismatch


async def test_a_worker_that_encrypts_blocks_in_another_way_is_not_used(tmp_path):
    plain, other = decode_worker("d0"), decode_worker("d1")

    def welcome(made=other._welcome):
        said = made()
        said.block_encryption = "aes-gcm"
        return said

    other._welcome = welcome
    async with FollowingRouter(tmp_path, [], [plain]) as router:
        router.name(plain, await router.add(other))
        await router.until(lambda: "d1" in router.fleet.decodes and "aes" in router.fleet.decodes["d1"].mismatch)
        assert router.fleet.decodes["d1"].mismatch == "block_encryption is aes-gcm here and none in the fleet"
        assert not router.fleet.decodes["d1"].connected


async def test_a_removed_worker_is_no_peer_and_no_hit(tmp_path):
    prefill, decode, other = prefill_worker(), decode_worker("d0"), decode_worker("d1")

    async def match(hashes, _traceparent="", *, scattered):
        holders = tuple(Holder(name, 1, WorkerRole.DECODE, Tier.DEVICE) for name in ("d0", "d1"))
        return PrefixMatch((holders,) * len(hashes))

    async with FollowingRouter(tmp_path, [prefill], [decode, other]) as router:
        lookup = PrefixLookup(SimpleNamespace(match=match), router.fleet)
        assert (await lookup.hits(list(PROMPT), "", len(PROMPT))).local == {"d0": 8, "d1": 8}
        router.name(prefill, other)
        await router.connected("p0", "d1")
        hits = await lookup.hits(list(PROMPT), "", len(PROMPT))
        assert hits.local == {"d1": 8}
        assert [peer.name for peer in hits.peers] == ["d1"]
