"""A recorded cluster: the trace says what was asked and nothing of the text, and can be replayed and predicted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from loadtest.simulator.cli import main as simulate
from loadtest.workloads.trace_json import read_json_trace
from shared.rpc.pb.tandem.v1 import fleet_pb2, fleet_pb2_grpc
from tests.e2e.running import PatientCommands, Running, running, tandem
from tests.waiting import DEADLINE_S

SHARED = [20 + i * 37 % 2000 for i in range(48)]
PROMPTS = [[*SHARED, *([tail] * 16), 7, 8, 9] for tail in (101, 102, 101)]
"""67 tokens, five ids of 16: the first three blocks are the same in all, the fourth in two."""
ADMIN, TENANT = "k-admin", "k-tenant"


async def begun(run: Running, *arguments: str) -> asyncio.subprocess.Process:
    """`tandem record`, a process of its own: it gets Ctrl-C."""
    command = [sys.executable, "-m", "tandem_cli.main", "record", "--target", run.cluster.grpc, *arguments]
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)


@contextlib.asynccontextmanager
async def recording(run: Running, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A recording process, once its output says that it records."""
    process = await begun(run, *arguments)
    try:
        assert process.stderr is not None
        async with asyncio.timeout(DEADLINE_S):
            assert b"recording" in await process.stderr.readline()
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    async with asyncio.timeout(DEADLINE_S):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


def shared_blocks(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


async def test_what_was_asked_is_recorded_until_ctrl_c_and_replayed(tmp_path: Path, capsys) -> None:
    trace, again = tmp_path / "trace.jsonl", tmp_path / "again.jsonl"
    async with running(tmp_path) as run:
        for number in range(12):  # before the recording: steps to know the workers by
            await run.complete([30 + number] * (20 + 9 * number), max_tokens=6, ignore_eos=True)
        async with recording(run, "--out", str(trace), "--block-size", "16") as process:
            answers = [
                await run.complete(prompt, max_tokens=5 + i, ignore_eos=True) for i, prompt in enumerate(PROMPTS)
            ]
            process.send_signal(signal.SIGINT)
            status, out, err = await ended(process)
        assert status == 0, err
        assert "3 requests" in out
        lines = [json.loads(line) for line in trace.read_text().splitlines()]
        assert [(line["input_length"], line["output_length"]) for line in lines] == [(67, 5), (67, 6), (67, 7)]
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert [line["cached_length"] for line in lines] == cached
        ids = [tuple(line["hash_ids"]) for line in lines]
        assert [shared_blocks(ids[0], other) for other in ids[1:]] == [3, 5]
        assert {name for line in lines for name in line} <= {
            "timestamp", "input_length", "output_length", "hash_ids", "block_size", "outcome", "cached_length",
            "ttft_ms", "tpot_ms",
        }  # fmt: skip
        assert all(line["outcome"] == "finished" and line["ttft_ms"] > 0 and line["tpot_ms"] > 0 for line in lines)

        # In a real run, which is recorded too: other tokens, the same lengths, and the same prefixes under another key.
        async with recording(run, "--out", str(again), "--block-size", "16") as process:
            command = ["run", "--target", f"http://{run.cluster.http}", "--workload", f"trace:{trace}"]
            command += ["--out", str(tmp_path / "run"), "--vocab-size", "2000", "--warmup", "0", "--max-lag", "300s"]
            load = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "loadtest", *command, stdout=PIPE, stderr=PIPE
            )
            status, out, err = await ended(load)
            assert status == 0, err
            process.send_signal(signal.SIGINT)
            assert (await ended(process))[0] == 0
        replayed, first = list(read_json_trace(again)), list(read_json_trace(trace))
        assert [(one.num_prompt_tokens, one.num_output_tokens) for one in replayed] == [(67, 5), (67, 6), (67, 7)]
        assert [shared_blocks(replayed[0].hash_ids, one.hash_ids) for one in replayed[1:]] == [3, 5]
        assert not {*replayed[0].hash_ids} & {*first[0].hash_ids}

        # In the simulator, alone and by the step times of the cluster's own workers.
        simulate(["--trace", str(trace), "--policy", "static", "--prefill", "1", "--decode", "1"])
        assert "3 requests" in capsys.readouterr().out
        for measured in (str(tmp_path / "trace.cluster.json"), f"http://{run.cluster.http}"):
            fit = ("fit", "--trace", str(trace), "--measured", measured, "--ttft", "10s", "--tpot", "1s", "--json")
            status, out, err = await tandem(*fit)
            assert status == 0, err
            found = json.loads(out)
            assert found["present"] == "1P:1D"
            assert {one["split"] for one in found["predicted"]} == {"1P:1D", "2 collocated", "2 auto"}
            assert all(one["good_share"] == 1.0 for one in found["predicted"])
            assert found["measured"]["good_share"] == 1.0


async def test_only_an_administrator_records_and_bad_arguments_name_the_field(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TANDEM_ROUTER_EDGE__TENANTS", json.dumps({"t": {"api_keys": [TENANT]}}))
    monkeypatch.setenv("TANDEM_ROUTER_EDGE__ADMIN_KEYS", json.dumps([ADMIN]))
    key = bytes(32)
    async with running(tmp_path, kind=PatientCommands, api_key=TENANT) as run:
        stub = fleet_pb2_grpc.FleetServiceStub(run.channel)

        async def refusal(api_key: str, **fields: object) -> grpc.aio.AioRpcError:
            asked = fleet_pb2.RecordRequest(**{"key": key, "block_size": 512, **fields})
            metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
            while True:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    async for _ in stub.Record(iter([asked]), metadata=metadata, timeout=DEADLINE_S):
                        pass
                # A call that is refused before gRPC's client could send its message ends so there, without an answer.
                if refused.value.details() != "Internal error from Core":
                    return refused.value

        for api_key in ("", TENANT, "k-unknown"):
            assert (await refusal(api_key)).code() is grpc.StatusCode.UNAUTHENTICATED
        for fields, field in (
            ({"key": b"short"}, "key"),
            ({"block_size": 24}, "block_size"),
            ({"block_size": 1 << 20}, "block_size"),
        ):
            error = await refusal(ADMIN, **fields)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert field in (error.details() or "")
        assert (await refusal(ADMIN, model="other")).code() is grpc.StatusCode.NOT_FOUND
        status, _, err = await ended(
            await begun(run, "--out", str(tmp_path / "t.jsonl"), "--block-size", "8", "--api-key", ADMIN)
        )
        assert status == 2
        assert "block_size" in err
        assert "--block-size" in err
