"""The pages name files that exist."""

import re
from pathlib import Path

import oracle

ROOT = Path(oracle.__file__).resolve().parent.parent
_FOLDERS = "oracle|targets|properties|reports|meta_tests|benchmarks|docs"
_FILE = re.compile(rf"\b(?:{_FOLDERS})/[A-Za-z0-9_/]+\.(?:py|md|json)\b")


def missing(text: str) -> list[str]:
    return sorted({name for name in _FILE.findall(text) if not (ROOT / name).exists()})


def test_files_that_pages_name_exist() -> None:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        assert missing(page.read_text(encoding="utf-8")) == [], page.name


def test_a_file_that_moved_is_found() -> None:
    assert missing("see oracle/case.py and oracle/gone/case.py") == ["oracle/gone/case.py"]
