"""Of two decode workers one leaves the file that names them, is drained, or is killed: no answer loses a token."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import grpc
import jsonschema
import pytest
import pytest_asyncio
import yaml

from shared.errors import Unauthenticated
from shared.rpc.errors import from_rpc_error
from shared.rpc.pb.tandem.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2, types_pb2
from tests.e2e.running import PatientCommands, Running, running
from tests.e2e.stage import prompt
from tests.e2e.streams import Streams
from tests.e2e.structured_answers import NUM_ANSWERS, NUM_CALLS, NUM_TEXTS, WORDS, StructuredStream, whole
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = prompt(75)
LONG = {"max_tokens": 800, "ignore_eos": True}
SHORT = {"max_tokens": 8, "ignore_eos": True}
POOL = ("decode-0", "decode-1")


class WithFile(PatientCommands):
    """Gives the router a file in place of the flags."""

    def router(self, workers, kvstore, stores="", number=0):
        self._workers = workers
        self._path = self._spec.state_dir / "workers.yaml"
        self.name("prefill-0", *POOL)
        return [*super().router({}, kvstore, stores), "--workers-file", str(self._path)]

    def name(self, *names: str) -> None:
        """From now on these are the workers."""
        entries = [
            {"name": name, "role": str(role), "address": address}
            for role, pool in self._workers.items()
            for name, address in pool.items()
            if name in names
        ]
        beside = self._path.with_suffix(".new")
        beside.write_text(yaml.safe_dump({"workers": entries}))
        beside.replace(self._path)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """Every test leaves both decode workers running."""
    folder = tmp_path_factory.mktemp("cluster")
    shape = {"num_prefill": 1, "num_decode": 2, "num_kv_blocks": 1100, "restart": True}
    async with running(folder, kind=WithFile, **shape) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(cluster: Running) -> list[int]:
    """The long answer to PROMPT."""
    return await cluster.tokens(PROMPT, **LONG)


async def begun(cluster: Running, **sampling) -> tuple[Streams, str, str]:
    """The long answer to PROMPT once it has some tokens, the decode worker that writes it, and the other one."""
    await cluster.idle()
    streams = Streams(cluster, [PROMPT], **LONG, **sampling)
    await streams.begun(num_tokens=20)
    busy = await cluster.busy()
    (other,) = set(POOL) - {busy}
    return streams, busy, other


async def test_one_that_leaves_the_file_in_mid_answer_finishes_it_and_gets_no_more(cluster: Running, expected):
    streams, busy, other = await begun(cluster)
    cluster.commands.name("prefill-0", other)
    assert await streams.ended() == [expected]
    status = await cluster.until(lambda status: len(status.workers) == 2)
    assert ([w.worker.name for w in status.workers], list(status.degraded)) == (["prefill-0", other], [])
    assert await cluster.tokens(PROMPT, **SHORT) == expected[:8]
    cluster.commands.name("prefill-0")
    status = await cluster.until(lambda status: not status.ready)
    assert status.not_ready_reason == "no decode worker is known"
    cluster.commands.name("prefill-0", busy, other)
    await cluster.until(lambda status: status.ready and len(status.workers) == 3)
    assert await cluster.tokens(PROMPT, **SHORT) == expected[:8]


async def test_one_that_is_drained_finishes_takes_nothing_new_and_comes_back(cluster: Running, expected):
    streams, busy, other = await begun(cluster)
    code, out, err = await cluster.command("drain", busy)
    assert (code, err) == (0, "")
    assert out.startswith(f"{busy} drains")
    assert await streams.ended() == [expected]
    for _ in range(4):
        assert (await cluster.generate(PROMPT, max_tokens=2))[-1].decode_worker == other
    fleet = fleet_pb2_grpc.FleetServiceStub(cluster.channel)
    last = fleet_pb2.DrainWorkersRequest(workers=[other])
    await fleet.Drain(last, timeout=DEADLINE_S)
    lost = await cluster.until(lambda status: not status.ready)
    assert "no decode worker is ready" in lost.not_ready_reason
    assert (await cluster.command("undrain", busy)) == (0, f"{busy} takes requests again\n", "")
    assert (await cluster.generate(PROMPT, max_tokens=2))[-1].decode_worker == busy
    await fleet.Undrain(last, timeout=DEADLINE_S)
    code, _, err = await cluster.command("drain", "decode-7")
    assert code != 0
    assert "there is no worker 'decode-7'" in err


async def test_one_that_is_killed_in_mid_answer_costs_no_token(cluster: Running):
    sampling = {"temperature": 0.8, "seed": 5}
    undisturbed = await cluster.tokens(PROMPT, **LONG, **sampling)
    streams, busy, _ = await begun(cluster, **sampling)
    cluster.signal(busy)
    assert await streams.ended() == [undisturbed]
    assert (await cluster.http.get("/readyz")).status_code == 200
    assert await cluster.restarted(busy) == "SIGKILL"
    await cluster.until(lambda status: all(worker.connected for worker in status.workers))


async def test_structured_answers_outlive_the_one_that_writes_them(cluster: Running):
    undisturbed = await asyncio.gather(*(whole(cluster, number) for number in range(NUM_ANSWERS)))
    assert [end for _, end in undisturbed] == ["stop"] * NUM_TEXTS + ["tool_calls"] * NUM_CALLS
    for text, _ in undisturbed:
        jsonschema.validate(json.loads(text), WORDS)

    async with asyncio.timeout(DEADLINE_S):
        while True:
            streams = [StructuredStream(number) for number in range(NUM_ANSWERS)]
            tasks = [asyncio.create_task(stream.read(cluster)) for stream in streams]
            if victim := await writer_of_both(cluster, streams):
                break
            assert await asyncio.gather(*tasks) == undisturbed, "they ended before one worker wrote both kinds at once"
    cluster.signal(victim)
    async with asyncio.timeout(DEADLINE_S):
        assert await asyncio.gather(*tasks) == undisturbed
    await cluster.restarted(victim)
    await cluster.until(lambda status: all(worker.connected for worker in status.workers))


async def writer_of_both(cluster: Running, streams: list[StructuredStream]) -> str:
    """A decode worker that is in the middle of a text and of a call; empty once all streams have ended."""
    while any(stream.finish_reason is None for stream in streams):
        served = await by_decode_worker(cluster, streams)
        for name in POOL:
            cut = [n for n in served[name] if streams[n].finish_reason is None and len(streams[n].text) >= 40]
            if {number < NUM_TEXTS for number in cut} == {True, False}:
                return name
    return ""


async def by_decode_worker(cluster: Running, streams: list[StructuredStream]) -> dict[str, list[int]]:
    """The numbers of the streams that each decode worker writes now."""

    async def worker_of(stream: StructuredStream) -> str:
        request = inference_pb2.GetRequestRequest(request_id=stream.request_id)
        with contextlib.suppress(grpc.aio.AioRpcError):  # it has ended
            return (await cluster.stub.GetRequest(request, timeout=DEADLINE_S)).decode_worker
        return ""

    workers = await asyncio.gather(*map(worker_of, streams))
    return {name: [n for n, worker in enumerate(workers) if worker == name] for name in POOL}


async def test_every_kind_of_structure_is_followed(cluster: Running):
    """Over HTTP and gRPC, several choices at once, cut by max_tokens, with logprobs and stop strings."""
    both = await cluster.complete("Is it? ", guided_choice=["yes", "no"], n=2, temperature=1, max_tokens=9, logprobs=1)
    assert {choice["text"] for choice in both["choices"]} <= {"yes", "no"}
    assert [choice["finish_reason"] for choice in both["choices"]] == ["stop", "stop"]
    cut = await cluster.complete("Count: ", structured_outputs={"regex": "(12)+"}, max_tokens=5, min_tokens=5)
    assert (cut["choices"][0]["finish_reason"], set(cut["choices"][0]["text"])) == ("length", {"1", "2"})
    stopped = await cluster.complete("A", guided_grammar='root ::= "one;two"', stop=";", max_tokens=20)
    assert stopped["choices"][0]["text"] == "one"
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    chat = await cluster.http.post(
        "/v1/chat/completions",
        json={
            "messages": [{"role": "user", "content": "Well?"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema}},
            "max_tokens": 200,
        },
    )
    assert isinstance(json.loads(chat.json()["choices"][0]["message"]["content"])["ok"], bool)
    structure = types_pb2.StructuredOutput(choice={"values": ["left", "right"]})
    replies = await cluster.generate([20, 30, 40], structured_output=structure, max_tokens=9)
    assert "".join(reply.text for reply in replies) in ("left", "right")


async def test_a_structure_that_cannot_be_compiled_is_refused(cluster: Running):
    async def refused(**fields: object) -> dict:
        answer = await cluster.http.post("/v1/completions", json={"prompt": "a", **fields})
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]

    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "array", "uniqueItems": True}}}
    error = await refused(response_format=schema)
    assert error["param"] == "response_format.json_schema.schema"
    assert "uniqueItems" in error["message"]
    assert (await refused(guided_regex="(a"))["param"] == "guided_regex"
    assert (await refused(guided_regex="a" * 70_000))["param"] == "guided_regex"
    assert (await refused(guided_regex="a", guided_choice=["b"]))["param"] == "guided_choice"


@pytest.mark.slow
async def test_only_an_administrator_drains(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_ROUTER_EDGE__API_KEYS", json.dumps(["user"]))
    monkeypatch.setenv("TANDEM_ROUTER_EDGE__ADMIN_KEYS", json.dumps(["admin"]))
    async with running(tmp_path, api_key="admin") as run:
        stub = fleet_pb2_grpc.FleetServiceStub(run.channel)
        request = fleet_pb2.DrainWorkersRequest(workers=["decode-0"])
        for call in (stub.Drain, stub.Undrain):
            for key in (None, "user"):
                metadata = (("authorization", f"Bearer {key}"),) if key else ()
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(request, metadata=metadata, timeout=DEADLINE_S)
                assert isinstance(from_rpc_error(caught.value, "router"), Unauthenticated)
        admin = (("authorization", "Bearer admin"),)
        drained = await stub.Drain(request, metadata=admin, timeout=DEADLINE_S)
        assert [worker.load.draining for worker in drained.workers] == [True]
        assert (await run.status()).not_ready_reason == "no decode worker is ready (decode-0: draining)"
        undrained = await stub.Undrain(request, metadata=admin, timeout=DEADLINE_S)
        assert [worker.load.draining for worker in undrained.workers] == [False]
