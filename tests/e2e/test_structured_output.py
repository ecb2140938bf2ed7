"""Structured answers of a real cluster: valid, and exact when their decode worker is killed in mid-answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal

import grpc
import jsonschema

from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2
from tests.e2e.running import DEADLINE_S, Running, running

WORDS = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 5, "maxLength": 20},
        "lines": {
            "type": "array",
            "items": {"type": "string", "minLength": 8, "maxLength": 16},
            "minItems": 16,
            "maxItems": 20,
        },
        "number": {"type": "integer", "minimum": 1000, "maximum": 99999},
    },
    "required": ["title", "lines", "number"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " "},
}
NUM_TEXTS, NUM_CALLS = 3, 3
NUM_STREAMS = NUM_TEXTS + NUM_CALLS
PROMPT = "Once upon a time"


TOOL = {"type": "function", "function": {"name": "sing", "parameters": WORDS}}


def asked(number: int) -> tuple[str, dict]:
    """Path and body: texts of a schema first, then calls of a tool."""
    text = f"{PROMPT}, {number} years ago"
    sampling = {"max_tokens": 1000, "temperature": 0 if number in (0, NUM_TEXTS) else 0.9, "seed": number}
    if number < NUM_TEXTS:
        return "/v1/completions", {"prompt": text, "guided_json": WORDS, **sampling}
    messages = [{"role": "user", "content": text}]
    tools = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    return "/v1/chat/completions", {"messages": messages, **tools, **sampling}


def answered(choice: dict) -> str:
    """What a whole or streamed choice has of the schema's JSON."""
    message = choice.get("message") or choice.get("delta") or {}
    calls = message.get("tool_calls") or ()
    return choice.get("text") or "".join(call["function"]["arguments"] for call in calls)


async def whole(cluster: Running, number: int) -> tuple[str, str]:
    """Text and finish reason of an answer that is not disturbed."""
    path, body = asked(number)
    choice = (await cluster.http.post(path, json=body)).json()["choices"][0]
    return answered(choice), choice["finish_reason"]


class Stream:
    """One client's stream."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.text = ""
        self.finish_reason: str | None = None
        self.error: object = None

    async def run(self, cluster: Running) -> None:
        path, body = asked(self.number)
        named = {**body, "request_id": f"stream-{self.number}", "stream": True}
        async with cluster.http.stream("POST", path, json=named) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                self.error = self.error or event.get("error")
                for choice in event.get("choices", ()):
                    self.text += answered(choice)
                    self.finish_reason = choice["finish_reason"] or self.finish_reason


async def refused(cluster: Running, **fields: object) -> dict:
    answer = await cluster.http.post("/v1/completions", json={"prompt": "a", **fields})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


async def test_structured_answers_outlive_their_decode_worker(tmp_path):
    async with running(tmp_path, num_prefill=1, num_decode=2, num_kv_blocks=1100) as cluster:
        await every_kind_is_followed(cluster)
        await what_cannot_be_compiled_is_refused(cluster)
        expected = await asyncio.gather(*(whole(cluster, number) for number in range(NUM_STREAMS)))
        assert [end for _, end in expected] == ["stop"] * NUM_TEXTS + ["tool_calls"] * NUM_CALLS
        for text, _ in expected:
            jsonschema.validate(json.loads(text), WORDS)

        streams = [Stream(number) for number in range(NUM_STREAMS)]
        tasks = [asyncio.create_task(stream.run(cluster)) for stream in streams]
        async with asyncio.timeout(DEADLINE_S):
            while any(len(stream.text) < 40 for stream in streams):
                await asyncio.sleep(0.01)
        served = await by_decode_worker(cluster)
        victim = max(served, key=lambda name: (len({number < NUM_TEXTS for number in served[name]}), len(served[name])))
        os.kill(cluster.cluster.children[victim].pid, signal.SIGKILL)
        cut = [number for number in served[victim] if streams[number].finish_reason is None]
        assert {number < NUM_TEXTS for number in cut} == {True, False}, "it had to write a text and a call"
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*tasks)
        found = [(stream.error, stream.text, stream.finish_reason) for stream in streams]
        assert found == [(None, *answer) for answer in expected]


async def by_decode_worker(cluster: Running) -> dict[str, list[int]]:
    """The numbers of the streams that each decode worker writes now."""

    async def worker_of(number: int) -> str:
        request = inference_pb2.GetRequestRequest(request_id=f"stream-{number}")
        with contextlib.suppress(grpc.aio.AioRpcError):  # it has ended
            return (await cluster.stub.GetRequest(request, timeout=DEADLINE_S)).decode_worker
        return ""

    workers = await asyncio.gather(*map(worker_of, range(NUM_STREAMS)))
    return {name: [n for n, worker in enumerate(workers) if worker == name] for name in ("decode-0", "decode-1")}


async def every_kind_is_followed(cluster: Running) -> None:
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


async def what_cannot_be_compiled_is_refused(cluster: Running) -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "array", "uniqueItems": True}}}
    error = await refused(cluster, response_format=schema)
    assert error["param"] == "response_format.json_schema.schema"
    assert "uniqueItems" in error["message"]
    assert (await refused(cluster, guided_regex="(a"))["param"] == "guided_regex"
    assert (await refused(cluster, guided_regex="a" * 70_000))["param"] == "guided_regex"
    assert (await refused(cluster, guided_regex="a", guided_choice=["b"]))["param"] == "guided_choice"
