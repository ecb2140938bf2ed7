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


class Bodies:
    """Strategies of one document."""

    def __init__(self, document: Mapping[str, Any], model: str) -> None:
        """`model`: the name that is served."""
        self._model = model
        self._schemas: Mapping[str, Schema] = document["components"]["schemas"]

    def raw(self, name: str) -> st.SearchStrategy[bytes]:
        """Bodies of the schema `name`: as JSON, and as JSON with a piece cut out or replaced."""
        whole = self._object(self._schemas[name], chance_of_junk=True).map(_encoded)
        return st.one_of(whole, whole, whole, st.builds(_damaged, whole, st.floats(0, 1), st.binary(max_size=6)))

    def _value(self, schema: Schema) -> st.SearchStrategy[Any]:
        if "$ref" in schema:
            return self._object(self._schemas[schema["$ref"].rpartition("/")[2]])
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
