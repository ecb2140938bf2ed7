"""Options of `python -m loadtest baseline`: which systems are compared, under which requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from loadtest import options
from loadtest.baseline.design import TIME
from loadtest.baseline.systems import Hardware, System, adaptive, default_splits, disaggregated, speculating
from loadtest.baseline.workloads import OF_GUESSES, WORKLOADS
from loadtest.rig.command_line import Option, choice, integers
from loadtest.rig.models import DEMO, SERVED, SHAPES, write_model
from shared.errors import ConfigError

CHUNKS = f"128 512 {TIME}"
"""Chunk budgets that are tried by default."""
WITHOUT_GUESSES = {
    "prefill": "all workers are collocated",
    "auto": "what is compared with the collocated workers is the same workers with guesses",
    "chunks": f"both have chunks by {TIME}",
    "model": "its answers have to be known; shape says how large it is",
}
"""Options of SystemOptions that a comparison of workers that guess excludes, and why."""


@dataclass(frozen=True)
class SystemOptions:
    """What is compared, and on what it runs."""

    workers: Annotated[int, Option("of every system")] = 2
    prefill: Annotated[str, Option("prefill workers of the fixed splits; default: a quarter, half, three quarters")] = (
        ""
    )
    auto: Annotated[bool | None, Option("measure mode auto too, the default; without it only the fixed systems")] = None
    speculation: Annotated[
        str,
        Option(
            "compare collocated workers with this setting (auto, ngram) to those without guesses, in place of splits "
            "and modes; they serve the model of SHAPE (default 125m) that gives each token its successor. Excludes "
            f"{', '.join(f'--{name}' for name in WITHOUT_GUESSES)}"
        ),
    ] = ""
    chunks: Annotated[
        str,
        Option(f"chunk budgets to try for fixed systems, tokens; {TIME}: as the TPOT target allows; default: {CHUNKS}"),
    ] = ""
    device: Annotated[str, Option("of every worker; timed:FILE: steps take the time in FILE and compute nothing")] = (
        "cpu"
    )
    model: Annotated[Path | None, Option(f"model folder; default: {DEMO.name}")] = None
    shape: Annotated[str, Option(f"random weights of this shape instead: {', '.join(SERVED)}")] = ""
    num_kv_blocks: Annotated[int, Option("KV blocks of each worker")] = 1024

    @property
    def label(self) -> str:
        """What reports call the system."""
        return f"{self.workers} workers, {self.device}, {self._shape or self._folder.name}"

    @property
    def settings(self) -> dict[str, object]:
        """Settings that must be the same where a kept study is continued."""
        common: dict[str, object] = {
            "model": self._shape or str(self._folder),
            "device": self.device,
            "num_kv_blocks": self.num_kv_blocks,
        }
        return common | ({"speculation": self.speculation} if self.speculation else {})

    def splits(self) -> Sequence[System]:
        """The fixed splits, none beside guesses; raises ConfigError (`prefill`)."""
        if self.speculation:
            return []
        splits = integers(self.prefill, "prefill") or default_splits(self.workers)
        if self.workers < 2 or not all(1 <= split < self.workers for split in splits):
            raise ConfigError("workers must be at least 2, and every split leaves one of each role", field="prefill")
        return [disaggregated(split, self.workers) for split in splits]

    def adaptive(self) -> System | None:
        """What is compared with the best fixed system."""
        if self.speculation:
            return speculating(self.workers, self.speculation)
        return None if self.auto is False else adaptive(self.workers)

    def budgets(self) -> Sequence[str]:
        """Chunk budgets to try, tokens or TIME; raises ConfigError (`chunks`)."""
        return [TIME] if self.speculation else _chunks(self.chunks or CHUNKS)

    def check(self) -> None:
        """Raises ConfigError (`speculation`, `shape`, or the option that `speculation` excludes)."""
        if self.speculation:
            choice(self.speculation, "speculation", ("auto", "ngram"))
            for name, why in WITHOUT_GUESSES.items():
                if getattr(self, name) not in ("", None):
                    raise ConfigError(f"{name} and speculation exclude each other: {why}", field=name)
        if self._shape:
            choice(self._shape, "shape", SHAPES if self.speculation else SERVED)

    def hardware(self, scratch: Path) -> Hardware:
        """What all systems run on; a model of a shape is written to `scratch`."""
        return Hardware(self._written(scratch), self.device, self.num_kv_blocks)

    @property
    def _folder(self) -> Path:
        return self.model or DEMO

    @property
    def _shape(self) -> str:
        return self.shape or ("125m" if self.speculation else "")

    def _written(self, scratch: Path) -> Path:
        if self.speculation:
            from loadtest.rig.successors import successors  # here: the command starts without torch

            return successors(self._shape)
        return write_model(scratch / self.shape, SERVED[self.shape], self._folder) if self.shape else self._folder


@dataclass(frozen=True)
class LoadOptions:
    """Which requests the systems get, and how many."""

    workloads: Annotated[
        str,
        Option(f"{', '.join(WORKLOADS)}, or NAME=SPEC; with SPECULATION {', '.join(OF_GUESSES)}; default: all of them"),
    ] = ""
    loads: Annotated[str, Option("shares of the capacity, which is calibrated for each workload")] = "0.7 1.0 1.3"
    rounds: Annotated[int, Option("windows of every system at every load", at_least=1)] = 8
    requests: Annotated[int, Option("least number of requests of a window", at_least=1)] = 50
    window: Annotated[str, Option("least time of a window, in which more requests may come")] = "2s"
    warm_up: Annotated[int, Option("requests of every system before its first round", at_least=0)] = 0
    slo: Annotated[str | None, Option("default: 3 times one request alone, for each workload")] = None
    vocab_size: options.VocabSize = 1000
    seed: options.Seed = None


def _chunks(text: str) -> Sequence[str]:
    chunks = text.replace(",", " ").split()
    if not chunks or not all(chunk == TIME or (chunk.isdecimal() and int(chunk) >= 16) for chunk in chunks):
        raise ConfigError(
            f"chunks={text}: expected token counts of 16 or more or {TIME}, as in 128 512", field="chunks"
        )
    return chunks
