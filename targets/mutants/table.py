"""The mutants: what is broken, the property that must kill it, and the public reports behind it.

Nothing is listed here: `mutants` reads the calls of `mutant` in this package's modules, without importing them, since
they import torch. A new mutant is one block of one of them.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from targets.honest.describe import UP_TO_32_BITS

HERE = Path(__file__).parent
REPORT = re.compile(r"[\w.-]+/[\w.-]+#\d+")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One broken kernel, as `targets.mutants.mutant.mutant` describes its fields.

    target: `module:function`, for `targets.calling.registry.resolve`. reports: as `owner/repo#number`.
    """

    name: str
    op: str
    target: str
    killed_by: str
    dtypes: tuple[str, ...]
    reports: tuple[str, ...]
    defect: str


@cache
def mutants() -> tuple[Mutant, ...]:
    """All of them, by module and place in it."""
    return tuple(row for path in sorted(HERE.glob("*/*.py")) for row in read(path))


def mutant_named(name: str) -> Mutant:
    """Raises KeyError, with the names that resemble it, where there is none."""
    found = {row.name: row for row in mutants()}
    if name not in found:
        near = [known for known in found if name in known or known in name]
        raise KeyError(f"no mutant is called {name}" + (f"; {', '.join(near)}?" if near else ""))
    return found[name]


def read(path: Path) -> Iterator[Mutant]:
    """The mutants of one module: functions below `@mutant(...)`, and names given to `mutant(...)(kernel)`."""
    module = ".".join((__package__ or "", *path.relative_to(HERE).with_suffix("").parts))
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef(name=name, decorator_list=[ast.Call(func=ast.Name("mutant")) as call, *_]):
                yield _row(module, name, call)
            case ast.Assign(targets=[ast.Name(name)], value=ast.Call(func=ast.Call(func=ast.Name("mutant")) as call)):
                yield _row(module, name, call)


def _row(module: str, name: str, call: ast.Call) -> Mutant:
    op, killed_by, defect = map(ast.literal_eval, call.args)
    more = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg != "smallest"}
    reports = tuple(REPORT.findall(more.get("reports", "")))
    return Mutant(name, op, f"{module}:{name}", killed_by, more.get("dtypes", UP_TO_32_BITS), reports, defect)
