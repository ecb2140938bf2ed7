"""The stream of one `tandem record`: its client's messages in, a model's requests out as they end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from services.router.views.recorder import Recorded, Recorder, Recording
from shared.errors import InvalidRequest
from shared.rpc.pb.tandem.v1 import fleet_pb2

logger = logging.getLogger(__name__)

_BATCH_S = 0.1
"""What ends within this time goes in one message, seconds."""
_MOST_REQUESTS, _MOST_IDS = 1000, 100_000
"""Most requests and token ids of one message, which gRPC lets have 4 MB: an id takes 8 bytes."""


async def recorded(
    recorder_of: Callable[[str], Recorder], messages: AsyncIterator[fleet_pb2.RecordRequest]
) -> AsyncIterator[fleet_pb2.RecordedRequests]:
    """What FleetService.Record answers. Raises what `recorder_of` raises for a model's name, InvalidRequest, and
    Overloaded where there are too many recordings."""
    asked = await anext(aiter(messages), None)
    if asked is None:
        raise InvalidRequest("a recording begins with a message, which has its key", field="key")
    recorder = recorder_of(asked.model)
    recording = recorder.open(asked.key, asked.block_size)
    logger.info("a recording of requests begins, %d tokens an id", asked.block_size)
    closing = asyncio.create_task(_close(recording, messages))
    try:
        yield fleet_pb2.RecordedRequests()
        while not recording.is_over:
            await recording.wait()
            if not recording.is_over:
                await asyncio.sleep(_BATCH_S)
            yield _message(recording)
    finally:
        closing.cancel()
        recorder.close(recording)
        logger.info("the recording has ended")


async def _close(recording: Recording, messages: AsyncIterator[fleet_pb2.RecordRequest]) -> None:
    """Once the client has nothing more to say."""
    async for _ in messages:
        pass
    recording.stop()


def _message(recording: Recording) -> fleet_pb2.RecordedRequests:
    found = [_request(one) for one in recording.take(_MOST_REQUESTS, _MOST_IDS)]
    return fleet_pb2.RecordedRequests(
        requests=found, num_dropped=recording.num_dropped, num_running=recording.num_running
    )


def _request(one: Recorded) -> fleet_pb2.RecordedRequest:
    return fleet_pb2.RecordedRequest(
        arrived_unix_s=one.arrived_unix_s,
        num_prompt_tokens=one.num_prompt_tokens,
        num_output_tokens=one.num_output_tokens,
        max_tokens=one.max_tokens,
        block_ids=one.block_ids,
        num_cached_tokens=one.num_cached_tokens,
        outcome=one.outcome,
        ttft_ms=(one.ttft_s or 0.0) * 1e3,
        tpot_ms=(one.tpot_s or 0.0) * 1e3,
    )
