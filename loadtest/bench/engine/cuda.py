"""`python -m loadtest.bench engine-cuda`: an 8B-shaped engine's steps on a GPU beside limits of the same run.

Weights are drawn on the device: speed does not depend on their values. Decode steps run as the engine runs them, each
launched while the one before computes. A step's limit is that of its products with the weights plus that of attention:
each reads what it needs once, at the bandwidth of a large copy, or computes at the rate of a large matrix product,
whichever takes longer. Steps whose KV the device cannot hold are left out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated

import torch

from loadtest.bench.kernels.limits import Limits, cuda_device, graph_clock, limit_results, measure_limits
from loadtest.rig.command_line import Option, Out
from loadtest.rig.results import Report, Result
from loadtest.rig.results import verdicts as goal_verdicts
from shared.engine.plan import PlannedSequence, SampleSpec, StepPlan
from shared.engine.runner.profile_run import measure_budget
from shared.engine.runner.runner import Runner, RunnerConfig
from shared.engine.sampling_params import SamplingParams
from shared.errors import ConfigError
from shared.kernels.pool_view import dtype_name
from shared.kv.layout import BlockLayout
from shared.model.decoder import Decoder
from shared.model.families.registry import parse_config
from shared.model.layers.parameters import DecoderParameters
from shared.model.random_weights import random_decoder
from shared.model.weights.plan import AS_STORED, QUANTIZATIONS

BLOCK_SIZE = 16
LLAMA_8B: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 16_384,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class Step:
    """`batch` sequences that compute `count` tokens each behind `start` cached ones."""

    batch: int
    start: int
    count: int
    goal: float | None = None
    """Share of the limit that an H200 is to reach."""

    @property
    def name(self) -> str:
        """As the report has it."""
        return f"decode {self.batch} at {self.start}" if self.count == 1 else f"prefill {self.count}"

    @property
    def num_blocks(self) -> int:
        """Blocks of each sequence."""
        return -(-(self.start + self.count) // BLOCK_SIZE)

    @property
    def num_kv_tokens(self) -> int:
        """Slots of whole blocks that it takes."""
        return self.batch * self.num_blocks * BLOCK_SIZE

    def plan(self, vocab_size: int, *, pending: bool = False) -> StepPlan:
        """Each sequence with blocks of its own; `pending` decodes what the step before sampled."""
        spec = SampleSpec(SamplingParams(temperature=0.0, seed=0, max_tokens=1), self.start + self.count)
        return StepPlan(
            tuple(
                PlannedSequence(
                    f"s{i}",
                    (0,) if pending else tuple((7 * i + 13 * j) % vocab_size for j in range(self.count)),
                    self.start,
                    tuple(range(i * self.num_blocks, (i + 1) * self.num_blocks)),
                    self.start + self.count,
                    (spec,),
                    i if pending else None,
                )
                for i in range(self.batch)
            )
        )


def in_groups(plan: StepPlan, layout: BlockLayout) -> StepPlan:
    """The plan for blocks of this layout: as many where there is one block as the layout has groups."""
    size = layout.groups.size
    return StepPlan(
        tuple(
            item._replace(block_ids=tuple(block * size + group for block in item.block_ids for group in range(size)))
            for item in plan.sequences
        )
    )


STEPS = (
    *(Step(batch, 2048, 1, goal) for batch, goal in ((1, 0.75), (32, 0.87), (256, 0.85))),
    Step(1, 0, 2048),
    Step(1, 0, 8192, goal=0.80),
    *(Step(batch, 2048, 1) for batch in (8, 64)),
    Step(1, 0, 512),
    *(Step(batch, 256, 1) for batch in (1, 8, 32, 64, 256)),
)
"""What is most worth knowing first."""
HOST_GOAL = 10.0
"""Percent of a decode step that Python may take."""


class EngineBench:
    """One model over one pool, ready for the given steps."""

    def __init__(self, decoder: Decoder, steps: Sequence[Step]) -> None:
        self.config = config = decoder.config
        dtype = dtype_name(decoder.dtype)
        self.layout = config.block_layout(BLOCK_SIZE, dtype)
        num_blocks = max(step.batch * step.num_blocks for step in steps)
        longest = max(step.num_blocks for step in steps) * BLOCK_SIZE
        batch = max(step.batch for step in steps)
        most_tokens = max(step.batch * step.count for step in steps)
        settings = RunnerConfig(batch, longest, most_tokens, piecewise_tokens=None)  # as a worker has it
        self.runner = Runner(decoder, self.layout, num_blocks, settings)
        self.runner.pool.rows.normal_()
        self.runner.start()
        views = DecoderParameters.allocate(config, decoder.dtype, "meta").checkpoint_views(config)
        shapes = {name: view.shape for name, view in views.items()}
        self.num_weights = sum(
            shape.numel() for name, shape in shapes.items() if len(shape) == 2 and "embed" not in name
        )
        """Elements that every token is multiplied by."""
        self.weight_bytes = decoder.projection_bytes

    def measure(self, step: Step, limits: Limits, repeats: int) -> list[Result]:
        """The step's rate beside its limit, and for a decode step what the host took of it."""
        is_decode = step.count == 1
        plans = [step.plan(self.config.vocab_size, pending=pending) for pending in (False, is_decode)]
        pending = self.runner.launch(plans[0])
        steps, launches = [], []
        begin = time.perf_counter()
        for _ in range(repeats + 3):
            launched = time.perf_counter()
            following = self.runner.launch(plans[1])
            launches.append(time.perf_counter() - launched)
            pending.result()
            pending = following
            steps.append(time.perf_counter() - begin)
            begin = time.perf_counter()
        pending.result()
        seconds, host_s = median(steps[3:]), median(launches[3:])  # the first compile, or fill the queue
        value, limit = step.batch * step.count / seconds, step.batch * step.count / self.limit_s(step, limits)
        results = [Result(step.name, value, "tok/s", limit, value / limit)]
        if is_decode:
            results.append(Result(f"{step.name}, host time", 100 * host_s / seconds, "% of the step"))
        return results

    def limit_s(self, step: Step, limits: Limits) -> float:
        """Seconds that the limits of the device allow for a step."""
        config, num_tokens = self.config, step.batch * step.count
        head = config.vocab_size * config.hidden_size  # needed for each sequence's last token alone
        products = 2 * ((self.num_weights - head) * num_tokens + head * step.batch)
        pairs = step.batch * step.count * (step.start + (step.count + 1) / 2)  # of a token with one it sees
        attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
        kv_bytes = step.batch * (step.start + step.count) * self.layout.block_bytes / BLOCK_SIZE
        return limits.least_s(self.weight_bytes, products) + limits.least_s(kv_bytes, attention)


