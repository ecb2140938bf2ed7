"""Muon for the hidden matrices, AdamW for the rest, one schedule over both.

Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks". It needs fewer tokens than AdamW,
and on one CPU core tokens are the scarce resource.
"""

import torch
from torch import Tensor, nn
from torch.optim import AdamW

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # quintic coefficients of the paper


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised; for 2-D parameters."""

    def __init__(
        self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Apply one update from the gradients."""
        for group in self.param_groups:
            for weight in group["params"]:
                buffer = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                buffer.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonalise(weight.grad.lerp(buffer, group["momentum"]))
                scale = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
                weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)


def orthogonalise(gradient: Tensor, iterations: int = 5) -> Tensor:
    """Approximates the nearest (semi-)orthogonal matrix by Newton–Schulz. gradient: [rows, columns]."""
    a, b, c = NEWTON_SCHULZ
    tall = gradient.shape[0] > gradient.shape[1]
    x = gradient.T if tall else gradient
    x = x / (x.norm() + 1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.T if tall else x
    return result


class Optimizer:
    """Both optimizers with warm-up, a constant phase and a linear decay (WSD)."""

    def __init__(self, model: nn.Module, steps: int, warmup: int = 20, flat: float = 0.45) -> None:
        hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
        rest = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n]
        self.parts: list[torch.optim.Optimizer] = [
            Muon(hidden, lr=0.02, weight_decay=0.05),
            AdamW(rest, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.01),
        ]
        self.peaks = [part.param_groups[0]["lr"] for part in self.parts]
        self.params = hidden + rest
        self.steps, self.warmup, self.flat = steps, warmup, flat

    def factor(self, step: int) -> float:
        """Share of the peak learning rate at ``step``: rising over ``warmup``, constant, then falling to 2 %."""
        decay = 1 - (step / self.steps - self.flat) / (1 - self.flat)
        return min(1.0, (step + 1) / self.warmup, max(0.02, decay))

    def step(self, step: int) -> None:
        """Clip, update, clear."""
        nn.utils.clip_grad_norm_(self.params, 1.0)
        for part, peak in zip(self.parts, self.peaks, strict=True):
            part.param_groups[0]["lr"] = peak * self.factor(step)
            part.step()
            part.zero_grad(set_to_none=True)
