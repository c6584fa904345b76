"""Imports point to the left, nothing heavy happens at import, and every module says what it is for."""

import ast
import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import oracle
import properties
import reports
import targets

ROOT = Path(oracle.__file__).resolve().parent.parent
PACKAGES = (oracle, targets, properties, reports)
# Frameworks, and what only some commands need.
HEAVY = ("torch", "triton", "jax", "transformers", "matplotlib")


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("importlinter", reason="import-linter is not installed")
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    # It reads the pyproject.toml of the folder that it runs in.
    return subprocess.run(
        [sys.executable, "-c", program, "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_imports_point_to_the_left() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("oracle/formulas.py", "import targets.kernels"),
        ("oracle/formulas.py", "from reports import pages"),
        ("targets/kernels.py", "from properties import checks"),
        ("properties/checks.py", "import reports.pages"),
        ("oracle/formulas.py", "import torch"),
        # Inside a function, and for type checkers only, is an import all the same.
        ("targets/kernels.py", "def late():\n    import properties.checks"),
        ("oracle/formulas.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import targets"),
    ],
)
def test_an_import_to_the_right_is_found(module: str, line: str, tmp_path: Path) -> None:
    """The project's own contracts, on four small packages of the same names, one of which breaks them."""
    for name in ("oracle/formulas", "targets/kernels", "properties/checks", "reports/pages"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir()
        path.write_text("")
        (path.parent / "__init__.py").write_text("")
    (tmp_path / "reports" / "pages.py").write_text("import properties.checks\nimport oracle.formulas\n")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    clean = lint_imports(tmp_path)
    assert clean.returncode == 0, clean.stdout + clean.stderr
    (tmp_path / module).write_text(line + "\n")
    broken = lint_imports(tmp_path)
    assert broken.returncode == 1, broken.stdout + broken.stderr
    assert "1 broken" in broken.stdout
    assert module.removesuffix(".py").replace("/", ".") in broken.stdout


def loaded_after(source: str) -> set[str]:
    """Heavy modules in a fresh interpreter after ``source``."""
    program = f"{textwrap.dedent(source)}\nimport sys\nprint(*(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_nothing_heavy_is_imported_with_the_packages() -> None:
    names = [
        module.name
        for package in (oracle, properties, reports)
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
        if ".test_" not in module.name
    ]
    names += [
        f"targets.{name}"
        for name in (
            "calling.target",
            "calling.registry",
            "probing.probes",
            "probing.conformance",
            "mutants.table",
            "honest.table",
        )
    ]
    assert len(names) > 60
    assert loaded_after("\n".join(f"import {name}" for name in ("targets", *names))) == set()
    # The check sees what it is for.
    assert loaded_after("import targets.third_party.torch_sdpa") == {"torch"}


def test_the_command_loads_no_framework_until_a_target_needs_it() -> None:
    assert loaded_after("from reports.command.cli import main\nassert main(['verify', 'nosuch']) == 2") == set()
    assert loaded_after("from reports.command.cli import main\nassert main(['report', 'nosuch']) == 2") == set()
    kernel = "from reports.command.cli import main\nassert main(['targets', 'seed_rope_numpy']) == 0"
    assert "torch" not in loaded_after(
        f"import io, sys\nsys.stdout = io.StringIO()\n{kernel}\nsys.stdout = sys.__stdout__"
    )


def modules() -> list[Path]:
    return [p for package in PACKAGES for p in sorted(Path(package.__path__[0]).rglob("*.py"))]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.__name__)
def test_a_package_says_what_belongs_in_it(package: object) -> None:
    assert len((package.__doc__ or "").split()) >= 10


def test_every_module_has_a_docstring() -> None:
    without = [str(p.relative_to(ROOT)) for p in modules() if not ast.get_docstring(ast.parse(p.read_text()))]
    assert without == []


def test_nothing_prints_but_the_command_line() -> None:
    printing = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert {place.partition(":")[0] for place in printing} <= {"reports/command/cli.py"}
    assert printing, "the check sees nothing"


def test_exceptions_of_targets_are_caught_in_one_place() -> None:
    """`except Exception` only where a target, somebody's file, the whole command or one section of a page is run."""
    allowed = {"targets/calling/target.py", "targets/calling/registry.py", "reports/command/cli.py"}
    allowed |= {"reports/content/sections.py", "reports/page/render_html.py"}
    broad = {"Exception", "BaseException"}
    found = set()
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                caught = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else broad
                if caught & broad:
                    found.add(str(path.relative_to(ROOT)))
    assert found <= allowed, f"hides faults of the suite: {sorted(found - allowed)}"
    assert "targets/calling/target.py" in found


def test_modules_can_be_imported_in_any_order() -> None:
    """Each alone in a fresh interpreter would be slow; the leaves that import their siblings most are enough."""
    for name in ("targets.probing.probes", "targets.calling.target", "properties.plugin", "reports.command.cli"):
        assert importlib.import_module(name)
        assert loaded_after(f"import {name}") == set()
