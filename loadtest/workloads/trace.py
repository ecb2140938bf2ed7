"""Common parts of trace formats: requests with a time and lengths, cut to a slice and replayed at a speed."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TextIO

import numpy as np

from loadtest.workloads.conversation import Conversation, Turn
from loadtest.workloads.lengths import MAX_LEN
from loadtest.workloads.tokens import Span
from shared.errors import ConfigError

BLOCK_LEN = 512
"""Prompt tokens that one hash id stands for, where a trace does not say another number."""
LATEST_S = 1e12
"""Latest time of a request: up to here a float holds every millisecond."""
PACKED = ".gz"
"""End of the name of a trace that is packed by gzip."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace."""

    at_s: float  # relative to the trace's first request
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()  # one a block of the trace; equal ids = equal prefix. Empty: unknown
    block_len: int = BLOCK_LEN  # tokens of a hash id; the same in all lines of a trace


@dataclass(frozen=True, slots=True)
class TraceSlice:
    """The part of a trace that is replayed, in the trace's own seconds: start ≤ at < end."""

    start_s: float = 0.0
    end_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.start_s < self.end_s:  # also false for NaN
            raise ConfigError(
                f"slice must go from 0 or more to something later, got {self.start_s:g}:{self.end_s:g}", field="slice"
            )


def parse_slice(text: str) -> TraceSlice:
    """`START:END` in seconds of the trace, each may be missing; raises ConfigError (`slice`)."""
    start, colon, end = text.partition(":")
    try:
        if text and not colon:
            raise ValueError
        return TraceSlice(float(start or 0), float(end or math.inf))
    except ValueError:
        raise ConfigError(f"slice={text}: expected START:END in seconds, as in 0:600", field="slice") from None


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace's requests with their lengths divided.

    With `block_len` B, a hash id represents B tokens of the trace and B/scale tokens here. So exactly those prefixes
    that are equal in the trace are equal here, at every scale. Without hash ids every prompt is unrelated to others.
    """

    requests: Sequence[TraceRequest]
    block_len: int  # tokens of a hash id in the trace
    scale: int = 1
    scale_output: int = 1

    turns_per_conversation: ClassVar[float] = 1.0
    timed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.scale < 1 or self.block_len % self.scale:
            raise ConfigError(
                f"scale must divide the trace's block of {self.block_len} tokens, got {self.scale}", field="scale"
            )
        if self.scale_output < 1:
            raise ConfigError(f"scale_output must be at least 1, got {self.scale_output}", field="scale_output")
        if not self.requests:
            raise ConfigError("the slice of the trace has no requests", field="slice")
        _check_longest("prompt", max(one.num_prompt_tokens for one in self.requests), "scale", self.scale)
        _check_longest("answer", max(one.num_output_tokens for one in self.requests), "scale_output", self.scale_output)

    @property
    def scaled_block_len(self) -> int:
        """Tokens of one hash id here."""
        return self.block_len // self.scale

    @property
    def span_s(self) -> float:
        """From the first request to the last, seconds of the trace."""
        return self.requests[-1].at_s - self.requests[0].at_s

    def conversations(self, rng: np.random.Generator) -> Iterator[Conversation]:  # noqa: ARG002 - the protocol's
        """In the trace's order, times relative to the first request; does not use `rng`."""
        start_s = self.requests[0].at_s
        for i, request in enumerate(self.requests):
            spans = tuple(self._spans(i, request))
            num_output_tokens = -(-request.num_output_tokens // self.scale_output)
            yield Conversation((Turn(spans, num_output_tokens),), at_s=request.at_s - start_s)

    def _spans(self, index: int, request: TraceRequest) -> Iterator[Span]:
        num_left = -(-request.num_prompt_tokens // self.scale)
        if not request.hash_ids:
            yield Span(f"trace/{index}", num_left)
            return
        for hash_id in request.hash_ids:
            yield Span(f"block/{hash_id}", min(num_left, self.scaled_block_len))
            num_left -= self.scaled_block_len


def _check_longest(what: str, num_tokens: int, field: str, scale: int) -> None:
    if num_tokens > MAX_LEN * scale:
        raise ConfigError(
            f"the trace's longest {what} has {num_tokens} tokens; with {field} {scale} at most {MAX_LEN * scale} fit",
            field=field,
        )


def trace_error(path: Path, line: int, problem: str) -> ConfigError:
    """The error for a malformed line, numbered from 1."""
    return ConfigError(f"{path}, line {line}: {problem}", field="workload", line=line)


class RisingTimes:
    """Times of a trace's lines, relative to the first one."""

    def __init__(self, path: Path, name: str) -> None:
        """`name`: of the field that has them."""
        self._path, self._name = path, name
        self._first_s: float | None = None
        self._last_s = -math.inf

    def relative_s(self, at_s: float, written: object, line: int) -> float:
        """Of the next line, which has it `written` so. Raises ConfigError (`workload`) for one before the last."""
        if at_s < self._last_s:
            raise trace_error(self._path, line, f"{self._name} {written} goes back in time")
        self._last_s = at_s
        self._first_s = at_s if self._first_s is None else self._first_s
        return at_s - self._first_s


def open_trace(path: Path) -> Iterator[tuple[int, str]]:
    """A file's lines that are not blank, with their numbers from 1; it may be packed by gzip. Raises ConfigError
    (`workload`)."""
    opened: Callable[..., TextIO] = gzip.open if path.suffix.lower() == PACKED else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except UnicodeDecodeError as error:
        raise ConfigError(f"the trace {path} is not UTF-8 text: {error.reason}", field="workload") from error
    except (OSError, EOFError, zlib.error) as error:
        problem = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read the trace {path}: {problem}", field="workload") from error


def slice_requests(lines: Iterator[TraceRequest], part: TraceSlice) -> list[TraceRequest]:
    """The requests within the slice; later lines are not read."""
    chosen = []
    for request in lines:
        if request.at_s >= part.end_s:
            break
        if request.at_s >= part.start_s:
            chosen.append(request)
    return chosen
