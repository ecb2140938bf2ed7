"""One streamed answer: what came, and when, as the client saw it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from services.cli.client import InferenceClient
from shared.rpc.convert import finish_reason_from_proto
from shared.rpc.pb.tandem.v1 import inference_pb2, types_pb2


@dataclass(slots=True)
class Answer:
    """The state of one answer; usage, split and workers are set once it is complete."""

    request_id: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    usage: types_pb2.Usage = field(default_factory=types_pb2.Usage)
    split: types_pb2.TtftSplit = field(default_factory=types_pb2.TtftSplit)
    prefill_worker: str = ""  # empty: the decode worker prefilled
    decode_worker: str = ""
    ttft_ms: float = 0.0  # client send → first token at the client
    tpot_ms: float = 0.0  # (end - first token) / (output tokens - 1); 0 for a single token


async def stream_answer(
    client: InferenceClient,
    request: inference_pb2.GenerateRequest,
    answer: Answer,
    on_text: Callable[[str], None],
) -> None:
    """Fills `answer` as it arrives and passes each piece of text to `on_text`.

    If the call fails or is cancelled, `answer` keeps what came before.
    """
    sent_at = time.perf_counter()
    first_at = 0.0
    async with aclosing(client.generate(request)) as responses:
        async for response in responses:
            if response.token_ids and not first_at:
                first_at = time.perf_counter()
                answer.ttft_ms = (first_at - sent_at) * 1e3
            answer.token_ids += response.token_ids
            if response.text:
                answer.text += response.text
                on_text(response.text)
            if response.finish_reason:
                _finish(answer, response)
    if len(answer.token_ids) > 1:
        answer.tpot_ms = (time.perf_counter() - first_at) * 1e3 / (len(answer.token_ids) - 1)


def _finish(answer: Answer, last: inference_pb2.GenerateResponse) -> None:
    answer.request_id = last.request_id
    answer.finish_reason = reason.value if (reason := finish_reason_from_proto(last.finish_reason)) else ""
    answer.usage = last.usage
    answer.split = last.ttft
    answer.prefill_worker = last.prefill_worker
    answer.decode_worker = last.decode_worker
