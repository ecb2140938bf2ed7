"""How `tandem fit` shows its answer: tables for people, one object for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from shared.sizing.break_even import HOURS_OF_A_MONTH, MOST_GPUS, BreakEven, paying_tokens
from shared.sizing.degrees import DegreeFit
from shared.sizing.fit import Cost, Fit
from shared.sizing.load import PoolFit
from shared.sizing.memory import GB, gpus_by_memory
from shared.sizing.shapes import BYTES_PER_VALUE, KEPT_STATES, NAMED_MODELS
from tandem_cli.console import table_of

GIB = 1 << 30
PUBLISHED_LOADS = ((8000, 32), (128_000, 256))
"""(context, sequences) of the table that is often cited for the cost of KV."""
WORKERS_OF_TODAY = (
    "arithmetic: workers of at most 16 ranks, on CPUs also over several machines; on GPUs no group of ranks has run yet"
)
"""The note below the table of degrees."""


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """GPUs by memory alone."""

    memory_bytes: float
    rows: list[dict[str, object]]

    def render(self) -> Table:
        """The rows as a table for a terminal."""
        rows = [
            (
                f"{row['model']}",
                f"{row['weights_gb']} GB",
                f"{row['context']:,}",
                f"{row['sequences']}",
                f"{row['gpus_mha']}",
                f"{row['kv_heads']}",
                f"{row['gpus']}",
                f"{row['kv_gib_of_128k']} GiB",
            )
            for row in self.rows
        ]
        headers = ("model", "weights", "context", "sequences", "MHA 2·L·H", "KV heads", "GPUs", "KV of 128k tokens")
        title = f"GPUs of {self.memory_bytes / GB:g} GB that hold 16-bit weights and KV if no byte is lost"
        return table_of(headers, rows, text=("model",), title=title)


def memory_table(memory_bytes: float) -> MemoryTable:
    """The named models under the published loads: (weights + KV a token · context · sequences) / memory."""
    rows: list[dict[str, object]] = []
    for context, sequences in PUBLISHED_LOADS:
        for name, model in NAMED_MODELS.items():
            rows.append(
                {
                    "model": name,
                    "weights_gb": round(model.weight_bytes / GB, 1),
                    "context": context,
                    "sequences": sequences,
                    "gpus_mha": gpus_by_memory(model, context, sequences, memory_bytes, mha=True),
                    "kv_heads": model.num_kv_heads,
                    "gpus": gpus_by_memory(model, context, sequences, memory_bytes, mha=False),
                    "kv_gib_of_128k": round(model.kv_bytes(model.num_kv_heads, "bf16") * 128_000 / GIB, 1),
                }
            )
    return MemoryTable(memory_bytes, rows)


def show(console: Console, fit: Fit, name: str, even: BreakEven, token_price: float | None = None) -> None:
    """Everything, with the arithmetic. `token_price`: of a million tokens elsewhere."""
    load, hardware, model = fit.load, fit.hardware, fit.model
    kv = model.kv_bytes(model.num_kv_heads, hardware.kv_dtype)
    kept = model.kv_bytes(model.num_kv_heads, hardware.kv_dtype, load.context)
    weights = model.num_params * BYTES_PER_VALUE[hardware.weights]
    active = "" if model.experts is None else f" ({model.active_params / 1e9:.3g} B of them for a token)"
    values = f"2 · {model.kv_layers} layers · {model.num_kv_heads} heads · {model.head_dim}"
    if model.latent is not None:
        values = f"{model.num_layers} layers · latents of {model.latent.kv_rank} + {model.latent.rope_dim}"
    states = "" if model.states is None else f", {KEPT_STATES} states of {model.states.nbytes / 1e6:.3g} MB included"
    lines = [
        f"{name}: {model.num_params / 1e9:.3g} B parameters{active}, {weights / GB:.3g} GB in {hardware.weights}; "
        f"KV {kv / 1024:.0f} KiB a token in {hardware.kv_dtype} ({values}), "
        f"{kept * load.context / GIB:.1f} GiB for {load.context:,} tokens{states}",
        f"load: {load.concurrency} sequences at once, {load.rate:.3g} req/s, prompts of {load.prompt_len:,}, answers "
        f"of {load.output_len:,} tokens; TTFT {load.ttft_s:g} s for {1 - load.late_share:.0%}, "
        f"TPOT {load.tpot_s * 1e3:g} ms",
        f"by memory alone: {fit.floor} × {hardware.decode_name}, {fit.floor_mha} if every attention head had its "
        "own KV (2 · L · H)",
    ]
    if hardware.draft is not None:
        draft = hardware.draft
        lines.append(
            f"draft model: {draft.weight_bytes / GB:.3g} GB and {draft.kv_bytes_per_token / 1024:.3g} KiB a token on "
            "each worker that decodes; its guesses shorten no time here"
        )
    if hardware.has_head:
        own = model.head_params * BYTES_PER_VALUE[hardware.weights]
        lines.append(
            f"head: {own / GB:.3g} GB and {kv / model.kv_layers / 1024:.3g} KiB a token on each worker; its guesses, "
            "of workers that decode on CPUs alone, shorten no time here"
        )
    if hardware.adapter_slots:
        lines.append(
            f"adapters: {hardware.adapter_slots} of rank {hardware.adapter_rank} take "
            f"{hardware.adapter_bytes(model) / GB:.3g} GB of each worker; what they add to its steps costs no time here"
        )
    if hardware.adapter_copies:
        lines.append(
            f"copies of {hardware.adapter_copies} take {hardware.adapter_host_bytes(model) / GB:.3g} GB of each "
            "worker's host, which is not counted among the memory of its GPUs"
        )
    for line in lines:
        console.print(line, markup=False)
    console.print()
    console.print(_pool_table(fit))
    console.print()
    for line in [*_verdict(fit), *_break_even(fit, even, token_price)]:
        console.print(line, markup=False)


def _pool_table(fit: Fit) -> Table:
    headers = ("GPU", "workers", "GPUs each", "GPUs", "KV tokens", "seqs", "TTFT alone", "TPOT", "busy")
    pools = (fit.prefill, fit.decode, *([fit.collocated] if fit.collocated is not None else []))
    return table_of(("pool", *headers, "sized by"), map(_cells, pools), text=("pool",), folds=("sized by",))


def _cells(pool: PoolFit) -> list[str]:
    return [
        pool.role,
        pool.gpu,
        f"{pool.workers}",
        f"{pool.gpus_each}",
        f"{pool.gpus}",
        f"{pool.kv_tokens:,}",
        f"{pool.sequences}" if pool.role != "prefill" else "-",
        f"{pool.ttft_s:.3g} s" if pool.ttft_s is not None else "-",
        f"{pool.tpot_s * 1e3:.1f} ms" if pool.tpot_s is not None else "-",
        f"{pool.busy:.0%}" if pool.busy is not None else "-",
        "; ".join(pool.limits),
    ]


def _verdict(fit: Fit) -> list[str]:
    prefill, decode = fit.ratio
    lines = [f"prefill : decode = {prefill} : {decode} workers, {fit.gpus} GPUs in two pools"]
    if fit.cost is not None:
        lines.append(f"cost of two pools: {_cost(fit.cost)}")
    if fit.collocated_cost is not None:
        lines.append(f"cost of one pool: {_cost(fit.collocated_cost)}")
    lines += warnings(fit)
    lines.append(verdict(fit))
    return lines


def _break_even(fit: Fit, even: BreakEven, token_price: float | None) -> list[str]:
    """From which load on the other number of pools is the answer, and from how many tokens on own GPUs pay."""
    this, other = ("one pool", "two pools") if even.one_pool else ("two pools", "one pool")
    places = [
        f"{rate:.3g} req/s and {side}"
        for rate, side in ((even.below, "fewer"), (even.above, "more"))
        if rate is not None
    ]
    where = f"{other} at {' and at '.join(places)}" if places else f"none, {this} everywhere"
    lines = [f"break-even: {where} (a 64th to 64 times this load were tried, up to {MOST_GPUS} GPUs)"]
    cost = fit.collocated_cost if fit.takes_one_pool else fit.cost
    if cost is not None and token_price is not None:
        tokens = paying_tokens(cost.per_hour, token_price)
        share = tokens / (_tokens_of_a_month(fit) or 1.0)
        lines.append(
            f"against {token_price:g} for a million tokens elsewhere these GPUs pay from {tokens / 1e6:,.0f} million "
            f"tokens a month on, {share:.0%} of this load"
        )
    return lines


def _tokens_of_a_month(fit: Fit) -> float:
    return fit.load.rate * (fit.load.prompt_len + fit.load.output_len) * 3600 * HOURS_OF_A_MONTH


def verdict(fit: Fit) -> str:
    """One sentence: two pools or one."""
    if fit.collocated is None:
        return "disaggregated: workers that do both do not meet both targets, not even on four times as many GPUs"
    one, two = f"{fit.collocated.gpus} GPUs", f"{fit.gpus}"
    if fit.cost is not None and fit.collocated_cost is not None:
        one, two = (
            f"{fit.collocated.gpus} GPUs at {fit.collocated_cost.per_hour:.2f} an hour",
            f"{fit.gpus} at {fit.cost.per_hour:.2f}",
        )
    if fit.is_undecided:
        return f"disaggregated, while the overlap of a step is not known: {_by_overlap(fit)}"
    if fit.collocated_is_better:
        return f"collocated serves this load better: one pool meets the same targets with {one}, two pools take {two}"
    return f"disaggregated: one pool would take {one}, two take {two}"


def _by_overlap(fit: Fit) -> str:
    """The two ends between which the answer lies."""
    assert fit.apart is not None
    hidden, apart = _pools_of(fit), _pools_of(fit.apart)
    return (
        f"{hidden} if a step's products hide behind the reading of its weights, {apart} if they do not; measure "
        "mixed steps (loadtest.bench step-times) and give their --steps, or --overlap"
    )


def _pools_of(fit: Fit) -> str:
    one = f"one takes {fit.collocated.gpus} GPUs" if fit.collocated is not None else "one does not meet the targets"
    return f"{one} and two take {fit.gpus}"


def warnings(fit: Fit) -> list[str]:
    """Notes on the limits of the answer."""
    found = []
    kv_heads = fit.model.num_kv_heads
    prefill, decode = fit.prefill.spread, fit.decode.spread
    if fit.model.latent is not None and max(prefill.tensor, decode.tensor) > 1:
        found.append("warning: latents do not split by heads: each GPU of a worker holds all of them")
    elif max(prefill.tensor, decode.tensor) > kv_heads:
        found.append(f"warning: {kv_heads} KV heads on more GPUs: several GPUs of a worker hold the same head's KV")
    if prefill != decode:
        found.append(
            f"note: prefill workers have {prefill}, decode workers {decode}: blocks are handed over whole, whatever "
            "the degrees"
        )
    if (most := max(prefill.num_ranks, decode.num_ranks)) > fit.hardware.node_devices:
        found.append(
            f"warning: a worker of {most} GPUs spans machines of {fit.hardware.node_devices} (--node-gpus), which no "
            "worker does yet"
        )
    if fit.transfer > 1:
        found.append(
            f"warning: the KV of the prompts is {fit.transfer:.1f} times what the prefill GPUs' network cards carry"
        )
    return found


def as_dict(fit: Fit, name: str, even: BreakEven, token_price: float | None = None) -> dict[str, object]:
    """The whole answer for scripts; bytes and seconds."""
    cost, collocated_cost = fit.cost, fit.collocated_cost
    used = collocated_cost if fit.takes_one_pool else cost
    pays = paying_tokens(used.per_hour, token_price) if used is not None and token_price is not None else None
    return {
        "model": {
            "name": name,
            "num_params": fit.model.num_params,
            "num_active_params": fit.model.active_params,
            "weight_bytes": fit.model.num_params * BYTES_PER_VALUE[fit.hardware.weights],
            "kv_bytes_per_token": fit.model.kv_bytes(fit.model.num_kv_heads, fit.hardware.kv_dtype),
            "adapter_bytes": fit.hardware.adapter_bytes(fit.model),
            "adapter_host_bytes": fit.hardware.adapter_host_bytes(fit.model),
        },
        "load": asdict(fit.load),
        "gpus_by_memory": {"mha": fit.floor_mha, "own_kv_heads": fit.floor},
        "pools": [_pool(fit.prefill), _pool(fit.decode)],
        "gpus": fit.gpus,
        "ratio": {"prefill": fit.ratio[0], "decode": fit.ratio[1]},
        "collocated": _pool(fit.collocated) if fit.collocated is not None else None,
        "better": "collocated" if fit.takes_one_pool else "disaggregated",
        "undecided": fit.is_undecided,
        "without_overlap": None if fit.apart is None else _without_overlap(fit.apart),
        "reason": verdict(fit),
        "warnings": warnings(fit),
        "cost": _cost_as_dict(cost),
        "collocated_cost": _cost_as_dict(collocated_cost),
        "break_even": {"rate_below": even.below, "rate_above": even.above, "tokens_a_month": pays},
    }


def _cost_as_dict(cost: Cost | None) -> dict[str, float] | None:
    return None if cost is None else {**asdict(cost), "per_month": cost.per_hour * HOURS_OF_A_MONTH}


def _without_overlap(fit: Fit) -> dict[str, object]:
    return {
        "pools": [_pool(fit.prefill), _pool(fit.decode)],
        "gpus": fit.gpus,
        "collocated": _pool(fit.collocated) if fit.collocated is not None else None,
        "better": "collocated" if fit.collocated_is_better else "disaggregated",
    }


def _pool(pool: PoolFit) -> dict[str, object]:
    return {**asdict(pool), "tensor": pool.spread.tensor, "gpus": pool.gpus}


def _cost(cost: Cost) -> str:
    month = cost.per_hour * HOURS_OF_A_MONTH
    parts = [
        f"{cost.per_hour:.2f} an hour, {month:,.0f} a month",
        f"{cost.per_million_tokens:.3f} for a million tokens",
    ]
    if cost.per_million_prompt_tokens:
        parts.append(
            f"{cost.per_million_prompt_tokens:.3f} of prompts, {cost.per_million_output_tokens:.3f} of answers by pool"
        )
    return "; ".join(parts)


def degrees_table(fits: Sequence[DegreeFit], gpu: str, prompt_len: int, context: int) -> Table:
    """One row for each; a spread that does not hold one sequence has no times."""
    has_experts = any(one.experts_read for one in fits)
    headers = ["tp", "pp", "ep", "ranks", "weights", "KV a token", "KV tokens"]
    headers += ["prompt", "seqs", "step", "sent", "bubble", *(["experts"] if has_experts else [])]
    title = (
        f"a worker over ranks of one {gpu} each: prompts of {prompt_len:,} tokens alone, a decode step of as many "
        f"sequences as the load has and {context:,} tokens each leave room for"
    )
    rows = [_degree_cells(one, has_experts) for one in fits]
    return table_of(headers, rows, title=title)


def _degree_cells(one: DegreeFit, has_experts: bool) -> list[str]:
    spread = one.spread
    cells = [f"{spread.tensor}", f"{spread.pipeline}", f"{spread.expert}", f"{spread.num_ranks}"]
    cells += [f"{one.weight_bytes / GB:.3g} GB", f"{one.kv_bytes_per_token / 1024:.3g} KiB"]
    if not one.fits:
        return [*cells, f"{one.kv_tokens:,}" if one.kv_tokens > 0 else "none", "does not fit"]
    cells += [f"{one.kv_tokens:,}", f"{one.prompt_s:.3g} s", f"{one.batch}", f"{one.step_s * 1e3:.3g} ms"]
    cells += [f"{one.exchange_s * 1e3:.2g} ms", f"{one.bubble:.0%}"]
    return [*cells, f"{one.experts_read:.0%}"] if has_experts else cells


def degrees_as_dict(fits: Sequence[DegreeFit]) -> list[dict[str, object]]:
    """The fits as values for scripts; bytes and seconds."""
    return [{**asdict(one), "fits": one.fits} for one in fits]
