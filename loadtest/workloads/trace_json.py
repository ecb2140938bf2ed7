"""Traces in JSON lines, with a hash id for each block of a prompt, or without any.

Mooncake's (Qin et al., FAST 2025): milliseconds, and 512 tokens a block. Lines that `tandem record` wrote may have
another number of tokens, which they name as `block_size`; what else they have is of those requests' own times, and not
read here. Qwen-Bailian's (Wang et al., ATC 2025), told by its `chat_id`: seconds, and 16 tokens a block.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from loadtest.workloads.trace import BLOCK_LEN, LATEST_S, RisingTimes, TraceRequest, open_trace, trace_error
from shared.errors import ConfigError

BAILIAN_BLOCK_LEN = 16
"""Prompt tokens of a hash id of Qwen-Bailian's."""

UNITS = {"ms": 1000, "s": 1}
"""Number of a timestamp's units in a second, by the unit's name."""
MOST_RATE = 1000.0
"""Requests/s of a trace whose unit is not said: read as milliseconds, one in seconds has a thousand times its rate."""
_CHECKED = 256
"""First requests by which that is judged."""
_OF_BAILIAN = "chat_id"
_END_OF_IDS = 1 << 64
_NEEDED = ("timestamp", "input_length", "output_length")
_BY_LINES = "; a trace that is not .csv has a JSON object on each line"
_NAMES_SHOWN, _SHOWN = 8, 200


def read_json_trace(path: Path, unit: str = "") -> Iterator[TraceRequest]:
    """Requests in the file's order, times relative to the first; raises ConfigError with the line's number. `unit` of
    the timestamps is one of UNITS; empty: as the format has it, refused where milliseconds give more than MOST_RATE."""
    if unit and unit not in UNITS:
        raise ConfigError(f"unit={unit}: expected one of {', '.join(UNITS)}", field="unit", value=unit)
    times = RisingTimes(path, "timestamp")
    block_len = 0
    has_ids: bool | None = None
    for count, (number, line) in enumerate(open_trace(path), start=1):
        hint = _BY_LINES if count == 1 else ""
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise trace_error(path, number, f"not JSON: {error}{hint}") from error
        if not isinstance(fields, dict):
            raise trace_error(path, number, f"expected a JSON object{hint}")
        _check_names(fields, path, number)
        usual_unit, usual_len = ("s", BAILIAN_BLOCK_LEN) if _OF_BAILIAN in fields else ("ms", BLOCK_LEN)
        read_s = _timestamp_s(fields, UNITS[unit or usual_unit], path, number)
        at_s = times.relative_s(read_s, fields["timestamp"], number)
        if not unit and count == _CHECKED and 0 < at_s < _CHECKED / MOST_RATE:
            problem = f"{count} requests in {at_s:g} s: say the timestamps' unit, ms or s"
            raise trace_error(path, number, problem)
        num_prompt_tokens = _count(fields, "input_length", path, number)
        own_len = _count(fields, "block_size", path, number) if "block_size" in fields else usual_len
        if own_len != (block_len or own_len):
            raise trace_error(path, number, f"a block has {own_len} tokens, in the lines before {block_len}")
        block_len = own_len
        if has_ids not in (None, "hash_ids" in fields):
            raise trace_error(path, number, "hash_ids must be in all lines or in none")
        has_ids = "hash_ids" in fields
        yield TraceRequest(
            at_s=at_s,
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=_count(fields, "output_length", path, number),
            hash_ids=_hash_ids(fields, num_prompt_tokens, block_len, path, number) if has_ids else (),
            block_len=block_len,
        )


def _check_names(fields: dict[str, object], path: Path, number: int) -> None:
    """Raises ConfigError for a line without one of the fields that are read, such as one of texts or of delays."""
    missing = [name for name in _NEEDED if name not in fields]
    if missing:
        found = ", ".join(map(repr, list(fields)[:_NAMES_SHOWN])) or "none"
        raise trace_error(
            path, number, f"no {', '.join(missing)}: expected {', '.join(_NEEDED)}, found {found[:_SHOWN]}"
        )


def _timestamp_s(fields: dict[str, object], units: int, path: Path, number: int) -> float:
    value = fields.get("timestamp")
    latest = LATEST_S * units
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= latest:
        got = repr(value) if not isinstance(value, int) or abs(value) < latest else "a longer number"
        raise trace_error(path, number, f"timestamp must be a number from 0 to {latest:g}, got {got}")
    return value / units


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
