"""Which part of a model one rank of a group holds: heads, columns, experts, rows of the vocabulary, layers. Pure
arithmetic.

A group of `tensor` x `pipeline` ranks has `pipeline` stages, each of some adjacent layers, and `tensor` ranks in each
stage, which split every projection. Ranks are numbered stage by stage: rank = stage * tensor + part. The ranks of a
stage form `expert` sets of neighbours: each set has experts of its own, whose columns its ranks split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shared.errors import ConfigError
from shared.kernels.delta_sizes import PartPlaces
from shared.model.config.model_config import ModelConfig
from shared.model.layers.expert_placement import Placement, adjacent

MAX_DEGREE = 16
"""Most ranks of either kind, and of both multiplied."""
_INNER_UNIT = 16
"""Columns of the feed-forward block are split in whole vectors, where there are any."""
_VOCAB_UNIT = 32
"""Rows of the vocabulary, in whole panels."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """Degrees by which a group splits its model."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    """Sets of a stage's ranks over which the experts of a layer are spread, whole; it divides `tensor`."""

    @property
    def num_ranks(self) -> int:
        """Processes of the group."""
        return self.tensor * self.pipeline

    @property
    def expert_slices(self) -> int:
        """Ranks that split each expert."""
        return self.tensor // self.expert

    @property
    def has_kv_groups(self) -> bool:
        """Whether blocks are of one KV group each: a stage would have to have some layers of all of them."""
        return self.pipeline == 1

    def check(self, config: ModelConfig, *, own_pools: bool = False) -> None:
        """Raises ConfigError, with the two numbers, where the model cannot be split so. `own_pools`: whether each rank
        has a pool of its own."""
        if self.num_ranks > MAX_DEGREE:
            raise ConfigError(
                f"tp {self.tensor} times pp {self.pipeline} is {self.num_ranks} ranks, the most are {MAX_DEGREE}",
                field="pp" if self.pipeline > 1 else "tp",
                value=self.num_ranks,
                limit=MAX_DEGREE,
            )
        heads, kv_heads, layers = config.num_heads, config.num_kv_heads, config.num_layers
        if heads % self.tensor:
            raise ConfigError(
                f"tp is {self.tensor}, which does not divide the model's {heads} attention heads",
                field="tp",
                value=self.tensor,
                limit=heads,
            )
        if kv_heads % self.tensor and self.tensor % kv_heads:
            raise ConfigError(
                f"tp is {self.tensor}, and the model has {kv_heads} KV heads: one must divide the other",
                field="tp",
                value=self.tensor,
                limit=kv_heads,
            )
        if config.delta is not None and config.num_state_parts % self.tensor:
            raise ConfigError(
                f"tp is {self.tensor}, and the states of {config.architecture} have {config.num_state_parts} parts, "
                f"each of some of its {config.delta.num_key_heads} key heads and {kv_heads} KV heads: "
                "it must divide that",
                field="tp",
                value=self.tensor,
                limit=config.num_state_parts,
            )
        if config.has_dense and config.intermediate_size < self.tensor:
            raise _too_many(f"tp is {self.tensor}", "tp", self.tensor, "intermediate_size", config.intermediate_size)
        self._check_experts(config)
        if own_pools:
            self._check_own_pools(config)
        if self.pipeline > layers:
            raise ConfigError(
                f"pp is {self.pipeline}, and the model has {layers} layers",
                field="pp",
                value=self.pipeline,
                limit=layers,
            )

    def _check_own_pools(self, config: ModelConfig) -> None:
        if config.delta is None:
            return
        if self.pipeline > 1:
            raise ConfigError(
                f"pp is {self.pipeline}, and ranks with pools of their own do not split the states of "
                f"{config.architecture} by layers: 1 is the only degree",
                field="pp",
                value=self.pipeline,
                limit=1,
            )
        if self.tensor > 1 and config.delta.places is not None:
            raise ConfigError(
                f"tp is {self.tensor}, and ranks with pools of their own do not split the states of "
                f"{config.architecture}, which lie beside latents that all ranks have: 1 is the only degree",
                field="tp",
                value=self.tensor,
                limit=1,
            )

    def _check_experts(self, config: ModelConfig) -> None:
        if self.tensor % self.expert:
            raise ConfigError(
                f"ep is {self.expert}, which does not divide tp, {self.tensor}",
                field="ep",
                value=self.expert,
                limit=self.tensor,
            )
        moe = config.moe
        if moe is None:
            if self.expert > 1:
                raise ConfigError(
                    f"ep is {self.expert}, but {config.architecture} has no experts here: 1 is the only degree",
                    field="ep",
                    value=self.expert,
                    limit=1,
                )
            return
        num_experts = moe.routing.num_experts
        if self.expert > num_experts:
            raise ConfigError(
                f"ep is {self.expert}, and the model has {num_experts} experts in a layer",
                field="ep",
                value=self.expert,
                limit=num_experts,
            )
        slices = self.expert_slices
        if moe.expert_size < slices:
            split = f"tp {self.tensor} with ep {self.expert} splits an expert over {slices} ranks"
            raise _too_many(split, "tp", slices, "expert's intermediate size", moe.expert_size)
        if 0 < moe.shared_size < self.tensor:
            size = "intermediate size of shared experts"
            raise _too_many(f"tp is {self.tensor}", "tp", self.tensor, size, moe.shared_size)


def _too_many(split: str, field: str, value: int, size: str, limit: int) -> ConfigError:
    article = "an" if size[0] in "aei" else "a"
    return ConfigError(f"{split}, too many for {article} {size} of {limit}", field=field, value=value, limit=limit)


