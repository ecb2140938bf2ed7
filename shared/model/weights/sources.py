"""Where each of a model's tensors comes from: the plain numbers or the parts of a quantized weight in a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from shared.errors import ModelLoadError
from shared.kernels.linear_spec import LinearSpec
from shared.kernels.quantized import Piece
from shared.model.config.quantization import FIELD, QuantizationConfig, WeightScheme
from shared.model.weights.checkpoint import Checkpoint
from shared.model.weights.safetensors_files import DENSE, TensorEntry, text_name

TIED_NAME = "lm_head.weight"
TIED_SOURCE = "model.embed_tokens.weight"
"""The output projection, and the embedding that a tied one is."""
PIECE_ELEMENTS = 1 << 22
"""Weights that a source opens or unpacks at a time, in whole rows."""
_NAMES_SHOWN = 3
_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_CALIBRATED = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".output_zero_point", ".q_scale",
    ".k_scale", ".v_scale", ".kv_scale", ".k_zero_point", ".v_zero_point",
)  # fmt: skip
"""Ends of the names of tensors that quantize activations or the cache: these are computed as they are."""
_PACKED_ENDS = (
    ".weight_packed", ".qweight", ".weight_scale", ".weight_scale_inv", ".weight_zero_point", ".weight_g_idx",
    ".weight_shape", ".qzeros", ".scales", ".g_idx",
)  # fmt: skip
_BESIDE_CODES = ("weight_scale", "weight_scale_inv", "weight.absmax")
"""What says that a plain-looking tensor holds codes."""


class WeightSource(Protocol):
    """The tensors of a checkpoint that one weight is made of."""

    @property
    def name(self) -> str:
        """Name of the tensor with the numbers or codes."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all of its tensors."""
        ...

    @property
    def spec(self) -> LinearSpec | None:
        """The form that it is stored in; None: plain numbers."""
        ...

    def check(self, checkpoint: Checkpoint) -> None:
        """Reads what is small, such as scales; raises ModelLoadError for values that no weight can have."""
        ...

    def pieces(self, checkpoint: Checkpoint, begin: int, end: int) -> Iterator[tuple[int, Tensor | Piece]]:
        """Rows begin … end - 1, some at a time: (first of them, plain numbers [num_rows, in_size] or codes). A piece is
        valid until the next one is asked for."""
        ...


@dataclass(frozen=True)
class PlainSource:
    """Numbers as they are."""

    name: str
    spec: None = None

    @property
    def names(self) -> tuple[str, ...]:
        """See `WeightSource`."""
        return (self.name,)

    def check(self, checkpoint: Checkpoint) -> None:
        """Nothing to read."""

    def pieces(self, checkpoint: Checkpoint, begin: int, end: int) -> Iterator[tuple[int, Tensor | Piece]]:
        """See `WeightSource`."""
        return checkpoint.rows(self.name, begin, end)


@dataclass(frozen=True)
class OfOneTensor:
    """What sources share that read one tensor of the checkpoint."""

    entry: TensorEntry

    @property
    def name(self) -> str:
        """See `WeightSource`."""
        return self.entry.name

    @property
    def names(self) -> tuple[str, ...]:
        """See `WeightSource`."""
        return (self.entry.name,)


@dataclass(frozen=True)
class OneOfStacked(OfOneTensor):
    """One weight out of a tensor that stacks several, such as experts', as rows of outputs. The tensor's entry is
    [num_rows, in_size], all weights' rows behind each other."""

    first: int
    spec: None = None

    def check(self, checkpoint: Checkpoint) -> None:
        """Nothing to read."""

    def pieces(self, checkpoint: Checkpoint, begin: int, end: int) -> Iterator[tuple[int, Tensor | Piece]]:
        """See `WeightSource`."""
        for row, piece in checkpoint.rows_as(self.entry, self.first + begin, self.first + end):
            yield row - self.first, piece


SourceMaker = Callable[
    [str, tuple[int, int], WeightScheme, QuantizationConfig, Mapping[str, TensorEntry]], WeightSource
]
"""Called with a module's name, the weight's shape, its scheme, all of the configuration and all entries."""


