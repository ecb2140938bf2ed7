"""An adapter of one model: read from a folder that PEFT wrote, checked whole, cut for one rank of several."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from shared.errors import ModelLoadError
from shared.kernels.cpu.beside_steps import pause
from shared.kernels.lora.parts import MAX_RANK, LoraPart
from shared.kernels.lora.step import ExpertParts, Projection
from shared.model.adapters.config import AdapterConfig
from shared.model.adapters.expert_stacks import ExpertStack, expert_stack, is_expert_stack
from shared.model.adapters.target_modules import Target, adapter_targets
from shared.model.config.model_config import ModelConfig
from shared.model.layers.delta_parameters import part_orders
from shared.model.layers.rope import rotary_order
from shared.model.weights.checkpoint import Checkpoint
from shared.model.weights.safetensors_files import DENSE, TensorEntry, read_header, text_name

WEIGHTS_FILE = "adapter_model.safetensors"
MAX_BYTES = 4 << 30
"""The largest file of weights that is read."""
PREFIX = "base_model.model."
"""Before the names of modules, as PEFT writes them."""
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
"""Behind the name of a module."""
_LAYERS = "model.layers."


@dataclass(frozen=True, eq=False)
class Adapter:
    """Low-rank additions to a decoder's projections, or to one rank's part of them."""

    digest: str
    """32 hexadecimal digits of all tensors and the configuration: the adapter's identity, whatever its name. The same
    for every rank."""
    rank: int
    """The highest of its parts."""
    layers: tuple[Mapping[Projection, tuple[LoraPart, ...]], ...]
    """For each of the decoder's layers, the parts of those projections that it adds to, in the order of outputs."""
    experts: Mapping[int, Mapping[int, ExpertParts]] = field(default_factory=dict)
    """By layer and by the expert's number among the decoder's own, what it adds to."""

    @property
    def nbytes(self) -> int:
        """Memory of its tensors."""
        parts = [part for layer in self.layers for found in layer.values() for part in found]
        of_experts = (found for layer in self.experts.values() for found in layer.values())
        parts += (part for found in of_experts for part in (*found.gate_up, *found.down))
        return sum(part.a.nbytes + part.b.nbytes for part in parts)


def in_dtype(adapter: Adapter, dtype: torch.dtype) -> Adapter:
    """The same adapter with its tensors in the dtype that they are computed in, in memory of their own: an expert's may
    be views of all experts'."""

    def part_of(part: LoraPart) -> LoraPart:
        pause()
        return replace(part, a=part.a.to(dtype, copy=True), b=part.b.to(dtype, copy=True))

    def expert_of(parts: ExpertParts) -> ExpertParts:
        return ExpertParts(tuple(map(part_of, parts.gate_up)), tuple(map(part_of, parts.down)))

    return replace(
        adapter,
        layers=tuple({name: tuple(map(part_of, parts)) for name, parts in layer.items()} for layer in adapter.layers),
        experts={
            index: {number: expert_of(parts) for number, parts in found.items()}
            for index, found in adapter.experts.items()
        },
    )


