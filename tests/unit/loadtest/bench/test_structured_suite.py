"""What becomes of the schemas of a folder."""

from __future__ import annotations

import json
from pathlib import Path

from loadtest.bench.structured.suite import DEMO, Suite, schemas


def test_answers_are_counted_by_what_became_of_them(tmp_path: Path) -> None:
    given = {
        "thing.json": {
            "type": "object",
            "properties": {"kind": {"enum": ["boat", "tower"]}},
            "required": ["kind"],
            "additionalProperties": False,
        },
        "script.json": {"type": "string", "pattern": r"^[\w-_]{2}$"},  # Python's expressions have no such range
        "unique.json": {"type": "array", "uniqueItems": True},
        "endless.json": {"type": "array", "items": {"type": "integer"}, "minItems": 100_000},
    }
    for name, schema in given.items():
        (tmp_path / name).write_text(json.dumps(schema))
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "broken.json").write_text("{")
    found = schemas(tmp_path)
    assert [name for name, _ in found] == sorted(given)
    suite = Suite(DEMO)
    for number, (name, schema) in enumerate(found):
        suite.answer(name, schema, number)
    assert suite.outcomes == {"valid": 1, "not judged": 1, "refused": 1, "cut off": 1}
    assert suite.invalid == []
    (reason,) = suite.reasons
    assert "uniqueItems" in reason
