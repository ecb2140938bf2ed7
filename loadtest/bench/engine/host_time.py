"""`python -m loadtest.bench host-time`: what an engine step costs Python on the engine's thread, without a GPU.

On a GPU the device computes while the host plans, fills and launches the next step, and no step is shorter than that.
Here the engine is the real one, and its model computes nothing: the time of a step is the
host's, apart from what launching the model's kernels would add where no graph is replayed. It is the thread's CPU time,
so that other processes do not count.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from statistics import median
from typing import Annotated

import torch
from torch import Tensor

from loadtest.figures import Result, machine, table, write
from loadtest.plain_options import Option, Out, integers
from shared.engine.engine import Engine
from shared.engine.messages import AddSequence, EngineDied, Event, StepOutput
from shared.engine.plan import StepPlan, StepResult
from shared.engine.runner.block_access import BlockAccess
from shared.engine.runner.runner import Runner, RunnerConfig
from shared.engine.sampling_params import SamplingParams
from shared.engine.scheduler.config import SchedulerConfig
from shared.engine.scheduler.scheduler import Scheduler
from shared.engine.sequence import EngineSequence, Goal
from shared.engine.step_runner import LaunchedStep
from shared.kernels.batch import AttentionBatch
from shared.kernels.torch_backend import TorchKernels
from shared.kv.pool import BlockPool
from shared.model.config import ModelConfig
from shared.model.decoder import Decoder
from shared.model.random_weights import random_decoder

BLOCK_SIZE = 16
VOCAB_SIZE = 512
CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "tie_word_embeddings": True,
}
_STEP_TIMEOUT_S = 60.0


class NoModel:
    """Stands where a decoder stands, and gives the same logits for every row."""

    num_stages, is_split = 1, False

    def __init__(self, decoder: Decoder, most_rows: int) -> None:
        self.config, self.dtype, self.device = decoder.config, decoder.dtype, decoder.device
        self.rotary, self.kernels = decoder.rotary, NoSampling()
        self._logits = torch.zeros(most_rows, VOCAB_SIZE)

    def forward(
        self,
        token_ids: Tensor,  # noqa: ARG002
        positions: Tensor,  # noqa: ARG002
        kv_blocks: Tensor,  # noqa: ARG002
        batch: AttentionBatch,  # noqa: ARG002
        logit_rows: Tensor,
        rope_lengths: Tensor | None = None,  # noqa: ARG002
        num_candidates: int = 0,  # noqa: ARG002
    ) -> Tensor:
        """[num_logits, vocab_size] fp32."""
        return self._logits[: logit_rows.shape[0]]


class NoSampling(TorchKernels):
    """Samples nothing: on a GPU that is a kernel, within the graph of a decode step."""

    def sample_tokens(self, logits: Tensor, rows: object) -> Tensor:  # noqa: ARG002
        """[num_rows] int64."""
        return torch.full((logits.shape[0],), 7)


@dataclass(frozen=True, slots=True)
class HostTime:
    """CPU milliseconds of one step on the engine's thread."""

    total: float
    launch: float
    """Of these, in `Runner.launch`: inputs, and the calls that queue work."""
    result: float
    """Of these, in reading the result."""


class TimedRunner:
    """A runner whose calls on the engine's thread are timed and counted."""

    is_async = True

    def __init__(self, runner: Runner) -> None:
        self.blocks: BlockAccess = runner.blocks
        self._runner = runner
        self._launch = self._result = 0.0
        self._num_steps = 0

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """See `StepRunner`."""
        begin = time.thread_time()
        step = self._runner.launch(plan)
        self._launch += time.thread_time() - begin
        return _TimedStep(step, self._add_result)

    def checksums(self, block_ids: list[int]) -> list[int]:
        """See `StepRunner`."""
        return self._runner.checksums(block_ids)

    def mean(self, total: float) -> HostTime:
        """Of the steps since the last call, which took `total` milliseconds altogether."""
        parts = (total, 1e3 * self._launch, 1e3 * self._result)
        mean = HostTime(*(part / max(1, self._num_steps) for part in parts))
        self._launch = self._result = 0.0
        self._num_steps = 0
        return mean

    def _add_result(self, seconds: float) -> None:
        self._result += seconds
        self._num_steps += 1


@dataclass(frozen=True, slots=True)
class _TimedStep:
    step: LaunchedStep
    add: Callable[[float], None]

    def result(self) -> StepResult:
        begin = time.thread_time()
        result = self.step.result()
        self.add(time.thread_time() - begin)
        return result


