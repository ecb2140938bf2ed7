"""GPU utilisation where NVML answers, and none where it is missing, refuses or falls silent."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from services.worker.telemetry.gpu_use import GpuUse


class NVMLError(Exception):
    pass


class Library:
    """The calls of NVIDIA's binding that are used, over two GPUs."""

    NVMLError = NVMLError

    def __init__(self, *, has_driver: bool = True) -> None:
        self.has_driver = has_driver
        self.is_lost = False

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.has_driver:
            raise NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> int:  # noqa: N802
        return {b"GPU-a": 3, b"GPU-b": 7}[uuid]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:  # noqa: N802
        if self.is_lost:
            raise NVMLError("GPU is lost")
        return SimpleNamespace(gpu=10 * handle, memory=1)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=handle << 30)


def read(monkeypatch: pytest.MonkeyPatch, library: object, uuids: dict[str, str]) -> GpuUse:
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return GpuUse(uuids)


def test_each_gpu_has_its_share_of_time_and_its_memory(monkeypatch):
    library = Library()
    use = read(monkeypatch, library, {"0": "GPU-b", "1": "GPU-a"})
    assert use.utilisation() == {"0": 0.7, "1": 0.3}
    assert use.used_bytes() == {"0": 7 << 30, "1": 3 << 30}
    library.is_lost = True
    assert use.utilisation() == {}


@pytest.mark.parametrize("library", [None, Library(has_driver=False)], ids=["no binding", "no driver"])
def test_without_nvml_there_are_no_samples(monkeypatch, library):
    use = read(monkeypatch, library, {"0": "GPU-a"})
    assert use.utilisation() == use.used_bytes() == {}


def test_a_gpu_that_nvml_does_not_know_has_no_samples(monkeypatch):
    assert read(monkeypatch, Library(), {"0": "MIG-x"}).utilisation() == {}


def test_a_worker_on_a_cpu_does_not_look_for_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuUse.of(("cpu",)).utilisation() == {}