def fitting(steps: Sequence[Step], num_blocks: int) -> list[Step]:
    """The steps whose KV a pool of that many blocks holds; prints which do not fit."""
    kept = [step for step in steps if step.batch * step.num_blocks <= num_blocks]
    for step in steps:
        if step not in kept:
            needed = step.batch * step.num_blocks
            print(f"{step.name} is left out: its KV of {needed} blocks does not fit in memory, {num_blocks} do")
    return kept


def room(decoder: Decoder, steps: Sequence[Step]) -> int:
    """Blocks that the device has room for beside the weights and the largest of these steps, as for a worker."""
    layout = decoder.config.block_layout(BLOCK_SIZE, dtype_name(decoder.dtype))
    most_tokens = max(step.batch * step.count for step in steps)
    longest = max(step.start + step.count for step in steps)
    batch = max(step.batch for step in steps)
    graphs = RunnerConfig(batch, longest, most_tokens, piecewise_tokens=None)
    return measure_budget(decoder, layout, batch, most_tokens, longest, graphs=graphs).num_blocks(layout)


def verdicts(steps: Sequence[Step], results: Sequence[Result]) -> list[str]:
    """A line for each goal that was measured."""
    found = {result.name: result for result in results}
    lines = goal_verdicts({step.name: step.goal for step in steps if step.goal is not None}, results)
    for step in steps:
        host = found.get(f"{step.name}, host time")
        if step.batch == 32 and host is not None:
            met = "met" if host.value < HOST_GOAL else "missed"
            lines.append(f"{met}: {host.name}: {host.value:.1f} %, the goal is below {HOST_GOAL:g} %")
    return lines


def main(
    repeats: Annotated[int, Option()] = 30,
    quantization: Annotated[str, Option(f"what weights are rounded to: {', '.join(QUANTIZATIONS)}")] = AS_STORED,
    out: Out = None,
) -> None:
    """Measure an 8B-shaped engine's steps on a GPU beside limits measured in the same run."""
    kind = next((known for known in QUANTIZATIONS if known == quantization), None)
    if kind is None:
        known = ", ".join(QUANTIZATIONS)
        raise ConfigError(
            f"quantization must be one of {known}, not {quantization!r}", field="quantization", limit=known
        )
    device = cuda_device("this benchmark", "; without one: make bench-engine")
    report = Report(out)
    with torch.inference_mode():
        limits = measure_limits(graph_clock, device)
        torch.cuda.empty_cache()
        decoder = random_decoder(parse_config(LLAMA_8B), torch.bfloat16, device, quantization=kind)
        print(f"weights of {decoder.projection_bytes / 1e9:.2f} GB", flush=True)
        steps = fitting(STEPS, room(decoder, STEPS))
        bench = EngineBench(decoder, steps)
        report.add(limit_results(limits))
        for step in steps:
            report.add(bench.measure(step, limits, repeats))
            print(f"{step.name}: {report.results[-1 if step.count > 1 else -2].value:.0f} tok/s", flush=True)
    report.print()
    print("\n".join(["", *verdicts(steps, report.results)]))
