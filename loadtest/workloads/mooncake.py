"""Mooncake's trace format: JSON lines, one hash id for every 512 prompt tokens (Qin et al., FAST 2025).

Timestamps are milliseconds. Traces of others in this format may have seconds, and nothing in a line says so.

Lines that `tandem record` wrote may have another number of tokens, which they name as `block_size`; what else they have
is of those requests' own times, and not read here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

from loadtest.workloads.trace import BLOCK_LEN as BLOCK_LEN
from loadtest.workloads.trace import TraceRequest, open_trace, trace_error
from shared.errors import ConfigError

_END_OF_IDS = 1 << 64
_MOST = 1e15
"""Latest timestamp: up to here a float holds every millisecond."""


UNITS = {"ms": 1e-3, "s": 1.0}
"""Seconds of a timestamp, by its unit."""
MOST_RATE = 1000.0
"""Requests/s of a trace whose unit is not said: read as milliseconds, one in seconds has a thousand times its rate."""
_CHECKED = 256
"""First requests by which that is judged."""


def read_mooncake(path: Path, unit: str = "") -> Iterator[TraceRequest]:
    """Requests in the file's order, times relative to the first; raises ConfigError with the line's number. `unit` of
    the timestamps is one of UNITS; empty: milliseconds, refused where that gives more than MOST_RATE."""
    if unit and unit not in UNITS:
        raise ConfigError(f"unit={unit}: expected one of {', '.join(UNITS)}", field="unit", value=unit)
    first_s: float | None = None
    unit_s = UNITS[unit or "ms"]
    last_s = -math.inf
    block_len = 0
    for count, (number, line) in enumerate(open_trace(path), start=1):
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise trace_error(path, number, f"not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise trace_error(path, number, "expected a JSON object")
        at_s = _timestamp(fields, path, number) * unit_s
        if at_s < last_s:
            raise trace_error(path, number, f"timestamp {fields['timestamp']} goes back in time")
        last_s = at_s
        first_s = at_s if first_s is None else first_s
        if not unit and count == _CHECKED and 0 < at_s - first_s < _CHECKED / MOST_RATE:
            problem = (
                f"{count} requests in {at_s - first_s:g} s if timestamps are milliseconds: say their unit, ms or s"
            )
            raise trace_error(path, number, problem)
        num_prompt_tokens = _count(fields, "input_length", path, number)
        own_len = _count(fields, "block_size", path, number) if "block_size" in fields else BLOCK_LEN
        if own_len != (block_len or own_len):
            raise trace_error(path, number, f"block_size is {own_len}, in the lines before {block_len}")
        block_len = own_len
        yield TraceRequest(
            at_s=at_s - first_s,
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=_count(fields, "output_length", path, number),
            hash_ids=_hash_ids(fields, num_prompt_tokens, block_len, path, number),
            block_len=block_len,
        )


def _timestamp(fields: dict[str, object], path: Path, number: int) -> float:
    value = fields.get("timestamp")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST:
        got = repr(value) if not isinstance(value, int) or abs(value) < _MOST else "a longer number"
        raise trace_error(path, number, f"timestamp must be a number from 0 to {_MOST:g}, got {got}")
    return value


def _count(fields: dict[str, object], name: str, path: Path, number: int) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise trace_error(path, number, f"{name} must be a whole number of at least 1, got {value!r}")
    return value


def _hash_ids(
    fields: dict[str, object], num_prompt_tokens: int, block_len: int, path: Path, number: int
) -> tuple[int, ...]:
    value = fields.get("hash_ids")
    if not isinstance(value, list) or not all(type(i) is int and abs(i) < _END_OF_IDS for i in value):
        raise trace_error(path, number, "hash_ids must be a list of whole numbers of at most 64 bits")
    num_blocks = -(-num_prompt_tokens // block_len)
    if len(value) != num_blocks:
        raise trace_error(
            path,
            number,
            f"hash_ids holds {len(value)} ids, but {num_prompt_tokens} tokens are {num_blocks} blocks of {block_len}",
        )
    return tuple(value)
