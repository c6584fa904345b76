"""A recipe of CONTRIBUTING as files to write and to edit, followed in a temporary copy of the product."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import oracle

ROOT = Path(oracle.__file__).resolve().parent.parent
PACKAGES = ("oracle", "targets", "properties", "reports")
Edit = tuple[str, str]
"""What stands in a file, and what stands there afterwards."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """new: place -> text. edited: place -> edits in turn. check: a program that fails, with the reason, unless all that
    was written works; its last line is "follows"."""

    new: Mapping[str, str]
    edited: Mapping[str, Sequence[Edit]]
    check: str

    @property
    def places(self) -> tuple[str, ...]:
        return *self.new, *self.edited

    @property
    def product(self) -> tuple[str, ...]:
        """The files but the mutants."""
        return tuple(place for place in self.places if not place.startswith("targets/mutants/"))


def follow(recipe: Recipe, root: Path, leave_out: str = "") -> subprocess.CompletedProcess[str]:
    """The recipe followed in a copy under ``root``, but for one step, and what the check then says."""
    for package in (*PACKAGES, "meta_tests"):
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    for place, text in recipe.new.items():
        if place != leave_out:
            (root / place).parent.mkdir(exist_ok=True)
            (root / place).write_text(text, encoding="utf-8")
    for place, edits in recipe.edited.items():
        if place != leave_out:
            text = (root / place).read_text(encoding="utf-8")
            for before, after in edits:
                assert before in text, (place, before)
                text = text.replace(before, after, 1)
            (root / place).write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, "-c", recipe.check]
    return subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True, timeout=300, check=False)


def assert_named(recipe: Recipe, root: Path, step: str, said: str) -> None:
    """That the check fails without this step, and says what is missing."""
    done = follow(recipe, root, step)
    assert done.returncode != 0
    assert said in done.stderr, done.stderr


def assert_follows(recipe: Recipe, root: Path) -> None:
    done = follow(recipe, root)
    assert done.stdout.endswith("follows\n"), done.stdout + done.stderr


def row(above: str, line: str, before: str, added: str) -> list[Edit]:
    """An import before what stands ``above`` in the module's margin, and a row before another one."""
    return [(f"\n{above}", f"\n{line}\n{above}"), (before, f"{added}\n{before}")]


def section(title: str) -> str:
    """CONTRIBUTING's text below a heading."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text.split(f"## {title}\n")[1].split("\n## ")[0]
