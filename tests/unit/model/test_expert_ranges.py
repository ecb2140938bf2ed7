"""A rank's experts: their outputs add up over all ranks to those of the whole layer."""

from __future__ import annotations

from pathlib import Path

import torch

from shared.kernels.backends.registry import choose_kernels
from shared.model.checkpoints import write_random_checkpoint
from shared.model.layers.parameters import DecoderParameters
from shared.model.weights.loader import load_weights


def test_ranges_of_experts_add_up(tmp_path: Path) -> None:
    extra = {"num_local_experts": 5, "num_experts_per_tok": 2}
    config = write_random_checkpoint(tmp_path, "MixtralForCausalLM", hidden_size=64, extra_config=extra)
    kernels = choose_kernels("cpu", torch.float32)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    ids = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(i))[:2] for i in range(9)])
    weights = torch.rand(9, 2, generator=torch.Generator().manual_seed(2))

    entire = DecoderParameters.allocate(config, torch.float32, "cpu").checkpoint_views(config)
    load_weights(tmp_path, entire)

    def forward(experts: range | None) -> torch.Tensor:
        own = None if experts is None else [experts] * config.num_layers
        parameters = DecoderParameters.allocate(config, torch.float32, "cpu", own)
        for name, view in parameters.checkpoint_views(config).items():
            view.copy_(entire[name])
        layer = parameters.layers[1].experts
        assert layer is not None
        made = kernels.make_experts(layer.gate_up, layer.down, layer.first_expert, own=True)
        return made.forward(x, ids, weights)

    whole = forward(None)
    torch.testing.assert_close(forward(range(3)) + forward(range(3, 5)), whole, rtol=1e-5, atol=1e-5)
    assert whole.abs().max() > 0.1
