"""The rendered defaults change on purpose alone."""

from __future__ import annotations

from tests.unit.helm import golden
from tests.unit.helm.charts import Helm


def test_the_defaults_render_as_before(helm: Helm) -> None:
    assert golden.rendered(helm) == golden.FILE.read_text(), "meant? then run python -m tests.unit.helm.golden"
