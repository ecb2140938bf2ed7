"""Which dtype a bf16 checkpoint is computed in on a CPU: the one whose products take less time there.

Timed are the kernels that will serve, in CPU time of one thread, so that other work on the machine counts little: a
product of PROMPT_ROWS rows, which arithmetic bounds, and one of a single row, which memory bounds.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from shared.errors import ConfigError
from shared.kernels.backend import Kernels
from shared.kernels.backends.registry import AUTO, choose_kernels
from shared.kernels.cpu.build import cache_folder, prebuilt_names
from shared.kernels.cpu.isa import processor_name
from shared.kernels.pool_view import dtype_name

SIZE = 2048
"""Rows and columns of the timed weight: 16 MiB in fp32, more than most processors' own caches."""
PROMPT_ROWS = 64
REPEATS = 3
WORTH = 1.05
"""bf16 is kept until it takes this much longer: a block of its KV has half the bytes."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProductTimes:
    """CPU seconds of the two products."""

    prompt_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The times of both dtypes with one kind of kernels."""

    bf16: ProductTimes
    fp32: ProductTimes

    @property
    def prompt(self) -> float:
        """bf16's time over fp32's, for prompts."""
        return self.bf16.prompt_s / self.fp32.prompt_s

    @property
    def decode(self) -> float:
        """bf16's time over fp32's, for one row."""
        return self.bf16.decode_s / self.fp32.decode_s

    @property
    def faster(self) -> torch.dtype:
        """bf16 unless it is slower: prompts and answers count alike, by the geometric mean of both ratios."""
        return torch.bfloat16 if math.sqrt(self.prompt * self.decode) <= WORTH else torch.float32

    @classmethod
    def parse(cls, text: str) -> Comparison:
        """The comparison that was written as this text; raises ValueError, KeyError or TypeError for any other text."""
        content = json.loads(text)
        times = {name: ProductTimes(**content[name]) for name in ("bf16", "fp32")}
        if not all(0 < value < math.inf for each in times.values() for value in asdict(each).values()):
            raise ValueError("a time is not positive")
        return cls(**times)

    @property
    def text(self) -> str:
        """The timings as JSON."""
        return json.dumps(asdict(self))


def faster_dtype(wanted: str = AUTO, folder: Path | None = None) -> torch.dtype:
    """float32 or bfloat16, by times of the backend `wanted` on the CPU. Blocking: half a second the first
    time.

    Times are kept in `folder` (default: beside the compiled kernels), so that all workers of a machine choose alike;
    those that start together wait for one of them. Raises ConfigError where that backend cannot serve.
    """
    fp32 = choose_kernels("cpu", torch.float32, wanted)
    try:
        bf16 = choose_kernels("cpu", torch.bfloat16, fp32.name)
    except ConfigError as error:
        _log.info("dtype auto: float32, since %s", error.message)
        return torch.float32
    found = kept(
        folder or cache_folder(),
        fp32.name,
        lambda: Comparison(time_products(bf16, torch.bfloat16), time_products(fp32, torch.float32)),
    )
    _log.info(
        "dtype auto: %s with kernels %s, where bfloat16 takes %.2f of float32's time for prompts and %.2f for a token",
        dtype_name(found.faster),
        fp32.name,
        found.prompt,
        found.decode,
    )
    return found.faster


def kept(folder: Path, kernels: str, measure: Callable[[], Comparison]) -> Comparison:
    """The times in `folder` for this processor, torch and kernels, measured where there are none yet."""
    key = "\n".join((processor_name(), torch.__version__, kernels, *prebuilt_names()))
    path = folder / f"dtype-{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.json"
    with contextlib.ExitStack() as stack:
        # A folder that cannot be written is no reason not to start: each worker then measures by itself.
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context((folder / "dtype.lock").open("w")), fcntl.LOCK_EX)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return Comparison.parse(path.read_text())
        measured = measure()
        with contextlib.suppress(OSError):
            path.write_text(measured.text)
    return measured


def time_products(kernels: Kernels, dtype: torch.dtype) -> ProductTimes:
    """Times these kernels on one thread, the best of REPEATS."""
    # 64 rows again and again: what the numbers are matters only to how bf16 ones are packed.
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(64, SIZE, generator=generator) * 0.02).to(dtype).repeat(SIZE // 64, 1)
    x = torch.randn(PROMPT_ROWS, SIZE, generator=generator).to(dtype)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with torch.inference_mode():
            linear = kernels.make_linear(weight, None, own=True)
            return ProductTimes(_best(linear.forward, x), _best(linear.forward, x[:1]))
    finally:
        torch.set_num_threads(threads)


def _best(product: Callable[[Tensor], Tensor], x: Tensor) -> float:
    product(x)  # warms up
    times = []
    for _ in range(REPEATS):
        start = time.thread_time()
        product(x)
        times.append(time.thread_time() - start)
    return max(min(times), 1e-9)
