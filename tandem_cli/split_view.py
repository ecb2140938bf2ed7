"""A drawing of the parts of the time to the first token: each part's bar begins where the one before it ended."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shared.rpc.pb.tandem.v1 import types_pb2
from tandem import Answer

_BAR_WIDTH = 36
_REST_SHARE = 0.02
"""Least share of the whole at which unaccounted time is shown as a part of its own."""


def split_parts(split: types_pb2.TtftSplit) -> list[tuple[str, float]]:
    """The parts of the router's TTFT in order, (name, milliseconds), without the empty ones."""
    parts = [
        ("queue", split.queue_ms),
        ("placement", split.placement_ms),
        ("reserve", split.reserve_ms),
        ("prefix fetch", split.prefix_fetch_ms),
        ("adapter", split.adapter_ms),
        ("prefill queue", split.prefill_queue_ms),
        ("prefill", split.prefill_compute_ms),
        ("return", split.return_ms),
    ]
    rest = split.ttft_ms - sum(value for _, value in parts)
    if rest > _REST_SHARE * split.ttft_ms:
        parts.append(("rest", rest))
    return [(name, value) for name, value in parts if value > 0.0]


def print_summary(console: Console, answer: Answer) -> None:
    """A drawing on a terminal, one line elsewhere."""
    if console.is_terminal:
        console.print(_drawing(answer))
    else:
        console.print(summary_line(answer), soft_wrap=True, markup=False, highlight=False)


def summary_line(answer: Answer) -> str:
    """All numbers of an answer in one line."""
    parts = ", ".join(f"{name} {value:.1f}" for name, value in split_parts(answer.split))
    parts += f"; then ship {answer.split.ship_exposed_ms:.1f}" if answer.prefill_worker else ""
    return (
        f"ttft {answer.ttft_ms:.1f} ms (in the router {answer.split.ttft_ms:.1f}: {parts}) | "
        f"tpot {answer.tpot_ms:.1f} ms | {_tokens(answer)} | {_route(answer)}"
    )


def _drawing(answer: Answer) -> RenderableType:
    split = answer.split
    headline = Text.assemble(
        (f"{answer.ttft_ms:.1f} ms", "bold"),
        f" to the first token, {split.ttft_ms:.1f} of them in the router ",
        (f"({_route(answer)})", "cyan"),
    )
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(min_width=13)
    table.add_column(justify="right", min_width=8)
    table.add_column()
    start = 0.0
    for name, value in split_parts(split):
        table.add_row(name, f"{value:.1f} ms", _bar(start, value, split.ttft_ms))
        start += value
    footer = f"{answer.tpot_ms:.1f} ms a token after it; {_tokens(answer)}"
    if answer.prefill_worker:
        footer += f"; last KV block +{split.ship_exposed_ms:.1f} ms"
    return Group(headline, Padding(table, (0, 0, 0, 2)), Text(footer, style="dim"))


def _bar(start_ms: float, length_ms: float, total_ms: float) -> Text:
    """A bar of at least a sliver, at its place in a row of _BAR_WIDTH cells."""
    cells_per_ms = _BAR_WIDTH / total_ms if total_ms > 0.0 else 0.0
    offset = min(round(start_ms * cells_per_ms), _BAR_WIDTH - 1)
    cells = round(length_ms * cells_per_ms)
    return Text(" " * offset + ("█" * cells or "▏"), style="green")


def _route(answer: Answer) -> str:
    if answer.prefill_worker:
        return f"{answer.prefill_worker} → {answer.decode_worker}"
    return f"{answer.decode_worker} alone"


def _tokens(answer: Answer) -> str:
    usage = answer.usage
    cached = f" ({usage.num_cached_tokens} cached)" if usage.num_cached_tokens else ""
    return f"{usage.num_prompt_tokens} tokens in{cached}, {usage.num_output_tokens} out"
