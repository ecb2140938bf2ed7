"""What each projection reads while a model computes a text, layer after layer: one layer's weights are in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from shared.kernels.backend import Kernels, Linear
from shared.kernels.batch import AttentionBatch
from shared.kernels.layer_stack import LayerInputs
from shared.kernels.lora.step import PROJECTIONS, Projection
from shared.kernels.pool_view import PoolView
from shared.model.config.model_config import ModelConfig
from shared.model.kernel_choice import kernels_for
from shared.model.layers.modules import DecoderModules, LayerModules
from shared.model.layers.parameters import DecoderParameters
from shared.model.layers.pieces import DecoderPieces
from shared.model.layers.rope import Rotary
from shared.model.layers.scales import scaled_embedding
from shared.model.weights.checkpoint import Checkpoint
from shared.model.weights.loader import Part, fill_weights
from shared.model.weights.plan import WeightPlan
from shared.model.weights.sources import TIED_SOURCE

_MOST_ROWS = 256
"""Rows that are kept of an input."""
_BLOCK_SIZE = 16
_OUT_SIZE = 32
"""Rows of the output projection that a single layer has and does not use."""


@dataclass(frozen=True)
class Inputs:
    """What the projections of one name read, over all tokens of the text."""

    mean: Tensor  # fp32 [in_size], of the absolute numbers
    largest: Tensor  # fp32 [in_size], likewise
    rows: Tensor  # fp32 [num_rows, in_size], some of them, at equal distances


class _Watched:
    """A linear layer that adds up what it reads."""

    def __init__(self, inner: Linear, every: int) -> None:
        """`every`: distance of the rows that are kept."""
        self._inner = inner
        self._every = every
        self._num_rows = 0
        self._sum = torch.zeros(inner.in_size, dtype=torch.float64)
        self._largest = torch.zeros(inner.in_size)
        self._rows: list[Tensor] = []

    @property
    def in_size(self) -> int:
        """See `Linear`."""
        return self._inner.in_size

    @property
    def out_size(self) -> int:
        """See `Linear`."""
        return self._inner.out_size

    @property
    def dtype(self) -> torch.dtype:
        """See `Linear`."""
        return self._inner.dtype

    @property
    def nbytes(self) -> int:
        """See `Linear`."""
        return self._inner.nbytes

    def forward(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        sizes = x.abs()
        self._sum += sizes.sum(0, dtype=torch.float64)
        self._largest = self._largest.maximum(sizes.amax(0))
        self._rows.append(x[-self._num_rows % self._every :: self._every].clone())
        self._num_rows += len(x)
        return self._inner.forward(x)

    def inputs(self) -> Inputs:
        """Mean, largest and sampled rows of all inputs read since the start."""
        return Inputs((self._sum / self._num_rows).float(), self._largest, torch.cat(self._rows))


def layer_inputs(
    checkpoint: Checkpoint, config: ModelConfig, plan: WeightPlan, windows: Sequence[Sequence[int]]
) -> Iterator[Mapping[Projection, Inputs]]:
    """Yields, layer by layer, the inputs of its projections where the layers before it have their plain weights.

    `windows`: token ids that are read each as a sequence of its own.
    """
    kernels = kernels_for(config, "cpu", torch.float32)
    every = max(1, sum(map(len, windows)) // _MOST_ROWS)
    embedding = checkpoint.whole(TIED_SOURCE)
    streams = [
        scaled_embedding(functional.embedding(torch.tensor(window), embedding).float(), config) for window in windows
    ]
    del embedding
    for layer in range(config.num_layers):
        single = replace(
            config, layers=(config.layers[layer],), vocab_size=_OUT_SIZE, tie_word_embeddings=True, quantization=None
        )
        modules = _one_layer(checkpoint, single, plan, layer, kernels)
        watched = {
            name: _Watched(linear, every)
            for name in PROJECTIONS
            if (linear := getattr(modules.layers[0], name)) is not None
        }
        # `replace` takes any names, which its types do not say of a mapping.
        changed: LayerModules = replace(modules.layers[0], **watched)  # type: ignore[arg-type]
        modules = replace(modules, layers=(changed,))
        pieces, rotary = DecoderPieces(single, modules, kernels), Rotary(single, "cpu", torch.float32)
        streams = [_forward(pieces, rotary, single, stream) for stream in streams]
        yield {name: linear.inputs() for name, linear in watched.items()}


def _one_layer(
    checkpoint: Checkpoint, single: ModelConfig, plan: WeightPlan, layer: int, kernels: Kernels
) -> DecoderModules:
    """A model of one layer; its norm, which the layer's output does not pass, and its embedding are 1."""
    parameters = DecoderParameters.allocate(single, torch.float32, "cpu")
    parameters.embedding.fill_(1.0)
    parameters.norm.fill_(1.0)
    prefix = "model.layers.0."
    targets = {name: view for name, view in parameters.checkpoint_views(single).items() if name.startswith(prefix)}
    sources = {name: plan.sources[f"model.layers.{layer}.{name.removeprefix(prefix)}"] for name in targets}
    parts = {name: Part([(0, view.shape[0])]) for name, view in targets.items()}
    fill_weights(checkpoint, sources, targets, parts=parts)
    return DecoderModules.build(parameters, kernels, single)


def _forward(pieces: DecoderPieces, rotary: Rotary, single: ModelConfig, stream: Tensor) -> Tensor:
    """The residual stream of a sequence behind the layer."""
    count = len(stream)
    num_blocks = -(-count // _BLOCK_SIZE)
    batch = AttentionBatch.from_lists([count], [count], [list(range(num_blocks))], _BLOCK_SIZE)
    layout = single.block_layout(_BLOCK_SIZE, "float32")
    pool = PoolView.of(torch.zeros(layout.shape(num_blocks), dtype=torch.uint8), layout)
    lengths = torch.full((count,), count) if rotary.needs_lengths else None
    return pieces.residual(LayerInputs(stream, *rotary.cos_sin(torch.arange(count), lengths), pool, batch))
