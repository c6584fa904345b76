"""A folder of records to its report: report.md and report.html beside them."""

from __future__ import annotations

from pathlib import Path

from reports.content.sections import sections
from reports.page import render_html, render_markdown
from reports.page.document import Paragraph, Section
from reports.run.load import Run, load

TITLE = "attn-oracle report"


def build(folder: Path) -> tuple[Path, ...]:
    """Read ``folder``/records-*.jsonl, write both pages, return their paths.

    UnlikeRuns, in one line, if the files are of unlike runs; then nothing is written.
    """
    run = load(folder)
    made = sections(run)
    line = byline(run)
    pages = {
        folder / "report.md": render_markdown.page(TITLE, (Section("run", "Run", (Paragraph(line),)), *made)),
        folder / "report.html": render_html.page(TITLE, line, made),
    }
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
    return tuple(pages)


def byline(run: Run) -> str:
    """When, where and from which commit, in a line."""
    if not run.environments:
        return "a run of unknown origin"
    e = run.environments[-1]
    commit = e.get("commit")
    facts = [
        str(e.get("date") or "").replace("T", " ").removesuffix("+00:00"),
        f"commit {str(commit)[:12]}{' with uncommitted changes' if e.get('dirty') else ''}" if commit else "",
        str(e.get("processor") or ""),
        f"device {e['device']}" if e.get("device") else "",
        f"profile {e['profile']}" if e.get("profile") else "",
        f"seed {e['seed']}" if e.get("seed") is not None else "",
    ]
    return " · ".join(f for f in facts if f)
