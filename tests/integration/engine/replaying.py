"""A process that repeats a recording: `python -m tests.integration.engine.replaying FOLDER RECORDING KERNELS
NUM_HOST_BLOCKS STATIC`, over the checkpoint in FOLDER. Writes what was recorded and what came now to stdout, a JSON
line a step."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from shared.engine.plan import NoToken, SampledToken
from shared.engine.runner.runner import Runner, RunnerConfig
from shared.model.decoder import Decoder
from tests.integration.engine.engine_run import BLOCK_SIZE
from tests.integration.engine.plan_log import replay

NUM_BLOCKS = 16


def main() -> None:
    folder, recording, kernels, num_host_blocks, static = sys.argv[1:]
    decoder = Decoder.load(Path(folder), torch.float32, "cpu", kernels=kernels)
    layout = decoder.config.block_layout(BLOCK_SIZE, "float32")
    config = RunnerConfig(max_num_seqs=8, num_host_blocks=int(num_host_blocks), static_decode=static == "static")
    runner = Runner(decoder, layout, NUM_BLOCKS, config)
    with torch.inference_mode(), Path(recording).open("rb") as file:
        runner.start()
        for step in replay(runner, file):
            names = [item.sequence_id for item in step.plan.sequences if item.sample is not None]
            results = [[_fields(token) for token in result.sampled] for result in (step.recorded, step.replayed)]
            print(json.dumps([names, *results]))


def _fields(token: SampledToken | NoToken) -> dict[str, object]:
    return token._asdict() if isinstance(token, SampledToken) else asdict(token)


if __name__ == "__main__":
    main()
