"""Whole steps of a runner on meta tensors: what a device would be asked for, and where the host would wait for it.

Triton's kernels are noted instead of launched, and a CUDA graph's capture runs what it would record. Only for the
process whose Triton compiles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared.collectives.interface import Collectives
from shared.collectives.rank_links import RankLinks, Ways
from shared.engine.plan import PlannedSequence, SampleSpec, StepPlan
from shared.engine.runner import runner as runners
from shared.engine.runner.device_link import DeviceLink
from shared.engine.runner.runner import Runner, RunnerConfig
from shared.engine.sampling_params import SamplingParams
from shared.kernels.lora.step import PackedAdapter
from shared.model.config.model_config import ModelConfig
from shared.model.decoder import Decoder
from shared.model.families.registry import load_config, parse_config
from shared.model.layers.head import HeadParameters, listed_rows
from shared.model.layers.parameters import DecoderParameters
from shared.model.random_weights import specs_of
from shared.model.ranks.rank_decoder import RankDecoder
from shared.model.ranks.shard import Degrees, Shard
from shared.model.ranks.shard_weights import allocate_shard
from shared.model.text.tokenizer import Tokenizer
from shared.model.weights.plan import AS_STORED, Quantization
from shared.structure.compiler import StructureCompiler
from shared.structure.structured_output import StructuredOutput, StructureKind
from tests.demo import DEMO

from .comparing import triton_kernels

META = torch.device("meta")
BLOCK_SIZE = 16
MOST_PROGRAMS = 65_535
"""Of a grid's second and third dimension, on CUDA devices."""
COMMON = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
    },
    "qwen3-next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
}
"""The published sizes of Llama-3-8B, Qwen3-30B-A3B, DeepSeek-V3 and Qwen3-Next-80B-A3B, but for the number of layers,
which of them attend, and the vocabulary, which is the demo model's: its tokenizer is here."""


class HostMeeting(AssertionError):
    """Host and device meet: one would wait for the other, or a graph would keep a value of its capture."""


@dataclass
class Noted:
    """What a step asked of the device."""

    launches: Counter[str] = field(default_factory=Counter)  # kernels by name, in graphs too when captured
    sends: int = 0  # copies from host memory, none of which waits
    fetches: int = 0
    waits: int = 0  # for marks: for what the step before, or this one, has chosen

    @property
    def num_launches(self) -> int:
        return self.launches.total()


class _Watch(TorchDispatchMode):
    """Raises HostMeeting for what would wait, and counts what would be launched."""

    def __init__(self, noted: Noted) -> None:
        super().__init__()
        self.noted = noted
        self.is_capturing = False

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = [tensor for tensor in tensors if tensor.device == META]
        on_host = [tensor for tensor in tensors if tensor.device != META and tensor.dim() > 0]
        name = func.overloadpacket.__name__
        target = kwargs.get("device")
        if name == "copy_" and on_device and on_host:
            if self.is_capturing:
                raise HostMeeting("a copy between host and device would be captured")
            if not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
                raise HostMeeting("a copy between host and device waits")
            return self._copied(*args[:2])
        if name in ("_to_copy", "to") and target is not None and tensors and tensors[0].device != torch.device(target):
            if self.is_capturing:
                raise HostMeeting("a copy between host and device would be captured")
            if not kwargs.get("non_blocking"):
                raise HostMeeting("a copy between host and device waits")
            if torch.device(target) != META:
                raise HostMeeting("a copy to the host without a link")
            self.noted.sends += 1
            return func(*args, **kwargs)
        if on_device and on_host:
            raise HostMeeting(f"{func} of tensors on both")
        if self.is_capturing and on_host:
            raise HostMeeting(f"{func} on the host would be left out of a capture")
        if on_device and _launches(func):
            self.noted.launches[name] += 1
        return func(*args, **kwargs)

    def _copied(self, target: Tensor, source: Tensor) -> Tensor:
        if target.device == META:
            self.noted.sends += 1
            return target
        self.noted.fetches += 1
        return target.zero_()