class HostBench:
    """An engine as it is on a GPU: static decode steps, each launched before the result of the one before is taken."""

    def __init__(self, num_seqs: int, max_seq_len: int, chunk: int) -> None:
        """Room for `num_seqs` sequences of `max_seq_len` tokens."""
        blocks = (num_seqs + 1) * (max_seq_len // BLOCK_SIZE + 1)
        config = ModelConfig.parse(CONFIG)
        decoder = NoModel(random_decoder(config, torch.float32, "cpu", kernels="torch"), num_seqs)
        layout = config.block_layout(BLOCK_SIZE, "float32")
        static = RunnerConfig(num_seqs, max_seq_len, chunk, static_decode=True)
        self._runner = TimedRunner(Runner(decoder, layout, blocks, static))  # type: ignore[arg-type]
        scheduler = Scheduler(BlockPool(blocks, BLOCK_SIZE), SchedulerConfig(num_seqs, chunk, output_quantile=0.75))
        self._engine = Engine(scheduler, self._runner, self._on_event, ahead=True)
        self._steps: queue.SimpleQueue[tuple[int, HostTime] | BaseException] = queue.SimpleQueue()
        self._before = 0.0

    def steps(self, prompts: Sequence[Sequence[int]], goal: Goal, max_tokens: int) -> list[tuple[int, HostTime]]:
        """Runs these prompts together; for each step that began or produced something, the tokens that it produced and
        the mean host time of the steps since the one before."""
        sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=max_tokens, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            room = len(prompt) + max_tokens
            root = number.to_bytes(16, "little")
            sequence = EngineSequence(
                f"s{number}", list(prompt), len(prompt), sampling, root, goal, room, frozenset(), frozenset()
            )
            self._engine.submit(AddSequence(sequence))
        self._engine.start()
        left = len(prompts) * (1 if goal is Goal.FIRST_TOKEN else max_tokens)
        found: list[tuple[int, HostTime]] = []
        while left:
            step = self._steps.get(timeout=_STEP_TIMEOUT_S)
            if isinstance(step, BaseException):
                raise step
            found.append(step)
            left -= step[0]
        self._engine.close()
        return found

    def _on_event(self, event: Event) -> None:
        """On the engine's thread."""
        if isinstance(event, EngineDied):
            self._steps.put(event.error)
        if isinstance(event, StepOutput):
            now = 1e3 * time.thread_time()
            self._steps.put((len(event.tokens), self._runner.mean(now - self._before)))
            self._before = now


def decode_time(num_seqs: int, context: int, repeats: int) -> HostTime:
    """Median of steps in which `num_seqs` sequences with `context` tokens decode."""
    chunk = 8192
    num_tokens = repeats + 2 * -(-num_seqs * context // chunk)  # the first decode while the last are being computed
    bench = HostBench(num_seqs, context + num_tokens + BLOCK_SIZE, chunk)
    steps = bench.steps([_prompt(number, context) for number in range(num_seqs)], Goal.COMPLETION, num_tokens)
    whole = [times for num_tokens, times in steps if num_tokens == num_seqs]
    return HostTime(*(median(column) for column in zip(*map(astuple, whole), strict=True)))


def prompt_time(chunk: int, repeats: int) -> HostTime:
    """Mean of the steps that compute a prompt of `repeats` chunks, as on a prefill worker; the first one, which also
    hashes the prompt and begins with an engine's start, is left out."""
    bench = HostBench(1, chunk * repeats, chunk)
    (_, _), (_, others) = bench.steps([_prompt(0, chunk * repeats)], Goal.FIRST_TOKEN, 1)
    return others


def _prompt(number: int, num_tokens: int) -> list[int]:
    return [(number * 31 + place * 7) % VOCAB_SIZE for place in range(num_tokens)]


def results_of(name: str, found: HostTime) -> list[Result]:
    """The whole step, then its parts."""
    rest = found.total - found.launch - found.result
    return [
        Result(name, found.total, "ms"),
        Result(f"{name}: scheduler and events", rest, "ms"),
        Result(f"{name}: launch", found.launch, "ms"),
        Result(f"{name}: result", found.result, "ms"),
    ]


def main(
    batch: Annotated[str, Option("sequences that decode")] = "64 256",
    context: Annotated[int, Option("cached tokens of each of them")] = 2048,
    chunk: Annotated[int, Option("tokens of a prompt's chunk")] = 8192,
    repeats: Annotated[int, Option()] = 60,
    out: Out = None,
) -> None:
    """Measure what a step costs the engine's thread, the model's computation left out."""
    torch.set_num_threads(1)
    results: list[Result] = []
    with torch.inference_mode():
        for num_seqs in integers(batch, "batch"):
            results += results_of(f"decode {num_seqs} at {context}", decode_time(num_seqs, context, repeats))
        results += results_of(f"prefill {chunk}", prompt_time(chunk, max(3, repeats // 8)))
    print(f"Host time of a step on {machine()}\n")
    print(table(results))
    if out is not None:
        write(out, results)
