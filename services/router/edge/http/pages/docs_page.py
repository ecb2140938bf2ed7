"""`GET /docs`: the API's paths and fields as a page of its own, with nothing loaded from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
summary { cursor: pointer; padding: .4rem 0; }
summary code { font-weight: 600; }
.method { display: inline-block; width: 3.5rem; font: 600 .8rem monospace; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
td, th { text-align: left; vertical-align: top; padding: .2rem .6rem .2rem 0; border-bottom: 1px solid #8884; }
"""


def docs_page(document: bytes) -> bytes:
    """HTML of an OpenAPI document."""
    content = json.loads(document)
    schemas = content["components"]["schemas"]
    parts = [_operation(path, method, operation, schemas) for path, method, operation in _operations(content)]
    title = escape(content["info"]["title"])
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f'<body><h1>{title}</h1><p>The same for programs: <a href="openapi.json">openapi.json</a></p>'
        f"{''.join(parts)}</body></html>"
    ).encode()


def _operations(content: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
    return [(path, method, item) for path, methods in content["paths"].items() for method, item in methods.items()]


def _operation(path: str, method: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    rows = ""
    body = operation.get("requestBody")
    if body is not None:
        (content,) = body["content"].values()
        schema = content["schema"]
        if "$ref" in schema:
            schema = schemas[schema["$ref"].rpartition("/")[2]]
        required = set(schema.get("required", ()))
        rows = "".join(
            f"<tr><td><code>{escape(field)}</code>{' *' if field in required else ''}</td>"
            f"<td>{escape(type_in_words(what))}</td></tr>"
            for field, what in schema.get("properties", {}).items()
        )
    table = f"<table><tr><th>field (* = needed)</th><th>type</th></tr>{rows}</table>" if rows else ""
    return (
        f'<details><summary><span class="method">{escape(method.upper())}</span> <code>{escape(path)}</code> '
        f"{escape(operation['summary'])}</summary>{table}</details>"
    )


def type_in_words(what: Mapping[str, Any]) -> str:
    """A schema in a few words."""
    if "anyOf" in what:
        return " or ".join(dict.fromkeys(type_in_words(kind) for kind in what["anyOf"] if kind.get("type") != "null"))
    if "$ref" in what:
        return str(what["$ref"]).rpartition("/")[2]
    if "enum" in what:
        return ", ".join(map(json.dumps, what["enum"]))
    if what.get("type") == "array":
        return f"list of {type_in_words(what.get('items', {}))}"
    return str(what.get("type", "anything"))
