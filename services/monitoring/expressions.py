"""PromQL from definitions: a metric or label that does not exist cannot be asked for."""

from __future__ import annotations

from dataclasses import dataclass

from services.monitoring.catalog import COMMON, TARGET_LABELS, metric
from shared.telemetry.metrics import Kind

_SCOPE = "@"  # stands first in each selector's braces


@dataclass(frozen=True, slots=True)
class Expression:
    """A query, and the series that it reads."""

    text: str
    uses: frozenset[tuple[str, frozenset[str]]]
    """Names of the samples that it reads, each with its labels but those of the target."""

    def scoped(self, matcher: str = "") -> str:
        """The query as PromQL, with this matcher in every selector."""
        text = self.text.replace("{@}", f"{{{matcher}}}" if matcher else "")
        return text.replace("{@,", f"{{{matcher}," if matcher else "{")

    def over(self, other: Expression) -> Expression:
        """The ratio."""
        return Expression(f"{self.text} / {other.text}", self.uses | other.uses)

    def above(self, limit: float) -> Expression:
        """The series above a value."""
        return Expression(f"{self.text} > {limit:g}", self.uses)

    def below(self, limit: float) -> Expression:
        """The series below a value."""
        return Expression(f"{self.text} < {limit:g}", self.uses)


def value(name: str, aggregate: str, *by: str, **where: str) -> Expression:
    """A gauge, aggregated by labels. `where`: label to value, or to a regular expression that begins with ~."""
    return _aggregated(aggregate, by, _selector(name, by, where), name, where)


def rate(name: str, *by: str, window: str = "1m", **where: str) -> Expression:
    """Growth of a counter a second, summed by labels."""
    assert metric(name).kind is Kind.COUNTER, name
    return _aggregated("sum", by, f"rate({_selector(name, by, where)}[{window}])", name, where)


def increase(name: str, *by: str, window: str, **where: str) -> Expression:
    """Growth of a counter over the window, summed by labels."""
    assert metric(name).kind is Kind.COUNTER, name
    return _aggregated("sum", by, f"increase({_selector(name, by, where)}[{window}])", name, where)


def quantile(share: float, name: str, *by: str, window: str = "1m", **where: str) -> Expression:
    """A quantile of a histogram's values, over all targets unless `by` names labels."""
    assert metric(name).kind is Kind.HISTOGRAM, name
    inner = f"rate({_selector(name, by, where, '_bucket')}[{window}])"
    summed = _aggregated("sum", (*by, "le"), inner, name, where, "_bucket")
    return Expression(f"histogram_quantile({share:g}, {summed.text})", summed.uses)


def observed(name: str, *by: str, window: str = "1m", **where: str) -> Expression:
    """Values that a histogram counted a second, summed by labels."""
    assert metric(name).kind is Kind.HISTOGRAM, name
    inner = f"rate({_selector(name, by, where, '_count')}[{window}])"
    return _aggregated("sum", by, inner, name, where, "_count")


def _selector(name: str, by: tuple[str, ...], where: dict[str, str], suffix: str = "") -> str:
    known = {*metric(name).labels, *COMMON.values(), *TARGET_LABELS}
    unknown = {*by, *where} - known
    assert not unknown, f"{name} has no label {', '.join(unknown)}"
    matchers = [_SCOPE]
    for label, wanted in where.items():
        matchers.append(f'{label}=~"{wanted[1:]}"' if wanted.startswith("~") else f'{label}="{wanted}"')
    return f"{name}{suffix}{{{','.join(matchers)}}}"


def _aggregated(
    aggregate: str, by: tuple[str, ...], inner: str, name: str, where: dict[str, str], suffix: str = ""
) -> Expression:
    labels = frozenset({*by, *where} - set(TARGET_LABELS))
    head = f"{aggregate} by ({', '.join(by)}) " if by else aggregate
    return Expression(f"{head}({inner})", frozenset({(name + suffix, labels)}))
