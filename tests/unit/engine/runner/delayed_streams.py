"""Streams of a device that is as late as it may be: queued work is done only when a caller waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from shared.engine.runner.device_link import DeviceLink


class Stream:
    """Work in order; `done` of it has been carried out."""

    def __init__(self, _device: object = None) -> None:
        self.queue: list[Callable[[], object]] = []
        self.done = 0
        self.waited_for: list[Event] = []

    def run_to(self, end: int) -> None:
        while self.done < end:
            self.done += 1
            self.queue[self.done - 1]()

    def wait_event(self, event: Event) -> None:
        self.waited_for.append(event)
        self.queue.append(event.synchronize)

    def synchronize(self) -> None:
        self.run_to(len(self.queue))


class Event:
    """The end of what was queued on a stream when it was recorded."""

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.end = 0

    def record(self, stream: Stream) -> None:
        self.stream, self.end = stream, len(stream.queue)

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run_to(self.end)


class DelayedStreams:
    """What `DeviceLink` uses of torch.cuda. Ops on host tensors cannot be queued: within `stream`, where they run at
    once, they see what that stream has waited for, and no more."""

    Stream, Event = Stream, Event

    def __init__(self) -> None:
        self.main = self.current = Stream()

    def current_stream(self, _device: object = None) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        stream.synchronize()
        try:
            yield
        finally:
            self.current = before


class DelayedLink(DeviceLink):
    """Over host memory, with copies of blocks queued on those streams."""

    def __init__(self) -> None:
        self.streams = DelayedStreams()
        super().__init__(torch.device("cpu"), self.streams)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.streams.current.queue.append(lambda: target.copy_(source))
