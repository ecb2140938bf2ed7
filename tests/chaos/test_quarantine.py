"""A prompt that ends every worker that it meets ends two, not the pool."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from services.local.supervisor import Died, Restarted
from shared.errors import Quarantined
from shared.rpc.errors import from_rpc_error
from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2
from tests.e2e.running import Running, running
from tests.waiting import DEADLINE_S

POISON = 1999
PROMPT = [20 + (i * 37) % 1900 for i in range(300)]
FIELDS = {"max_tokens": 60, "ignore_eos": True}


async def refusal(cluster: Running, prompt: list[int]) -> Quarantined:
    request = inference_pb2.GenerateRequest(
        request_id="poison",
        tokens=inference_pb2.TokenIds(ids=prompt),
        sampling=types_pb2.SamplingParams(temperature=0.0, max_tokens=4),
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in cluster.stub.Generate(request, timeout=DEADLINE_S):
            pass
    error = from_rpc_error(caught.value, "router")
    assert isinstance(error, Quarantined), error
    return error


@pytest.mark.parametrize("role", [pytest.param("prefill", marks=pytest.mark.slow), "decode"])
async def test_a_prompt_that_ends_workers_meets_no_third(tmp_path, monkeypatch, role):
    monkeypatch.setenv("TANDEM_WORKER_FAILPOINTS", f"engine.token=exit:{POISON}")
    counts = {"num_prefill": 3 if role == "prefill" else 1, "num_decode": 3 if role == "decode" else 1}
    async with running(tmp_path, restart=True, **counts) as cluster:
        expected = await cluster.tokens(PROMPT, **FIELDS)
        pool = [f"{role}-{number}" for number in range(3)]
        await cluster.arm(*pool)
        asking = asyncio.create_task(cluster.tokens(PROMPT, **FIELDS))
        error = await refusal(cluster, [*PROMPT[:100], POISON])
        workers = str(error.details["workers"]).split(",")
        assert len(set(workers)) == 2
        assert set(workers) < set(pool)
        assert await asking == expected
        again = await refusal(cluster, [*PROMPT[:100], POISON])  # nobody is asked
        assert again.details["workers"] == error.details["workers"]
        changes = []
        async with asyncio.timeout(DEADLINE_S):
            while sum(isinstance(change, Restarted) for change in changes) < 2:
                changes.append(await cluster.cluster.next_change())
        assert sorted(change.name for change in changes if isinstance(change, Died)) == sorted(workers)
        await cluster.idle()
        assert await cluster.tokens(PROMPT, **FIELDS) == expected
