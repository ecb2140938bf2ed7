"""An engine's process: loads it, then answers tasks. Events as in shared/process.py, but no imports of Tandem's."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from loadtest.bench.peers.adapter import Answers, Embeds, EngineAdapter, ReturnsLogits, Settings

CLASSES = {
    "ours": "Ours",
    "vllm_cpu": "VllmCpu",
    "openvino_genai": "OpenvinoGenai",
    "llama_cpp_python": "LlamaCpp",
    "transformers_sdpa": "TransformersSdpa",
}
"""Module in this folder → its class."""


def answer(adapter: EngineAdapter, task: dict[str, Any]) -> Any:
    """The result of a task: a description, seconds, an answer, or logits."""
    match task["op"]:
        case "describe":
            return adapter.describe()
        case "prefill":
            return adapter.prefill_s(task["prompt"])
        case "decode":
            return median(adapter.decode_steps_s(task["prompts"], task["num_steps"]))
        case "embed" if isinstance(adapter, Embeds):
            return adapter.embed_s(task["prompts"])
        case "answer" if isinstance(adapter, Answers):
            return adapter.answer(task["prompt"], task["num_tokens"], task["num_guesses"])
        case "logits" if isinstance(adapter, ReturnsLogits):
            return adapter.logits(task["prompt"])
        case op:
            raise ValueError(f"this engine has no task {op!r}")


def main() -> None:
    """Arguments: module, checkpoint, scratch folder, threads, instruction set, form of the weights, how it guesses, and
    the draft's folder. Emits a ready event, then an answer event a task."""
    module, folder, scratch, num_threads, cpu_isa, form, guesses_by, draft = sys.argv[1:]
    out = _own_stdout()
    try:
        loaded = importlib.import_module(f"loadtest.bench.peers.{module}")
        settings = Settings(
            Path(folder), Path(scratch), int(num_threads), cpu_isa, form, guesses_by, Path(draft) if draft else None
        )
        adapter: EngineAdapter = getattr(loaded, CLASSES[module])(settings)
        _emit(out, event="ready", address="")
        for line in sys.stdin:
            _emit(out, event="answer", value=answer(adapter, json.loads(line)))
    except Exception as error:
        _emit(out, event="error", kind=type(error).__name__, message=_reason(error))
        raise
    os._exit(0)  # a peer's threads may never end


def _own_stdout() -> TextIO:
    """Peers may print to stdout: it is redirected to stderr, and a copy of it is used for events only."""
    true_stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return true_stdout


def _emit(out: TextIO, **event: Any) -> None:
    out.write(json.dumps(event) + "\n")
    out.flush()


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


if __name__ == "__main__":
    main()
