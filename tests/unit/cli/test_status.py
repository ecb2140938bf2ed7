"""`tandem status` shows each worker and the cluster as a whole."""

from __future__ import annotations

import json

from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2
from tests.unit.cli.conftest import RunTandem
from tests.unit.cli.scripted_router import ScriptedRouter


def some_status() -> inference_pb2.ClusterStatus:
    """A worker that is up and one that is lost."""
    status = inference_pb2.ClusterStatus(
        model_name="demo",
        mode="disaggregated",
        ready=False,
        not_ready_reason="no decode worker is connected",
        queue_len=3,
        queue_limit=1024,
        num_running=2,
        num_finished=40,
        num_failed=1,
        num_prompt_tokens=1000,
        num_cached_tokens=250,
        store_available=True,
    )
    status.workers.add(
        worker=types_pb2.WorkerId(name="prefill-0", incarnation=7),
        role=types_pb2.WORKER_ROLE_PREFILL,
        address="127.0.0.1:4001",
        connected=True,
        load=types_pb2.Load(
            num_free_blocks=90,
            num_total_blocks=128,
            num_running=2,
            num_queued_tokens=640,
            num_prefix_hit_tokens=10,
            num_prompt_tokens=40,
            resident_bytes=441 << 20,
        ),
        kernels="cpu:avx512",
        dtype="float32",
        pool_bytes=64 << 20,
    )
    status.workers.add(
        worker=types_pb2.WorkerId(name="decode-0"), role=types_pb2.WORKER_ROLE_DECODE, address="127.0.0.1:4002"
    )
    return status


def test_the_table_has_a_row_for_each_worker(tandem: RunTandem, router: ScriptedRouter) -> None:
    router.status = some_status()
    result = tandem("status")
    assert result.status == 0
    lines = [line.split() for line in result.out.splitlines()]
    row = ["prefill-0", "prefill", "127.0.0.1:4001", "up", "2", "0", "640", "90/128", "25", "%"]
    assert [*row, "441", "MiB", "64.0", "MiB", "cpu:avx512", "float32"] in lines
    assert ["decode-0", "decode", "127.0.0.1:4002", "lost"] in lines
    assert "demo, disaggregated, not ready: no decode worker is connected" in result.out
    assert "queue 3 of 1024, running 2, finished 40, failed 1" in result.out
    assert "prefix hits 25 % of 1000 prompt tokens" in result.out
    assert "store" not in result.out


def test_memory_that_is_not_known_is_not_zero(tandem: RunTandem, router: ScriptedRouter) -> None:
    router.status = some_status()
    router.status.workers[0].load.ClearField("resident_bytes")
    assert "25 %         -  64.0 MiB" in tandem("status").out
    worker = json.loads(tandem("status", "--json").out)["workers"][0]
    assert "resident_bytes" not in worker["load"]
    assert (worker["pool_bytes"], worker["kernels"]) == (str(64 << 20), "cpu:avx512")


def test_a_store_that_is_gone_is_said(tandem: RunTandem, router: ScriptedRouter) -> None:
    router.status = some_status()
    router.status.store_available, router.status.num_store_errors = False, 4
    assert "the KV store does not answer (4 errors): local caches only" in tandem("status").out


def test_json_has_every_field(tandem: RunTandem, router: ScriptedRouter) -> None:
    router.status = some_status()
    status = json.loads(tandem("status", "--json").out)
    assert status["queue_len"] == 3
    assert status["num_store_errors"] == "0"
    assert status["workers"][0]["load"]["num_free_blocks"] == 90


def test_a_target_on_the_command_line_comes_before_the_environment(tandem: RunTandem) -> None:
    result = tandem("status", "--target", "127.0.0.1:1")
    assert (result.status, result.out) == (1, "")
    assert "nothing listens at 127.0.0.1:1:" in result.err


def test_several_models_have_a_line_each_and_workers_name_theirs(tandem: RunTandem, router: ScriptedRouter) -> None:
    router.status = some_status()
    router.status.ready = True
    router.status.models.add(name="llama", aliases=["gpt-4"], ready=True, mode="disaggregated", num_running=2)
    router.status.models.add(name="qwen", not_ready_reason="no decode worker is known", mode="collocated")
    for worker in router.status.workers:
        worker.model = "llama"
    lines = tandem("status").out.splitlines()
    assert lines[:3] == [
        "2 models, ready",
        "  llama (gpt-4), disaggregated, ready, queue 0, running 2",
        "  qwen, collocated, not ready: no decode worker is known, queue 0, running 0",
    ]
    assert [line.split()[-1] for line in lines[-3:]] == ["model", "llama", "llama"]


def test_a_workers_processes_and_their_sets_of_experts_are_shown(tandem: RunTandem, router: ScriptedRouter) -> None:
    router.status = some_status()
    router.status.workers[0].MergeFrom(inference_pb2.WorkerStatus(tp=4, pp=2, ep=2))
    assert "8 (tp 4, pp 2, ep 2)" in tandem("status").out
    router.status.workers[0].ep = 1
    assert "8 (tp 4, pp 2)" in tandem("status").out


def elastic() -> inference_pb2.ClusterStatus:
    """Two workers with both roles, of which one only prefills."""
    status = inference_pb2.ClusterStatus(model_name="demo", mode="auto", ready=True, store_available=True)
    for name, preference in (("w-0", types_pb2.WORKER_ROLE_DECODE), ("w-1", types_pb2.WORKER_ROLE_PREFILL)):
        status.workers.add(
            worker=types_pb2.WorkerId(name=name),
            role=types_pb2.WORKER_ROLE_DECODE,
            roles=[types_pb2.WORKER_ROLE_PREFILL, types_pb2.WORKER_ROLE_DECODE],
            preference=preference,
            connected=True,
        )
    status.split.MergeFrom(inference_pb2.RoleSplit(num_decoding=1, num_workers=2, headroom=1.5, num_flips=3))
    return status


def test_what_workers_of_both_roles_are_used_for_is_shown(tandem: RunTandem, router: ScriptedRouter) -> None:
    router.status = elastic()
    lines = tandem("status").out.splitlines()
    assert (
        "split: 1 of 2 workers decode, the others only prefill; headroom 1.50 times the demand, "
        "3 changes of a preference"
    ) in lines
    rows = [line.split() for line in lines]
    assert ["w-0", "prefill,decode", "decode"] in [row[:3] for row in rows]
    assert ["w-1", "prefill,decode", "prefill"] in [row[:3] for row in rows]
    router.status.split.ClearField("headroom")
    assert "split: all 2 workers prefill and decode: nothing is decided yet" in tandem("status").out
    router.status.split.MergeFrom(inference_pb2.RoleSplit(num_decoding=2, headroom=0.75))
    assert "split: all 2 workers prefill and decode; headroom 0.75 times the demand, 3" in tandem("status").out
