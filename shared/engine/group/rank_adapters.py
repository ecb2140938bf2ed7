"""Adapters on the ranks of a group: when the leader reads one, every follower reads its own part of it, in a thread
beside the steps. What was read is placed between two plans, by its number, so that a slot means the same on all ranks.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
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
from shared.kernels.cpu.beside_steps import work_beside_steps
from shared.kernels.lora.step import HostCopy, LoadedAdapter, PackedAdapter
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
    keeps_copy: bool = False  # what is read can be laid out again by its number
    copy_of: int = 0  # the number of what is to be laid out again, in place of reading a folder
    forgotten: tuple[int, ...] = ()  # numbers whose copies are kept no longer


class _Answer(NamedTuple):
    digest: str
    num_bytes: int
    error: str  # empty where it was read
    copy_bytes: int = 0

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


class _Part(NamedTuple):
    """What one rank has read, or laid out again."""

    rank: int
    packed: PackedAdapter
    copy: HostCopy | None


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
        self._forgotten: deque[int] = deque()  # likewise

    def read(self, folder: Path, max_rank: int, max_bytes: int, *, keeps_copy: bool = False) -> LoadedAdapter:
        """Reads an adapter on all ranks, laid out for their kernels, and returns the leader's part. Blocking; from any
        thread but the engine's. `keeps_copy`: every rank keeps one of its part for as long as the leader's is there.

        Raises:
            ModelLoadError: as `read_adapter`, for any rank; or ranks have read different content.
            RankLost: a rank is gone.
        """
        found = folder.resolve()
        request = _Request(0, str(found), max_rank, max_bytes, _files(found), (), keeps_copy)
        own, answers, number = self._ask(request, lambda request: _read(self._decoder, request))
        copy = own.copy
        if copy is not None:
            copy = HostCopy(sum(answer.copy_bytes for answer in answers), partial(self._again, number, copy))
            weakref.finalize(copy, self._forgotten.append, number).atexit = False
        num_bytes = sum(answer.num_bytes for answer in answers)
        return LoadedAdapter(answers[0].digest, own.rank, self._numbered(own.packed, number), num_bytes, copy)

    def _again(self, number: int, own: HostCopy) -> PackedAdapter:
        """Lays out on all ranks what was read under a number."""
        part, _, new = self._ask(_Request(0, "", 0, 0, (), (), copy_of=number), lambda _: _laid_out(own))
        return self._numbered(part.packed, new)

    def _numbered(self, packed: PackedAdapter, number: int) -> PackedAdapter:
        packed = replace(packed, number=number)
        # Followers keep a part until it is placed: afterwards there is nothing to drop.
        weakref.finalize(packed, self._dropped.append, number).atexit = False
        return packed

    def _ask(self, request: _Request, own: Callable[[_Request], _Found]) -> tuple[_Part, list[_Answer], int]:
        """The leader's part by `own`, all ranks' answers, and the number that the parts have."""
        with self._turn:
            if self._is_closed:
                raise RankLost("this worker's group has ended")
            self._count += 1
            request = request._replace(
                number=self._count, dropped=_taken(self._dropped), forgotten=_taken(self._forgotten)
            )
            broadcast_bytes(self._group, _ENCODER.encode(request))
            part, answer, failure = own(request)
            frames = self._group.gather(answer.frame())
            assert frames is not None
            try:
                if failure is not None:
                    raise failure
                answers = [_Answer.parse(frame) for frame in frames]
                _check_same(request.folder, answers)
            except BaseException:
                self._dropped.append(request.number)
                self._forgotten.append(request.number)
                raise
        assert part is not None
        return part, answers, request.number

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
        self._copies: dict[int, HostCopy] = {}
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
                for number in request.forgotten:
                    self._copies.pop(number, None)
                if request.copy_of:
                    own, answer, failure = _laid_out(self._copies[request.copy_of])
                else:
                    own, answer, failure = _read(self._decoder, request, from_leader=True)
                if own is not None:
                    self._read[request.number] = own.packed
                if own is not None and own.copy is not None:
                    self._copies[request.number] = own.copy
                if failure is not None:
                    logger.warning("adapter %s: %s", request.folder, failure)
                self._group.gather(answer.frame())
        except RankLost as error:
            logger.debug("no more adapters are read: %s", error)  # the steps fail with an error of their own
        except Exception:
            logger.exception("an adapter could not be read")
            self._links.fail(self._group.rank)


_Found = tuple[_Part | None, _Answer, Exception | None]
"""What a rank has, what the leader gets of it, what went wrong: an answer follows in any case."""


def _read(decoder: RankDecoder, request: _Request, *, from_leader: bool = False) -> _Found:
    folder = Path(request.folder)
    try:
        # Another host's links may lead elsewhere than those that the leader has followed.
        if from_leader and (folder.resolve() != folder or _files(folder) != request.files):
            raise ModelLoadError(f"{folder} or a file in it is a link on this host, and is not on the leader's")
        adapter = decoder.read_adapter(folder, max_rank=request.max_rank, max_bytes=request.max_bytes)
        packed = decoder.pack_adapter(adapter)
        copy = decoder.host_copy(adapter, packed) if request.keeps_copy else None
    except Exception as error:
        return _failed(str(folder), error)
    answer = _Answer(adapter.digest, packed.nbytes, "", 0 if copy is None else copy.num_bytes)
    return _Part(adapter.rank, packed, copy), answer, None


def _laid_out(copy: HostCopy) -> _Found:
    try:
        packed = copy.lay_out()
    except Exception as error:
        return _failed("that was read before", error)
    return _Part(0, packed, None), _Answer("", packed.nbytes, ""), None


def _failed(adapter: str, error: Exception) -> _Found:
    if not isinstance(error, TandemError):
        logger.exception("adapter %s could not be laid out", adapter)
    text = error.message if isinstance(error, TandemError) else f"{type(error).__name__}: {error}"
    return None, _Answer("", 0, text[:_MOST_TEXT] or "it failed"), error


def _taken(numbers: deque[int]) -> tuple[int, ...]:
    return tuple(numbers.popleft() for _ in range(len(numbers)))


def _files(folder: Path) -> tuple[str, ...]:
    return tuple(os.path.realpath(folder / name) for name in (ADAPTER_FILE, WEIGHTS_FILE))


def _check_same(folder: str, answers: list[_Answer]) -> None:
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