@dataclass(frozen=True)
class Makers:
    """The makers of sources that are not plain."""

    by_method: Mapping[str, SourceMaker]
    """Sources of projections, by the method of quantization."""
    stacked_method: str
    stacked: Callable[[str, tuple[int, ...], Mapping[str, TensorEntry]], WeightSource]
    """The source of a tensor of all experts of a layer in that method, by its plain name and shape."""
    blocks: Callable[[TensorEntry, tuple[int, ...]], WeightSource | None]
    """The source of a tensor that is stored in blocks or in another order of rows; None for plain numbers."""
    parted: Callable[[str, tuple[int, ...], Mapping[str, TensorEntry]], WeightSource | None]
    """The source of a tensor of all experts of a layer that is stored in parts; None where there are none."""


def match_sources(
    checkpoint: Checkpoint,
    shapes: Mapping[str, Sequence[int]],
    makers: Makers,
    quantization: QuantizationConfig | None = None,
    unused: tuple[str, ...] = (),
) -> dict[str, WeightSource]:
    """The source of each tensor that a model needs, by its plain name; every name, shape and dtype is checked.

    Args:
        checkpoint: what there is.
        shapes: what is needed, and of which shapes.
        makers: of sources in fewer bits.
        quantization: as in the model's configuration.
        unused: how the names of tensors begin that may be there and are not read.

    Raises:
        ModelLoadError: tensors missing or unexpected (`tensor`, `count`), or of a wrong shape or dtype (`tensor`); a
            quantized weight without one of its parts.
    """
    entries = checkpoint.entries
    quantization = None if quantization is None else quantization.renamed(text_name)
    sources: dict[str, WeightSource] = {}
    missing = []
    for name, shape in shapes.items():
        module, _, kind = name.rpartition(".")
        if name in entries and (source := makers.blocks(entries[name], tuple(shape))) is not None:
            sources[name] = source
        elif kind == "weight" and len(shape) == 2 and _is_packed(module, entries):
            sources[name] = _quantized(module, (shape[0], shape[1]), makers, quantization, entries)
        elif f"{name}_blocks" in entries:
            sources[name] = _stacked(name, tuple(shape), makers, quantization, entries)
        elif name in entries:
            _check_plain(entries[name], tuple(shape))
            sources[name] = PlainSource(name)
        elif (one := _one_of_stacked(name, tuple(shape), entries)) is not None:
            sources[name] = one
        elif (parted := makers.parted(name, tuple(shape), entries)) is not None:
            sources[name] = parted
        else:
            missing.append(name)
    _refuse_names("is missing from", missing)
    used = {name for source in sources.values() for name in source.names}
    packed = {module for module, source in _modules(sources) if source.spec is not None}
    extra = [name for name in entries if name not in used and not _may_be_left(name, packed, unused)]
    _refuse_names("is not expected in", extra)
    if quantization is not None:
        known = [name.rpartition(".")[0] for name in shapes]
        quantization.check_ignored([*known, TIED_NAME.rpartition(".")[0]], unused)
    return sources


def _modules(sources: Mapping[str, WeightSource]) -> Iterable[tuple[str, WeightSource]]:
    return ((name.rpartition(".")[0], source) for name, source in sources.items())


def _is_packed(module: str, entries: Mapping[str, TensorEntry]) -> bool:
    plain = entries.get(f"{module}.weight")
    if plain is not None:
        return plain.dtype not in DENSE or any(f"{module}.{end}" in entries for end in _BESIDE_CODES)
    return any(f"{module}{end}" in entries for end in _PACKED_ENDS)


def _quantized(
    module: str,
    shape: tuple[int, int],
    makers: Makers,
    quantization: QuantizationConfig | None,
    entries: Mapping[str, TensorEntry],
) -> WeightSource:
    name = f"{module}.weight"
    scheme = None if quantization is None else quantization.scheme_of(module)
    if quantization is None or scheme is None:
        found = next((entries[name].dtype for name in (name,) if name in entries), "packed codes")
        where = "has no scheme for it" if quantization is not None else "is missing"
        raise ModelLoadError(
            f"{name} is stored as {found}, but {FIELD} in config.json {where}; plain weights are one of "
            f"{', '.join(DENSE)}",
            tensor=name,
            field=FIELD,
        )
    return makers.by_method[quantization.method](module, shape, scheme, quantization, entries)


def _stacked(
    name: str,
    shape: tuple[int, ...],
    makers: Makers,
    quantization: QuantizationConfig | None,
    entries: Mapping[str, TensorEntry],
) -> WeightSource:
    if quantization is None or quantization.method != makers.stacked_method:
        raise ModelLoadError(
            f"{name} is stored in blocks, but {FIELD} in config.json is not of {makers.stacked_method}",
            tensor=f"{name}_blocks",
            field=FIELD,
        )
    return makers.stacked(name, shape, entries)


