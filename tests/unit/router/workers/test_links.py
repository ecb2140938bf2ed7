"""The router's links to its workers: which there are, whether they live, and what they can do."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.router.placement.filters import has_adapter_room
from services.router.placement.views import Pool, Tier
from services.router.workers.discovery import DiscoveredWorker, StaticDiscovery
from services.router.workers.fleet import Fleet
from services.router.workers.kubernetes_discovery import worker_of
from services.router.workers.link import WorkerLink
from services.router.workers.liveness import BEATS_TO_SUSPECT, FIRST_STEP_S, Liveness, LivenessLimits
from services.router.workers.sessions import Greeting
from shared.errors import ConfigError, ModelMismatch
from shared.identity import DECODE, PREFILL, WorkerRole
from shared.kv.layout import BlockLayout, KVFormat
from shared.model.text.texts_digest import texts_digest
from shared.rpc.convert import layout_to_proto, step_times_to_proto
from shared.rpc.pb.tandem.v1 import types_pb2, worker_pb2
from shared.sizing.step_time import StepTimes
from tests.demo import DEMO

BEAT = worker_pb2.Event(heartbeat=types_pb2.Heartbeat())


def welcome(digest: str) -> types_pb2.Welcome:
    layout = layout_to_proto(BlockLayout(2, 16, KVFormat("float32", 2, 8)))
    return types_pb2.Welcome(model_name="m", model_fingerprint="f", layout=layout, texts_digest=digest)


@pytest.mark.parametrize(("router", "worker"), [("a", "a"), ("a", ""), ("", "b"), ("", "")])
def test_a_worker_of_the_same_texts_or_of_unknown_ones_is_taken(router: str, worker: str) -> None:
    fleet = Fleet("r", StaticDiscovery.of({}, {}), lambda: None, texts_digest=router)
    fleet._check("w", welcome(worker))
    assert fleet.model_fingerprint == "f"


def test_a_worker_of_another_models_texts_is_refused() -> None:
    fleet = Fleet("r", StaticDiscovery.of({}, {}), lambda: None, texts_digest="a")
    with pytest.raises(ModelMismatch, match=r"serves m, whose config.json and tokenizer.json are not those"):
        fleet._check("w", welcome("b"))
    assert fleet.layout is None


def test_a_digest_depends_on_configuration_and_vocabulary_alone(tmp_path: Path) -> None:
    same = Path(shutil.copytree(DEMO, tmp_path / "same"))
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=4))
    (same / "model.safetensors").unlink()
    assert texts_digest(same) == texts_digest(DEMO) != ""
    (same / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert texts_digest(same) != texts_digest(DEMO)
    (same / "tokenizer.json").unlink()
    assert texts_digest(same) == ""


def link_in(pool: Pool) -> WorkerLink:
    """A link whose loop does not run."""
    worker = DiscoveredWorker("d0", DECODE, "h:1")
    return WorkerLink(worker, Greeting("router-0"), lambda _: None, lambda: None, {WorkerRole.DECODE: pool})


def test_a_session_begins_with_the_target_that_the_router_promises():
    hellos = [Greeting("r", tpot_target_s=0.05).hello(1), Greeting("r").hello(1)]
    commands = [worker_pb2.Commands.FromString(hello).commands[0] for hello in hellos]
    assert [command.hello.tpot_target_s for command in commands] == [0.05, 0.0]


def test_placement_knows_where_an_adapter_is_or_comes_into_a_slot_just_now():
    pool = Pool()
    link = link_in(pool)
    link._connected(types_pb2.Welcome(num_blocks=4))
    view = pool.get("d0")
    assert view is not None
    for place in ("loading", "resident"):
        listed = types_pb2.AdapterList(adapters=[types_pb2.Adapter(name="a", digest="A", **{place: True})])
        link._on_event(worker_pb2.Event(load=types_pb2.Load(adapters=listed, adapter_room=0)))
        assert has_adapter_room(view, "A")
        assert (view.adapters["A"] is Tier.READY) == (place == "resident")
        assert ("A" in view.loading_adapters) == (place == "loading")
        assert not has_adapter_room(view, "B")


def test_a_router_that_has_just_started_knows_whose_step_times_rest_on_enough():
    pool = Pool()
    quick = StepTimes(fixed_s=1e-3, read_s=4e-3, token_s=2e-5, sequence_s=1e-5, kv_s=1e-8, attention_s=1e-9)
    absurd = replace(quick, token_s=1e-3)
    for name, times, kinds in (("d0", quick, 8), ("d1", absurd, 2)):
        link = WorkerLink(
            DiscoveredWorker(name, DECODE, "h:1"),
            Greeting("r"),
            lambda _: None,
            lambda: None,
            {WorkerRole.DECODE: pool},
        )
        link._connected(types_pb2.Welcome(num_blocks=4))
        load = types_pb2.Load(num_decoding=2, num_context_tokens=200, num_batch_kinds=kinds, num_chunk_kinds=kinds)
        load.step_times.CopyFrom(step_times_to_proto(times))
        link._on_event(worker_pb2.Event(load=load))
    first, second = pool.get("d0"), pool.get("d1")
    assert first is not None
    assert second is not None
    assert second.times is not None
    assert first.times == quick
    assert second.times.token_s == pytest.approx(quick.token_s, rel=0.3)


def test_the_fleet_hears_of_weights_when_they_or_what_takes_requests_changes_alone():
    heard = []
    worker, pools = DiscoveredWorker("d0", DECODE, "h:1"), {WorkerRole.DECODE: Pool()}
    link = WorkerLink(
        worker,
        Greeting("router-0"),
        lambda _: None,
        lambda: None,
        pools,
        on_weights=lambda link: heard.append((link.model_fingerprint, link.load.draining)),
    )
    link._connected(types_pb2.Welcome(num_blocks=4, model_fingerprint="old"))
    for fingerprint, draining in (("", False), ("", True), ("new", True), ("new", True), ("new", False)):
        for num_free in (3, 4):
            load = types_pb2.Load(num_free_blocks=num_free, draining=draining, model_fingerprint=fingerprint)
            link._on_event(worker_pb2.Event(load=load))
    assert heard == [("old", False), ("old", True), ("new", True), ("new", False)]


def test_the_fleet_has_the_new_weights_once_the_last_worker_of_the_old_ones_takes_no_requests():
    fleet = Fleet("r", StaticDiscovery.of({}, {}), lambda: None)
    links = [
        WorkerLink(
            DiscoveredWorker(name, DECODE, "h:1"),
            Greeting("r"),
            lambda _: None,
            lambda: None,
            {WorkerRole.DECODE: fleet.decode_pool},
            on_weights=fleet._on_weights,
        )
        for name in ("updated", "joined")
    ]
    fleet.decodes.update((link.name, link) for link in links)
    for link in links:
        hello = welcome("")
        hello.model_fingerprint = "old"
        fleet._check(link.name, hello)
        link._connected(hello)
    updated, joined = links
    updated._on_event(worker_pb2.Event(load=types_pb2.Load(model_fingerprint="new")))
    assert fleet.model_fingerprint == "old"
    assert "serves model new" in updated.mismatch
    joined._on_event(worker_pb2.Event(load=types_pb2.Load(draining=True)))
    assert fleet.model_fingerprint == "new"
    assert [updated.mismatch, bool(joined.mismatch)] == ["", True]


def test_a_welcome_that_crosses_the_removal_brings_no_work():
    pool = Pool()
    kept, removed = link_in(pool), link_in(pool)
    removed.retire()
    removed._connected(types_pb2.Welcome(num_blocks=8))
    assert len(pool) == 0
    kept._connected(types_pb2.Welcome(num_blocks=4))
    view = pool.get("d0")
    assert view is not None
    removed._lost("gone")
    assert pool.get("d0") is view
    kept._lost("gone")
    assert len(pool) == 0


async def test_a_worker_was_heard_from_after_two_heartbeats_or_its_loss():
    link = link_in(Pool())
    await link.heard()  # not connected: nobody is waited for
    link._connected(types_pb2.Welcome(num_blocks=8))
    await link.heard()  # it sends none
    for end in (lambda: link._on_event(BEAT), lambda: link._lost("gone")):
        link._connected(types_pb2.Welcome(num_blocks=8, heartbeats=True))
        hearing = asyncio.create_task(link.heard())
        await asyncio.sleep(0)
        link._on_event(BEAT)
        for _ in range(3):
            await asyncio.sleep(0)
        assert not hearing.done()  # that one may have been on its way when the worker died
        end()
        await hearing


LIMITS = LivenessLimits(suspect_after_s=1.0, give_up_after_s=5.0)
WELL = types_pb2.Heartbeat(num_steps=3, has_work=True, since_turn_s=0.01, longest_step_s=0.1)


def after_ticks(count: int) -> Liveness:
    alive = Liveness(LIMITS)
    alive.heard(WELL)
    for _ in range(count):
        alive.tick(LIMITS.interval_s)
    return alive


def test_a_new_session_is_suspected_until_its_first_heartbeat():
    alive = Liveness(LIMITS)
    assert (alive.suspicion, alive.loss) == ("no heartbeat yet", "")
    alive.heard(WELL)
    assert alive.suspicion == ""


def test_silence_is_suspected_after_a_second_and_given_up_after_five():
    assert BEATS_TO_SUSPECT * LIMITS.interval_s == LIMITS.suspect_after_s
    assert after_ticks(4).suspicion == ""
    assert after_ticks(5).suspicion == "no heartbeat for 1.0 s"
    assert after_ticks(24).loss == ""
    assert after_ticks(25).loss == "no heartbeat for 5.0 s"


def test_one_heartbeat_ends_a_suspicion():
    alive = after_ticks(20)
    alive.heard(WELL)
    assert (alive.suspicion, alive.loss) == ("", "")


def test_a_router_that_was_stopped_listens_before_it_judges():
    """What the worker sent meanwhile is not read yet."""
    alive = after_ticks(24)
    alive.tick(30.0)
    assert alive.suspicion == "no heartbeat for 4.0 s"
    for _ in range(4):
        assert alive.loss == ""
        assert alive.has_slept(0.0)
        alive.tick(LIMITS.interval_s)
    assert alive.loss == ""
    alive.tick(LIMITS.interval_s)
    assert alive.loss == "no heartbeat for 5.0 s"
    assert not alive.has_slept(LIMITS.interval_s)


def test_a_late_timer_is_no_pause_and_a_timer_that_never_came_is_one():
    alive = after_ticks(24)
    alive.tick(1.2)
    assert alive.loss
    assert not alive.has_slept(1.2)
    assert alive.has_slept(1.3)


def test_an_engine_that_hangs_is_told_from_a_network_that_does():
    alive = after_ticks(0)
    alive.heard(types_pb2.Heartbeat(num_steps=3, has_work=True, since_turn_s=1.6, longest_step_s=0.1))
    assert "engine" in alive.suspicion
    assert alive.loss == ""
    alive.heard(types_pb2.Heartbeat(num_steps=3, has_work=True, since_turn_s=5.6, longest_step_s=0.1))
    assert "engine" in alive.loss


def test_long_steps_and_a_first_step_that_compiles_are_not_hung():
    alive = after_ticks(0)
    alive.heard(types_pb2.Heartbeat(num_steps=9, has_work=True, since_turn_s=11.0, longest_step_s=3.0))
    assert (alive.suspicion, alive.loss) == ("", "")
    alive.heard(types_pb2.Heartbeat(num_steps=0, has_work=True, since_turn_s=FIRST_STEP_S))
    assert alive.suspicion == ""


def test_an_idle_engine_is_never_hung():
    alive = after_ticks(0)
    alive.heard(types_pb2.Heartbeat(num_steps=3, has_work=False, since_turn_s=900.0))
    assert alive.suspicion == ""


def test_a_router_beats_several_times_before_its_workers_give_it_up():
    assert LIMITS.ticks_a_beat * LIMITS.interval_s == LIMITS.give_up_after_s / BEATS_TO_SUSPECT
    assert LivenessLimits(1.0, 1.0).ticks_a_beat == 1


def test_a_limit_to_give_up_below_the_limit_to_suspect_is_refused():
    with pytest.raises(ConfigError) as refused:
        LivenessLimits(suspect_after_s=2.0, give_up_after_s=1.0)
    assert refused.value.field == "give_up_after_s"


READY = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}]


def pod(role: str = "decode", ip: str = "10.0.0.1", conditions: Any = READY, **labels: str) -> dict[str, Any]:
    full = {f"tandem-llm.io/{name.replace('_', '-')}": value for name, value in labels.items() if name != "zone"}
    zone = {"topology.kubernetes.io/zone": labels["zone"]} if "zone" in labels else {}
    return {
        "metadata": {"name": "d0", "labels": {"tandem-llm.io/role": role, **zone, **full}},
        "spec": {
            "containers": [
                {"name": "proxy", "ports": [{"containerPort": 80}]},
                {"name": "logs"},
                {"name": "worker", "ports": [{"name": "metrics", "containerPort": 1}, SESSION]},
            ]
        },
        "status": {"podIP": ip, "conditions": conditions},
    }


SESSION = {"name": "session", "containerPort": 50061}


@pytest.mark.parametrize(
    ("role", "expected"),
    [("prefill", PREFILL), ("decode", DECODE), ("collocated", DECODE)],
)
def test_role_name_and_address(role, expected):
    assert worker_of(pod(role)) == DiscoveredWorker("d0", expected, "10.0.0.1:50061")
    assert worker_of(pod(role, ip="fd00::1")) == DiscoveredWorker("d0", expected, "[fd00::1]:50061")


@pytest.mark.parametrize(
    ("labels", "place"),
    [
        ({}, ()),
        ({"zone": "a"}, ("a",)),
        ({"zone": "a", "rack": "r", "nvlink_domain": "n"}, ("a", "r", "n")),
        ({"zone": "a", "nvlink_domain": "n"}, ("a", "", "n")),
        ({"rack": "r"}, ("", "r")),
    ],
)
def test_where_it_stands_keeps_the_order_of_its_parts(labels, place):
    worker = worker_of(pod(**labels))
    assert worker is not None
    assert worker.label == place


@pytest.mark.parametrize(
    "status", [{}, {"podIP": "10.0.0.1"}, {"conditions": READY}, {"podIP": "", "conditions": READY}]
)
def test_a_pod_without_address_or_readiness_is_no_worker(status):
    assert worker_of({**pod(), "status": status}) is None
    assert worker_of({**pod("nonsense"), "status": status}) is None


def test_a_pod_that_is_not_ready_or_is_ending_is_no_worker():
    assert worker_of(pod(conditions=[{"type": "Ready", "status": "False"}])) is None
    ending = pod()
    ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert worker_of(ending) is None


def test_a_ready_pod_that_says_something_wrong_is_refused_by_what_is_wrong():
    with pytest.raises(ConfigError, match=r"label tandem-llm\.io/role is 'router', not one of prefill, decode"):
        worker_of(pod("router"))
    with pytest.raises(ConfigError, match="in collocated mode the decode workers prefill"):
        worker_of(pod("prefill"), collocated=True)
    without = pod()
    without["spec"]["containers"].pop()
    with pytest.raises(ConfigError, match="no container has a port named 'session'"):
        worker_of(without)
