"""Dashboard, rules and reference are made from the definitions, are up to date, and are what Prometheus understands."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from services.monitoring.__main__ import FILES, ROOT, main
from services.monitoring.catalog import SERVICES, VLLM
from services.monitoring.dashboard import ROWS, SCOPE, dashboard
from services.monitoring.expressions import quantile, rate, value
from services.monitoring.rules import ALERTS, RECORDINGS, rules
from tests.k8s.programs import Missing, find

RULES = ROOT / "helm/tandem/files/rules.yaml"


@pytest.fixture(scope="module")
def promtool() -> Path:
    try:
        return find("promtool")
    except Missing as missing:
        pytest.skip(str(missing))


def test_the_files_are_those_that_the_definitions_make(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    assert main([], tmp_path) == 0
    (tmp_path / "docs/metrics.md").write_text("stale")
    assert main(["--check"], tmp_path) == 1
    assert "docs/metrics.md is stale" in capsys.readouterr().err


def test_what_does_not_exist_cannot_be_asked_for() -> None:
    with pytest.raises(KeyError):
        rate("tandem_nothing_total")
    with pytest.raises(AssertionError, match="no label tier"):
        rate("tandem_requests_total", "tier")
    with pytest.raises(AssertionError, match="no label kind"):
        value("tandem_kv_blocks", "sum", kind="free")
    with pytest.raises(AssertionError):
        quantile(0.5, "tandem_requests_total")


def test_a_scope_stands_in_every_selector() -> None:
    share = rate("tandem_requests_total", "pod", outcome="finished").over(rate("tandem_requests_total", "pod"))
    assert share.scoped() == (
        'sum by (pod) (rate(tandem_requests_total{outcome="finished"}[1m]))'
        " / sum by (pod) (rate(tandem_requests_total[1m]))"
    )
    assert share.scoped('a="b"') == (
        'sum by (pod) (rate(tandem_requests_total{a="b",outcome="finished"}[1m]))'
        ' / sum by (pod) (rate(tandem_requests_total{a="b"}[1m]))'
    )


def test_a_name_means_the_same_in_every_service() -> None:
    kinds: dict[str, set[object]] = {}
    for metrics in (*SERVICES.values(), *VLLM.values()):
        assert len({item.exposed_name for item in metrics}) == len(metrics)
        for item in metrics:
            kinds.setdefault(item.exposed_name, set()).add((item.kind, item.labels))
            assert re.fullmatch(r"(tandem_|gen_ai_|vllm:)[a-z0-9_]+", item.exposed_name)
    assert {name for name, forms in kinds.items() if len(forms) > 1} == set()


def test_prometheus_understands_the_rules(promtool: Path) -> None:
    done = subprocess.run([promtool, "check", "rules", RULES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(RECORDINGS) + len(ALERTS)} rules found" in done.stdout


def test_alerts_fire_where_they_should_and_nowhere_else(promtool: Path) -> None:
    test = Path(__file__).with_name("rules_test.yaml")
    done = subprocess.run([promtool, "test", "rules", test], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    tried = set(re.findall(r'alertname="(\w+)"', test.read_text()))
    assert tried == {alert.name for alert in ALERTS}


def test_prometheus_understands_every_panel(promtool: Path, tmp_path: Path) -> None:
    queries = [
        line.scoped(SCOPE.replace("$namespace", "n")) for row in ROWS.values() for p in row for line in p.lines.values()
    ]
    made = {"groups": [{"name": "g", "rules": [{"record": f"q{i}", "expr": text} for i, text in enumerate(queries)]}]}
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump(made))
    done = subprocess.run(
        [promtool, "check", "rules", tmp_path / "panels.yaml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_panels_lie_beside_each_other() -> None:
    panels = json.loads(dashboard())["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert yaml.safe_load(rules())["groups"]
