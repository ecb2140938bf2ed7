"""A contestant's process: loads it, then measures what it is told to, one JSON object a line in and out."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from loadtest.bench.peers.contestant import Contestant, Settings, TellsLogits

CLASSES = {
    "ours": "Ours",
    "vllm_cpu": "VllmCpu",
    "openvino_genai": "OpenvinoGenai",
    "transformers_sdpa": "TransformersSdpa",
}
"""Module beside this one → its class."""


def answer(contestant: Contestant, task: dict[str, Any]) -> Any:
    """What a task measured: seconds, or logits."""
    match task["op"]:
        case "prefill":
            return contestant.prefill_s(task["prompt"])
        case "decode":
            return median(contestant.decode_steps_s(task["prompts"], task["num_steps"]))
        case "logits" if isinstance(contestant, TellsLogits):
            return contestant.logits(task["prompt"])
        case op:
            raise ValueError(f"this contestant has no task {op!r}")


def main() -> None:
    """Arguments: module, checkpoint, scratch folder, threads. Says `{"ready": …}` or `{"failed": …}` first."""
    module, folder, scratch, num_threads = sys.argv[1:]
    out = _own_stdout()
    try:
        loaded = importlib.import_module(f"loadtest.bench.peers.{module}")
        contestant: Contestant = getattr(loaded, CLASSES[module])(
            Settings(Path(folder), Path(scratch), int(num_threads))
        )
        _say(out, {"ready": contestant.describe()})
    except Exception as error:
        _say(out, {"failed": _reason(error)})
        raise
    for line in sys.stdin:
        try:
            _say(out, {"value": answer(contestant, json.loads(line))})
        except Exception as error:
            _say(out, {"failed": _reason(error)})
            raise
    os._exit(0)  # peers' own threads may not end


def _own_stdout() -> TextIO:
    """Peers print to stdout as they like: it becomes stderr, and the true one is ours alone."""
    true_stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return true_stdout


def _say(out: TextIO, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


if __name__ == "__main__":
    main()