class AdapterPart(Protocol):
    """One rank's part of every adapter of a model."""

    @property
    def local_config(self) -> ModelConfig:
        """A model of this rank's sizes, its layers counted from 0."""
        ...

    @property
    def first_layer(self) -> int:
        """The first of them in the whole model."""
        ...

    def experts(self, layer: int) -> Sequence[int]:
        """Ids of its experts of a layer, counted from its first."""
        ...

    def cut(self, module: str, target: Target, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's columns and rows of a module's a [rank, in_size] and b [num_outputs, rank]."""
        ...


def read_adapter(
    folder: Path,
    config: ModelConfig,
    part: AdapterPart | None = None,
    *,
    max_rank: int = MAX_RANK,
    max_bytes: int = MAX_BYTES,
) -> Adapter:
    """Reads an adapter whole; nothing of it is used before all of it is known to fit.

    Args:
        folder: holds `adapter_config.json` and `adapter_model.safetensors`.
        config: of the whole model that it was trained for.
        part: what a rank has of it; None: all.
        max_rank: the highest rank that is taken, at most MAX_RANK.
        max_bytes: the largest file that is taken.

    Raises:
        ModelLoadError: what is missing, damaged, too large, or not served, with its `field`, `tensor` or `file`.
    """
    settings = AdapterConfig.read(folder)
    with _open(folder, max_bytes) as checkpoint:
        whole = adapter_targets(config)
        pairs, stacks = _pairs(settings, checkpoint, config, whole, max_rank)
        tensors, digest = _read_all(settings, checkpoint)
    rank = max(tensors[module + LORA_A].shape[0] for module in pairs) if pairs else 0
    rank = max(rank, *(own for _, own in stacks.values())) if stacks else rank
    scales = {module: settings.scale_of(module) for module in pairs}
    for module, (stack, _) in stacks.items():
        for name, a, b in stack.pairs(config, tensors.pop(module + LORA_A), tensors.pop(module + LORA_B)):
            if name in pairs:
                raise _refused(name, "is there by itself, and among all experts of its layer")
            pairs[name], scales[name] = whole[name], settings.scale_of(stack.name)
            tensors[name + LORA_A], tensors[name + LORA_B] = a, b
    own = config if part is None else part.local_config
    parts: list[dict[Projection, list[LoraPart]]] = [{} for _ in range(own.num_layers)]
    of_experts: dict[int, dict[int, dict[Projection, list[LoraPart]]]] = {}
    targets = whole if part is None else adapter_targets(own)
    first, order = 0 if part is None else part.first_layer, rotary_order(own)
    for module, target in pairs.items():
        pause()
        local = _counted_from(module, first)
        if local not in targets:  # another stage's
            continue
        place = targets[local]
        experts = range(0) if place.expert is None else _experts_of(own, part, place.layer)
        if place.expert is not None and place.expert not in experts:
            continue
        a, b = tensors[module + LORA_A], tensors[module + LORA_B]
        if part is not None:
            a, b = part.cut(module, target, a, b)
        if target.projection == "qkv":
            b = _ordered(b, place, own, order)
        found = parts[place.layer]
        if place.expert is not None:
            found = of_experts.setdefault(place.layer, {}).setdefault(experts.index(place.expert), {})
        found.setdefault(target.projection, []).append(LoraPart(a, b, scales[module], place.begin))
    return Adapter(
        digest,
        rank,
        tuple({projection: _by_outputs(found) for projection, found in layer.items()} for layer in parts),
        {
            layer: {
                expert: ExpertParts(_by_outputs(found.get("gate_up", ())), _by_outputs(found.get("down", ())))
                for expert, found in experts.items()
            }
            for layer, experts in of_experts.items()
        },
    )


def _experts_of(config: ModelConfig, part: AdapterPart | None, layer: int) -> Sequence[int]:
    assert config.moe is not None
    return range(config.moe.routing.num_experts) if part is None else part.experts(layer)


def _by_outputs(parts: Iterable[LoraPart]) -> tuple[LoraPart, ...]:
    return tuple(sorted(parts, key=lambda part: part.begin))


def _open(folder: Path, max_bytes: int) -> Checkpoint:
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        pickled = (
            " (adapter_model.bin is pickled, which is not loaded)" if (folder / "adapter_model.bin").exists() else ""
        )
        raise ModelLoadError(f"{WEIGHTS_FILE} is missing from {folder}{pickled}", file=WEIGHTS_FILE)
    num_bytes = path.stat().st_size
    if num_bytes > max_bytes:
        raise ModelLoadError(
            f"{path} has {num_bytes} bytes, the most that are read are {max_bytes}", file=WEIGHTS_FILE, limit=max_bytes
        )
    return Checkpoint([read_header(path)])


def _read_all(settings: AdapterConfig, checkpoint: Checkpoint) -> tuple[dict[str, Tensor], str]:
    """Tensors by their names without PEFT's prefix, and the digest of all there is."""
    from blake3 import blake3  # here, so that a machine without it runs steps; five times as fast as hashlib's

    digest = blake3(settings.content)
    found: dict[str, Tensor] = {}
    for name in sorted(checkpoint.entries):
        entry, tensor = checkpoint.entries[name], checkpoint.whole(name)
        if tensor.numel() and not all(math.isfinite(end) for end in torch.aminmax(tensor)):  # NaN is both ends
            raise _refused(name, "holds NaN or infinite numbers")
        header = f"{name}\0{entry.dtype}\0{entry.shape}\0".encode()
        digest.update(len(header).to_bytes(8, "little") + header)
        digest.update(tensor.view(torch.uint8).numpy().data if tensor.numel() else b"")
        found[_plain(name)] = tensor
        pause()
    return found, digest.hexdigest(length=16)


def _pairs(
    settings: AdapterConfig,
    checkpoint: Checkpoint,
    config: ModelConfig,
    targets: Mapping[str, Target],
    max_rank: int,
) -> tuple[dict[str, Target], dict[str, tuple[ExpertStack, int]]]:
    """Module → where it lies, and those of all experts of a layer → what they add to, and their rank; every tensor is
    one of a pair that fits. Raises ModelLoadError."""
    if config.latent is not None:
        raise ModelLoadError(f"adapters of {config.architecture}, whose attention is over latents, are not supported")
    by_name: dict[str, TensorEntry] = {}
    found, stacked = {}, set()
    for name, entry in checkpoint.entries.items():
        pause()
        plain = _plain(name)
        module = _module(name, plain)
        by_name[plain] = entry
        if settings.target_parameters and is_expert_stack(module):
            stacked.add(module)
            if entry.dtype not in DENSE:
                raise _refused(name, f"is stored as {entry.dtype}, expected one of {', '.join(DENSE)}")
            continue
        if module not in targets:
            raise _refused(name, f"adds to {module}, {_why_no_target(module, config)}")
        if module not in found and not settings.names(module):
            raise _refused(name, f"adds to {module}, which target_modules of the configuration does not name")
        found[module] = targets[module]
        if entry.dtype not in DENSE:
            raise _refused(name, f"is stored as {entry.dtype}, expected one of {', '.join(DENSE)}")
    if not found and not stacked:
        raise ModelLoadError(f"{WEIGHTS_FILE} holds no tensors", file=WEIGHTS_FILE)
    if len(by_name) < len(checkpoint.entries):
        raise ModelLoadError(f"{WEIGHTS_FILE} holds a tensor twice, with and without {PREFIX}", file=WEIGHTS_FILE)
    for module, target in found.items():
        pause()
        _check_pair(settings, by_name, module, target, max_rank)
    return found, _stacks(settings, by_name, sorted(stacked), config, max_rank)


def _stacks(
    settings: AdapterConfig,
    entries: Mapping[str, TensorEntry],
    modules: Iterable[str],
    config: ModelConfig,
    max_rank: int,
) -> dict[str, tuple[ExpertStack, int]]:
    found: dict[str, tuple[ExpertStack, int]] = {}
    for module in modules:
        pair = [entries.get(module + end) for end in (LORA_A, LORA_B)]
        if pair[0] is None or pair[1] is None:
            raise _refused(module, "has one half of a pair, and the other is missing")
        stack, rank = expert_stack(module, pair[0].shape, pair[1].shape, config)
        if not settings.names_parameter(stack.name):
            raise _refused(module, f"adds to {stack.name}, which target_parameters of the configuration does not name")
        if any(other == stack for other, _ in found.values()):
            raise _refused(module, f"adds to {stack.name}, as another pair does")
        _check_rank(settings, stack.name, max_rank)
        if rank != settings.rank_of(stack.name):
            raise _refused(module, f"has rank {rank}, and the configuration makes it {settings.rank_of(stack.name)}")
        found[module] = stack, rank
    return found


def _check_rank(settings: AdapterConfig, module: str, max_rank: int) -> int:
    rank = settings.rank_of(module)
    if rank > max_rank:
        raise ModelLoadError(
            f"the adapter's rank is {rank} for {module}, the highest that is taken is {max_rank}",
            field="r",
            value=rank,
            limit=max_rank,
        )
    return rank


def _check_pair(
    settings: AdapterConfig, entries: Mapping[str, TensorEntry], module: str, target: Target, max_rank: int
) -> None:
    rank = _check_rank(settings, module, max_rank)
    for end, shape in ((LORA_A, (rank, target.in_size)), (LORA_B, (target.num_outputs, rank))):
        entry = entries.get(module + end)
        if entry is None:
            raise _refused(module + end, "is missing, and its other half is there")
        if entry.shape != shape:
            raise _refused(
                entry.name, f"has shape {list(entry.shape)}, and the model and rank {rank} make it {list(shape)}"
            )


def _why_no_target(module: str, config: ModelConfig) -> str:
    leaf = module.rpartition(".")[2]
    if config.moe is not None and leaf in (config.moe.router, config.moe.shared_gate):
        return "and adapters of routers are not supported"
    if ".experts" in module and config.moe is not None and config.moe.stacked is not None:
        return f"and adapters of experts that lie in one tensor, as those of {config.architecture}, are not supported"
    if leaf in ("embed_tokens", "lm_head"):
        return "and adapters of embeddings and of the output projection are not supported"
    return f"which {config.architecture} of {config.num_layers} layers does not have, or no adapter can change"


def _plain(name: str) -> str:
    return text_name(name.removeprefix(PREFIX))


def _module(name: str, plain: str) -> str:
    for end in (LORA_A, LORA_B):
        if plain.endswith(end):
            return plain.removesuffix(end)
    raise _refused(name, "is no half of a low-rank pair (lora_A.weight, lora_B.weight)")


def _counted_from(module: str, first: int) -> str:
    """The name of a layer's module where layers are counted from `first`."""
    if first == 0:
        return module
    number, _, rest = module.removeprefix(_LAYERS).partition(".")
    return f"{_LAYERS}{int(number) - first}.{rest}"


def _ordered(b: Tensor, target: Target, config: ModelConfig, order: Tensor | None) -> Tensor:
    """The rows of a part of `qkv` in the order in which the kernels have them; `order`: of a head's dimensions."""
    if config.layers[target.layer].has_state:
        assert config.delta is not None
        if not config.delta.is_by_head:
            return b
        of_qkv, of_rates = part_orders(config.delta)
        return b[of_qkv if target.begin == 0 else of_rates]
    if order is None:
        return b
    size = config.head_dim
    num_queries = config.num_heads * size * (2 if config.is_gated else 1)
    num_placed = num_queries + config.num_kv_heads * size - target.begin
    if num_placed <= 0:
        return b
    by_head = b[:num_placed].view(-1, size, b.shape[1])
    placed = by_head[:, order]
    if config.is_gated and target.begin == 0:  # queries, each with its gate behind it, whose rows stay
        placed[1::2] = by_head[1::2]
    return torch.cat((placed.flatten(0, 1), b[num_placed:]))


def _refused(tensor: str, problem: str) -> ModelLoadError:
    return ModelLoadError(f"{tensor} {problem}", tensor=tensor, file=WEIGHTS_FILE)
