"""Plans that one process made and recorded give the same tokens in a runner of another process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from shared.engine.messages import AddSequence
from shared.engine.runner.runner import RunnerConfig
from tests.integration.engine.engine_run import EngineRun
from tests.integration.engine.families import write_family
from tests.integration.engine.replaying import NUM_BLOCKS
from tests.waiting import DEADLINE_S

ROOT = Path(__file__).parents[3]
PROMPTS = [[5 + (start + i * step) % 200 for i in range(length)] for start, step, length in ((0, 3, 70), (9, 7, 40))]
WAYS = ({}, {"temperature": 0.9, "top_k": 20, "seed": 7, "logprobs": 3}, {"repetition_penalty": 1.3, "min_tokens": 9})


@pytest.mark.slow
@pytest.mark.parametrize(("ahead", "static"), [(False, False), (True, True)], ids=["in turn", "ahead and static"])
def test_another_process_computes_the_same_from_a_recording(tmp_path, ahead, static):
    """Chunks, decodes in batches, preemption by way of host memory, and every way to sample."""
    folder = write_family(tmp_path / "model", "LlamaForCausalLM")
    config = RunnerConfig(max_num_seqs=8, static_decode=static)
    with (tmp_path / "steps").open("wb") as file:
        run = EngineRun(
            folder, NUM_BLOCKS, 32, config=config, ahead=ahead, recording=file, num_host_blocks=2 * NUM_BLOCKS
        )
        try:
            sequences = [run.sequence(prompt, 40, **way) for prompt in PROMPTS for way in WAYS]
            for item in sequences:
                run.engine.submit(AddSequence(item))
            names = [item.sequence_id for item in sequences]
            outputs = dict(zip(names, run.collect(names), strict=True))
        finally:
            run.close()
        assert run.scheduler.counters.num_swapped_in > 0
    done = subprocess.run(
        [
            sys.executable, "-m", "tests.integration.engine.replaying", str(folder), str(tmp_path / "steps"),
            run.decoder.kernels.name, str(2 * NUM_BLOCKS), "static" if static else "eager",
        ],
        cwd=ROOT, capture_output=True, check=True, timeout=DEADLINE_S,
    )  # fmt: skip
    tokens = defaultdict(list)
    for names, recorded, replayed in map(json.loads, done.stdout.splitlines()):
        assert recorded == replayed
        for name, token in zip(names, replayed, strict=True):
            tokens[name].append(token["token_id"])
    # Running ahead, steps behind a sequence's end are computed too, and thrown away.
    assert {name: tokens[name][: len(outputs[name])] for name in outputs} == outputs
