"""How a checkpoint's weights are quantized."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from shared.errors import ModelLoadError
from shared.kernels.linear_spec import Kind

Method = Literal["compressed-tensors", "awq", "gptq", "fp8", "mxfp4", "bitsandbytes", "modelopt", "quark"]
"""Ways to store weights in fewer bits, by the names that checkpoints give them."""
FIELD = "quantization_config"
"""Field of config.json."""
STACKED = "its experts lie in one tensor, which is read plain or in mxfp4 and kept in 16 or 32 bits"
"""Why an architecture takes no other storage, for messages."""
STACKED_METHOD: Method = "mxfp4"
"""The one of experts that lie in one tensor."""
NVFP4_GROUP = 16
"""Columns that share a scale in NVFP4."""
MX_GROUP = 32
"""Columns that share a scale, a power of two, in MXFP4 and MXFP8: OCP Microscaling Formats 1.0."""
Floats4 = Literal["", "nvfp4", "mxfp4"]
"""Ways to store floats of 4 bits."""
ALL_LINEAR = "Linear"
"""Target of all projections."""
PATTERN = "re:"
"""How a target begins that is a regular expression."""


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How some of a checkpoint's weights are stored."""

    kind: Kind
    group: int  # adjacent columns that share a scale; 0 = all of a row
    has_zeros: bool = False
    is_ordered: bool = False  # whether an index says which columns form a group
    block_rows: int = 0  # rows that share a scale too; 0 = each row has its own, or all have one
    rounds_input: bool = False  # as in LinearSpec
    floats4: Floats4 = ""  # floats of 4 bits, which are opened while they are read; `kind` says nothing of them


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """A checkpoint's quantization."""

    method: Method
    schemes: tuple[tuple[tuple[str, ...], WeightScheme], ...]  # (targets, scheme), in the file's order
    ignored: tuple[str, ...] = ()
    zeros_offset: int = 0  # of GPTQ: what is added to a stored zero

    def scheme_of(self, module: str) -> WeightScheme | None:
        """The scheme of a projection, by its name in the checkpoint; None where no target names it."""
        for wanted in (_names_exactly, _matches, lambda target, _: target == ALL_LINEAR):
            for targets, scheme in self.schemes:
                if any(wanted(target, module) for target in targets):
                    return scheme
        return None

    def renamed(self, rename: Callable[[str], str]) -> QuantizationConfig:
        """With other names of layers; patterns stay as they are."""
        schemes = tuple((tuple(map(rename, targets)), scheme) for targets, scheme in self.schemes)
        return replace(self, schemes=schemes, ignored=tuple(map(rename, self.ignored)))

    def check_ignored(self, modules: Iterable[str], unused: tuple[str, ...]) -> None:
        """Raises ModelLoadError for an ignored layer, or a target, that is none of the checkpoint's `modules`, nor
        within one, nor begins as the names of what is not read."""
        known = tuple(modules)
        for name in (*self.ignored, *(target for targets, _ in self.schemes for target in targets)):
            if name == ALL_LINEAR or name.startswith(PATTERN) or f"{name}.".startswith(unused):
                continue
            if not any(f".{name}." in f".{module}." for module in known):
                raise ModelLoadError(
                    f"{FIELD} names {name}, which is no layer of this checkpoint; layers are named as "
                    f"{known[0] if known else 'none'}",
                    field=FIELD,
                    tensor=name,
                )


def _names_exactly(target: str, module: str) -> bool:
    return target == module or module.endswith(f".{target}")


def _matches(target: str, module: str) -> bool:
    return target.startswith(PATTERN) and re.match(target.removeprefix(PATTERN), module) is not None
