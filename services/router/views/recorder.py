"""Requests as they end, for a trace that says nothing of their text: lengths, times, keyed hashes of prefixes."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from dataclasses import dataclass
from hashlib import blake2b

from services.router.dispatch.record import RequestRecord
from services.router.dispatch.request import Request
from services.router.views.attribution.verdict import outcome
from services.router.views.timings import tpot_s, ttft_s
from shared.errors import InvalidRequest, Overloaded

MAX_RECORDINGS = 4
"""Most recordings of one model at once."""
MAX_WAITING = 10_000
"""Most ended requests that a client has not read yet; those beyond are counted and dropped."""
MAX_WAITING_IDS = 2_000_000
"""Most ids of blocks, 8 bytes each, of requests that a client has not read yet; requests beyond are counted and
dropped."""
MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 64
BLOCK_STEP, MAX_BLOCK_SIZE = 16, 65_536
"""Tokens of an id are a multiple of the one, up to the other."""
ID_BITS = 53
"""Ids are exact in JSON whatever reads it, and of ten million two are equal by chance in one recording of 200."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request that has ended."""

    arrived_unix_s: float
    num_prompt_tokens: int
    """With what a request that was continued on another call had produced there."""
    num_output_tokens: int
    max_tokens: int
    block_ids: array[int]
    num_cached_tokens: int
    outcome: str
    """An `Outcome`'s value."""
    ttft_s: float | None
    tpot_s: float | None


class Recording:
    """What one client records, on the event loop alone. Requests that arrive after `stop` are not taken."""

    def __init__(self, key: bytes, block_size: int) -> None:
        """Raises InvalidRequest naming the field."""
        if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
            least, most = MIN_KEY_BYTES, MAX_KEY_BYTES
            raise InvalidRequest(
                f"key must have {least} to {most} bytes, got {len(key)}",
                field="key", limit=most if len(key) > most else least, value=len(key),
            )  # fmt: skip
        if not BLOCK_STEP <= block_size <= MAX_BLOCK_SIZE or block_size % BLOCK_STEP:
            raise InvalidRequest(
                f"block_size must be {BLOCK_STEP} to {MAX_BLOCK_SIZE} and a multiple of {BLOCK_STEP}, got {block_size}",
                field="block_size", limit=BLOCK_STEP if block_size < MAX_BLOCK_SIZE else MAX_BLOCK_SIZE,
                value=block_size,
            )  # fmt: skip
        self._key, self._block_size = key, block_size
        self._running: dict[RequestRecord, tuple[int, array[int]]] = {}  # prompt's length and ids, until it ends
        self._ended: deque[Recorded] = deque()
        self._num_waiting_ids = 0
        self._is_open = True
        self._changed = asyncio.Event()
        self._unix_s = time.time() - time.perf_counter()
        self.num_dropped = 0
        """Ended requests that the client did not read in time."""

    @property
    def num_running(self) -> int:
        """Requests that it took and that have not ended."""
        return len(self._running)

    @property
    def is_over(self) -> bool:
        """Whether it takes no more requests and all of them were read."""
        return not (self._is_open or self._running or self._ended)

    def began(self, request: Request, record: RequestRecord) -> None:
        """A request arrived, or is about to be refused."""
        if not self._is_open or request.is_complete:
            return
        tokens = array("I", request.prompt_token_ids)
        tokens.extend(request.resumed_token_ids)
        shares_with = f"{len(request.chain_salt)}/{request.chain_salt}/{request.adapter}"
        self._running[record] = (len(tokens), block_ids(self._key, shares_with, tokens, self._block_size))

    def ended(self, record: RequestRecord) -> None:
        """A request has ended for the core; one whose end says nothing of the cluster is left out."""
        begun = self._running.pop(record, None)
        if begun is None:
            return
        self._changed.set()
        num_tokens, ids = begun
        how = outcome(record)
        if how is None:
            return
        if len(self._ended) >= MAX_WAITING or self._num_waiting_ids + len(ids) > MAX_WAITING_IDS:
            self.num_dropped += 1
            return
        self._num_waiting_ids += len(ids)
        self._ended.append(
            Recorded(
                self._unix_s + record.ask.arrived_at,
                num_tokens,
                record.num_output_tokens,
                record.ask.max_tokens or 0,
                ids,
                record.num_cached_tokens,
                how.value,
                ttft_s(record),
                tpot_s(record),
            )
        )

    def stop(self) -> None:
        """Takes no request that arrives from now on."""
        self._is_open = False
        self._changed.set()

    async def wait(self) -> None:
        """Returns once something has ended or changed since the last call."""
        await self._changed.wait()
        self._changed.clear()

    def take(self, most: int, most_ids: int) -> list[Recorded]:
        """Ended requests in the order of their ends, of which the recording keeps nothing: at most `most`, and no more
        after `most_ids` ids."""
        taken: list[Recorded] = []
        num_ids = 0
        while self._ended and len(taken) < most and num_ids < most_ids:
            taken.append(self._ended.popleft())
            num_ids += len(taken[-1].block_ids)
        self._num_waiting_ids -= num_ids
        if self._ended:
            self._changed.set()
        return taken


class Recorder:
    """One model's recordings. Costs a request nothing while there are none. On the event loop alone."""

    def __init__(self) -> None:
        self._recordings: list[Recording] = []

    def open(self, key: bytes, block_size: int) -> Recording:
        """Begins a recording, which `close` ends. Raises InvalidRequest, and Overloaded where there are as many as can
        be."""
        if len(self._recordings) >= MAX_RECORDINGS:
            raise Overloaded(f"{MAX_RECORDINGS} recordings of the model run already", limit=MAX_RECORDINGS)
        recording = Recording(key, block_size)
        self._recordings.append(recording)
        return recording

    def close(self, recording: Recording) -> None:
        """Ends it and frees what it holds. Twice is fine."""
        if recording in self._recordings:
            self._recordings.remove(recording)

    def began(self, request: Request, record: RequestRecord) -> None:
        """A request arrived, or is about to be refused."""
        for recording in self._recordings:
            recording.began(request, record)

    def ended(self, record: RequestRecord) -> None:
        """A request has ended for the core."""
        for recording in self._recordings:
            recording.ended(record)


def block_ids(key: bytes, shares_with: str, tokens: array[int], block_size: int) -> array[int]:
    """An id for each block of the tokens, the last one maybe shorter; chained, so that equal ids mean equal prefixes.

    Without the key an id cannot be recomputed from a guess of the tokens. `shares_with`: requests of another one share
    no prefix.
    """
    found = array("Q")
    parent = blake2b(shares_with.encode(), key=key, digest_size=16).digest()
    content = memoryview(tokens).cast("B")
    step = block_size * tokens.itemsize
    for begin in range(0, len(content), step):
        parent = blake2b(parent + content[begin : begin + step], key=key, digest_size=16).digest()
        found.append(int.from_bytes(parent[:8]) >> (64 - ID_BITS))
    return found
