"""What tandem status, explain, top and chat show."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from shared.errors import Overloaded
from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2
from tandem_cli.explain import candidate_table, request_id_of, summary_line
from tandem_cli.top import Frame, Steps
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


def test_an_address_of_ipv6_is_shown_as_it_is(tandem: RunTandem, router: ScriptedRouter) -> None:
    router.status = some_status()
    router.status.workers[0].worker.name = router.status.workers[0].address = "[fd00::1]:50052"
    assert tandem("status").out.count("[fd00::1]:50052") == 2
    assert "[fd00::1]:50052" in tandem("top", "--once").out


def test_a_cache_in_another_dtype_is_named(tandem: RunTandem, router: ScriptedRouter) -> None:
    router.status = some_status()
    router.status.workers[0].kv_dtype = "float32"
    assert "KV float32" not in tandem("status").out
    router.status.workers[0].kv_dtype = "int8"
    assert "cpu:avx512 float32 KV int8" in tandem("status").out
    assert json.loads(tandem("status", "--json").out)["workers"][0]["kv_dtype"] == "int8"


def test_right_guesses_are_shown_by_method_where_something_guesses(tandem: RunTandem, router: ScriptedRouter) -> None:
    router.status = some_status()
    assert "guesses" not in tandem("status").out + tandem("top", "--once").out + drawn(router.status, width=132)
    guesses = router.status.workers[0].load.guesses
    guesses.add(method="ngram", num_tokens=200, num_accepted=50)
    guesses.add(method="draft", num_tokens=10, num_accepted=9)
    for shown in (tandem("status").out, drawn(router.status, width=132)):
        assert "right guesses" in shown
        assert "ngram 25 %, draft 90 %" in shown
    assert " 28 % " in drawn(router.status, width=92)


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


def test_ready_adapters_are_counted_where_any_worker_has_some(tandem: RunTandem, router: ScriptedRouter) -> None:
    router.status = some_status()
    assert "adapters" not in tandem("status").out
    router.status.workers[0].MergeFrom(inference_pb2.WorkerStatus(num_adapters=12, num_ready_adapters=3))
    assert "adapters" in tandem("status").out
    assert "3 of 12" in tandem("status").out


def decision(**more) -> inference_pb2.PlacementDecision:
    return inference_pb2.PlacementDecision(
        attempt=1,
        num_prompt_tokens=640,
        queue_ms=1.25,
        route="hand_off",
        decode_worker="d1",
        prefill_worker="p0",
        **more,
    )


def test_an_attempt_in_words():
    assert summary_line(decision()) == (
        "attempt 1: p0 -> d1, prefilled by the prefill pool; 640 prompt tokens, 1.2 ms in the queue"
    )
    assert summary_line(decision(predicted_ttft_ms=30.0)).endswith(", first token predicted in 30.0 ms")


def test_the_chosen_worker_is_marked_and_every_scorer_has_a_column():
    candidates = [
        inference_pb2.PlacementCandidate(
            worker=name,
            score=score,
            parts=[inference_pb2.ScorePart(scorer="queue", score=score)],
            num_hit_tokens=320,
        )
        for name, score in (("p0", 0.75), ("p1", 0.5))
    ]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(candidate_table("prefill", "p1", candidates))
    lines = console.export_text().splitlines()
    assert lines[0].split() == [
        "prefill",
        "worker",
        "score",
        "queue",
        "hit",
        "tokens",
        "queued",
        "free",
        "blocks",
        "requests",
    ]
    assert lines[1].split()[:3] == ["p0", "0.750", "0.750"]
    assert lines[2].split()[:4] == ["p1", "*", "0.500", "0.500"]


def cluster(**fields) -> inference_pb2.ClusterStatus:
    share = inference_pb2.CauseShare
    return inference_pb2.ClusterStatus(
        model_name="demo", router_name="router-0", mode="disaggregated", ready=True,
        flow=inference_pb2.RequestFlow(num_queued=3, num_prefilling=2, num_decoding=7),
        window=inference_pb2.GoodputWindow(
            window_s=60, num_requests=40, num_good=30, goodput=0.5, binding="kv_room", tpot_target_ms=50,
            ttft=inference_pb2.Percentiles(p50_ms=120, p95_ms=480),
            tpot=inference_pb2.Percentiles(p50_ms=12, p95_ms=80),
            causes=[share(cause="kv_room", num_lost=10, time_share=0.6), share(cause="decode_step", time_share=0.4)],
        ),
        workers=[
            inference_pb2.WorkerStatus(
                worker=types_pb2.WorkerId(name="decode-0"), role=types_pb2.WORKER_ROLE_DECODE, connected=True,
                load=types_pb2.Load(num_free_blocks=64, num_total_blocks=256, num_cached_blocks=32, num_running=7),
            ),
            inference_pb2.WorkerStatus(worker=types_pb2.WorkerId(name="decode-1"), role=types_pb2.WORKER_ROLE_DECODE),
        ],
        **fields,
    )  # fmt: skip


def drawn(status: inference_pb2.ClusterStatus, width: int = 120) -> str:
    screen = io.StringIO()
    Console(width=width, file=screen).print(Frame(status, Steps()))
    return screen.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_frame_fits_the_terminal_and_names_what_binds(width):
    text = drawn(cluster(), width)
    assert max(map(len, text.splitlines())) <= width
    assert "KV room: 10 of 40 lost" in text
    assert "192 of 256" in text
    assert "lost" in next(line for line in text.splitlines() if line.startswith("decode-1"))


def test_a_missed_target_is_told_without_colour_too():
    text = drawn(cluster())
    assert "p95 80 ✕ target 50 ms" in text


def test_nothing_lost_nothing_seen_and_no_router_are_told():
    calm = cluster()
    calm.window.binding = ""
    assert "nothing: no request was lost" in drawn(calm)
    assert "no request has ended" in drawn(inference_pb2.ClusterStatus(window=inference_pb2.GoodputWindow(window_s=60)))
    assert "not ready: gone" in drawn(inference_pb2.ClusterStatus(not_ready_reason="gone"))


def test_the_step_time_is_of_the_steps_since_the_last_look():
    steps = Steps()
    assert steps.mean_ms("d", types_pb2.Load(num_steps=10, busy_s=0.1)) == pytest.approx(10.0)
    assert steps.mean_ms("d", types_pb2.Load(num_steps=20, busy_s=0.4)) == pytest.approx(30.0)
    assert steps.mean_ms("d", types_pb2.Load(num_steps=20, busy_s=0.4)) == pytest.approx(30.0)
    assert steps.mean_ms("d", types_pb2.Load(num_steps=5, busy_s=0.1)) == pytest.approx(20.0)
    assert steps.mean_ms("other", types_pb2.Load()) == 0.0


def messages(router: ScriptedRouter, turn: int) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in router.requests[turn].chat.messages]


def test_a_turn_carries_all_before_it(tandem: RunTandem, router: ScriptedRouter) -> None:
    result = tandem("chat", "--system", "Be brief.", stdin="Hi\n\nMore\n/exit\nnever sent\n")
    assert result.status == 0
    assert result.out == "Hello, world\nHello, world\n"
    assert messages(router, 0) == [("system", "Be brief."), ("user", "Hi")]
    assert messages(router, 1) == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello, world"),
        ("user", "More"),
    ]
    assert len(router.requests) == 2


def test_reset_keeps_the_system_message_alone(tandem: RunTandem, router: ScriptedRouter) -> None:
    tandem("chat", "--system", "Be brief.", stdin="Hi\n/reset\nAgain\n")
    assert messages(router, 1) == [("system", "Be brief."), ("user", "Again")]


def test_a_turn_that_failed_is_reported_and_forgotten(tandem: RunTandem, router: ScriptedRouter) -> None:
    router.responses, router.error, router.status_fails = [], Overloaded("the queue is full"), False
    result = tandem("chat", stdin="Hi\nAgain\n")
    assert result.status == 0
    assert result.err == "tandem: the queue is full\ntandem: the queue is full\n"
    assert messages(router, 1) == [("user", "Again")]


def test_a_turn_that_cannot_be_sent_is_reported_and_forgotten(tandem: RunTandem, router: ScriptedRouter) -> None:
    result = tandem("chat", stdin="Hi\ncaf\udce9\nMore\n")
    assert (result.status, result.out) == (0, "Hello, world\nHello, world\n")
    assert result.err.startswith("tandem: content cannot be 'caf\\udce9'")
    assert messages(router, 1) == [("user", "Hi"), ("assistant", "Hello, world"), ("user", "More")]


@pytest.mark.parametrize("arguments", [("explain", "\udcff"), ("drain", "\udcff"), ("cache", "unpin", "\udcff")])
def test_a_name_that_is_not_utf8_is_one_line(tandem: RunTandem, arguments: tuple[str, ...]) -> None:
    result = tandem(*arguments)
    assert (result.status, result.err.count("\n")) == (2, 1)
    assert result.err.startswith("tandem: '\\udcff': 'utf-8' codec can't encode")


def test_an_unknown_command_is_not_sent(tandem: RunTandem, router: ScriptedRouter) -> None:
    result = tandem("chat", stdin="/quit\n")
    assert "no such command: /quit" in result.err
    assert router.requests == []


def test_nothing_at_the_target_is_said_before_the_first_question(tandem: RunTandem, router: ScriptedRouter) -> None:
    router.close()
    result = tandem("chat", stdin="Hi\n")
    assert result.status == 1
    assert "start a cluster with `tandem serve`" in result.err


def test_a_request_is_explained_by_the_router_that_remembers_it(tandem: RunTandem, router: ScriptedRouter) -> None:
    other = ScriptedRouter(remembers=("r-1",))
    both = f"{router.target},{other.target}"
    assert {request_id_of(f"{kind}r-1") for kind in ("", "chatcmpl-", "cmpl-", "resp_", "msg_")} == {"r-1"}
    for answer_id in ("r-1", "chatcmpl-r-1"):
        assert json.loads(tandem("explain", answer_id, "-t", both, "--json").out)["request_id"] == "r-1"
    result = tandem("explain", "r-2", "-t", both)
    assert (result.status, result.err) == (2, "tandem: request r-2 is not remembered here\n")
    other.close()
    result = tandem("explain", "r-2", "-t", both)
    assert (result.status, f"nothing listens at {other.target}" in result.err) == (1, True)
