"""Mutants of a target: cosmic-ray's operators, applied to a file's text in memory."""

from __future__ import annotations

import ast
import random
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from tests.mutation.targets import Target


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change at one place."""

    target: str
    path: str  # of the file, relative to the target's root
    operator: str  # cosmic-ray's name
    occurrence: int  # which place in the file, counted from 0 in the operator's order
    line: int  # counted from 1

    def text(self, root: Path) -> str:
        """The whole file with the change in it."""
        mutated: str | None = mutate_code(
            (root / self.path).read_text(), get_operator(self.operator)(), self.occurrence
        )
        assert mutated is not None, f"{self.path} has no {self.operator} number {self.occurrence}"
        return mutated


def mutants(target: Target) -> list[Mutant]:
    """All that cosmic-ray proposes, less those that cannot change what the code does."""
    return [mutant for path in target.files() for mutant in _of_file(target, path)]


def sample(target: Target, count: int, seed: int) -> list[Mutant]:
    """`count` of the target's mutants, or all if there are fewer. A larger sample of the same seed contains a smaller
    one. Left out is what is no Python any more, which nothing has to notice."""
    every = mutants(target)
    random.Random(f"{seed}/{target.name}").shuffle(every)
    return list(islice((mutant for mutant in every if _is_python(mutant.text(target.root))), count))


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _of_file(target: Target, path: str) -> list[Mutant]:
    text = (target.root / path).read_text()
    ignored = _Inert.lines_and_columns(text)
    nodes = list(ast_nodes(get_ast(text)))
    found = []
    for name in operator_names():
        operator = get_operator(name)
        if operator.arguments():  # it would need the names of variables
            continue
        places = [start for node in nodes for start, _ in operator().mutation_positions(node)]
        found += [
            Mutant(target.name, path, name, occurrence, place[0])
            for occurrence, place in enumerate(places)
            if not any(begin <= tuple(place) < end for begin, end in ignored)
        ]
    return found


class _Inert(ast.NodeVisitor):
    """Finds text that does not decide what the code does: annotations, which nothing evaluates under
    `from __future__ import annotations`, the flags of `@dataclass`, and what only a type checker reads."""

    def __init__(self) -> None:
        self.ranges: list[tuple[tuple[int, int], tuple[int, int]]] = []

    @classmethod
    def lines_and_columns(cls, text: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Beginnings and ends, as (line from 1, column from 0)."""
        visitor = cls()
        visitor.visit(ast.parse(text))
        return visitor.ranges

    def _ignore(self, node: ast.expr | ast.stmt | None) -> None:
        if node is not None:
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            # parso counts characters where ast counts bytes of UTF-8: the same on our lines of code.
            self.ranges.append(((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._ignore(node.annotation)
        self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        self._ignore(node.annotation)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._ignore(node.returns)
        self.generic_visit(node)

    visit_FunctionDef = _function  # noqa: N815
    visit_AsyncFunctionDef = _function  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "dataclass":
                for keyword in decorator.keywords:
                    self._ignore(keyword.value)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            self._ignore(node)
        else:
            self.generic_visit(node)
