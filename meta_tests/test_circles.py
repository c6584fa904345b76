"""No circle among modules: an import inside a function counts, and only frameworks are imported there."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import oracle

ROOT = Path(oracle.__file__).resolve().parent.parent
PACKAGES = ("oracle", "targets", "properties", "reports")
# What may be imported where it is used: frameworks, what only one command needs, and the package that finds itself.
LATE = {
    "torch": "a framework",
    "triton": "a framework",
    "transformers": "only the capture of activations needs it",
    "pytest": "the command starts it; other commands do without",
    "xdist": "optional",
    "properties.forked": "imports pytest",
    "reports.command.live": "imports pytest",
    "targets.builtin.triton": "kernels, which import triton",
}


def sources(root: Path) -> dict[str, ast.Module]:
    """Module name -> syntax tree, of all modules of the four packages."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imported(node: ast.AST, known: set[str]) -> Iterator[str]:
    """What one import statement names: own modules by their longest known name, others as they stand."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module is not None:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    for name in names:
        whole = name
        while name and name not in known:
            name = name.rpartition(".")[0]
        yield name or whole


def graph(modules: dict[str, ast.Module]) -> dict[str, set[str]]:
    known = set(modules)
    return {
        name: {other for node in ast.walk(tree) for other in imported(node, known) if other in known} - {name}
        for name, tree in modules.items()
    }


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules that reach one another (Tarjan's strongly connected components of more than one)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(edges[name]):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            held = [stack.pop()]
            while held[-1] != name:
                held.append(stack.pop())
            if len(held) > 1:
                found.append(sorted(held))

    for name in edges:
        if name not in order:
            visit(name)
    return found


def late(modules: dict[str, ast.Module]) -> list[str]:
    """Imports inside a function that no rule allows."""
    found = []
    for name, tree in modules.items():
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for node in ast.walk(function):
                    found += [
                        f"{name}: {other}"
                        for other in imported(node, set(modules))
                        if not any(other == rule or other.startswith(f"{rule}.") for rule in LATE)
                    ]
    return sorted(set(found))


def test_no_circle_among_modules() -> None:
    assert circles(graph(sources(ROOT))) == []


def test_only_frameworks_are_imported_late() -> None:
    assert late(sources(ROOT)) == []


@pytest.mark.parametrize("line", ["import oracle.a", "from oracle import a", "def f():\n    from oracle.a import x"])
def test_a_circle_is_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "oracle").mkdir()
    (tmp_path / "oracle" / "__init__.py").write_text("")
    (tmp_path / "oracle" / "a.py").write_text("from oracle.b import y\n")
    (tmp_path / "oracle" / "b.py").write_text("y = 1\n")
    assert circles(graph(sources(tmp_path))) == []
    (tmp_path / "oracle" / "b.py").write_text(f"{line}\n")
    assert circles(graph(sources(tmp_path))) == [["oracle.a", "oracle.b"]]


def test_a_late_import_is_found(tmp_path: Path) -> None:
    (tmp_path / "oracle").mkdir()
    (tmp_path / "oracle" / "a.py").write_text("def f():\n    import torch\n")
    assert late(sources(tmp_path)) == []
    (tmp_path / "oracle" / "a.py").write_text("def f():\n    import json\n    from oracle import b\n")
    assert late(sources(tmp_path)) == ["oracle.a: json", "oracle.a: oracle.b"]
