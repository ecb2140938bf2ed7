"""`tandem fit --trace … --measured …`: each split of a cluster's workers under a trace, beside what was measured."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from shared.errors import ConfigError
from shared.sizing.break_even import HOURS_OF_A_MONTH, paying_tokens
from tandem_cli.console import table_of
from tandem_cli.fit.measured_cluster import measured_cluster
from tandem_cli.fit.options import LoadOptions, PriceOptions

if TYPE_CHECKING:
    from loadtest.simulator.outcome import Targets
    from loadtest.simulator.prediction import Figures, MeasuredCluster, Split
    from loadtest.workloads.trace import TraceRequest

_MOST_OFF = 0.1
"""An error of goodput from which on the answer warns of itself."""
_CLOSE = 1.02
"""Goodputs within this factor are shown as equal: the simpler split is named."""


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """A trace, and the cluster that is to serve it."""

    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            help="What `tandem record` wrote, Mooncake's JSON lines, or Azure's CSV, also .gz; with --measured.",
        ),
    ] = None
    measured: Annotated[
        str,
        typer.Option(
            "--measured",
            help="The cluster whose step times count: a router's http://HOST:PORT, or a file with its status, as "
            "`tandem record` writes it beside the trace.",
        ),
    ] = ""
    api_key: Annotated[
        str, typer.Option("--api-key", envvar="TANDEM_API_KEY", help="API key for --measured, if it requires one.")
    ] = ""

    @property
    def is_asked(self) -> bool:
        """Raises ConfigError where one of the two is missing."""
        if bool(self.measured) != (self.trace is not None):
            missing = "trace" if self.measured else "measured"
            raise ConfigError(f"--{missing} is missing: --trace and --measured go together", field=missing)
        return self.trace is not None


@dataclass(frozen=True, slots=True)
class Prediction:
    """One split under the trace."""

    split: Split
    figures: Figures


@dataclass(frozen=True, slots=True)
class Held:
    """Requests that calibrated nothing, as they were predicted and as they were served."""

    num_requests: int
    predicted: Figures
    measured: Figures


@dataclass(frozen=True, slots=True)
class _Found:
    """The figures that the command shows."""

    trace: Sequence[TraceRequest]
    cluster: MeasuredCluster
    targets: Targets
    measured: Figures | None
    held: Held | None
    predictions: Sequence[Prediction]
    present: Prediction
    best: Prediction
    gpus: int
    per_hour: float | None
    token_price: float | None


def show_trace(
    console: Console, asked: TraceOptions, load: LoadOptions, prices: PriceOptions, *, quiet: bool
) -> dict[str, object]:
    """Prints the answer unless it is to be quiet, and returns it for scripts. Raises ConfigError."""
    found = _find(asked, load, prices, quiet=quiet)
    if not quiet:
        _show(console, found)
    return _as_dict(found)


def _find(asked: TraceOptions, load: LoadOptions, prices: PriceOptions, *, quiet: bool) -> _Found:
    from loadtest.simulator import prediction as simulator  # numpy, and the router's policy

    assert asked.trace is not None
    trace = simulator.recorded_trace(asked.trace)
    span_s = trace[-1].at_s - trace[0].at_s
    cluster = measured_cluster(asked.measured, asked.api_key)
    targets = simulator.with_targets(cluster, load.ttft_s, load.tpot_s)
    served = simulator.read_served(asked.trace)
    present, splits = simulator.present_split(cluster), simulator.splits_of(cluster)
    is_known = simulator.every_other_stretch(trace)
    is_judge = [not known for known in is_known]
    known = simulator.Calibration()
    if served is not None:
        known = simulator.calibrate(trace, served, is_known, cluster, targets)
    predictions, held = [], None
    with _progress(len(splits), quiet=quiet) as show:
        for split in splits:
            show(split.name)
            played = simulator.predict(trace, cluster, split, targets, known)
            predictions.append(Prediction(split, simulator.simulated_figures(played, span_s, targets)))
            if split == present and served is not None and known.residuals:
                rest_s = span_s / 2
                held = Held(
                    sum(is_judge),
                    simulator.simulated_figures(list(compress(played, is_judge)), rest_s, targets),
                    simulator.served_figures(list(compress(served, is_judge)), rest_s, targets),
                )
    gpus, price = sum(worker.num_devices for worker in cluster.workers), prices.decode
    return _Found(
        trace,
        cluster,
        targets,
        None if served is None else simulator.served_figures(served, span_s, targets),
        held,
        predictions,
        next(one for one in predictions if one.split == present),
        _best(predictions, present),
        gpus,
        None if price is None else price * gpus,
        prices.tokens,
    )


@contextlib.contextmanager
def _progress(count: int, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Shows on a terminal which split is simulated; the line is gone in the end."""
    is_shown, numbers = sys.stderr.isatty() and not quiet, itertools.count(1)

    def show(name: str) -> None:
        if is_shown:
            print(f"\rsimulating {name}, {next(numbers)} of {count}{'':<20}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if is_shown:
            print(f"\r{'':<60}\r", end="", file=sys.stderr, flush=True)


def _best(predictions: Sequence[Prediction], present: object) -> Prediction:
    """The one with the most goodput; the present one where it is as good."""
    most = max(predictions, key=lambda one: one.figures.goodput)
    own = next(one for one in predictions if one.split == present)
    return own if own.figures.goodput * _CLOSE >= most.figures.goodput else most


def _show(console: Console, found: _Found) -> None:
    from loadtest.simulator.prediction import NEVER_S

    targets = [
        f"{name} {value * 1e3:g} ms"
        for name, value in (("TTFT", found.targets.ttft_s), ("TPOT", found.targets.tpot_s))
        if value < NEVER_S
    ]
    trace, count = found.trace, len(found.trace)
    span_s = trace[-1].at_s - trace[0].at_s
    prompts = sum(request.num_prompt_tokens for request in trace) / count
    answers = sum(request.num_output_tokens for request in trace) / count
    lines = [
        f"{count:,} requests over {span_s:.0f} s ({count / span_s:.3g}/s), prompts of {prompts:.0f} and answers of "
        f"{answers:.0f} tokens in the mean; targets {', '.join(targets)}",
        f"{len(found.cluster.workers)} workers, now {found.present.split.name}; steps take what these have reported",
        "",
    ]
    for line in lines:
        console.print(line, markup=False)
    console.print(_table(found))
    console.print()
    if found.held is not None:
        console.print(_error_table(found.present.split.name, found.held))
        console.print()
    for line in [*_verdict(found), *_cost_lines(found)]:
        console.print(line, markup=False)


def _table(found: _Found) -> Table:
    rows = [
        _row(f"{one.split.name}{' *' if one is found.present else ''}", one.figures, found) for one in found.predictions
    ]
    if found.measured is not None:
        rows.append(_row("measured *", found.measured, found))
    headers = ["split", "goodput", "good", "refused", "hits", "TTFT p50", "p90", "TPOT p50", "p90"]
    if found.per_hour is not None:
        headers.append("per 1,000 good")
    return table_of(headers, rows, text=("split",), title="predicted; * as the cluster is now")


def _row(name: str, figures: Figures, found: _Found) -> list[str]:
    cells = [
        name,
        f"{figures.goodput:.3g}/s",
        f"{figures.good_share:.1%}",
        f"{figures.refused_share:.1%}",
        f"{figures.hit_rate:.0%}",
        *(_ms(value) for value in (*figures.ttft_s, *figures.tpot_s)),
    ]
    if found.per_hour is not None:
        cells.append(f"{found.per_hour / figures.goodput / 3.6:.3g}" if figures.goodput else "-")
    return cells


def _ms(value: float) -> str:
    return "-" if math.isnan(value) else f"{value * 1e3:.3g} ms" if value < 0.9995 else f"{value:.2f} s"


def errors(predicted: Figures, measured: Figures) -> dict[str, float]:
    """Predicted over measured, of goodput and of each quantile; what was not measured is left out."""
    pairs = {
        "goodput": (predicted.goodput, measured.goodput),
        "TTFT p50": (predicted.ttft_s[0], measured.ttft_s[0]),
        "TTFT p90": (predicted.ttft_s[1], measured.ttft_s[1]),
        "TPOT p50": (predicted.tpot_s[0], measured.tpot_s[0]),
        "TPOT p90": (predicted.tpot_s[1], measured.tpot_s[1]),
    }
    return {name: one / other for name, (one, other) in pairs.items() if other > 0 and not math.isnan(one)}


def _error_table(split: str, held: Held) -> Table:
    ratios = errors(held.predicted, held.measured)
    title = f"{split}, predicted over measured: {held.num_requests:,} requests that calibrated nothing"
    return table_of(list(ratios), [[f"{ratio - 1:+.1%}" for ratio in ratios.values()]], title=title)


def _verdict(found: _Found) -> list[str]:
    best, present = found.best, found.present
    lines = []
    if best is present:
        lines.append(f"{present.split.name} is as good as any split of these workers for this load")
    elif present.figures.goodput > 0:
        gain = best.figures.goodput / present.figures.goodput
        lines.append(f"{best.split.name} would serve {gain:.2f} times the goodput of {present.split.name}")
    else:
        lines.append(f"{best.split.name} would serve this load, {present.split.name} serves none of it in time")
    if found.held is None:
        lines.append("the trace does not say how enough requests were served: record one with `tandem record`")
    elif (off := abs(errors(found.held.predicted, found.held.measured).get("goodput", 1.0) - 1)) > _MOST_OFF:
        lines.append(
            f"the prediction of the present split is off by {off:.0%}: take those of the others as no better than that"
        )
    return lines


def _cost_lines(found: _Found) -> list[str]:
    if found.per_hour is None:
        return []
    month = found.per_hour * HOURS_OF_A_MONTH
    lines = [f"{found.gpus} GPUs cost {found.per_hour:.2f} an hour, {month:,.0f} a month"]
    if found.token_price is not None:
        tokens = paying_tokens(found.per_hour, found.token_price)
        served = _good_tokens_of_a_month(found)
        share = f", {tokens / served:.0%} of what {found.best.split.name} serves in time at this load" if served else ""
        lines.append(
            f"against {found.token_price:g} for a million tokens elsewhere they pay from {tokens / 1e6:,.0f} million "
            f"tokens a month on{share}"
        )
    return lines


def _good_tokens_of_a_month(found: _Found) -> float:
    tokens = sum(request.num_prompt_tokens + request.num_output_tokens for request in found.trace) / len(found.trace)
    return found.best.figures.goodput * tokens * 3600 * HOURS_OF_A_MONTH


def _as_dict(found: _Found) -> dict[str, object]:
    measured, held = found.measured, found.held
    return {
        "num_requests": len(found.trace),
        "targets": {"ttft_s": found.targets.ttft_s, "tpot_s": found.targets.tpot_s},
        "predicted": [_prediction(one) for one in found.predictions],
        "present": found.present.split.name,
        "best": found.best.split.name,
        "measured": None if measured is None else _figures(measured),
        "predicted_over_measured": None if held is None else errors(held.predicted, held.measured),
        "cost": None if found.per_hour is None else _cost(found, found.per_hour),
    }


def _cost(found: _Found, per_hour: float) -> dict[str, float | None]:
    pays = None if found.token_price is None else paying_tokens(per_hour, found.token_price)
    return {"per_hour": per_hour, "per_month": per_hour * HOURS_OF_A_MONTH, "tokens_a_month": pays}


def _prediction(one: Prediction) -> dict[str, object]:
    return {"split": one.split.name, **_figures(one.figures)}


def _figures(figures: Figures) -> dict[str, object]:
    """A quantile that there is not is null."""
    found = asdict(figures)
    for name in ("ttft_s", "tpot_s"):
        p50, p90 = (None if math.isnan(value) else value for value in found[name])
        found[name] = {"p50": p50, "p90": p90}
    return found
