"""The feed-forward block of a layer."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from shared.kernels.activation.activations import Activation
from shared.kernels.backend import DecoderOps
from shared.kernels.cpu.torch_threads import in_this_thread
from shared.kernels.lora.step import Loras, StepExpertLoras
from shared.model.config.model_config import ModelConfig
from shared.model.config.moe_config import MoeConfig
from shared.model.layers.modules import ExpertModules, LayerModules, project
from shared.model.layers.parameters import BIAS_COLUMNS


class FeedForward(Protocol):
    """The block of a layer behind its attention."""

    def forward(self, x: Tensor, loras: Loras | None = None) -> Tensor:
        """[num_tokens, hidden_size] to the same shape; a row's result follows from that row and its adapter alone."""
        ...


class Mlp:
    """`down` of the activated `gate` and `up` of x."""

    def __init__(self, layer: LayerModules, index: int, activation: Activation, kernels: DecoderOps) -> None:
        """Keeps references to its arguments; `index` is the layer's number, from 0."""
        self._index = index
        self._activation = activation
        assert layer.gate_up is not None
        assert layer.down is not None
        self._gate_up = layer.gate_up
        self._down = layer.down
        self._kernels = kernels

    def forward(self, x: Tensor, loras: Loras | None = None) -> Tensor:
        """[num_tokens, hidden_size] to the same shape."""
        gate_up = project(self._gate_up, x, loras, self._index, "gate_up")
        return project(self._down, self._kernels.act_and_mul(gate_up, self._activation), loras, self._index, "down")


class MixtureOfExperts:
    """The experts that a router chooses for each token, and the shared ones that all pass."""

    def __init__(
        self, moe: MoeConfig, modules: ExpertModules, shared: Mlp | None, kernels: DecoderOps, index: int
    ) -> None:
        """Keeps references to its arguments; `index` is the layer's number, from 0."""
        self._index = index
        self._routing = moe.routing
        self._fp32_router = moe.fp32_router
        self._scales_inputs = moe.scales_inputs
        self._modules = modules
        self._shared = shared
        self._kernels = kernels
        self._one = torch.ones((), dtype=torch.int64, device="cpu")
        self._num_experts = moe.routing.num_experts
        self._first_expert = modules.first_expert
        most_copies = 1 if modules.copies is None else modules.copies.most_copies
        self._num_chosen = torch.zeros(self._num_experts * most_copies, dtype=torch.int64, device="cpu")

    @property
    def num_chosen(self) -> Tensor:
        """[num_experts, most copies of one] tokens that each copy of each expert was chosen for since start, other
        ranks' too; counted on the CPU alone."""
        return self._num_chosen.view(self._num_experts, -1)

    def forward(self, x: Tensor, loras: Loras | None = None) -> Tensor:
        """[num_tokens, hidden_size] to the same shape."""
        modules = self._modules
        logits = modules.router.forward(x.float() if self._fp32_router else x)
        expert_ids, weights = self._kernels.choose_experts(logits, modules.router_bias, self._routing)
        slots = expert_ids if modules.copies is None else modules.copies.slots(expert_ids)
        if x.device.type == "cpu":
            chosen = slots.flatten()
            self._num_chosen.scatter_add_(0, chosen, self._one.expand(chosen.shape))
        local_ids = expert_ids if modules.copies is None else modules.copies.local_ids(slots)
        out = self._chosen(x, local_ids, weights, None if loras is None else loras.experts(self._index))
        if self._shared is not None:
            shared = self._shared.forward(x, loras)
            with in_this_thread(x, x.numel()):
                if modules.shared_gate is not None:
                    shared = (x @ modules.shared_gate.T).sigmoid() * shared
                out = out + shared
        if modules.group is not None:  # all ranks have x: nothing is sent to experts, and one sum brings all back
            modules.group.all_reduce(out)
        return out

    def _chosen(self, x: Tensor, local_ids: Tensor, weights: Tensor, loras: StepExpertLoras | None) -> Tensor:
        """What the chosen experts give; with biases, an input of 1 adds those of gate and up."""
        experts, down_bias = self._modules.experts, self._modules.down_bias
        if down_bias is None and not self._scales_inputs:
            return experts.forward(x, local_ids, weights, loras)
        assert loras is None, "no adapter adds to experts of one tensor"
        if self._scales_inputs:
            return self._of_scaled(x, local_ids, weights)
        assert down_bias is not None
        with in_this_thread(x, x.numel()):
            padded = functional.pad(x, (0, BIAS_COLUMNS))
            padded[:, x.shape[1]] = 1
        out = experts.forward(padded, local_ids, weights)[:, : x.shape[1]]
        with in_this_thread(x, x.numel()):
            first = self._first_expert
            is_local = (local_ids >= first) & (local_ids < first + down_bias.shape[0])
            shares = weights.new_zeros((x.shape[0], down_bias.shape[0]))
            shares.scatter_add_(1, torch.where(is_local, local_ids - first, 0), torch.where(is_local, weights, 0.0))
            return (out.float() + shares @ down_bias.float()).to(x.dtype)

    def _of_scaled(self, x: Tensor, local_ids: Tensor, weights: Tensor) -> Tensor:
        """Each choice by itself: what an expert reads follows from its weight, which is then 1."""
        total = None
        for choice in range(weights.shape[1]):
            chosen = slice(choice, choice + 1)
            with in_this_thread(x, x.numel()):
                scaled = x * weights[:, chosen].to(x.dtype)
            ones = torch.ones_like(weights[:, chosen])
            out = self._modules.experts.forward(scaled, local_ids[:, chosen].contiguous(), ones)
            total = out if total is None else total + out
        assert total is not None
        return total


def feed_forward(layer: LayerModules, index: int, config: ModelConfig, kernels: DecoderOps) -> FeedForward:
    """The feed-forward block for a layer, the `index`-th: dense, or with experts."""
    dense = None if layer.gate_up is None else Mlp(layer, index, config.activation, kernels)
    if layer.experts is None:
        assert dense is not None
        return dense
    assert config.moe is not None
    return MixtureOfExperts(config.moe, layer.experts, dense, kernels, index)
