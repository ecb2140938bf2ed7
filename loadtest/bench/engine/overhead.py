"""How much of a decode step the engine spends outside its kernels: scheduling, preparing inputs, launching, events."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

from loadtest.bench.peers.adapter import random_prompt
from loadtest.bench.peers.ours import Ours
from shared.kernels.cpu.launch import CpuOps


@dataclass(frozen=True)
class StepTime:
    """A decode step of the whole engine."""

    step_s: float
    """Median."""
    overhead: float
    """Share of the step outside the C++ kernels, median. Torch's few own ops, such as embedding and argmax, count as
    overhead too, and so does reading the clock at each call."""


class TimedLibrary:
    """Wraps the kernels' library and adds up the time inside its functions."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.total_s = 0.0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)

        def timed(*args: Any) -> None:
            start = time.perf_counter()
            function(*args)
            self.total_s += time.perf_counter() - start

        setattr(self, name, timed)
        return timed


def step_time(engine: Ours, batch: int, context: int, num_steps: int) -> StepTime | None:
    """None where other kernels than the C++ ones serve: their time cannot be measured from outside."""
    kernels = engine.decoder.kernels
    if not isinstance(kernels, CpuOps):
        return None
    generator = random.Random(batch)
    timed = TimedLibrary(kernels.library)
    untimed, kernels.library = kernels.library, timed  # type: ignore[assignment]
    try:
        prompts = [random_prompt(context, generator, engine.decoder.config.vocab_size) for _ in range(batch)]
        steps = engine.decode_steps(prompts, num_steps, lambda: timed.total_s)
    finally:
        kernels.library = untimed
    return StepTime(median(s for s, _ in steps), median(1 - inside / s for s, inside in steps))