class _Factories(TorchFunctionMode):
    """Refuses to make tensors of Python's numbers on the device: torch copies them there and waits. A meta tensor has
    no numbers to copy, so the dispatcher does not see it."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "cpu") == META:
            raise HostMeeting("a tensor of numbers is made on the device")
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].device == META:
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(place, list) for place in places):
                raise HostMeeting("a list of places is brought to the device")
        return func(*args, **kwargs)


def _launches(func: Any) -> bool:
    """Whether an op of torch starts a kernel: not if it is a view, or memory alone."""
    if "empty" in func.overloadpacket.__name__ or func.overloadpacket.__name__ in ("_unsafe_view", "detach", "alias"):
        return False
    returns = func._schema.returns
    return not (returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns))


class MetaLink(DeviceLink):
    """Copies as to a GPU, without pinned memory and without numbers: what is fetched is zeros."""

    def __init__(self, noted: Noted) -> None:
        super().__init__(META)
        self.is_async = True
        self._noted = noted

    def empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def send(self, host: Tensor) -> Tensor:
        return host.to(META, non_blocking=True)

    def fetch(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        return host.copy_(tensor, non_blocking=True)

    def mark(self) -> Callable[[], None]:
        def wait() -> None:
            self._noted.waits += 1

        return wait


def model(name: str, num_layers: int, **more: Any) -> ModelConfig:
    """One of MODELS."""
    vocab_size = load_config(DEMO).vocab_size
    return parse_config({**COMMON, **MODELS[name], "num_hidden_layers": num_layers, "vocab_size": vocab_size, **more})


class _Graph:
    def replay(self) -> None:
        """Queues nothing: the launches were noted at the capture."""


class _OnDevice:
    """`Collectives` whose calls are queued on the device, as NCCL's are."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: Tensor) -> None:
        assert x.is_contiguous()

    def gather(self, x: Tensor) -> Tensor | None:
        return x.new_empty((self.size, *x.shape)) if self.rank == 0 else None

    def broadcast(self, x: Tensor) -> None:
        assert x.is_contiguous()


class _Announcer:
    """Of a leader whose followers are elsewhere."""

    def __call__(self, plan: StepPlan) -> None:
        pass

    def check(self) -> None:
        pass


def _links(degrees: Degrees, rank: int) -> RankLinks:
    """Of one rank among GPUs."""
    ways = Ways(degrees.tensor, degrees.pipeline, "nccl")
    return ways.join(rank, lambda group: cast(Collectives, _OnDevice(group.ranks.index(rank), len(group.ranks))))


