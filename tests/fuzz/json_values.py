"""Bodies for the HTTP API, drawn from its OpenAPI document: mostly well-formed, with wrong values among them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from services.router.edge.http.openai.unsupported import CHAT_FIELDS, COMPLETION_FIELDS, MESSAGE_FIELDS

Schema = Mapping[str, Any]

texts = st.text(st.characters(exclude_categories=()), max_size=20)
numbers = st.one_of(
    st.integers(-3, 130),
    st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**30, -(2**63)]),
    st.floats(allow_nan=True, allow_infinity=True),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
junk = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=8
)

BOUNDARY = "edge"


@st.composite
def _forms(draw: st.DrawFn) -> bytes:
    line = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}).encode()
    files = st.sampled_from([line, line + b"\n" + line, b"", b"{"]) | st.binary(max_size=40)
    purpose = st.sampled_from([b"batch", b"user_data"]) | st.binary(max_size=10)
    expiry = st.sampled_from([b"3600", b"-1", b"nan"])
    kinds = {"file": files, "purpose": purpose, "expires_after[anchor]": st.just(b"created_at")}
    kinds |= {"expires_after[seconds]": expiry, "other": st.binary(max_size=10)}
    names = [name for name in ("purpose", "file") if draw(st.integers(0, 9))]
    form = b""
    for name in (*draw(st.lists(st.sampled_from(list(kinds)), max_size=2)), *names):
        filename = '; filename="f.jsonl"' if name == "file" else ""
        head = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"{filename}\r\n\r\n'
        form += head.encode() + draw(kinds[name]) + b"\r\n"
    return form + f"--{BOUNDARY}--\r\n".encode()


raw_forms = st.one_of(
    _forms(), _forms(), st.builds(lambda *what: _damaged(*what), _forms(), st.floats(0, 1), st.binary(max_size=6))
)
"""Uploads of files, one in three damaged."""


class Bodies:
    """Strategies of one document."""

    def __init__(self, document: Mapping[str, Any], model: str) -> None:
        """`model`: the name that is served."""
        self._model = model
        self._schemas: Mapping[str, Schema] = document["components"]["schemas"]
        self._objects: dict[str, st.SearchStrategy[dict[str, Any]]] = {}

    def raw(self, name: str) -> st.SearchStrategy[bytes]:
        """Bodies of the schema `name`: as JSON, and as JSON with a piece cut out or replaced."""
        whole = self._object(self._schemas[name], chance_of_junk=True).map(_encoded)
        return st.one_of(whole, whole, whole, st.builds(_damaged, whole, st.floats(0, 1), st.binary(max_size=6)))

    def _value(self, schema: Schema) -> st.SearchStrategy[Any]:
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            return st.deferred(lambda: self._named(name))  # some hold others of their kind
        if "anyOf" in schema:
            return st.one_of(*(self._value(each) for each in schema["anyOf"]))
        if "const" in schema:
            return st.just(schema["const"])
        kinds: dict[str, st.SearchStrategy[Any]] = {
            "string": texts,
            "integer": st.integers(-2, 40) | st.sampled_from([0, 1, 2**31, 2**64]),
            "number": st.floats(-3, 3) | numbers,
            "boolean": st.booleans(),
            "null": st.none(),
        }
        if schema.get("type") == "array":
            return st.lists(self._value(schema["items"]), max_size=5)
        return kinds.get(schema.get("type", ""), junk)

    def _named(self, name: str) -> st.SearchStrategy[dict[str, Any]]:
        if name not in self._objects:
            self._objects[name] = self._object(self._schemas[name])
        return self._objects[name]

    def _object(self, schema: Schema, *, chance_of_junk: bool = False) -> st.SearchStrategy[dict[str, Any]]:
        """The required fields and a few others, and with `chance_of_junk` some with any value."""
        properties = {name: self._value(value) for name, value in schema["properties"].items()}
        if "model" in properties:
            properties["model"] = st.sampled_from([self._model, "", "other", None])
        required = schema.get("required", ())
        names = st.lists(st.sampled_from(list(properties)), max_size=4)
        wrong_names = st.sampled_from([*properties, *COMPLETION_FIELDS, *CHAT_FIELDS, *MESSAGE_FIELDS]) | texts
        wrong = st.dictionaries(wrong_names, junk, max_size=1) if chance_of_junk else st.just({})

        @st.composite
        def bodies(draw: st.DrawFn) -> dict[str, Any]:
            return {name: draw(properties[name]) for name in (*required, *draw(names))} | draw(wrong)

        return bodies()


def _encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()  # NaN and half surrogate pairs stay in, as clients would send them


def crossed(one: bytes, other: bytes, rng: random.Random) -> bytes:
    """A body with the first one's fields and some of the other's; of what is no JSON, the beginning of one and the end
    of the other."""
    try:
        first, second = json.loads(one), json.loads(other)
        return _encoded(first | {name: value for name, value in second.items() if rng.random() < 0.3})
    except (ValueError, AttributeError, TypeError):
        return one[: rng.randrange(len(one) + 1)] + other[rng.randrange(len(other) + 1) :]


def _damaged(body: bytes, at: float, piece: bytes) -> bytes:
    place = int(at * len(body))
    return body[:place] + piece + body[place + len(piece) // 2 + 1 :]
