"""Writes `helm/tandem/values.schema.json`: what the chart's values may be.

    python .ci/chart_schema.py [--check]

The schema is `values.schema.base.json` beside this file, where the chart's own values stand, and the settings of the
three services, which are values too (`router.config`, `worker.config`, `kvstore.config`, `pools[].config`): those come
from the code. With --check nothing is written; exit status 1 where the file is stale.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from services.kvstore.settings import KVStoreSettings  # noqa: E402 - the path is set only now
from services.router.settings import RouterSettings  # noqa: E402
from services.worker.settings import WorkerSettings  # noqa: E402

BASE = Path(__file__).parent / "values.schema.base.json"
OUT = ROOT / "helm/tandem/values.schema.json"
KEPT = frozenset(
    ("type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "minLength", "maxLength", "pattern", "items",
     "additionalProperties", "patternProperties", "propertyNames", "anyOf", "properties", "$ref", "multipleOf",
     "description")
)  # fmt: skip
"""What helm's validator knows and a reader wants; titles and defaults are the code's."""

BY_CHART: dict[type[BaseModel], tuple[str, ...]] = {
    RouterSettings: (
        "name", "http", "grpc", "tls", "fleet_key", "model", "served_model_name", "prefill", "decode", "workers_file",
        "kvstore", "stores", "mode", "labels", "drain_timeout_s", "log_format", "discovery", "kubernetes",
    ),
    WorkerSettings: (
        "name", "bind", "tls", "fleet_key", "metrics", "model", "device", "kvstore", "store", "drain_timeout_s",
        "tp", "pp", "ep", "group_hosts", "group_leader", "group_host_index", "group_address", "log_format",
    ),
    KVStoreSettings: (
        "bind", "tls", "fleet_key", "metrics", "redis_url", "redis_password", "redis_cluster", "name",
        "host_bytes", "disk_folder", "disk_bytes", "disk_shared", "log_format",
    ),
}  # fmt: skip
"""Settings that other values or the cluster decide: they are refused under `config`."""


def settings_schema(settings: type[BaseModel], prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of a service's `config`, and the definitions that it refers to, their names after `prefix`."""
    whole = settings.model_json_schema()
    definitions = {f"{prefix}{name}": _plain(part, prefix) for name, part in whole.get("$defs", {}).items()}
    fields = {name: part for name, part in whole["properties"].items() if name not in BY_CHART[settings]}
    schema = {
        "type": "object",
        "additionalProperties": False,
        "properties": {name: _plain(part, prefix) for name, part in fields.items()},
    }
    return schema, definitions


def build() -> str:
    """The file's text."""
    schema = json.loads(BASE.read_text())
    schema["properties"]["models"] = _models(schema["properties"])
    services = (("router", RouterSettings), ("worker", WorkerSettings), ("kvstore", KVStoreSettings))
    for service, settings in services:
        schema["definitions"][f"{service}Config"], further = settings_schema(settings, f"{service}.")
        schema["definitions"] |= further
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _models(properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of `models`: each entry has what `model` and `pools` have."""
    model = properties["model"]
    own = {
        name: part for name, part in model["properties"].items() if not part.get("description", "").startswith("Moved")
    }
    shares = {"description": "Its workers use the store nodes too; its blocks have the size of the first model's."}
    return {
        "description": "More models behind the same routers, each with workers of its own.",
        "type": "object",
        "propertyNames": {"pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 20},
        "additionalProperties": {
            "type": "object",
            "required": ["uri", "pools"],
            "additionalProperties": False,
            "properties": {**own, "pools": properties["pools"], "sharesStore": {**shares, "type": "boolean"}},
        },
    }


def _plain(part: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The part with the kept keywords alone; descriptions are one line."""
    result: dict[str, Any] = {}
    for key, value in part.items():
        if key not in KEPT:
            continue
        if key == "$ref":
            value = value.replace("#/$defs/", f"#/definitions/{prefix}")
        elif key == "description":
            value = " ".join(value.split())
        elif key in ("properties", "patternProperties"):
            value = {name: _plain(each, prefix) for name, each in value.items()}
        elif key == "anyOf":
            value = [_plain(each, prefix) for each in value]
        elif isinstance(value, dict):
            value = _plain(value, prefix)
        result[key] = value
    return result


def main() -> None:
    """Exit status 1 where --check finds another text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, say whether the file is current")
    text = build()
    if not parser.parse_args().check:
        OUT.write_text(text)
    elif not OUT.exists() or OUT.read_text() != text:
        sys.exit("helm/tandem/values.schema.json is stale: run python .ci/chart_schema.py")


if __name__ == "__main__":
    main()