@dataclass(frozen=True, slots=True)
class Span:
    """Adjacent rows, columns, heads or layers: begin … end - 1."""

    begin: int
    end: int

    @property
    def length(self) -> int:
        """Number of rows, columns, heads or layers."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of one model."""

    config: ModelConfig
    """Configuration of the whole model."""
    degrees: Degrees
    rank: int
    placement: Placement = ()
    """Placement of experts on the sets of ranks."""

    @property
    def stage(self) -> int:
        """The rank's stage of the pipeline."""
        return self.rank // self.degrees.tensor

    @property
    def part(self) -> int:
        """The rank's number among the ranks of its stage."""
        return self.rank % self.degrees.tensor

    @property
    def is_first(self) -> bool:
        """Whether the stage embeds tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage computes logits."""
        return self.stage == self.degrees.pipeline - 1

    @property
    def heads(self) -> Span:
        """The rank's query heads."""
        count = self.config.num_heads // self.degrees.tensor
        return Span(self.part * count, (self.part + 1) * count)

    @property
    def kv_heads(self) -> Span:
        """The rank's KV heads: those that its query heads read. With fewer than ranks, several hold the same one."""
        total, ranks = self.config.num_kv_heads, self.degrees.tensor
        if total >= ranks:
            return Span(self.part * (total // ranks), (self.part + 1) * (total // ranks))
        own = self.part * total // ranks
        return Span(own, own + 1)

    @property
    def delta_heads(self) -> Span:
        """The rank's key heads of layers with a state, of which it has the value heads too."""
        assert self.config.delta is not None, "a model without states"
        count = self.config.delta.num_key_heads // self.degrees.tensor
        return Span(self.part * count, (self.part + 1) * count)

    @property
    def _state_places(self) -> PartPlaces | None:
        """Places of its parts of states beside latents."""
        if self.config.delta is None or self.config.delta.places is None:
            return None
        whole = self.config.delta.places
        count = whole.count // self.degrees.tensor
        return replace(whole, first=self.part * count, count=count)

    @property
    def inner(self) -> Span:
        """The rank's columns of a dense feed-forward block."""
        return _split(self.config.intermediate_size, self.degrees.tensor, self.part, _INNER_UNIT)

    @property
    def expert_set(self) -> int:
        """Number of the rank's set of ranks."""
        return self.part // self.degrees.expert_slices

    @property
    def experts(self) -> tuple[Sequence[int], ...] | None:
        """Ids of its experts of each of its layers, as if all had some. None in dense models."""
        if self.config.moe is None:
            return None
        return tuple(self.expert_sets(layer)[self.expert_set] for layer in range(self.layers.length))

    def expert_sets(self, layer: int) -> Sequence[Sequence[int]]:
        """Ids of each set's experts in a layer, counted from the stage's first."""
        assert self.config.moe is not None, "a dense model"
        return self.placed(layer) or adjacent(self.config.moe.routing.num_experts, self.degrees.expert)

    def placed(self, layer: int) -> Sequence[Sequence[int]] | None:
        """As `expert_sets` where the sets do not hold adjacent ranges, else None."""
        return self.placement[self.layers.begin + layer] if self.placement else None

    @property
    def expert_inner(self) -> Span:
        """The rank's columns of each of its experts."""
        size = 0 if self.config.moe is None else self.config.moe.expert_size
        slices = self.degrees.expert_slices
        return _split(size, slices, self.part % slices, _INNER_UNIT)

    @property
    def shared_inner(self) -> Span:
        """The rank's columns of the experts that every token passes."""
        size = 0 if self.config.moe is None else self.config.moe.shared_size
        return _split(size, self.degrees.tensor, self.part, _INNER_UNIT)

    @property
    def vocab(self) -> Span:
        """The rank's rows of embedding and output projection."""
        return _split(self.config.vocab_size, self.degrees.tensor, self.part, _VOCAB_UNIT)

    @property
    def most_vocab(self) -> int:
        """The most rows that any part has."""
        parts = range(self.degrees.tensor)
        return max(_split(self.config.vocab_size, self.degrees.tensor, part, _VOCAB_UNIT).length for part in parts)

    @property
    def layers(self) -> Span:
        """The layers of the rank's stage."""
        return _split(self.config.num_layers, self.degrees.pipeline, self.stage, 1)

    @property
    def local_config(self) -> ModelConfig:
        """A model of this rank's sizes, its layers counted from 0."""
        config, layers = self.config, self.layers
        moe = config.moe and replace(
            config.moe,
            expert_size=self.expert_inner.length,
            shared_size=self.shared_inner.length,
        )
        delta = config.delta and replace(
            config.delta,
            num_key_heads=self.delta_heads.length,
            num_value_heads=config.delta.num_value_heads // self.degrees.tensor,
            places=self._state_places,
        )
        return replace(
            config,
            vocab_size=self.vocab.length,
            intermediate_size=self.inner.length,
            num_heads=self.heads.length,
            num_kv_heads=self.kv_heads.length,
            layers=config.layers[layers.begin : layers.end],
            moe=moe,
            delta=delta,
        )


def _split(total: int, parts: int, part: int, unit: int) -> Span:
    """As even as whole units allow, where each part gets one at least; else as even as can be. The last part takes what
    is left of one."""
    if total % unit or total < parts * unit:
        unit = 1
    units = total // unit
    begin, end = (units * edge // parts * unit for edge in (part, part + 1))
    return Span(begin, total if part == parts - 1 else end)
