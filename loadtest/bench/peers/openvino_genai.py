"""OpenVINO GenAI's continuous batching, stepped explicitly."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from loadtest.bench.peers.adapter import (
    DRAFT,
    INT4,
    INT8,
    MAX_BATCH,
    NGRAM,
    PLAIN,
    STEP_TOKENS,
    W4A8,
    W4A8_WIDE,
    W8A8,
    W8A8_WIDE,
    Settings,
    spare_steps,
)

_FORMATS = {
    PLAIN: "fp16",
    INT8: "int8",
    INT4: "int4",
    W8A8: "int8",
    W4A8: "int4",
    W8A8_WIDE: "int8",
    W4A8_WIDE: "int4",
}
"""Form → what its exporter calls it; int4 has groups of 128 and some layers in int8, as its default is."""
_ROUNDED = {INT8: 0, INT4: 0, W8A8_WIDE: 128, W4A8_WIDE: 128}
"""Form → for how many numbers of a token activations get a scale when they are rounded to int8; 0: they are not. By
default they are rounded where weights are, with a scale for 32."""
_LONGEST_NGRAM = 3
"""As in its samples of prompt lookup."""


class OpenvinoGenai:
    """See `EngineAdapter`. The checkpoint is converted once to each form, of which fp16 is OpenVINO's of 16 bits."""

    def __init__(self, settings: Settings) -> None:
        import openvino_genai as genai  # type: ignore[import-not-found, unused-ignore]

        self._genai: Any = genai
        self._weights = _FORMATS[settings.form]
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.max_num_seqs = MAX_BATCH
        scheduler.max_num_batched_tokens = STEP_TOKENS
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        folder = _converted(settings.folder, settings.scratch, settings.form)
        kind = _precision()
        # KV in the compute precision, as in the other engines: the default would be 8 bits.
        properties: dict[str, object] = {"INFERENCE_PRECISION_HINT": kind, "KV_CACHE_PRECISION": kind}
        properties["INFERENCE_NUM_THREADS"] = settings.num_threads
        if settings.form in _ROUNDED:
            properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = _ROUNDED[settings.form]
        self._form = settings.form
        self._guesses_by = settings.guesses_by
        if settings.guesses_by == NGRAM:
            properties["prompt_lookup"] = True
        elif settings.guesses_by == DRAFT:
            assert settings.draft is not None
            draft = _converted(settings.draft, settings.scratch / "draft", settings.form)
            properties["draft_model"] = genai.draft_model(str(draft), "CPU", **properties)
        self._pipeline: Any = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)
        self._names = itertools.count()

    def describe(self) -> str:
        """See `EngineAdapter`."""
        version = self._genai.__version__
        rounded = "" if self._form in (PLAIN, INT8, INT4) else f", activations rounded to int8 ({self._form})"
        return f"openvino-genai {version}, {self._weights} weights{rounded}, computes and keeps KV in {_precision()}"

    def prefill_s(self, prompt: list[int]) -> float:
        """See `EngineAdapter`."""
        start = time.perf_counter()
        handle = self._add(prompt, 1)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        seconds = time.perf_counter() - start
        handle.read_all()
        return seconds

    def decode_steps_s(self, prompts: list[list[int]], num_steps: int) -> list[float]:
        """See `EngineAdapter`. Computes a few more steps than requested: in the last ones all sequences decode."""
        spare = spare_steps(prompts)
        handles = [self._add(prompt, num_steps + spare + 1) for prompt in prompts]
        times = []
        most = 0
        while self._pipeline.has_non_finished_requests():
            start = time.perf_counter()
            self._pipeline.step()
            seconds = time.perf_counter() - start
            counts = [len(handle.read()) if handle.can_read() else 0 for handle in handles]
            most = max(most, sum(counts))
            if sum(counts) == len(prompts):
                times.append(seconds)
        if not times:
            raise RuntimeError(f"no step gave all {len(prompts)} sequences a token, at most {most} did")
        return times[1:][-num_steps:]  # the first step may still compute prompts

    def answer(self, prompt: list[int], num_tokens: int, num_guesses: int) -> tuple[float, list[int]]:
        """See `Answers`."""
        handle = self._add(prompt, num_tokens, num_guesses)
        tokens: list[int] = []
        begun = ended = 0.0
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            ended = time.perf_counter()
            if handle.can_read():
                tokens += next(iter(handle.read().values())).generated_ids
                begun = begun or ended
        return ended - begun, tokens

    def _add(self, prompt: list[int], num_tokens: int, num_guesses: int = 0) -> Any:
        import numpy
        import openvino  # type: ignore[import-not-found, unused-ignore]

        config = self._genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        if self._guesses_by:
            config.num_assistant_tokens = num_guesses
        if self._guesses_by == NGRAM:
            config.max_ngram_size = _LONGEST_NGRAM
        tokens = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
        return self._pipeline.add_request(next(self._names), tokens, config)


def _precision() -> str:
    """bf16 if the processor supports it, else OpenVINO computes in fp32."""
    import openvino  # type: ignore[import-not-found, unused-ignore]

    return "bf16" if "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES") else "f32"


def _converted(checkpoint: Path, scratch: Path, form: str) -> Path:
    """A model in OpenVINO's format, and any tokenizer: the pipeline requires one, the benchmark passes token ids."""
    weights = _FORMATS[form]
    folder = scratch / ("openvino" if form == PLAIN else f"openvino-{weights}")
    if not (folder / "openvino_detokenizer.xml").exists():
        command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino"]
        command += ["--task", "text-generation-with-past", "--weight-format", weights, "--model", str(checkpoint)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        subprocess.run([*command, str(folder)], check=True, stdout=sys.stderr, env=environment)
    return folder
