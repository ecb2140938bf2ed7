"""Servers that answer as scripted, over HTTP and gRPC, and log when they really did.

A process of its own, `python -m tests.integration.loadtest.fake_server`, holding any number of servers. It reads lines
of JSON: a script starts a server and is answered by its ports, `{"finish": port}` ends the one with that HTTP port and
is answered by its log. It ends when stdin is closed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from itertools import count
from typing import Any

import grpc
import grpc.aio
import httptools
import uvloop

from shared.rpc.pb.tandem.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.integration.loadtest.fake_script import Behaviour, Script, Truth

MODEL = "fake"
FIRST_TOKEN = 7


class Stage:
    """The script and the log, shared by both protocols."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.log: list[Truth] = []
        self._numbers = count()
        self._busy_until_s = 0.0

    def enter(self, request_id: str, prompt: list[int], max_tokens: int, model: str) -> tuple[Behaviour, Truth]:
        """The next behaviour; warm-up requests get a plain answer and no turn of the script."""
        truth = Truth(request_id, time.perf_counter(), prompt, max_tokens, model)
        self.log.append(truth)
        if request_id.startswith("warmup"):
            return Behaviour(), truth
        behaviours = self.script.behaviours
        return behaviours[next(self._numbers) % len(behaviours)], truth

    async def play(self, behaviour: Behaviour, truth: Truth) -> AsyncIterator[list[int]]:
        """Token ids of each message at its time; each is noted when it has been handed to the network."""
        self._busy_until_s = max(self._busy_until_s, truth.arrived_s) + self.script.service_ms / 1e3
        due_s = self._busy_until_s
        for i, (gap_ms, num_tokens) in enumerate(behaviour.messages):
            if behaviour.die_after == i:
                os._exit(9)
            if behaviour.fail_after == i:
                raise RuntimeError("scripted")
            due_s += gap_ms / 1e3
            while (left_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(left_s)
            yield [FIRST_TOKEN + i] * num_tokens
            truth.sent_s.append(time.perf_counter())
            truth.counts.append(num_tokens)


class HttpSide(asyncio.Protocol):
    """OpenAI's completions."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._tasks: set[asyncio.Task[None]] = set()
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body = b""
        self._request_id = ""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        for task in self._tasks:
            task.cancel()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._request_id = value.decode()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._url.endswith(b"/v1/models"):
            self._json(200, {"data": [{"id": MODEL}]})
        else:
            task = asyncio.create_task(self._complete(json.loads(self._body), self._request_id))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._begin()

    async def _complete(self, body: dict[str, Any], request_id: str) -> None:
        behaviour, truth = self._stage.enter(request_id, body["prompt"], body["max_tokens"], body["model"])
        if behaviour.refuse:
            kind = "rate_limit_error" if behaviour.refuse == 429 else "server_error"
            self._json(
                behaviour.refuse, {"error": {"message": "refused as scripted", "type": kind, "code": "scripted"}}
            )
            return
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        try:
            async for token_ids in self._stage.play(behaviour, truth):
                choice: dict[str, Any] = {"index": 0, "text": "x" * len(token_ids), "finish_reason": None}
                if self._stage.script.token_ids:
                    choice["token_ids"] = token_ids
                self._event({"choices": [choice], "usage": None})
        except RuntimeError as error:
            self._event({"error": {"message": str(error), "type": "server_error", "code": "worker_lost"}})
            self._transport.write(b"0\r\n\r\n")
            return
        self._event({"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": "length"}]})
        details = {"cached_tokens": behaviour.cached_tokens}
        num_prompt, num_output = len(truth.prompt), sum(truth.counts)
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_output, "prompt_tokens_details": details}
        split = {"queue_ms": 1.0, "prefill_compute_ms": truth.ttft_s * 1e3 - 1.0, "ttft_ms": truth.ttft_s * 1e3}
        self._event({"choices": [], "usage": usage, "tandem": {"ttft": split, "decode_worker": "d0"}})
        self._chunk(b"data: [DONE]\n\n")
        self._transport.write(b"0\r\n\r\n")

    def _event(self, value: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _json(self, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)


class GrpcSide(inference_pb2_grpc.InferenceServiceServicer):
    """tandem.v1.InferenceService."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    async def GetStatus(self, request: Any, context: Any) -> inference_pb2.ClusterStatus:  # noqa: N802
        return inference_pb2.ClusterStatus(model_name=MODEL, ready=True)

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> Any:  # noqa: N802
        sampling = request.sampling
        behaviour, truth = self._stage.enter(
            request.request_id, list(request.tokens.ids), sampling.max_tokens, request.model
        )
        if behaviour.refuse:
            refused = grpc.StatusCode.RESOURCE_EXHAUSTED if behaviour.refuse == 429 else grpc.StatusCode.INTERNAL
            await context.abort(refused, "refused as scripted")
        try:
            async for token_ids in self._stage.play(behaviour, truth):
                yield inference_pb2.GenerateResponse(token_ids=token_ids)
        except RuntimeError as error:
            await context.abort(grpc.StatusCode.INTERNAL, str(error))
        ttft_ms = truth.ttft_s * 1e3
        yield inference_pb2.GenerateResponse(
            finish_reason=types_pb2.FINISH_REASON_LENGTH,
            usage=types_pb2.Usage(
                num_prompt_tokens=len(truth.prompt),
                num_output_tokens=sum(truth.counts),
                num_cached_tokens=behaviour.cached_tokens,
            ),
            ttft=types_pb2.TtftSplit(queue_ms=1.0, prefill_compute_ms=ttft_ms - 1.0, ttft_ms=ttft_ms),
            decode_worker="d0",
        )


class Server:
    """A stage behind both protocols."""

    def __init__(self, script: Script) -> None:
        self.stage = Stage(script)
        self._grpc = grpc.aio.server()

    async def start(self) -> dict[str, int]:
        """Serves on any free ports, which it returns."""
        loop = asyncio.get_running_loop()
        self._http = await loop.create_server(lambda: HttpSide(self.stage), "127.0.0.1", 0, backlog=1024)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(GrpcSide(self.stage), self._grpc)
        port = self._grpc.add_insecure_port("127.0.0.1:0")
        await self._grpc.start()
        return {"http": self._http.sockets[0].getsockname()[1], "grpc": port}

    async def stop(self) -> None:
        """Takes nothing more; what is being answered is dropped."""
        self._http.close()
        await self._grpc.stop(0)


async def main() -> None:
    """Until stdin is closed."""
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    servers: dict[int, Server] = {}
    while line := await reader.readline():
        order = json.loads(line)
        answer: object
        if "finish" in order:
            server = servers.pop(order["finish"])
            await server.stop()
            answer = [asdict(truth) for truth in server.stage.log]
        else:
            server = Server(Script.load(order))
            answer = ports = await server.start()
            servers[ports["http"]] = server
        print(json.dumps(answer), flush=True)
    for server in servers.values():
        await server.stop()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
