"""Numbers on their way between host and device, with neither waiting for the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class DeviceLink:
    """On a CUDA device, copies by way of pinned memory in the order of the current stream; on the CPU, hardly a copy.

    Pinned memory comes from torch's cache, which does not hand it out again before the copies that use it are done.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_async = device.type == "cuda"
        """True where work is queued on the device rather than done when a call returns."""

    def empty(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 on the host, to be filled and copied from."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.is_async)

    def send(self, host: Tensor) -> Tensor:
        """A host tensor on the device; on the CPU, the tensor itself."""
        if not self.is_async:
            return host
        return host.pin_memory().to(self.device, non_blocking=True) if host.numel() else host.to(self.device)

    def fetch(self, tensor: Tensor) -> Tensor:
        """A copy on the host; it holds the values once a `mark` made after this call has been waited for."""
        if not self.is_async:
            return tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def mark(self) -> Callable[[], None]:
        """A function that waits until the device has done everything queued so far."""
        if not self.is_async:
            return _done
        event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
        event.record(torch.cuda.current_stream(self.device))
        return event.synchronize


def _done() -> None:
    """What the CPU computed is there when the call returns."""
