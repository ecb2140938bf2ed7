"""A recorded trace on disk: requests come in the order of their ends, the file has them in that of their arrival."""

from __future__ import annotations

import json
import os
from array import array
from pathlib import Path
from types import TracebackType
from typing import Self

from shared.errors import ConfigError
from shared.rpc.pb.tandem.v1 import fleet_pb2

MOONCAKE_BLOCK = 512
"""Tokens of an id where a line does not say another number."""
_OTHER_FORMATS = (".csv", ".gz")
"""What readers of traces take a file for by its name."""


def cluster_file(trace: Path) -> Path:
    """Where the cluster lies as it was when the trace ended."""
    return trace.with_suffix(".cluster.json")


class TraceFile:
    """Lines go to a file beside the trace as they come; what is kept in memory is where each begins."""

    def __init__(self, path: Path, block_size: int) -> None:
        self.path = path
        self.num_requests = 0
        self.num_dropped = 0
        """Requests that the recorder could not take."""
        self.num_running = 0
        """Requests that had not ended when the recording did."""
        self._block_size = block_size
        self._part = path.with_name(path.name + ".part")
        self._arrived_s = array("d")
        self._begins = array("Q", [0])
        self._num_prompt_tokens = self._num_output_tokens = self._num_answered = 0
        self._outcomes: dict[str, int] = {}

    def __enter__(self) -> Self:
        """Raises ConfigError where the trace is there already, cannot be written, or has another format's name."""
        if self.path.suffix.lower() in _OTHER_FORMATS:
            raise ConfigError(f"--out: the trace is JSON lines, not {self.path.suffix}: name it .jsonl", field="out")
        if os.path.exists(self.path):
            raise ConfigError(f"--out: {self.path} is there already; name another file", field="out")
        try:
            self._file = self._part.open("w+b")
        except OSError as error:
            raise ConfigError(f"--out: cannot write {self._part}: {error.strerror}", field="out") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._part.unlink(missing_ok=True)

    @property
    def mean_prompt_tokens(self) -> float:
        """0 without requests."""
        return self._num_prompt_tokens / max(1, self.num_requests)

    @property
    def _mean_output(self) -> int:
        return max(1, round(self._num_output_tokens / max(1, self._num_answered)))

    def add(self, request: fleet_pb2.RecordedRequest) -> None:
        """One that has ended."""
        data = request.SerializeToString()
        self._file.write(data)
        self._begins.append(self._begins[-1] + len(data))
        self._arrived_s.append(request.arrived_unix_s)
        self.num_requests += 1
        self._num_prompt_tokens += request.num_prompt_tokens
        self._num_output_tokens += request.num_output_tokens
        self._num_answered += request.num_output_tokens > 0
        self._outcomes[request.outcome] = self._outcomes.get(request.outcome, 0) + 1

    def finish(self) -> str:
        """Writes the trace, and says what it has. Raises ConfigError for a trace without requests."""
        if not self.num_requests:
            raise ConfigError("no request ended while it was recorded: nothing was written", field="duration")
        order = sorted(range(self.num_requests), key=self._arrived_s.__getitem__)
        first_s = self._arrived_s[order[0]]
        with self.path.open("w") as out:
            for number in order:
                self._file.seek(self._begins[number])
                data = self._file.read(self._begins[number + 1] - self._begins[number])
                line = self._line(fleet_pb2.RecordedRequest.FromString(data), first_s)
                out.write(json.dumps(line, separators=(",", ":")) + "\n")
        return self._summary(self._arrived_s[order[-1]] - first_s)

    def _line(self, request: fleet_pb2.RecordedRequest, first_s: float) -> dict[str, object]:
        """A request's line. Where it got no token, the length of its answer is the mean of the others', at most what it
        asked for: a replay has to offer something."""
        num_output = request.num_output_tokens or min(self._mean_output, request.max_tokens or self._mean_output)
        line: dict[str, object] = {
            "timestamp": round((request.arrived_unix_s - first_s) * 1e3),
            "input_length": request.num_prompt_tokens,
            "output_length": num_output,
            "hash_ids": list(request.block_ids),
        }
        if self._block_size != MOONCAKE_BLOCK:
            line["block_size"] = self._block_size
        line |= {"outcome": request.outcome, "cached_length": request.num_cached_tokens}
        if request.ttft_ms:
            line["ttft_ms"] = round(request.ttft_ms, 3)
        if request.tpot_ms:
            line["tpot_ms"] = round(request.tpot_ms, 4)
        return line

    def _summary(self, span_s: float) -> str:
        rate = f" ({self.num_requests / span_s:.3g}/s)" if span_s > 0 else ""
        parts = [
            f"{self.num_requests} requests over {span_s:.3g} s{rate}",
            f"prompts of {self.mean_prompt_tokens:.0f} and answers of {self._mean_output} tokens in the mean",
        ]
        others = {"refused": "refused", "failed": "failed", "cut": "left by their clients or ended by a stop string"}
        parts += [f"{self._outcomes[name]} {text}" for name, text in others.items() if name in self._outcomes]
        if self.num_running:
            parts.append(f"{self.num_running} that still ran are left out")
        if self.num_dropped:
            parts.append(f"{self.num_dropped} were dropped, for they were not read in time")
        return "; ".join(parts)
