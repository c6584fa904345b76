"""Waivers: their files, what they explain, and that each of them has a reason that somebody can look up."""

from dataclasses import replace
from pathlib import Path

import pytest

from properties.ops.table import properties_for
from properties.record import Record
from properties.waivers import FOLDER, BadWaiver, Waiver, stale, waive, waivers_of
from targets.calling.registry import BUILTINS, Unavailable, load_builtin

GOOD = """
[known]
properties = ["P1"]
dtypes = ["fp32"]
contains = ["breaks lse"]
reason = "a fast exp"
link = "https://example.org/1"
reproducer = "q = ..."
"""


def written(folder: Path, text: str) -> tuple[Waiver, ...]:
    (folder / "t.toml").write_text(text)
    return waivers_of("t", folder)


def test_a_waiver_is_read_from_its_file(tmp_path: Path) -> None:
    (waiver,) = written(tmp_path, GOOD)
    assert (waiver.target, waiver.key, waiver.properties, waiver.dtypes) == ("t", "known", ("P1",), ("fp32",))
    assert waiver.link == "https://example.org/1"
    assert waivers_of("nosuch", tmp_path) == ()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[known]", "known = 3\n[x", "Error"),
        (GOOD, "known = 3", "known is no table of its own"),
        ('reason = "a fast exp"\n', "", "known needs reason, a text"),
        ('reason = "a fast exp"', 'reason = ""', "known needs reason, a text"),
        ('link = "https://example.org/1"\n', "", "known needs link, a text"),
        ('["breaks lse"]', '"breaks lse"', "known needs contains, a list of names"),
        ('["P1"]', '"P1"', "known needs properties, a list of names"),
        ('["P1"]', "[]", "known needs properties, a list of names"),
        ('["fp32"]', '["fp23"]', "known names an unknown dtype 'fp23'"),
        ("reason", "raeson", "known has an unknown field 'raeson'"),
    ],
)
def test_a_file_that_cannot_be_used_is_said_in_one_line(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in GOOD
    with pytest.raises(BadWaiver) as refused:
        written(tmp_path, GOOD.replace(old, new))
    assert message in str(refused.value)
    assert "t.toml" in str(refused.value)
    assert "\n" not in str(refused.value)


def record(**changes: str | None) -> Record:
    plain = Record("t", "third_party", "attention", "fp32", "cpu", "P1", "", "c", "", "FAIL", "derived")
    return replace(plain, detail="plain breaks lse 5", **changes)  # type: ignore[arg-type]


def test_a_waiver_explains_its_own_subject_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (waiver,) = written(tmp_path, GOOD)
    monkeypatch.setattr("properties.waivers.waivers_of", lambda target: (waiver,) if target == "t" else ())
    assert waive(record()) == waiver
    for other in (
        {"target": "u"},
        {"property": "P2"},
        {"dtype": "fp16"},
        {"detail": "plain breaks out 5"},
        {"origin": "own"},
        {"origin": "user"},
    ):
        assert waive(replace(record(), **other)) is None, other  # type: ignore[arg-type]


def test_a_waiver_is_stale_where_its_subject_was_examined_and_it_explained_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (waiver,) = written(tmp_path, GOOD.replace('["fp32"]', '["fp32", "fp16"]'))
    monkeypatch.setattr("properties.waivers.waivers_of", lambda target: (waiver,))
    passed, waived = record(), replace(record(), verdict="WAIVED", waiver="known")
    passed = replace(passed, verdict="PASS", detail="within the bound")
    both = [passed, replace(passed, dtype="fp16")]
    assert stale(both, complete=True) == [waiver]
    assert stale(both, complete=False) == []
    # Without fp16 nobody can say that it explains nothing.
    assert stale([passed], complete=True) == []
    assert stale([*both, waived], complete=True) == []
    # A pass whose text happens to contain the words is no finding.
    assert stale([*both, replace(passed, detail="no case breaks lse")], complete=True) == [waiver]
    assert stale([replace(r, origin="user") for r in both], complete=True) == []


def test_the_projects_waivers_are_about_code_of_others_that_is_still_examined() -> None:
    rows = {b.name: b for b in BUILTINS}
    files = sorted(FOLDER.glob("*.toml"))
    assert files
    for path in files:
        row = rows.get(path.stem)
        assert row is not None, f"{path.name} is about no built-in target"
        assert row.origin == "third_party", f"{path.name}: the project's own targets have no waivers"
        try:
            target = load_builtin(row)
        except Unavailable as reason:
            pytest.skip(str(reason))
        ids = {p.id for p in properties_for(target.op)} | {"contract"}
        for waiver in waivers_of(path.stem):
            where = f"{path.name}: {waiver.key}"
            assert set(waiver.properties) <= ids, where
            assert set(waiver.dtypes) <= set(target.dtypes) <= set(target.row.formats), where
            assert waiver.link.startswith("https://"), where
            assert len(waiver.reason.split()) > 5, f"{where} does not explain anything"
