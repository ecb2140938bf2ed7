"""Numbers on their way between host and device, with neither waiting for the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class DeviceLink:
    """On a CUDA device, copies by way of pinned memory in the order of the current stream; on the CPU, hardly a copy.

    Pinned memory comes from torch's cache, which does not hand it out again before the copies that use it are done.
    """

    def __init__(self, device: torch.device, streams: Any = None) -> None:
        """`streams` offers `Stream`, `Event`, `stream` and `current_stream` as torch.cuda does; None: torch.cuda on a
        CUDA device, and elsewhere no streams, since every call is done when it returns."""
        self.device = device
        self.is_async = device.type == "cuda"
        """True where work is queued on the device rather than done when a call returns."""
        self._streams = torch.cuda if streams is None and self.is_async else streams
        self._copied: Any = None  # event behind the last copies of blocks

    def bind_thread(self) -> None:
        """Makes the device the calling thread's current one, which kernels launch on: a new thread begins with the
        first GPU. And OpenMP takes the process's number of threads for it: it begins with one a core of the machine,
        and where they share fewer cores, each waits for the others' slices of time."""
        if self.is_async and self.device.index is not None:
            torch.cuda.set_device(self.device)
        torch.get_num_threads()

    def empty(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 on the host, to be filled and copied from."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.is_async)

    def send(self, host: Tensor) -> Tensor:
        """A host tensor on the device; on the CPU, the tensor itself."""
        if not self.is_async:
            return host
        return host.pin_memory().to(self.device, non_blocking=True) if host.numel() else host.to(self.device)

    def send_all(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Host arrays on the device by one copy, in this order: those of 8-byte elements before those of 4 bytes."""
        if not self.is_async:
            return [torch.from_numpy(array) for array in arrays]
        host = self.empty(sum(array.nbytes for array in arrays))
        content, begin = host.numpy(), 0
        for array in arrays:
            content[begin : begin + array.nbytes] = array.view(np.uint8)
            begin += array.nbytes
        sent, begin, tensors = host.to(self.device, non_blocking=True), 0, []
        for array in arrays:
            part = sent[begin : begin + array.nbytes]
            tensors.append(part.view(getattr(torch, array.dtype.name)))
            begin += array.nbytes
        return tensors

    def fetch(self, tensor: Tensor) -> Tensor:
        """A copy on the host; it holds the values once a `mark` made after this call has been waited for."""
        if not self.is_async:
            return tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Queues a copy between host and device on the current stream; host memory must be pinned."""
        target.copy_(source, non_blocking=True)

    def mark(self) -> Callable[[], None]:
        """A function that waits until the device has done everything queued so far."""
        if not self.is_async:
            return _done
        event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
        event.record(torch.cuda.current_stream(self.device))
        return event.synchronize

    def mark_copies(self) -> None:
        """Blocks of the pool were copied on the current stream: side streams entered from now on wait for that."""
        if self._streams is not None:
            event = self._streams.Event()
            event.record(self._streams.current_stream(self.device))
            self._copied = event

    def side_stream(self) -> SideStream:
        """A stream of its own for work on blocks beside the steps."""
        return SideStream(self.device, self._streams, lambda: self._copied)


class SideStream:
    """Work on blocks of the pool that does not wait for the running step. Without streams, it is simply done.

    It waits for the copies of `DeviceLink.mark_copies`: a block may be named, given away or sent as soon as a copy to
    or from it was queued. What a step computes needs no such order: its blocks are named when its result was read.
    """

    def __init__(self, device: torch.device, streams: Any, copied: Callable[[], Any]) -> None:
        """`copied()`: the event behind the last copies of blocks, or None."""
        self._streams = streams
        self._copied = copied
        self._stream = None if streams is None else streams.Stream(device)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within, work is queued here, behind the copies of blocks."""
        if self._stream is None:
            yield
            return
        event = self._copied()
        if event is not None:
            self._stream.wait_event(event)
        with self._streams.stream(self._stream):
            yield

    def synchronize(self) -> None:
        """Waits until everything queued here is done."""
        if self._stream is not None:
            self._stream.synchronize()


def _done() -> None:
    """The wait on a CPU: results are there when a call returns."""
