"""How `tandem fit --degrees` shows what each way to spread a model over ranks takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table

from services.cli.tables import table_of
from shared.sizing.degrees import DegreeFit
from shared.sizing.memory import GB

WORKERS_OF_TODAY = (
    "arithmetic: workers of at most 16 ranks, on CPUs also over several machines; on GPUs no group of ranks has run yet"
)
"""What is printed below the table."""


def degrees_table(fits: Sequence[DegreeFit], gpu: str, prompt_len: int, context: int) -> Table:
    """One row for each; a spread that does not hold one sequence has no times."""
    has_experts = any(one.experts_read for one in fits)
    headers = ["tp", "pp", "ep", "ranks", "weights", "KV a token", "KV tokens"]
    headers += ["prompt", "seqs", "step", "sent", "bubble", *(["experts"] if has_experts else [])]
    title = (
        f"a worker over ranks of one {gpu} each: prompts of {prompt_len:,} tokens alone, a decode step of as many "
        f"sequences as the load has and {context:,} tokens each leave room for"
    )
    rows = [_cells(one, has_experts) for one in fits]
    return table_of(headers, rows, title=title)


def _cells(one: DegreeFit, has_experts: bool) -> list[str]:
    spread = one.spread
    cells = [f"{spread.tensor}", f"{spread.pipeline}", f"{spread.expert}", f"{spread.num_ranks}"]
    cells += [f"{one.weight_bytes / GB:.3g} GB", f"{one.kv_bytes_per_token / 1024:.3g} KiB"]
    if not one.fits:
        return [*cells, f"{one.kv_tokens:,}" if one.kv_tokens > 0 else "none", "does not fit"]
    cells += [f"{one.kv_tokens:,}", f"{one.prompt_s:.3g} s", f"{one.batch}", f"{one.step_s * 1e3:.3g} ms"]
    cells += [f"{one.exchange_s * 1e3:.2g} ms", f"{one.bubble:.0%}"]
    return [*cells, f"{one.experts_read:.0%}"] if has_experts else cells


def degrees_as_dict(fits: Sequence[DegreeFit]) -> list[dict[str, object]]:
    """For scripts; bytes and seconds."""
    return [{**asdict(one), "fits": one.fits} for one in fits]
