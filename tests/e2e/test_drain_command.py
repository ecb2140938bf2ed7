"""`tandem drain` and `tandem undrain` on a real cluster: what runs goes on, and only an administrator may."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import grpc
import grpc.aio
import pytest

from services.local.cluster import LocalCluster
from services.local.spec import ClusterSpec
from shared.errors import Unauthenticated
from shared.rpc.errors import from_rpc_error
from shared.rpc.pb.tandem.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.e2e.running import DEADLINE_S, DEMO, Running, running

ROOT = Path(__file__).parents[2]
PROMPT = [20 + (i * 37) % 2000 for i in range(100)]


async def tandem(run: Running, *arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli.main", *arguments, "--target", run.cluster.grpc, cwd=ROOT,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    return process.returncode or 0, out.decode(), err.decode()


async def test_a_drained_worker_finishes_takes_nothing_new_and_comes_back(tmp_path):
    async with running(tmp_path, num_decode=2) as run:
        expected = await run.tokens(PROMPT, max_tokens=1000, ignore_eos=True)
        await run.idle()
        asking = asyncio.create_task(run.tokens(PROMPT, max_tokens=1000, ignore_eos=True))
        status = await run.until(
            lambda status: any(w.num_requests for w in status.workers if w.worker.name.startswith("decode"))
        )
        (busy,) = [w.worker.name for w in status.workers if w.num_requests and w.worker.name.startswith("decode")]
        other = {"decode-0": "decode-1", "decode-1": "decode-0"}[busy]
        code, out, err = await tandem(run, "drain", busy)
        assert (code, err) == (0, "")
        assert out.startswith(f"{busy} drains")
        assert await asking == expected
        for _ in range(4):
            assert (await run.generate(PROMPT, max_tokens=2))[-1].decode_worker == other
        assert (await tandem(run, "drain", other))[0] == 0
        _, out, _ = await tandem(run, "status")
        assert "not ready: no decode worker is ready" in out
        assert (await tandem(run, "undrain", busy)) == (0, f"{busy} takes requests again\n", "")
        assert (await run.generate(PROMPT, max_tokens=2))[-1].decode_worker == busy
        code, _, err = await tandem(run, "drain", "decode-7")
        assert code != 0
        assert "there is no worker 'decode-7'" in err


@pytest.mark.slow
async def test_only_an_administrator_drains(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_ROUTER_EDGE__API_KEYS", json.dumps(["user"]))
    monkeypatch.setenv("TANDEM_ROUTER_EDGE__ADMIN_KEYS", json.dumps(["admin"]))
    spec = ClusterSpec(
        model=DEMO, http="127.0.0.1:0", grpc="127.0.0.1:0", state_dir=tmp_path, num_kv_blocks=256, dtype="fp32"
    )
    async with LocalCluster(spec) as cluster, grpc.aio.insecure_channel(cluster.grpc) as opened:
        stub = fleet_pb2_grpc.FleetServiceStub(opened)
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
        status = await inference_pb2_grpc.InferenceServiceStub(opened).GetStatus(
            inference_pb2.GetStatusRequest(), metadata=admin, timeout=DEADLINE_S
        )
        assert status.not_ready_reason == "no decode worker is ready (decode-0: draining)"
        undrained = await stub.Undrain(request, metadata=admin, timeout=DEADLINE_S)
        assert [worker.load.draining for worker in undrained.workers] == [False]
