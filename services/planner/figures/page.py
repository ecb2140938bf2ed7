"""A Prometheus page, read once: sums and histograms by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from shared.errors import Internal

MODEL = "gen_ai_response_model"
"""Label of a router's samples, but for those of the process as a whole."""


@dataclass(slots=True)
class Page:
    """Sums over all label sets of each sample, and cumulative histogram buckets by their upper bounds."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    by_outcome: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """`tandem_requests_total` by its label."""
    num_cached_tokens: float = 0.0
    buckets: dict[str, dict[float, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    by_model: dict[str, Page] = field(default_factory=lambda: defaultdict(Page))
    """The samples of each model that a router serves."""

    @classmethod
    def parse(cls, text: str) -> Page:
        """Raises Internal where it is no such page."""
        page = cls()
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    page._add(sample)
                    if MODEL in sample.labels:
                        page.by_model[sample.labels[MODEL]]._add(sample)
        except (ValueError, KeyError) as error:
            raise Internal(f"not a page of Prometheus metrics: {error}") from error
        return page

    def _add(self, sample: Sample) -> None:
        if sample.name.endswith("_bucket"):
            name = sample.name.removesuffix("_bucket")
            self.buckets[name][float(sample.labels["le"])] += sample.value
            return
        self.sums[sample.name] += sample.value
        if sample.name == "tandem_requests_total":
            self.by_outcome[sample.labels["outcome"]] += sample.value
        elif sample.name == "tandem_tokens_total" and sample.labels["kind"] == "cached":
            self.num_cached_tokens += sample.value


def share_above(buckets: Mapping[float, float], limit: float) -> tuple[float, float]:
    """(observations above `limit`, all observations) of a histogram's growth; between two bounds interpolated."""
    total = max(buckets.values(), default=0.0)
    below_bound, below = 0.0, 0.0
    for bound in sorted(buckets):
        count = buckets[bound]
        if bound >= limit:
            part = (
                (limit - below_bound) / (bound - below_bound)
                if bound not in (float("inf"), limit)
                else float(bound == limit)
            )
            return total - (below + part * (count - below)), total
        below_bound, below = bound, count
    return 0.0, total
