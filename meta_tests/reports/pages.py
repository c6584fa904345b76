"""Both pages of a run, and what they are made of, for the tests of pages."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from meta_tests.reports.synthetic import FAILED, PASSED, sweeps
from reports.page.build import build

_VOID = {"meta", "br", "hr", "img", "link", "input", "line", "circle", "path", "rect", "polyline", "use"}


_ALLOWED = {
    "html", "head", "meta", "title", "style", "body", "header", "main", "nav", "section", "h1", "h2", "h3", "h4", "h5",
    "h6", "p", "a", "span", "strong", "code", "pre", "ul", "li", "dl", "dt", "dd", "div", "table", "thead", "tbody",
    "tr", "th", "td", "details", "summary", "article", "figure", "figcaption", "svg", "g", "path", "line", "rect",
    "polyline", "text",
}  # fmt: skip


class Page(HTMLParser):
    """An HTML page taken apart; `faults` says what is not well formed."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.faults: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.pieces: list[str] = []
        self.feed(source)
        self.close()
        self.faults += [f"{name} is never closed" for name in self.open]

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[name] += 1
        self.attributes += [(name, key, value or "") for key, value in attrs]
        if len({key for key, _ in attrs}) < len(attrs):
            self.faults.append(f"{name} has an attribute twice")
        if name not in _VOID:
            self.open.append(name)

    def handle_startendtag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[name] += 1
        self.attributes += [(name, key, value or "") for key, value in attrs]

    def handle_endtag(self, name: str) -> None:
        if not self.open or self.open.pop() != name:
            self.faults.append(f"{name} closes something else")

    def handle_data(self, data: str) -> None:
        self.pieces.append(data)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def values(self, key: str) -> list[str]:
        return [value for _, k, value in self.attributes if k == key]


def pages(folder: Path) -> tuple[str, str]:
    markdown, html = build(folder)
    assert (markdown.name, html.name) == ("report.md", "report.html")
    return markdown.read_text(encoding="utf-8"), html.read_text(encoding="utf-8")


FULL = [
    PASSED,
    FAILED,
    replace(
        FAILED,
        dtype="fp16",
        property="P9",
        ratio=float("inf"),
        rerun="attn-oracle verify k.py:f --property P9 --case 'a b.json'",
    ),
    replace(
        FAILED,
        verdict="ERROR",
        detail="raised: ValueError: no",
        worst={},
        rerun="attn-oracle verify k.py:f --property P18",
    ),
    replace(
        PASSED, verdict="UNDECIDED", detail="undecided at 2048 bits", rerun="attn-oracle verify k.py:f --property P8"
    ),
    replace(PASSED, verdict="EXEMPT"),
    replace(PASSED, verdict="VACUOUS"),
    replace(PASSED, verdict="UNSUPPORTED", property="P7", detail="the target has no return_lse"),
    replace(PASSED, property="G3", basis="calibrated", metrics={"model_ratio_out": 0.97, "model_ratio_lse": 1.1}),
    replace(PASSED, property="contract", detail="contract flash kept in its plain form by all 9 cases"),
    *sweeps(),
]
