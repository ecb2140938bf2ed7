"""Finds the first part of a model that gave a NaN or an infinity, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from shared.kernels.backend import Kernels
from shared.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class StepNumerics:
    """Which parts of the model gave finite numbers in one step."""

    finite: list[tuple[str, Tensor]]  # (part, [num_tokens] bool), in the order of computation

    def source(self, begin: int, end: int) -> str:
        """The first part whose output was not finite for all of the tokens begin … end - 1 of the step."""
        return next((part for part, finite in self.finite if not finite[begin:end].all()), "output head")


class NumericsProbe:
    """Wraps a decoder's kernels and checks what its blocks add to the residual stream.

    Every block's output passes the norm that adds, in the order of the layers, so the count of their calls tells
    the layer. For debugging: it costs a pass over the activations for each block.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._first_norm: Tensor | None = None  # weight of the norm that begins a step
        self._finite: list[tuple[str, Tensor]] = []  # as in StepNumerics, a list of its own for each step

    def __getattr__(self, name: str) -> Any:
        """All other ops are the kernels' own."""
        return getattr(self._kernels, name)

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float, *, is_centered: bool = False) -> Tensor:
        """The first norm of a step, where x is the embedding, or one within a block."""
        if weight is self._first_norm:
            self._finite = []
            self._look("embedding", x)
        return self._kernels.rms_norm(x, weight, eps, is_centered=is_centered)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, *, is_centered: bool = False
    ) -> tuple[Tensor, Tensor]:
        """x is the output of a layer's attention, then of its feed-forward block."""
        layer, block = divmod(len(self._finite) - 1, 2)
        self._look(f"layer {layer} {'feed-forward' if block else 'attention'}", x)
        return self._kernels.add_rms_norm(x, residual, weight, eps, is_centered=is_centered)

    def last_step(self) -> StepNumerics:
        """The numerics of the last step."""
        return StepNumerics(self._finite)

    def attach(self, decoder: Decoder) -> Decoder:
        """A decoder of the same weights that computes by this probe, op by op."""
        self._first_norm = decoder.first_norm
        return decoder.op_by_op(cast(Kernels, self))

    def _look(self, part: str, x: Tensor) -> None:
        self._finite.append((part, x.isfinite().all(dim=-1)))
