"""`python -m loadtest.bench.long_prompt.neighbour`: computes long prompts on its core and has no part in any cluster.

Workers on one machine share its memory and caches whatever they are told to do. What this process does to the answers
of a cluster next to it is the machine's doing; what a long prompt within the cluster does beyond that is the system's.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from shared.errors import Internal
from shared.parent_death import command_dying_with_parent

_NICENESS = 5
"""That of the load tests' workers."""
_END_S = 10.0


class Neighbour(AbstractContextManager["Neighbour"]):
    """The process, stopped except within `busy()`. Gone with the context."""

    def __init__(self, model: Path, chunk_len: int, num_tokens: int, core: int) -> None:
        """Prompts of `num_tokens` tokens in chunks, one after the other, by one thread on `core`."""
        self._command = [
            sys.executable, "-m", "loadtest.bench.long_prompt.neighbour", "--model", str(model),
            "--chunk", str(chunk_len), "--tokens", str(num_tokens), "--core", str(core),
        ]  # fmt: skip

    def __enter__(self) -> Neighbour:
        """Returns when the model is loaded and one prompt was computed; raises Internal where that fails."""
        self._process = subprocess.Popen(command_dying_with_parent(self._command), stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        try:
            if self._process.stdout.readline() != "ready\n":
                raise Internal("the neighbour of the measured cluster did not start")
        except BaseException:
            self._end()
            raise
        self._process.send_signal(signal.SIGSTOP)
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @contextmanager
    def busy(self) -> Iterator[None]:
        """It computes. Raises Internal where it ended instead."""
        self._process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGSTOP)
        if self._process.poll() is not None:
            raise Internal(f"the neighbour of the measured cluster ended with status {self._process.returncode}")

    def _end(self) -> None:
        self._process.kill()
        self._process.wait(_END_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


def main() -> None:
    """Until it is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    for name in ("chunk", "tokens", "core"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.core})
    os.nice(_NICENESS)
    # Imported here, with the core and the niceness for all of its threads.
    import torch

    from loadtest.bench.engine.cpu import Bench
    from shared.kernels.registry import AUTO

    torch.set_num_threads(1)
    bench = Bench(options.model, torch.float32, AUTO, options.tokens)
    chunks = [bench.plan(1, start, options.chunk) for start in range(0, options.tokens, options.chunk)]
    told = False
    with torch.inference_mode():
        while True:
            for chunk in chunks:
                bench.runner.execute(chunk)
            if not told:
                print("ready", flush=True)
                told = True


if __name__ == "__main__":
    main()