def _one_of_stacked(name: str, shape: tuple[int, ...], entries: Mapping[str, TensorEntry]) -> OneOfStacked | None:
    """An expert's projection where all experts of a layer are in one tensor, as Qwen publishes them: [num_experts,
    2 * expert_size, hidden_size], gate first, and [num_experts, hidden_size, expert_size]."""
    found = _OF_EXPERT.fullmatch(name)
    if found is None:
        return None
    layer, expert, part = found[1], int(found[2]), found[3]
    stacked = f"{layer}.{'down_proj' if part == 'down' else 'gate_up_proj'}"
    if stacked not in entries:
        return None
    entry, rows = entries[stacked], shape[0] * (1 if part == "down" else 2)
    count = entry.shape[0] if entry.shape else 0
    check_entry(entry, (max(count, expert + 1), rows, shape[1]), DENSE)
    flat = replace(entry, shape=(count * rows, shape[1]))
    return OneOfStacked(flat, expert * rows + (shape[0] if part == "up" else 0))


def _may_be_left(name: str, packed: set[str], unused: tuple[str, ...]) -> bool:
    module, _, kind = name.rpartition(".")
    if name.startswith(unused) or name.endswith(("rotary_emb.inv_freq", *_CALIBRATED)) or name == TIED_NAME:
        return True
    return kind == "bias" and module in packed  # zeros, which `check_left_biases` makes sure of


def check_left_biases(checkpoint: Checkpoint, sources: Mapping[str, WeightSource]) -> None:
    """Raises ModelLoadError for a bias that the model's family has no place for, unless it is zero: some tools write
    such ones beside quantized weights."""
    for module, source in _modules(sources):
        name = f"{module}.bias"
        if source.spec is None or name in sources or name not in checkpoint.entries:
            continue
        if checkpoint.whole(name).any():
            raise ModelLoadError(f"{name} is not zero, and this architecture has no bias there", tensor=name)


def _check_plain(entry: TensorEntry, shape: tuple[int, ...]) -> None:
    check_entry(entry, shape, DENSE)


def check_entry(entry: TensorEntry, shape: tuple[int, ...] | None, dtypes: Sequence[str]) -> None:
    """Raises ModelLoadError (`tensor`) for another shape or dtype; `shape` None: any."""
    if shape is not None and entry.shape != shape:
        raise ModelLoadError(
            f"{entry.name} has shape {list(entry.shape)}, expected {list(shape)}",
            tensor=entry.name,
            expected=str(list(shape)),
            found=str(list(entry.shape)),
        )
    if entry.dtype not in dtypes:
        expected = ", ".join(dtypes)
        raise ModelLoadError(f"{entry.name} is stored as {entry.dtype}, expected one of {expected}", tensor=entry.name)


def needed(entries: Mapping[str, TensorEntry], name: str, why: str) -> TensorEntry:
    """Raises ModelLoadError where there is none of this name."""
    if name not in entries:
        raise ModelLoadError(f"{name} is missing from the checkpoint: {why}", tensor=name, count=1)
    return entries[name]


def check_scales(name: str, scales: Tensor) -> None:
    """Raises ModelLoadError (`tensor`) for a scale that is no number, infinite or zero."""
    values = scales.float()
    bad = ~torch.isfinite(values) | (values == 0)
    if bad.any():
        place = int(bad.flatten().nonzero()[0])
        raise ModelLoadError(
            f"{name} has {int(bad.sum())} scales that are zero or no number, the first {values.flatten()[place]} at "
            f"{place}: the checkpoint is damaged",
            tensor=name,
            count=int(bad.sum()),
        )


def check_groups(module: str, in_size: int, group: int) -> None:
    """Raises ModelLoadError (`group_size`) for a weight whose columns are no whole number of groups."""
    if in_size % group:
        raise ModelLoadError(
            f"{module}.weight has {in_size} columns, which groups of {group} do not divide",
            tensor=f"{module}.weight",
            field="group_size",
        )


def _refuse_names(problem: str, names: list[str]) -> None:
    if not names:
        return
    shown = ", ".join(names[:_NAMES_SHOWN]) + (", …" if len(names) > _NAMES_SHOWN else "")
    raise ModelLoadError(
        f"{len(names)} tensor(s) whose name {problem} the checkpoint: {shown}",
        tensor=names[0],
        count=len(names),
    )
