"""Which part of a model one rank of a group holds: heads, columns, rows of the vocabulary, layers. Pure arithmetic.

A group of `tensor` x `pipeline` ranks has `pipeline` stages, each of some adjacent layers, and `tensor` ranks in each
stage, which split every projection. Ranks are numbered stage by stage: rank = stage * tensor + part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shared.errors import ConfigError
from shared.model.config import ModelConfig

MAX_DEGREE = 16
"""Of either kind, and of both multiplied."""
_INNER_UNIT = 16
"""Columns of the feed-forward block are split in whole vectors, where there are any."""
_VOCAB_UNIT = 32
"""Rows of the vocabulary, in whole panels."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """How a group splits its model."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def num_ranks(self) -> int:
        """Processes of the group."""
        return self.tensor * self.pipeline

    def check(self, config: ModelConfig) -> None:
        """Raises ConfigError, with the two numbers, where the model cannot be split so."""
        if self.num_ranks > MAX_DEGREE:
            raise ConfigError(
                f"tp {self.tensor} times pp {self.pipeline} is {self.num_ranks} ranks, the most are {MAX_DEGREE}",
                field="pp" if self.pipeline > 1 else "tp",
                value=self.num_ranks,
                limit=MAX_DEGREE,
            )
        kind = "latent attention" if config.latent is not None else "experts" if config.moe is not None else ""
        if self.num_ranks > 1 and kind:
            raise ConfigError(
                f"tp is {self.tensor} and pp is {self.pipeline}, but {config.architecture} has {kind}: such models run "
                "in one process a worker, with tp and pp of 1",
                field="tp" if self.tensor > 1 else "pp",
                value=self.num_ranks,
                limit=1,
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
        if config.intermediate_size < self.tensor * _unit(config.intermediate_size, _INNER_UNIT):
            raise ConfigError(
                f"tp is {self.tensor}, too many for an intermediate_size of {config.intermediate_size}",
                field="tp",
                value=self.tensor,
                limit=config.intermediate_size,
            )
        if self.pipeline > layers:
            raise ConfigError(
                f"pp is {self.pipeline}, and the model has {layers} layers",
                field="pp",
                value=self.pipeline,
                limit=layers,
            )


@dataclass(frozen=True, slots=True)
class Span:
    """Adjacent rows, columns, heads or layers: begin … end - 1."""

    begin: int
    end: int

    @property
    def length(self) -> int:
        """How many."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of one model."""

    config: ModelConfig
    """Of the whole model."""
    degrees: Degrees
    rank: int

    @property
    def stage(self) -> int:
        """Its stage of the pipeline."""
        return self.rank // self.degrees.tensor

    @property
    def part(self) -> int:
        """Its number among the ranks of its stage."""
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
        """Its query heads."""
        count = self.config.num_heads // self.degrees.tensor
        return Span(self.part * count, (self.part + 1) * count)

    @property
    def kv_heads(self) -> Span:
        """Its KV heads: those that its query heads read. With fewer than ranks, several hold the same one."""
        total, ranks = self.config.num_kv_heads, self.degrees.tensor
        if total >= ranks:
            return Span(self.part * (total // ranks), (self.part + 1) * (total // ranks))
        own = self.part * total // ranks
        return Span(own, own + 1)

    @property
    def inner(self) -> Span:
        """Its columns of the feed-forward block."""
        return _split(self.config.intermediate_size, self.degrees.tensor, self.part, _INNER_UNIT)

    @property
    def vocab(self) -> Span:
        """Its rows of embedding and output projection."""
        return _split(self.config.vocab_size, self.degrees.tensor, self.part, _VOCAB_UNIT)

    @property
    def most_vocab(self) -> int:
        """The most rows that any part has."""
        parts = range(self.degrees.tensor)
        return max(_split(self.config.vocab_size, self.degrees.tensor, part, _VOCAB_UNIT).length for part in parts)

    @property
    def layers(self) -> Span:
        """Its stage's layers."""
        return _split(self.config.num_layers, self.degrees.pipeline, self.stage, 1)

    @property
    def local_config(self) -> ModelConfig:
        """A model of this rank's sizes, its layers counted from 0."""
        config, layers = self.config, self.layers
        return replace(
            config,
            vocab_size=self.vocab.length,
            intermediate_size=self.inner.length,
            num_layers=layers.length,
            num_heads=self.heads.length,
            num_kv_heads=self.kv_heads.length,
            windows=config.windows[layers.begin : layers.end],
        )


def _split(total: int, parts: int, part: int, unit: int) -> Span:
    """As even as whole units allow; the last part takes what is left of one."""
    unit = _unit(total, unit)
    units = total // unit
    begin, end = (units * edge // parts * unit for edge in (part, part + 1))
    return Span(begin, total if part == parts - 1 else end)


def _unit(total: int, unit: int) -> int:
    return unit if total % unit == 0 else 1