class Steps:
    """A runner of one model on meta tensors, ready for steps; with `degrees`, that of one rank of a group of GPUs."""

    def __init__(
        self,
        described: ModelConfig,
        quantization: Quantization = AS_STORED,
        degrees: Degrees | None = None,
        rank: int = 0,
        *,
        has_head: bool = False,
        **config: Any,
    ) -> None:
        self.noted = Noted()
        self.captured: list[Counter[str]] = []
        self._watch = _Watch(self.noted)
        self._follows, specs = rank > 0, specs_of(described, quantization)
        layout, more = described.block_layout(BLOCK_SIZE, "bfloat16", has_head=has_head), {}
        if degrees is None:
            parameters = DecoderParameters.allocate(described, torch.bfloat16, META, specs=specs)
            places = described.with_head().layer_places[:-1] if has_head else None
            decoder = Decoder(described, parameters, triton_kernels(), places=places)
            if has_head:
                head = HeadParameters.allocate(described, torch.bfloat16, META, specs)
                decoder.add_head(described, replace(head, listed=listed_rows(parameters, described.vocab_size)))
        else:
            shard = Shard(described, degrees, rank)
            parameters = allocate_shard(shard, torch.bfloat16, META, specs)
            decoder = RankDecoder(shard, parameters, triton_kernels(), _links(degrees, rank))
            layout = decoder.own_layout(BLOCK_SIZE, "bfloat16")
            more = {} if rank else {"announce": _Announcer()}
        ends = load_config(DEMO).eos_token_ids
        structures = StructureCompiler(lambda: Tokenizer.load(DEMO), ends, described.vocab_size)
        settings = {"max_num_seqs": 20, "max_seq_len": 512, "warm_up": False, "staged_transfer": False, **config}
        with patch.object(runners, "CudaGraphs", lambda _device: self):
            link = MetaLink(self.noted)
            self.runner = Runner(decoder, layout, 256, RunnerConfig(**settings), link, structures, **more)
        with self.watched():
            self.runner.start()

    def place(self, slot: int, adapter: PackedAdapter | None) -> None:
        """Fills a slot of adapters, or empties it."""
        with self.watched():
            self.runner.place_adapter(slot, adapter)

    def capture(self, run: Callable[[], Any]) -> tuple[_Graph, Any]:
        """In the place of `CudaGraphs`."""
        before = self.noted.launches.copy()
        self._watch.is_capturing = True
        try:
            output = run()
        finally:
            self._watch.is_capturing = False
        self.captured.append(self.noted.launches - before)
        return _Graph(), output

    @contextmanager
    def watched(self) -> Iterator[Noted]:
        """Fails where host and device meet; what is launched meanwhile."""
        from triton.runtime.jit import JITFunction

        def note(kernel: Any, *_args: Any, grid: Sequence[int], **_options: Any) -> None:
            name = kernel.fn.__name__
            assert all(size <= MOST_PROGRAMS for size in grid[1:]), f"{name} with a grid of {grid}"
            self.noted.launches[name] += 1

        for name in ("sends", "fetches", "waits"):
            setattr(self.noted, name, 0)
        self.noted.launches.clear()
        with patch.object(JITFunction, "run", note), torch.no_grad(), _Factories(), self._watch:
            yield self.noted

    def run(self, plan: StepPlan) -> Noted:
        """What one step asked for, up to and without its result."""
        with self.watched() as noted:
            if self._follows:
                self.runner.follow(plan)
            else:
                self.runner.launch(plan)
        return Noted(noted.launches.copy(), noted.sends, noted.fetches, noted.waits)


STRUCTURE = StructuredOutput(StructureKind.REGEX, "[a-z ]{200}")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "top_p": 0.9, "min_p": 0.1, "seed": 7},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25, "seed": 3},
    "bias": {"logit_bias": ((5, 2.0), (9, -100.0)), "bad_sequences": ((4,), (6, 7)), "temperature": 0.0},
    "structure": {"structured_output": STRUCTURE, "repetition_penalty": 1.1, "seed": 1},
}


def plan(
    ways: Sequence[str],
    start: int,
    *,
    chunk: int = 1,
    pending: bool = False,
    first: bool = False,
    num_groups: int = 1,
    adapters: Sequence[int] = (0,),
    **more: Any,
) -> StepPlan:
    """A sequence for each way, with a chunk of its own length for the last; `first`: the first step that samples;
    `num_groups`: of KV; `adapters`: slots of the sequences in turns."""
    items = []
    for at, way in enumerate(ways):
        count = chunk if at == len(ways) - 1 else 1
        params = SamplingParams(**{"max_tokens": 400, "seed": 0, **WAYS[way], **more})
        known = tuple(range(3, 3 + start)) if first else ()
        spec = SampleSpec(params, start + count, known, ())
        tokens = (0,) if pending and count == 1 else tuple(range(3, 3 + count))
        num_blocks = -(-(start + count) // BLOCK_SIZE)
        blocks = tuple(range(8 * at * num_groups, (8 * at + num_blocks) * num_groups))
        is_pending = at if pending and count == 1 else None
        made = PlannedSequence(f"s{at}", tokens, start, blocks, start + count, (spec,), is_pending)
        items.append(made._replace(adapter=adapters[at % len(adapters)]))
    return StepPlan(tuple(items))
