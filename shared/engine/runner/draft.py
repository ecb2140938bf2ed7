"""A draft model ready to guess: a second decoder, and a runner over a KV pool of its own."""

from __future__ import annotations

from pathlib import Path

import torch

from shared.engine.runner.runner import Runner, RunnerConfig
from shared.engine.speculation.draft_model import MOST_CHUNK, DraftModel
from shared.errors import ConfigError
from shared.kernels.backends.registry import AUTO
from shared.kernels.pool_view import dtype_name
from shared.kv.layout import BlockLayout
from shared.kv.pool import BlockPool
from shared.model.decoder import Decoder
from shared.model.families.eagle3 import is_eagle
from shared.model.families.registry import load_config


def load_draft(
    folder: Path, dtype: torch.dtype, vocab_size: int, kernels: str = AUTO, device: torch.device | str = "cpu"
) -> Decoder:
    """Reads a draft for a target of that vocabulary. Raises ConfigError (`draft`) where the two differ, before weights
    are read; else as `Decoder.load`."""
    check_draft(folder, vocab_size)
    return Decoder.load(folder, dtype, device, kernels=kernels)


def check_draft(folder: Path, vocab_size: int) -> None:
    """Raises ConfigError (`draft`) where the model in that folder has another vocabulary, or layers with states, or is
    a head, and ModelLoadError where it is none that can be served."""
    if is_eagle(folder):
        raise ConfigError(
            f"draft {folder} is a head, which reads its model's states: take speculation heads",
            field="draft",
            value=str(folder),
        )
    config = load_config(folder)
    if config.delta is not None:
        raise ConfigError(
            f"draft {folder} is of {config.architecture}, whose layers have states: a wrong guess cannot be taken back "
            "from them",
            field="draft",
            value=config.architecture,
        )
    own = config.vocab_size
    if own != vocab_size:
        raise ConfigError(
            f"draft {folder} has a vocabulary of {own} tokens, the model has {vocab_size}: its guesses would be of "
            f"other tokens",
            field="draft",
            value=own,
            limit=vocab_size,
        )


def draft_layout(decoder: Decoder, block_size: int) -> BlockLayout:
    """The layout of the draft model's KV, in its own dtype."""
    return decoder.config.block_layout(block_size, dtype_name(decoder.dtype))


def draft_steps(max_num_seqs: int) -> RunnerConfig:
    """How a draft's steps are run; `max_num_seqs`: of a round. On a GPU its rounds are graphs."""
    return RunnerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=MOST_CHUNK)


def open_draft(
    decoder: Decoder, layout: BlockLayout, num_blocks: int, max_num_seqs: int, config: RunnerConfig | None = None
) -> DraftModel:
    """Allocates its pool, and captures its graphs on a GPU. Raises ConfigError where that does not fit. `max_num_seqs`:
    of a round; `config`: in place of `draft_steps`."""
    runner = Runner(decoder, layout, num_blocks, config or draft_steps(max_num_seqs))
    with torch.inference_mode():
        runner.start()
    pool = BlockPool(num_blocks, layout.block_size)
    return DraftModel(runner, pool, decoder.config.max_position_embeddings)
