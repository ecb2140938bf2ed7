"""A file of steps: every plan as it is launched, every result as it is taken, so that another process can repeat them.

Records follow each other in the order in which they happened: one byte for the kind, a little-endian u32 length, the
plan as `PlanEncoder` writes it, or the result in msgpack.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

from shared.engine.engine import LaunchedStep, StepRunner
from shared.engine.group.plans import PlanDecoder, PlanEncoder
from shared.engine.plan import StepPlan, StepResult
from shared.engine.runner.block_access import BlockAccess
from shared.errors import TransferFailed

_RECORD = struct.Struct("<cI")
_PLAN, _RESULT = b"P", b"R"
_RESULTS = msgspec.msgpack.Decoder(StepResult)


class RecordingRunner:
    """A `StepRunner` that writes what passes through it to a file, which the caller opens and closes."""

    def __init__(self, runner: StepRunner, file: BinaryIO) -> None:
        """Begins with the runner's first step: a recording cannot be replayed from the middle."""
        self._runner = runner
        self._file = file
        self._encoder = PlanEncoder()

    @property
    def is_async(self) -> bool:
        """See StepRunner."""
        return self._runner.is_async

    @property
    def blocks(self) -> BlockAccess:
        """See StepRunner. Blocks that are written from outside are not part of the recording."""
        return self._runner.blocks

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """See StepRunner."""
        self._write(_PLAN, self._encoder.encode(plan))
        return _RecordedStep(self._runner.launch(plan), self)

    def checksums(self, block_ids: list[int]) -> list[int]:
        """See StepRunner."""
        return self._runner.checksums(block_ids)

    def on_result(self, result: StepResult) -> None:
        """The oldest launched step's result was taken."""
        self._write(_RESULT, msgspec.msgpack.encode(result))

    def _write(self, kind: bytes, message: bytes) -> None:
        self._file.write(_RECORD.pack(kind, len(message)))
        self._file.write(message)


class _RecordedStep:
    def __init__(self, step: LaunchedStep, recorder: RecordingRunner) -> None:
        self._step = step
        self._recorder = recorder

    def result(self) -> StepResult:
        result = self._step.result()
        self._recorder.on_result(result)
        return result


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One recorded step, computed again."""

    plan: StepPlan
    recorded: StepResult
    replayed: StepResult


def replay(runner: StepRunner, file: BinaryIO) -> Iterator[ReplayedStep]:
    """Launches the recorded plans and takes their results in the recorded order. Call it in torch's inference mode.

    `runner` is a fresh one of the same model and pool. Raises TransferFailed for a file that is no recording; a last
    record that was cut off, as by a killed process, ends it.
    """
    decoder = PlanDecoder()
    launched: deque[tuple[StepPlan, LaunchedStep]] = deque()
    for kind, message in _records(file):
        if kind == _PLAN:
            plan = decoder.decode(message)
            launched.append((plan, runner.launch(plan)))
        elif launched:
            plan, step = launched.popleft()
            yield ReplayedStep(plan, _result(message), step.result())
        else:
            raise TransferFailed("the recording has a result before its plan")


def _records(file: BinaryIO) -> Iterator[tuple[bytes, bytes]]:
    while len(head := file.read(_RECORD.size)) == _RECORD.size:
        kind, length = _RECORD.unpack(head)
        if kind not in (_PLAN, _RESULT):
            raise TransferFailed(f"the recording has a record of kind {kind!r}")
        message = file.read(length)
        if len(message) < length:
            return
        yield kind, message


def _result(message: bytes) -> StepResult:
    try:
        return _RESULTS.decode(message)
    except ValueError as error:
        raise TransferFailed(f"the recording has a result that cannot be read: {error}") from error
