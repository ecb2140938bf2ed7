"""A workload as one line of text: `name:field=value,field=value`, so that a result file names its workload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from loadtest.slo import parse_duration_s
from loadtest.workloads.conversation import Workload
from loadtest.workloads.lengths import Fixed, LogNormal, Uniform, parse_lengths
from loadtest.workloads.synthetic import Chats, Copies, Random, SharedPrefix
from loadtest.workloads.trace import Replay, TraceSlice, slice_requests
from loadtest.workloads.trace_files import read_trace
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How traces are cut and scaled; synthetic workloads ignore it."""

    part: TraceSlice = TraceSlice()  # noqa: RUF009 - frozen
    scale: int = 1
    scale_output: int = 1


@dataclass(frozen=True, slots=True)
class _Kind:
    """One workload by name: its fields with their defaults, and an example for messages."""

    build: Callable[[Mapping[str, str], TraceOptions], Workload]
    defaults: Mapping[str, str]
    summary: str


def parse_workload(text: str, options: TraceOptions | None = None) -> Workload:
    """Builds the workload that `text` names; raises ConfigError (`workload`, or the field at fault)."""
    name, _, rest = text.partition(":")
    wanted = name.strip().lower()
    kind = KINDS.get(_FORMERLY.get(wanted, wanted))
    if kind is None:
        raise ConfigError(f"unknown workload {name!r}; known are {', '.join(KINDS)}", field="workload", value=name)
    return kind.build(_fields(name, kind, rest), options or TraceOptions())


def describe_workloads() -> str:
    """All workloads, for --help."""
    return "; ".join(kind.summary for kind in KINDS.values())


def _fields(name: str, kind: _Kind, text: str) -> dict[str, str]:
    """The defaults updated from `text`; a trace's path needs no field name."""
    fields = dict(kind.defaults)
    if "path" in fields and "path=" not in text:
        return {**fields, "path": text}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        key = key.strip().lower()
        if not equals or key not in fields:
            raise ConfigError(
                f"workload {name}: cannot read {part.strip()!r}; its fields are {', '.join(fields)}",
                field="workload",
                value=text,
            )
        fields[key] = value.strip()
    return fields


def _whole(fields: Mapping[str, str], name: str) -> int:
    lengths = parse_lengths(fields[name], name)
    if not isinstance(lengths, Fixed):
        raise ConfigError(f"{name}={fields[name]}: expected one number", field=name)
    return lengths.num_tokens


def _random(fields: Mapping[str, str], allowed: type | None = None) -> Random:
    input_len, output_len = parse_lengths(fields["input"], "input"), parse_lengths(fields["output"], "output")
    if allowed is not None:
        for name, lengths in (("input", input_len), ("output", output_len)):
            if not isinstance(lengths, allowed | Fixed):
                raise ConfigError(
                    f"{name}={fields[name]} is not of this workload's kind; `random` takes any", field=name
                )
    return Random(input_len, output_len)


def _copies(fields: Mapping[str, str], _: TraceOptions) -> Copies:
    try:
        share = float(fields["share"])
    except ValueError:
        raise ConfigError(f"share={fields['share']}: expected a number from 0 to 1", field="share") from None
    return Copies(
        input_len=parse_lengths(fields["input"], "input"),
        output_len=parse_lengths(fields["output"], "output"),
        run_len=parse_lengths(fields["run"], "run"),
        share=share,
    )


def _shared_prefix(fields: Mapping[str, str], _: TraceOptions) -> SharedPrefix:
    return SharedPrefix(
        prefix_len=_whole(fields, "prefix"),
        groups=_whole(fields, "groups"),
        input_len=parse_lengths(fields["input"], "input"),
        output_len=parse_lengths(fields["output"], "output"),
    )


def _chats(fields: Mapping[str, str], _: TraceOptions) -> Chats:
    return Chats(
        system_len=_whole(fields, "system"),
        turns=parse_lengths(fields["turns"], "turns"),
        input_len=parse_lengths(fields["input"], "input"),
        output_len=parse_lengths(fields["output"], "output"),
        mean_think_s=parse_duration_s(fields["think"], "think"),
    )


def _trace(fields: Mapping[str, str], options: TraceOptions) -> Replay:
    if not fields["path"]:
        raise ConfigError("workload trace needs a file: trace:PATH", field="workload")
    requests = slice_requests(read_trace(Path(fields["path"]), fields["unit"]), options.part)
    has_blocks = any(request.hash_ids for request in requests)
    # Without hash ids there are no blocks to preserve: any scale is valid.
    block_len = requests[0].block_len if has_blocks else options.scale
    return Replay(requests, block_len, options.scale, options.scale_output)


KINDS: Mapping[str, _Kind] = {
    "fixed": _Kind(
        lambda fields, _: _random(fields, Fixed),
        {"input": "512", "output": "64"},
        "fixed:input=512,output=64",
    ),
    "uniform": _Kind(
        lambda fields, _: _random(fields, Uniform),
        {"input": "256-768", "output": "32-96"},
        "uniform:input=256-768,output=32-96",
    ),
    "lognormal": _Kind(
        lambda fields, _: _random(fields, LogNormal),
        {"input": "512~0.7", "output": "64~0.7"},
        "lognormal:input=512~0.7,output=64~0.7  (mean~sigma)",
    ),
    "random": _Kind(
        lambda fields, _: _random(fields),
        {"input": "512", "output": "64"},
        "random:input=128@0.8+1024-2048@0.2,output=64~0.5  (any lengths, also mixed by weight)",
    ),
    "copies": _Kind(
        _copies,
        {"input": "256", "output": "64", "run": "16-32", "share": "1"},
        "copies:input=256,output=64,run=16-32,share=1  (prompts with runs of their answers, for models that count up)",
    ),
    "shared-prefix": _Kind(
        _shared_prefix,
        {"prefix": "512", "groups": "4", "input": "128", "output": "64"},
        "shared-prefix:prefix=512,groups=4,input=128,output=64",
    ),
    "conversation": _Kind(
        _chats,
        {"system": "256", "turns": "4", "input": "64", "output": "64", "think": "1s"},
        "conversation:system=256,turns=4,input=64,output=64,think=1s  (history with the server's answers)",
    ),
    "trace": _Kind(
        _trace,
        {"path": "", "unit": ""},
        "trace:PATH or trace:path=PATH,unit=s  (Mooncake's, Qwen-Bailian's, Azure's, BurstGPT's or Splitwise's; "
        "--scale, --scale-output, --slice, --speedup)",
    ),
}
_FORMERLY = {"mooncake": "trace", "azure": "trace"}
"""Names from when each format had its own."""
