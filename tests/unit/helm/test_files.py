"""The chart's files agree with the code that they speak of."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.unit.helm.charts import CHART

ROOT = CHART.parents[1]


@pytest.mark.slow
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
