"""A noisy neighbour: a process outside the measured cluster that computes long prompts on one core.

Workers on one machine share its memory bandwidth and caches. The neighbour's effect on the answers of a cluster is the
machine's; the further effect of a long prompt within the cluster is the system's.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Annotated

import psutil

from loadtest.rig.command_line import Option, run
from loadtest.rig.processes import module_process, pinned
from shared.child_process import ChildProcess
from shared.errors import Internal
from shared.process import ready_event


def pin_all_but(workers: Collection[int], cores: Collection[int]) -> None:
    """Pins this process and its descendants to `cores`, except the processes of `workers` and their descendants.

    Otherwise the router and the client would run on any free core: next to an idle prefill worker on its core, next to
    a busy one also on the decode worker's. The figure would then describe the machine, not the system.
    """
    kept = set(workers)
    for worker in workers:
        with suppress(psutil.NoSuchProcess):
            kept |= {child.pid for child in psutil.Process(worker).children(recursive=True)}
    me = psutil.Process()
    for pid in (me.pid, *(child.pid for child in me.children(recursive=True))):
        if pid in kept:
            continue
        with suppress(FileNotFoundError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with suppress(ProcessLookupError):  # it has ended
                    os.sched_setaffinity(int(thread.name), cores)


_NICENESS = 5
"""The same niceness as the load tests' workers."""


class NoisyNeighbour:
    """The process, stopped except within `busy()`."""

    def __init__(self, process: ChildProcess) -> None:
        """The caller starts and ends it."""
        self._process = process
        process.send_signal(signal.SIGSTOP)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @contextmanager
    def busy(self) -> Iterator[None]:
        """A context in which the process computes. Raises Internal if it has ended."""
        self._process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGSTOP)
        if self._process.returncode is not None:
            raise Internal(f"the noisy neighbour ended with {self._process.exit_text()}")


@asynccontextmanager
async def noisy_neighbour(
    model: Path, chunk_len: int, num_tokens: int, core: int, logs: Path
) -> AsyncIterator[NoisyNeighbour]:
    """Prompts of `num_tokens` tokens in chunks, one after the other, by one thread on `core`; its log goes to the
    folder `logs`. Begins when the model is loaded and one prompt was computed; raises Internal if that fails."""
    flags = {"model": model, "chunk": chunk_len, "tokens": num_tokens}
    process = module_process("noisy_neighbour", "loadtest.bench.long_prompt.noisy_neighbour", logs, flags)
    async with pinned(process, [core]):
        yield NoisyNeighbour(process)


def main(
    model: Annotated[Path, Option("the model's folder")],
    chunk: Annotated[int, Option("tokens of a step")],
    tokens: Annotated[int, Option("tokens of a prompt")],
) -> None:
    """Computes prompts until it is killed; ready after the first one."""
    os.nice(_NICENESS)
    # Imported here, so that all of its threads get the niceness.
    import torch

    from loadtest.bench.engine.cpu import Bench
    from shared.kernels.backends.registry import AUTO

    torch.set_num_threads(1)
    bench = Bench(model, torch.float32, AUTO, tokens)
    chunks = [bench.plan(1, start, chunk) for start in range(0, tokens, chunk)]
    is_ready = False
    with torch.inference_mode():
        while True:
            for plan in chunks:
                bench.runner.execute(plan)
            if not is_ready:
                ready_event("", {})
                is_ready = True


if __name__ == "__main__":
    run(main)
