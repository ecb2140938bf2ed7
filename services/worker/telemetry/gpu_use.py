"""What NVML knows of a worker's GPUs, where NVIDIA's library and its Python binding are there; nothing elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

logger = logging.getLogger(__name__)


class GpuUse:
    """Reads NVML when the metrics page is asked for. From any thread."""

    def __init__(self, uuids: Mapping[str, str]) -> None:
        """`uuids`: NVML's, such as `GPU-…`, by the name that samples have. A GPU that NVML does not know, as a slice of
        MIG, has no sample."""
        self._nvml: Any = None
        self._handles: dict[str, Any] = {}
        if not uuids:
            return
        try:
            pynvml: Any = import_module("pynvml")  # of the package nvidia-ml-py, which nothing requires
            pynvml.nvmlInit()
            self._handles = {name: pynvml.nvmlDeviceGetHandleByUUID(uuid.encode()) for name, uuid in uuids.items()}
            self._nvml = pynvml
        except Exception as error:  # no binding, no driver, a slice: whatever it is, the worker serves without
            logger.info("no GPU utilisation is reported: %s: %s", type(error).__name__, error)

    @classmethod
    def of(cls, devices: Sequence[str]) -> GpuUse:
        """The meters of torch's devices, such as `cuda:0`; others have none."""
        on_gpu = [torch.device(device).index or 0 for device in devices if device.startswith("cuda")]
        found = {str(index): getattr(torch.cuda.get_device_properties(index), "uuid", None) for index in on_gpu}
        return cls({name: f"GPU-{uuid}" for name, uuid in found.items() if uuid is not None})

    def utilisation(self) -> Mapping[str, float]:
        """Share of NVML's last sample period in which a kernel ran, in [0, 1], by GPU."""
        return self._each(lambda handle: self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)

    def used_bytes(self) -> Mapping[str, float]:
        """Memory of each GPU in use by all processes, bytes."""
        return self._each(lambda handle: self._nvml.nvmlDeviceGetMemoryInfo(handle).used)

    def _each(self, read: Any) -> Mapping[str, float]:
        if self._nvml is None:
            return {}
        try:
            return {name: float(read(handle)) for name, handle in self._handles.items()}
        except self._nvml.NVMLError as error:
            logger.warning("NVML: %s", error)
            return {}
