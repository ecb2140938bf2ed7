"""The oracle of adapters: transformers' model with `scale * B A` added to its weights, as PEFT merges them."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from shared.kernels.batch import AttentionBatch
from shared.kernels.lora.rows import LoraRows
from shared.kernels.lora.step import PackedAdapter, StepLoras
from shared.kernels.pool_view import PoolView, dtype_name
from shared.model.decoder import Decoder

BLOCK_SIZE = 4
_EXPERT = re.compile(r"(.*)\.(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(\w+)")


@torch.no_grad()
def merged(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """A copy of the model with the adapter's additions in its weights; read with safetensors and json alone."""
    fields = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    found = copy.deepcopy(model)
    weights = dict(found.named_parameters())
    for name in tensors:
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removesuffix(".lora_A.weight")
        plain = module.removeprefix("base_model.model.")
        leaf = plain.rpartition(".")[2]
        experts, b = plain.removesuffix(".base_layer"), tensors[f"{module}.lora_B.weight"]
        if experts.endswith(".mlp.experts"):
            _add_to_all(weights, experts, tensors[name], b, fields)
            continue
        rank = fields.get("rank_pattern", {}).get(leaf, fields["r"])
        alpha = fields.get("alpha_pattern", {}).get(leaf, fields["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)
        weight, rows = _weight(weights, plain)
        weight[rows] += scale * (b.float() @ tensors[name].float())
    return found


def _add_to_all(weights: dict[str, Parameter], experts: str, a: Tensor, b: Tensor, fields: dict[str, Any]) -> None:
    """Of experts whose additions are one pair: PEFT's `ParamWrapper`."""
    for leaf in ("gate_up_proj", "down_proj"):
        weight = weights[f"{experts}.{leaf}"]  # [experts, outputs, inputs]
        if weight.shape[1:] == (b.shape[0], a.shape[1]):
            of_b = b.float().view(b.shape[0], -1, weight.shape[0])
            of_a = a.float().view(weight.shape[0], -1, a.shape[1])
            weight += fields["lora_alpha"] / fields["r"] * torch.einsum("ore,eri->eoi", of_b, of_a)


def _weight(weights: dict[str, Parameter], module: str) -> tuple[Tensor, slice]:
    """The weight of a module and its rows in it: transformers has all experts of a layer in one tensor, gate first."""
    if (of_expert := _EXPERT.fullmatch(module)) is None:
        return weights[f"{module}.weight"], slice(None)
    layer, number, leaf = of_expert.groups()
    if leaf in ("w2", "down_proj"):
        return weights[f"{layer}.mlp.experts.down_proj"][int(number)], slice(None)
    both = weights[f"{layer}.mlp.experts.gate_up_proj"][int(number)]
    inner = both.shape[0] // 2
    return both, slice(inner) if leaf in ("w1", "gate_proj") else slice(inner, None)


class MixedBatch:
    """Sequences of one decoder that step together, each with its adapter or none."""

    def __init__(self, decoder: Decoder, adapters: Sequence[PackedAdapter | None], max_tokens: int) -> None:
        layout = decoder.config.block_layout(BLOCK_SIZE, dtype_name(decoder.dtype))
        self.groups = layout.groups
        num_blocks = -(-max_tokens // BLOCK_SIZE) * self.groups.size
        shape = layout.shape(num_blocks * len(adapters))
        self.pool = PoolView.of(torch.full(shape, 255, dtype=torch.uint8), layout)
        self.decoder = decoder
        self.tables = [list(range(i * num_blocks, (i + 1) * num_blocks)) for i in range(len(adapters))]
        self.distinct = tuple(dict.fromkeys(adapter for adapter in adapters if adapter is not None))
        self.slots = [-1 if adapter is None else self.distinct.index(adapter) for adapter in adapters]
        self.lengths = [0] * len(adapters)

    def step(self, tokens: Sequence[Sequence[int]], *, all_rows: bool = True, rope_length: int = 0) -> Tensor:
        """Feeds each sequence its next tokens: the logits of all of them, or of each sequence's last one.
        `rope_length`: of the prompt whose chunks these are."""
        counts = [len(part) for part in tokens]
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        pairs = list(zip(counts, self.lengths, strict=True))
        ends = torch.tensor(counts).cumsum(0) - 1
        rows = torch.arange(sum(counts)) if all_rows else ends
        of_rows = [slot for slot, count in zip(self.slots, counts, strict=True) for _ in range(count)]
        loras = StepLoras(
            self.distinct,
            LoraRows.of(of_rows, len(self.distinct)),
            LoraRows.of([of_rows[row] for row in rows.tolist()], len(self.distinct)),
            self.decoder.kernels,
        )
        positions = torch.cat([torch.arange(length - count, length) for count, length in pairs])
        lengths = torch.tensor([max(length, rope_length) for count, length in pairs for _ in range(count)])
        return self.decoder.forward(
            torch.tensor([token for part in tokens for token in part]),
            positions,
            self.pool,
            self._batch(counts),
            rows,
            lengths if self.decoder.rotary.needs_lengths else None,
            loras=loras if self.distinct else None,
        )

    def _batch(self, counts: list[int]) -> AttentionBatch:
        groups = self.groups
        first, *later = (
            AttentionBatch.from_lists(
                counts, self.lengths, [table[group :: groups.size] for table in self.tables], BLOCK_SIZE
            )
            for group in range(groups.size - groups.num_states)
        )
        batch = first if groups.is_plain else first.with_groups(later)
        if groups.num_states:
            ends = zip(self.tables, counts, self.lengths, strict=True)
            states = [groups.state_blocks(table, end - count, end) for table, count, end in ends]
            batch = replace(batch, state_blocks=torch.tensor(states, dtype=torch.int32))
        return batch

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Each sequence's continuation."""
        found = [[int(token)] for token in self.step(prompts, all_rows=False).argmax(-1)]
        while len(found[0]) < num_tokens:
            chosen = self.step([tokens[-1:] for tokens in found], all_rows=False).argmax(-1)
            for tokens, token in zip(found, chosen, strict=True):
                tokens.append(int(token))
        return found
