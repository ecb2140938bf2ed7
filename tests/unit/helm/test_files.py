"""The chart's files agree with the code that they speak of."""

from __future__ import annotations

import json
import re
import subprocess
import sys

from services.kvstore.metrics import METRICS as KVSTORE_METRICS
from services.kvstore.metrics import NODE_METRICS
from services.router.metrics import METRICS as ROUTER_METRICS
from services.worker.metrics import METRICS as WORKER_METRICS
from shared.telemetry.metrics import Kind
from tests.unit.helm.charts import CHART

ROOT = CHART.parents[1]


def pages() -> set[str]:
    """All sample names that the services' pages have."""
    observed = (item.metric for item in (*WORKER_METRICS, *KVSTORE_METRICS, *NODE_METRICS))
    names = set()
    for metric in (*ROUTER_METRICS, *observed):
        name = metric.name.replace(".", "_")
        names.add(f"{name}_seconds_bucket" if metric.kind is Kind.HISTOGRAM else name)
    return names


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    dashboard = json.loads((CHART / "files/dashboard.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"\b(?:tandem|gen_ai)_[a-z_]+", target["expr"])
    }
    assert len(asked) > 10
    assert asked - pages() == set()


def test_the_schema_has_the_settings_of_the_services() -> None:
    done = subprocess.run(
        [sys.executable, ".ci/chart_schema.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""


def test_every_value_is_explained() -> None:
    readme = (CHART / "README.md").read_text()
    schema = json.loads((CHART / "values.schema.json").read_text())
    pool = schema["definitions"]["pool"]["properties"]
    top = schema["properties"]
    missing = [
        name
        for properties in (pool, top)
        for name, part in properties.items()
        if not part.get("description", "").startswith("Moved")
        and f"`{name}" not in readme
        and f".{name}`" not in readme
    ]
    assert missing == []
