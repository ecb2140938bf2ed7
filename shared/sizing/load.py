"""The load that hardware is sized for, and the hardware it may use."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shared.errors import ConfigError
from shared.sizing.adapter_memory import adapter_bytes
from shared.sizing.devices import H200, GpuShape
from shared.sizing.roofline import step_times
from shared.sizing.shapes import BYTES_PER_VALUE, ModelShape
from shared.sizing.spread import MOST_RANKS, Spread
from shared.sizing.step_time import StepTimes


@dataclass(frozen=True, slots=True)
class Load:
    """Requests and their targets. Raises ConfigError where they contradict each other."""

    context: int
    """Most tokens of a sequence, prompt and answer: memory is kept for that many."""
    concurrency: int
    """Sequences at once on decode workers."""
    prompt_len: int
    """Mean tokens; time is reckoned with it."""
    output_len: int
    ttft_s: float
    tpot_s: float
    rate: float
    """Requests/s."""
    late_share: float = 0.05
    """Share of the requests that may miss the TTFT target."""

    def __post_init__(self) -> None:
        if self.prompt_len + self.output_len > self.context:
            raise ConfigError(
                f"--prompt {self.prompt_len} and --output {self.output_len} tokens do not fit --context {self.context}",
                field="context",
                limit=self.prompt_len + self.output_len,
                value=self.context,
            )

    @staticmethod
    def rate_of(concurrency: int, output_len: int, ttft_s: float, tpot_s: float) -> float:
        """The requests/s that keep `concurrency` of them in the system where all just meet their targets (Little)."""
        return concurrency / (ttft_s + output_len * tpot_s)


@dataclass(frozen=True, slots=True)
class Hardware:
    """GPUs of each pool, and how the model lies on them."""

    prefill_gpu: GpuShape = H200
    decode_gpu: GpuShape = H200
    prefill_name: str = "H200"
    decode_name: str = "H200"
    weights: str = "bf16"
    kv_dtype: str = "bf16"
    memory_share: float = 0.9
    """Share of a GPU's memory for weights and KV; the rest is for activations and the runtime."""
    max_tensor: int = 8
    """Most GPUs that split a layer."""
    max_pipeline: int = 1
    """Most stages of a worker: its GPUs are at most that many times `max_tensor`."""
    node_devices: int = 8
    """GPUs of a machine, which reach each other without the network."""
    overlap: float | None = None
    """Share, from 0 to 1, of the shorter one of reading weights and products that costs a step no time; None = not
    known, and taken as 1."""
    measured: StepTimes | None = None
    """Step times of a worker of one GPU, of either kind; None = by arithmetic, as those of several GPUs always are."""
    draft: ModelShape | None = None
    """A draft model that each worker that decodes has in 16 bit on one of its GPUs, with the KV of as many tokens."""
    has_head: bool = False
    """Whether all workers, of one rank each then, have the checkpoint's layer that guesses, and its KV."""
    adapter_slots: int = 0
    """LoRA adapters that lie ready on each worker."""
    adapter_copies: int = 0
    """LoRA adapters of which the host of each worker keeps a copy."""
    adapter_rank: int = 16
    """Rank of each of them, which adds to every projection."""
    prefill_price: float | None = None
    """Price of one GPU and hour, in any currency."""
    decode_price: float | None = None

    def tensor_sizes(self, model: ModelShape) -> list[int]:
        """Powers of two that divide the heads, and the parts of states, up to `max_tensor`."""
        divided = model.num_heads if model.states is None else math.gcd(model.num_heads, model.states.parts)
        return [1 << i for i in range(10) if 1 << i <= self.max_tensor and divided % (1 << i) == 0]

    def adapter_bytes(self, model: ModelShape) -> int:
        """Memory of a worker's adapters, on all of its GPUs together."""
        return self.adapter_slots * self._one_adapter_bytes(model)

    def adapter_host_bytes(self, model: ModelShape) -> int:
        """Memory of the host for copies of a worker's adapters."""
        return self.adapter_copies * self._one_adapter_bytes(model)

    def _one_adapter_bytes(self, model: ModelShape) -> int:
        kept_as = "fp32" if self.weights == "fp32" else "bf16"
        return adapter_bytes(model.adapter_values, self.adapter_rank, BYTES_PER_VALUE[kept_as])

    def step_times(self, model: ModelShape, gpu: GpuShape, spread: Spread) -> StepTimes:
        """Step times of a worker of these ranks."""
        if self.measured is not None and spread.num_ranks == 1:
            return self.measured
        overlap = 1.0 if self.overlap is None else self.overlap
        return step_times(model, gpu, spread, self.weights, self.kv_dtype, self.node_devices, overlap)

    def spreads(self, model: ModelShape) -> list[Spread]:
        """What a worker may be, fewest GPUs first: stages and ranks of a stage are powers of two. Experts are split as
        everything is: that no rank reads more of them than another one is never slower here."""
        if self.has_head:
            return [Spread()]
        most = min(self.max_pipeline, model.num_layers)
        stages = [1 << i for i in range(10) if 1 << i <= most]
        found = [Spread(t, p) for p in stages for t in self.tensor_sizes(model) if t * p <= MOST_RANKS]
        return sorted(found, key=lambda spread: (spread.num_ranks, spread.pipeline))


@dataclass(frozen=True, slots=True)
class PoolFit:
    """One pool that carries the load."""

    role: str
    gpu: str
    workers: int
    spread: Spread
    """How each worker is split over GPUs."""
    weight_bytes: float
    """Bytes of the weights on a worker's GPU that has the most."""
    kv_bytes_per_token: float
    """Bytes of a token's KV on that GPU."""
    kv_tokens: int
    """Tokens whose KV one worker holds."""
    sequences: int
    """Most sequences on one worker."""
    ttft_s: float | None = None
    """TTFT of the mean prompt on an idle worker."""
    tpot_s: float | None = None
    """TPOT at the largest number of sequences on one worker."""
    busy: float | None = None
    """Share of the time in which a worker computes prompts."""
    limits: list[str] = field(default_factory=list)
    """The limits that set the pools' sizes, in words."""

    @property
    def gpus_each(self) -> int:
        """GPUs of a worker."""
        return self.spread.num_ranks

    @property
    def gpus(self) -> int:
        """GPUs of the pool."""
        return self.workers * self.gpus_each
