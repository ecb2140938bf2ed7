"""Prompts with their answers, for `bench speculation`: how often guesses are right depends on the texts."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path

from loadtest.rig.models import DEMO
from shared.structure.structured_output import StructuredOutput, StructureKind

PEOPLE = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "first_name": {"type": "string", "maxLength": 20},
            "last_name": {"type": "string", "maxLength": 20},
            "birth_year": {"type": "integer"},
            "lives_in_jerusalem": {"type": "boolean"},
        },
        "required": ["first_name", "last_name", "birth_year", "lives_in_jerusalem"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True)
class Text:
    """A prompt and what is answered to it."""

    prompt: str
    answer: str = ""
    structure: StructuredOutput | None = None
    temperature: float = 0.0
    is_own: bool = False
    """Whether the answer is the demo model's own, to the prompt."""


def chat(number: int) -> Text:
    """A question, and prose that does not repeat it."""
    paragraphs = _paragraphs()
    begin = 7 * number % len(paragraphs)
    return Text("Tell me what happened then, in your own words.", "\n".join(paragraphs[begin:] + paragraphs[:begin]))


def edit(number: int) -> Text:
    """A source file, and the same with a name changed throughout."""
    folder = Path(__file__).parents[3] / "shared" / "engine" / "scheduler"
    files = sorted(folder.glob("*.py"), key=lambda file: -file.stat().st_size)[:4]
    source = files[number % len(files)].read_text()
    begin = source.index("class ")
    begin += 2000 * (number // len(files)) % (len(source) - begin - 2000)
    source = source[begin : begin + 6000]
    return Text(
        f"Rename sequence to request in this file:\n{source}\nThe file:\n", source.replace("sequence", "request")
    )


def quotes(number: int) -> Text:
    """A document, and an answer that quotes every third sentence of it."""
    paragraphs = _paragraphs()
    begin = 5 * number % len(paragraphs)
    document = "\n".join((paragraphs[begin:] + paragraphs[:begin])[:12])
    sentences = re.split(r"(?<=[.!?])\s+", document)
    leads = itertools.cycle(("It is written: ", "The text says: ", "Further on: "))
    cited = "\n".join(f"{lead}{sentence}" for lead, sentence in zip(leads, sentences[1::3], strict=False))
    return Text(f"{document}\nWhich verses speak of this? Quote them.\n", cited)


def people(number: int) -> Text:
    """A list by a schema."""
    first = ("Noah", "Ruth", "Esther", "Micah", "Joel", "Naomi", "Amos", "Hannah", "Levi", "Deborah", "Gideon")
    last = ("Cohen", "Baker", "Smith", "Miller", "Potter", "Fisher", "Shepherd")
    found = [
        {
            "first_name": first[(5 * i + number) % len(first)],
            "last_name": last[(3 * i + number) % len(last)],
            "birth_year": 1900 + (37 * i + 11 * number) % 100,
            "lives_in_jerusalem": (i * i + number) % 3 == 0,
        }
        for i in range(40)
    ]
    schema = StructuredOutput(StructureKind.JSON_SCHEMA, json.dumps(PEOPLE))
    return Text("Who was there? Answer in JSON.", json.dumps(found), schema)


def record(number: int) -> Text:
    """One object of many properties, whose names stand nowhere else."""
    words = (
        "altar",
        "bread",
        "cedar",
        "desert",
        "earth",
        "field",
        "garden",
        "harvest",
        "iron",
        "jordan",
        "king",
        "lamb",
    )
    properties = [
        f"{a}_{b}_{'count' if i % 2 else 'name'}" for i, (a, b) in enumerate(itertools.permutations(words, 2))
    ]
    properties = properties[40 * (number % 3) :][:35]
    found = {
        name: 100 + 7 * i + number if name.endswith("count") else words[(5 * i + number) % len(words)].title()
        for i, name in enumerate(properties)
    }
    schema = {
        "type": "object",
        "properties": {
            name: {"type": "integer"} if name.endswith("count") else {"type": "string", "maxLength": 20}
            for name in properties
        },
        "required": properties,
        "additionalProperties": False,
    }
    structure = StructuredOutput(StructureKind.JSON_SCHEMA, json.dumps(schema))
    return Text("What was counted? Answer in JSON.", json.dumps(found), structure)


def greedy(number: int) -> Text:
    """The beginning of a paragraph as the prompt; the answer is what the demo model writes, greedy."""
    return Text(_paragraphs()[7 * number % len(_paragraphs())][:160], is_own=True)


def sampled(number: int) -> Text:
    """The prompt of `greedy`; the answer is what the demo model writes, sampled."""
    return Text(greedy(number).prompt, temperature=0.8, is_own=True)


CASES = {
    "edit": edit,
    "quotes": quotes,
    "chat": chat,
    "json": people,
    "record": record,
    "greedy": greedy,
    "sampled": sampled,
}


def _paragraphs() -> list[str]:
    return [line for line in (DEMO / "held_out.txt").read_text().splitlines() if len(line) > 80]
