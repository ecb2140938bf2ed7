"""Adapters on the ranks of a group: when the leader reads one, every follower reads its own part of it, in a thread
beside the steps. What was read is placed between two plans, by its number, so that a slot means the same on all ranks.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from shared.collectives.broadcast import broadcast_bytes
from shared.collectives.interface import Collectives
from shared.collectives.rank_links import RankLinks
from shared.engine.runner.device_link import DeviceLink
from shared.errors import ModelLoadError, RankLost, TandemError, TransferFailed
from shared.kernels.cpu.torch_threads import work_beside_steps
from shared.kernels.lora.step import LoadedAdapter, PackedAdapter
from shared.model.adapters.adapter import WEIGHTS_FILE
from shared.model.config.folder import ADAPTER_FILE
from shared.model.ranks.rank_decoder import RankDecoder

logger = logging.getLogger(__name__)

_END = b""
_ANSWER_BYTES = 1024
_MOST_TEXT = 240
"""Characters of an error, of up to four bytes each."""
_ENCODER = msgspec.msgpack.Encoder()


class _Request(NamedTuple):
    number: int
    folder: str
    max_rank: int
    max_bytes: int
    files: tuple[str, ...]  # of the folder, links followed
    dropped: tuple[int, ...]  # numbers of loads that will not be placed


class _Answer(NamedTuple):
    digest: str
    num_bytes: int
    error: str  # empty where it was read

    def frame(self) -> Tensor:
        data = _ENCODER.encode(self)
        found = torch.zeros(_ANSWER_BYTES, dtype=torch.uint8)
        found[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found[-2], found[-1] = divmod(len(data), 256)
        return found

    @classmethod
    def parse(cls, frame: Tensor) -> _Answer:
        length = int(frame[-2]) * 256 + int(frame[-1])
        return _ANSWERS.decode(frame[:length].numpy().tobytes())


_REQUESTS, _ANSWERS = msgspec.msgpack.Decoder(_Request), msgspec.msgpack.Decoder(_Answer)


class GroupAdapters:
    """The leader's side. A load is one message to all ranks and one answer of each, which says what it has read."""

    def __init__(self, group: Collectives, decoder: RankDecoder) -> None:
        """`group`: of all ranks, for this alone. `decoder`: the leader's."""
        self._group = group
        self._decoder = decoder
        self._turn = threading.Lock()
        self._is_closed = False
        self._count = 0
        self._dropped: deque[int] = deque()  # from any thread

    def read(self, folder: Path, max_rank: int, max_bytes: int) -> LoadedAdapter:
        """Reads an adapter on all ranks, laid out for their kernels, and returns the leader's part. Blocking; from any
        thread but the engine's.

        Raises:
            ModelLoadError: as `read_adapter`, for any rank; or ranks have read different content.
            RankLost: a rank is gone.
        """
        with self._turn:
            if self._is_closed:
                raise RankLost("this worker's group has ended")
            self._count += 1
            dropped = tuple(self._dropped.popleft() for _ in range(len(self._dropped)))
            found = folder.resolve()
            request = _Request(self._count, str(found), max_rank, max_bytes, _files(found), dropped)
            broadcast_bytes(self._group, _ENCODER.encode(request))
            own, answer, failure = _read(self._decoder, request)
            frames = self._group.gather(answer.frame())
            assert frames is not None
            try:
                if failure is not None:
                    raise failure
                answers = [_Answer.parse(frame) for frame in frames]
                _check_same(folder, answers)
            except BaseException:
                self._dropped.append(request.number)
                raise
        assert own is not None
        rank, packed = own
        packed = replace(packed, number=request.number)
        # Of a part that was placed followers have none to drop any more.
        weakref.finalize(packed, self._dropped.append, request.number).atexit = False
        return LoadedAdapter(answer.digest, rank, packed, sum(found.num_bytes for found in answers))

    def close(self) -> None:
        """Ends the followers' threads, behind a load that is under way. Raises RankLost. Twice is fine."""
        with self._turn:
            was_closed, self._is_closed = self._is_closed, True
            if not was_closed:
                broadcast_bytes(self._group, _END)


class AdapterFollower:
    """A follower's side: a thread that reads what the leader names, until that ends it."""

    def __init__(self, links: RankLinks, decoder: RankDecoder, link: DeviceLink) -> None:
        """`link`: of this rank's runner."""
        assert links.adapters is not None, "a group without adapters"
        self._links = links
        self._group = links.adapters
        self._decoder = decoder
        self._link = link
        self._read: dict[int, PackedAdapter] = {}
        self._thread = threading.Thread(target=self._run, name="adapters", daemon=True)

    def start(self) -> None:
        """Starts to answer loads."""
        self._thread.start()

    def join(self) -> None:
        """Waits until the leader has ended it, or is lost."""
        self._thread.join()

    def take(self, number: int) -> PackedAdapter:
        """This rank's part of what was read under a number, once. Raises TransferFailed where there is none."""
        found = self._read.pop(number, None)
        if found is None:
            raise TransferFailed(f"adapter {number} is to be placed, and this rank has not read it")
        return found

    def _run(self) -> None:
        self._link.bind_thread()
        work_beside_steps()
        try:
            while (message := broadcast_bytes(self._group)) != _END:
                request = _REQUESTS.decode(message)
                for number in request.dropped:
                    self._read.pop(number, None)
                own, answer, failure = _read(self._decoder, request, from_leader=True)
                if own is not None:
                    self._read[request.number] = own[1]
                if failure is not None:
                    logger.warning("adapter %s: %s", request.folder, failure)
                self._group.gather(answer.frame())
        except RankLost as error:
            logger.debug("no more adapters are read: %s", error)  # the steps fail with an error of their own
        except Exception:
            logger.exception("an adapter could not be read")
            self._links.fail(self._group.rank)


def _read(
    decoder: RankDecoder, request: _Request, *, from_leader: bool = False
) -> tuple[tuple[int, PackedAdapter] | None, _Answer, Exception | None]:
    """((low rank, part) where it was read, what the leader gets, what went wrong): an answer follows in any case."""
    folder = Path(request.folder)
    try:
        # Another host's links may lead elsewhere than those that the leader has followed.
        if from_leader and (folder.resolve() != folder or _files(folder) != request.files):
            raise ModelLoadError(f"{folder} or a file in it is a link on this host, and is not on the leader's")
        adapter = decoder.read_adapter(folder, max_rank=request.max_rank, max_bytes=request.max_bytes)
        packed = decoder.pack_adapter(adapter)
    except Exception as error:
        if not isinstance(error, TandemError):
            logger.exception("adapter %s could not be read", folder)
        text = error.message if isinstance(error, TandemError) else f"{type(error).__name__}: {error}"
        return None, _Answer("", 0, text[:_MOST_TEXT] or "it failed"), error
    return (adapter.rank, packed), _Answer(adapter.digest, packed.nbytes, ""), None


def _files(folder: Path) -> tuple[str, ...]:
    return tuple(os.path.realpath(folder / name) for name in (ADAPTER_FILE, WEIGHTS_FILE))


def _check_same(folder: Path, answers: list[_Answer]) -> None:
    """Raises ModelLoadError where a rank has not read what the leader has."""
    for rank, answer in enumerate(answers):
        if answer.error:
            raise ModelLoadError(f"rank {rank} of this worker's group: {answer.error}")
        if answer.digest != answers[0].digest:
            raise ModelLoadError(
                f"{folder} holds another adapter where rank {rank} of this worker's group runs: all its hosts need the "
                "same folder",
                field="adapter",
                value=answer.digest,
            )
