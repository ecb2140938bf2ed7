"""An engine's process: loads it, then answers tasks; events as in shared/process.py, but any venv's Python will do."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from loadtest.bench.peers.adapter import EngineAdapter, ReturnsLogits, Settings

CLASSES = {
    "ours": "Ours",
    "vllm_cpu": "VllmCpu",
    "openvino_genai": "OpenvinoGenai",
    "transformers_sdpa": "TransformersSdpa",
}
"""Module beside this one → its class."""


def answer(adapter: EngineAdapter, task: dict[str, Any]) -> Any:
    """What a task asks for: a description, seconds, or logits."""
    match task["op"]:
        case "describe":
            return adapter.describe()
        case "prefill":
            return adapter.prefill_s(task["prompt"])
        case "decode":
            return median(adapter.decode_steps_s(task["prompts"], task["num_steps"]))
        case "logits" if isinstance(adapter, ReturnsLogits):
            return adapter.logits(task["prompt"])
        case op:
            raise ValueError(f"this engine has no task {op!r}")


def main() -> None:
    """Arguments: module, checkpoint, scratch folder, threads. A ready event first, then an answer event a task."""
    module, folder, scratch, num_threads = sys.argv[1:]
    out = _own_stdout()
    try:
        loaded = importlib.import_module(f"loadtest.bench.peers.{module}")
        settings = Settings(Path(folder), Path(scratch), int(num_threads))
        adapter: EngineAdapter = getattr(loaded, CLASSES[module])(settings)
        _emit(out, event="ready", address="")
        for line in sys.stdin:
            _emit(out, event="answer", value=answer(adapter, json.loads(line)))
    except Exception as error:
        _emit(out, event="error", kind=type(error).__name__, message=_reason(error))
        raise
    os._exit(0)  # peers' own threads may not end


def _own_stdout() -> TextIO:
    """Peers print to stdout as they like: it becomes stderr, and a copy of it is for events alone."""
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
