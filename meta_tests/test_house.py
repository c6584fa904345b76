"""The house: what is true of an op stands in its row and its folders, and nowhere else; nothing is crowded or long."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

import oracle
from oracle.ops import describe
from oracle.ops.attention.options import ROWS
from oracle.ops.table import ops

ROOT = Path(oracle.__file__).resolve().parent.parent
PACKAGES = ("oracle", "targets", "properties", "reports")

# Where an op is at home: folders of ops, implementations, and the tables that a new op adds a row to.
HOMES = (
    "oracle/ops/*/*",
    "oracle/bounds/*/*",
    "oracle/bounds/table.py",
    "properties/ops/*/*",
    "properties/ops/table.py",
    "targets/builtin/*",
    "targets/builtin/*/*",
    "targets/third_party/*",
    "targets/honest/*",
    "targets/mutants/*",
    "targets/mutants/*/*",
)
# How often a module elsewhere may say the name of an op, and why.
ALLOWED = {
    "properties/diagnosis/counterfactual.py": (1, "the output of a log-sum-exp has no second axis"),
    "properties/diagnosis/engine.py": (6, "ops whose outputs have rows of different kinds"),
    "properties/diagnosis/heads.py": (1, "a layout's head is explained as a case of attention"),
    "properties/diagnosis/outputs.py": (1, "the output of a log-sum-exp has no second axis"),
    "properties/diagnosis/where.py": (2, "the rows of a rotation are positions"),
    "properties/data/capture.py": (2, "keys of a provenance file"),
    "properties/inputs/real_input.py": (2, "keys of a provenance file"),
    "properties/inputs/strategies.py": (1, "inputs of attention that its gradient and its layouts draw too"),
    "reports/content/blind_spots.py": (1, "a family"),
    "reports/content/plots.py": (2, "families"),
}


# Where an option of attention is at home: its rows, what computes it, and the inputs and alternatives of its own.
OPTION_HOMES = (
    "oracle/ops/attention/*",
    "oracle/bounds/attention/*",
    "properties/ops/attention/options.py",
    "properties/ops/attention/option_edges.py",
    "properties/ops/attention/alternatives.py",
    "targets/probing/option_probes.py",
    "targets/builtin/*",
    "targets/builtin/*/*",
    "targets/third_party/*",
    "targets/honest/*",
    "targets/mutants/*/*",
)
OPTION_ALLOWED = {
    "properties/judge/empty_rows.py": (1, "the LSE of a row that sees nothing but a sink"),
    "properties/ops/attention/merge.py": (3, "one part of the keys counts the sink"),
    "properties/ops/attention/relations.py": (3, "the hull of V times its factor; keys at the ends of a window"),
    "properties/ops/gradients/backward_pass.py": (2, "the backward pass in float64"),
    "properties/ops/gradients/diagnosis.py": (1, "a step of that pass"),
}


def namings(
    root: Path, names: Iterable[str], *, homes: tuple[str, ...] = HOMES, keywords: bool = False
) -> dict[str, int]:
    """Module -> how many string literals (and keywords of calls) outside the homes are one of the names."""
    known, found = set(names), {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            place = path.relative_to(root)
            if any(_fits(place, home) for home in homes):
                continue
            tree = ast.parse(path.read_text(encoding="utf-8"))
            literals: list[object] = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
            literals += [node.arg for node in ast.walk(tree) if keywords and isinstance(node, ast.keyword)]
            count = sum(isinstance(value, str) and value in known for value in literals)
            if count:
                found[place.as_posix()] = count
    return found


def _fits(place: Path, home: str) -> bool:
    return len(place.parts) == home.count("/") + 1 and place.match(home)


def test_an_op_is_named_at_home_only() -> None:
    found = namings(ROOT, ops())
    assert {place: count for place, count in found.items() if count > ALLOWED.get(place, (0, ""))[0]} == {}


def option_namings(root: Path) -> dict[str, int]:
    """Those of attention's options; scale, the masks and their alignment are other ops' as well."""
    names = set(ROWS) - {"scale", "is_causal", "attn_mask", "causal_alignment"}
    return namings(root, names, homes=OPTION_HOMES, keywords=True)


def test_an_option_is_named_at_home_only() -> None:
    found = option_namings(ROOT)
    assert {place: count for place, count in found.items() if count > OPTION_ALLOWED.get(place, (0, ""))[0]} == {}


def test_no_allowance_is_left_over() -> None:
    assert set(ALLOWED) - set(namings(ROOT, ops())) == set()
    assert set(OPTION_ALLOWED) - set(option_namings(ROOT)) == set()


@pytest.mark.parametrize("said", ['options["softcap"]', "call(sinks=1)"])
@pytest.mark.parametrize(("module", "found"), [("properties/checks/bias.py", True), ("targets/honest/flash.py", False)])
def test_an_option_named_elsewhere_is_found(said: str, module: str, found: bool, tmp_path: Path) -> None:
    path = tmp_path / module
    path.parent.mkdir(parents=True)
    path.write_text(f'"""The softcap and sinks."""\n\n{said}\n', encoding="utf-8")
    assert option_namings(tmp_path) == ({module: 1} if found else {})


@pytest.mark.parametrize(
    ("module", "found"),
    [
        ("properties/search.py", True),
        ("oracle/ops/op.py", True),
        ("oracle/ops/softmax/case.py", False),
        ("properties/ops/table.py", False),
    ],
)
def test_a_name_elsewhere_is_found(module: str, found: bool, tmp_path: Path) -> None:
    path = tmp_path / module
    path.parent.mkdir(parents=True)
    path.write_text('"""About softmax."""\n\nif op == "softmax":\n    pass\n', encoding="utf-8")
    assert namings(tmp_path, ops()) == ({module: 1} if found else {})


def test_the_readme_shows_the_table_of_ops() -> None:
    """Made anew by ``python -c "from oracle.ops.describe import as_markdown; print(as_markdown())"``."""
    assert describe.as_markdown() in (ROOT / "README.md").read_text(encoding="utf-8")


def test_another_row_would_be_another_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describe, "ops", lambda: {"softmin": ops()["softmax"], **ops()})
    with pytest.raises(AssertionError):
        test_the_readme_shows_the_table_of_ops()


PARTS = ("oracle", "targets", "properties", "reports", "meta_tests", "benchmarks")
FILES, LINES = 25, 400


def crowded(root: Path) -> dict[str, int]:
    """Folders of more than `FILES` files, by their number."""
    folders = [f for part in PARTS for f in [root / part, *(root / part).rglob("*")] if f.is_dir()]
    counted = {f: sum(path.is_file() for path in f.iterdir()) for f in folders if f.name != "__pycache__"}
    return {f.relative_to(root).as_posix(): n for f, n in counted.items() if n > FILES}


def long(root: Path) -> dict[str, int]:
    """Modules of more than `LINES` lines, by their number."""
    modules = [path for part in PARTS for path in (root / part).rglob("*.py")]
    counted = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in modules}
    return {path.relative_to(root).as_posix(): n for path, n in counted.items() if n > LINES}


def test_no_folder_is_crowded() -> None:
    assert crowded(ROOT) == {}


def test_no_module_is_long() -> None:
    assert long(ROOT) == {}


@pytest.mark.parametrize("part", PARTS)
def test_both_checks_can_fail(part: str, tmp_path: Path) -> None:
    folder = tmp_path / part / "deeper"
    folder.mkdir(parents=True)
    for n in range(FILES):
        (folder / f"f{n}.py").write_text("x = 1\n" * LINES)
    assert (crowded(tmp_path), long(tmp_path)) == ({}, {})
    (folder / "one_more.txt").touch()
    (folder / "f0.py").write_text("x = 1\n" * (LINES + 1))
    assert crowded(tmp_path) == {f"{part}/deeper": FILES + 1}
    assert long(tmp_path) == {f"{part}/deeper/f0.py": LINES + 1}
