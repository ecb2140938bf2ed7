"""One prompt through the whole cluster: router → prefill → UCX → decode → client, index in a real Valkey."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import openai
import psutil
import pytest
import pytest_asyncio
import torch

from shared.kernels.backends.registry import choose_kernels
from tests.e2e.running import BLOCK_SIZE, DEMO, Running, block_bytes, loads, running
from tests.waiting import DEADLINE_S, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 64


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory):
    async with running(tmp_path_factory.mktemp("cluster")) as run:
        yield run


def prompt_of(length: int, salt: int) -> list[int]:
    """Token ids that no other test uses."""
    return [20 + (i * 37 + salt * 101) % 2000 for i in range(length)]


async def test_kv_bytes_cross_ucx_block_by_block_and_a_repeat_recomputes_only_its_last_partial_block(
    cluster: Running,
):
    before = loads(await cluster.idle())
    prompt = prompt_of(7 * BLOCK_SIZE + 5, salt=1)
    first = await cluster.generate(prompt, max_tokens=8, ignore_eos=True)
    sent = 8 * block_bytes(DEMO)
    after = loads(
        await cluster.until(  # each worker tells its part by itself
            lambda s: (
                loads(s)["decode-0"].kv_bytes_received == before["decode-0"].kv_bytes_received + sent
                and loads(s)["prefill-0"].kv_bytes_sent == before["prefill-0"].kv_bytes_sent + sent
            )
        )
    )
    assert first[-1].usage.num_cached_tokens == 0

    again = await cluster.generate(prompt, max_tokens=8, ignore_eos=True)
    last = again[-1]
    assert [t for m in again for t in m.token_ids] == [t for m in first for t in m.token_ids]
    assert last.usage.num_prompt_tokens == len(prompt)
    assert last.usage.num_cached_tokens == 7 * BLOCK_SIZE
    assert last.usage.num_output_tokens == 8
    repeated = loads(
        await cluster.until(lambda s: loads(s)["decode-0"].kv_bytes_received > after["decode-0"].kv_bytes_received)
    )
    # The decode worker holds the seven sealed blocks itself: only the partial one travels.
    assert repeated["decode-0"].kv_bytes_received - after["decode-0"].kv_bytes_received == block_bytes(DEMO)


async def test_the_final_message_splits_the_ttft(cluster: Running):
    last = (await cluster.generate(prompt_of(40, salt=2), max_tokens=4, ignore_eos=True))[-1]
    split = last.ttft
    assert (last.prefill_worker, last.decode_worker) == ("prefill-0", "decode-0")
    parts = (
        split.queue_ms + split.placement_ms + split.reserve_ms + split.prefix_fetch_ms
        + split.prefill_queue_ms + split.prefill_compute_ms + split.return_ms
    )  # fmt: skip
    assert split.prefill_compute_ms > 0
    assert split.first_decode_step_ms > 0
    assert split.ttft_ms == pytest.approx(parts, rel=0.05, abs=0.5)


async def test_the_index_knows_the_blocks(cluster: Running):
    from shared.kv.hashing import chain, root_hash
    from shared.kv.layout import LAYOUT_VERSION
    from shared.kv_index.client import KVStoreClient
    from shared.model.weights.loader import fingerprint

    prompt = prompt_of(3 * BLOCK_SIZE + 1, salt=3)
    await cluster.generate(prompt, max_tokens=1)
    root = root_hash(fingerprint(DEMO, "float32"), "float32", LAYOUT_VERSION, salt="default")
    hashes = chain(root, prompt, BLOCK_SIZE)
    log = (cluster.cluster.spec.log_dir / "kvstore.log").read_text()
    assert "rror" not in log
    client = KVStoreClient(cluster.kvstore_address, match_timeout_s=5.0)
    try:

        async def known() -> bool:
            match = await client.match(hashes)
            names = {holder.worker_name for holders in match.blocks for holder in holders}
            return match.num_blocks == 3 and names == {"prefill-0", "decode-0"}

        await until(known)
    finally:
        await client.close()


async def test_greedy_tokens_are_those_of_transformers_also_from_the_cache(cluster: Running):
    from transformers import AutoModelForCausalLM

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    prompt = (await cluster.complete("And God said, Let there be", max_tokens=1))["choices"][0]["prompt_token_ids"]
    prompt = prompt * 5
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    with torch.inference_mode():
        tokens = torch.tensor([prompt])
        output = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    expected = output[0, len(prompt) :].tolist()
    for _ in range(2):
        assert await cluster.tokens(prompt, max_tokens=NUM_TOKENS, ignore_eos=True) == expected


async def test_a_prompts_log_probabilities_are_those_of_transformers_also_where_its_prefix_is_cached(
    cluster: Running,
):
    from transformers import AutoModelForCausalLM

    prompt = prompt_of(300, salt=11)  # more than a step's share of such tokens
    await cluster.tokens(prompt, max_tokens=2)
    theirs = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for _ in range(2):
        answer = await cluster.complete(prompt, max_tokens=0, echo=True, logprobs=1, prompt_logprobs=3)
        (choice,) = answer["choices"]
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None
        assert len(found["tokens"]) == len(prompt)  # and nothing of the token that was computed for their sake
        wanted = [expected[i, token].item() for i, token in enumerate(prompt[1:])]
        assert found["token_logprobs"][1:] == pytest.approx(wanted, abs=2e-3)
        tops = [max(entry.values(), key=lambda value: value["logprob"]) for entry in choice["prompt_logprobs"][1:]]
        assert [top["logprob"] for top in tops] == pytest.approx(expected[:-1].max(-1).values.tolist(), abs=2e-3)
        assert (answer["usage"]["completion_tokens"], choice["finish_reason"]) == (0, "length")
        assert "".join(found["tokens"]) == choice["text"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "describe"}}])
async def test_a_forced_call_matches_its_schema_also_on_anthropics_endpoint(cluster: Running, choice):
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["boat", "tower"]}, "large": {"type": "boolean"}},
        "required": ["kind", "large"],
        "additionalProperties": False,
    }
    messages = [{"role": "user", "content": "Name a thing."}]
    tool = {"type": "function", "function": {"name": "describe", "parameters": schema}}
    body = {"messages": messages, "tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
    answer = (await cluster.http.post("/v1/chat/completions", json={**body, "max_tokens": 200})).json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    (call,) = answer["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert call["function"]["name"] == "describe"
    assert arguments["kind"] in ("boat", "tower")
    assert isinstance(arguments["large"], bool)
    theirs = {
        "max_tokens": 200,
        "messages": messages,
        "tools": [{"name": "describe", "input_schema": schema}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    (block,) = (await cluster.http.post("/v1/messages", json=theirs)).json()["content"]
    assert (block["type"], block["input"].keys()) == ("tool_use", {"kind", "large"})


async def test_biased_and_forbidden_tokens_are_chosen_and_not_chosen_by_the_workers(cluster: Running):
    prompt = prompt_of(40, salt=12)
    plain = await cluster.tokens(prompt, max_tokens=6, ignore_eos=True)
    assert await cluster.tokens(prompt, max_tokens=6, ignore_eos=True, logit_bias={"77": 100}) == [77] * 6
    word = (await cluster.http.post("/detokenize", json={"tokens": plain[:1]})).json()["prompt"]
    without = await cluster.tokens(prompt, max_tokens=6, ignore_eos=True, bad_words=[word])
    assert without[0] != plain[0]


async def test_the_official_openai_client_streams_a_chat(cluster: Running):
    client = openai.AsyncOpenAI(base_url=f"http://{cluster.cluster.http}/v1", api_key="none")
    try:
        stream = await client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "Tell me about the king."}], max_tokens=12,
            temperature=0, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )  # fmt: skip
        chunks = [chunk async for chunk in stream]
    finally:
        await client.close()
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text.strip()
    assert chunks[-1].usage.completion_tokens == 12


async def test_a_plain_grpc_client_generated_from_the_protos_streams(cluster: Running, tmp_path):
    """In a process of its own, with stubs of its own and none of our code."""
    protos = sorted(map(str, (ROOT / "proto").rglob("*.proto")))
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}", f"--python_out={tmp_path}",
         f"--grpc_python_out={tmp_path}", *protos],
        check=True, timeout=DEADLINE_S,
    )  # fmt: skip
    script = tmp_path / "client.py"
    script.write_text(
        "import sys, grpc\n"
        "from tandem.v1 import inference_pb2 as pb, inference_pb2_grpc, types_pb2\n"
        "stub = inference_pb2_grpc.InferenceServiceStub(grpc.insecure_channel(sys.argv[1]))\n"
        "sampling = types_pb2.SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)\n"
        "for m in stub.Generate(pb.GenerateRequest(text='In the beginning', sampling=sampling)):\n"
        "    print(m.text, end='')\n"
        "print('|', m.usage.num_output_tokens)\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), cluster.cluster.grpc, cwd=tmp_path, stdout=subprocess.PIPE
    )
    async with asyncio.timeout(DEADLINE_S):
        output, _ = await process.communicate()
    assert process.returncode == 0
    assert output.decode().endswith("| 10\n")


async def test_a_client_that_disconnects_frees_its_blocks_on_both_pools(cluster: Running):
    await cluster.idle()
    body = {"prompt": prompt_of(300, salt=4), "max_tokens": 1500, "ignore_eos": True, "stream": True}
    async with cluster.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.aiter_lines()
        await anext(lines)
        assert (await cluster.status()).num_running == 1
    await cluster.idle()
    call = cluster.stub.Generate(_long_request(), timeout=DEADLINE_S)
    await call.read()
    call.cancel()
    status = await cluster.idle()
    assert status.num_running == 0


def _long_request():
    from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2

    return inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenIds(ids=prompt_of(300, salt=5)),
        sampling=types_pb2.SamplingParams(max_tokens=1500, ignore_eos=True),
    )


async def test_sixteen_prompts_at_once_get_what_each_gets_alone(cluster: Running):
    prompts = [prompt_of(30 + 7 * i, salt=10 + i) for i in range(16)]
    fields = {"max_tokens": 24, "ignore_eos": True}
    together = await asyncio.gather(*(cluster.tokens(prompt, **fields) for prompt in prompts))
    for prompt, tokens in list(zip(prompts, together, strict=True))[::5]:
        assert await cluster.tokens(prompt, **fields) == tokens
    await cluster.idle()


async def test_a_seed_gives_the_same_answer_again_and_another_one_another(cluster: Running):
    fields = {"max_tokens": 24, "ignore_eos": True, "temperature": 1.0}
    prompt = prompt_of(20, salt=40)
    first = await cluster.tokens(prompt, seed=1, **fields)
    assert await cluster.tokens(prompt, seed=1, **fields) == first
    assert await cluster.tokens(prompt, seed=2, **fields) != first


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "x", "max_tokens": "many"}, 400, "max_tokens"),
        ({"prompt": "x", "temperature": -1}, 400, "temperature"),
        ({"prompt": "x", "top_p": 2}, 400, "top_p"),
        ({"prompt": "x", "model": "other"}, 404, "model"),
        ({"prompt": [10**9]}, 400, "prompt"),
        ({"prompt": [5] * 5000}, 400, None),
        ({"prompt": [5] * 100, "max_tokens": 100_000}, 400, "max_tokens"),
        ({}, 400, "prompt"),
    ],
)
async def test_bad_input_is_an_openai_error_and_the_cluster_serves_on(cluster: Running, fields, status, param):
    response = await cluster.http.post("/v1/completions", json=fields)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param
    assert len(await cluster.tokens([5, 6, 7], max_tokens=2, ignore_eos=True)) == 2


async def test_the_status_says_what_computes_and_how_much_memory_that_holds(cluster: Running):
    status = await cluster.status()
    pids = {name: child.pid for name, child in cluster.cluster.children.items()}
    told = {worker["worker"]["name"]: worker for worker in (await cluster.http.get("/status")).json()["workers"]}
    assert set(told) == {worker.worker.name for worker in status.workers} == {"prefill-0", "decode-0"}
    for worker in status.workers:
        assert worker.kernels == choose_kernels("cpu", torch.float32).name
        assert (worker.dtype, worker.pool_bytes) == ("float32", 256 * block_bytes(DEMO))
        resident = psutil.Process(pids[worker.worker.name]).memory_info().rss
        assert resident / 2 < worker.load.resident_bytes < resident * 2
        row = told[worker.worker.name]
        assert (row["kernels"], row["pool_bytes"]) == (worker.kernels, str(worker.pool_bytes))
        assert int(row["load"]["resident_bytes"]) > worker.pool_bytes


async def test_ready_models_health_and_metrics_answer(cluster: Running):
    for path in ("/readyz", "/healthz", "/health"):
        assert (await cluster.http.get(path)).status_code == 200
    models = (await cluster.http.get("/v1/models")).json()
    assert [model["id"] for model in models["data"]] == ["demo"]
    assert "gen_ai_server_time_to_first_token" in (await cluster.http.get("/metrics")).text


async def test_without_its_only_prefill_worker_the_decode_worker_computes_prompts(cluster: Running):
    """The last test: the worker stays away. The router knows of the loss before the prompts come."""
    prompts = [prompt_of(60, salt=40 + n) for n in range(5)]
    expected = [await cluster.tokens(prompt, max_tokens=20) for prompt in prompts]
    cluster.signal("prefill-0")
    lost = await cluster.until(lambda status: not status.ready)
    assert "no prefill worker is ready" in lost.not_ready_reason
    assert (await cluster.http.get("/readyz")).status_code == 503
    found = await asyncio.gather(*(cluster.tokens(prompt, max_tokens=20) for prompt in prompts))
    assert list(found) == expected
