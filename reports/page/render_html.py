"""Sections as one HTML page that needs nothing else: styles and figures inline, no script, nothing fetched.

The page forbids itself scripts and requests by a content security policy, should an escape ever fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from reports.content.wording import slug
from reports.page import svg
from reports.page.document import (
    Badge,
    Block,
    Bullets,
    Card,
    Code,
    Command,
    Facts,
    Fold,
    Inline,
    Line,
    Link,
    Notice,
    Paragraph,
    Plot,
    Section,
    Strong,
    Table,
    parts,
)
from reports.page.markup import Html, join, tag
from reports.page.render_markdown import safe_link

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = Path(__file__).with_name("style.css")


def page(title: str, byline: str, sections: Sequence[Section]) -> str:
    """The whole report."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Html(_STYLE.read_text(encoding="utf-8"))),
    )
    links = [tag("a", s.title, href=f"#{s.id}") for s in sections]
    body = tag(
        "body",
        tag("header", tag("h1", title), tag("p", byline, class_="byline"), tag("nav", *links, aria_label="Sections")),
        tag("main", *(_section(s, 2) for s in sections)),
    )
    return "<!DOCTYPE html>\n" + tag("html", head, body, lang="en") + "\n"


def inline(line: Line) -> Html:
    """A line of text."""
    return join(_inline(p) for p in parts(line))


def _inline(piece: Inline) -> str:
    match piece:
        case str():
            return piece
        case Code(text):
            return tag("code", text)
        case Strong(text):
            return tag("strong", text)
        case Link(text, href):
            return tag("a", text, href=href) if safe_link(href) else text
        case Badge(verdict, count):
            label = verdict if count is None else f"{verdict} {count}"
            return tag("span", label, class_=f"badge {slug(verdict)}")


def _section(section: Section, level: int) -> Html:
    heading = tag(f"h{min(level, 6)}", section.title)
    return tag("section", heading, *_blocks(section.blocks, level + 1), id=section.id)


def _blocks(blocks: Iterable[Block], level: int) -> list[Html]:
    return [_guarded(block, level) for block in blocks]


def _guarded(block: Block, level: int) -> Html:
    try:
        return _block(block, level)
    except Exception as error:  # a figure that cannot be drawn leaves the rest of its section readable
        return tag("p", f"This part could not be drawn: {type(error).__name__}: {error}", class_="notice bad")


def _block(block: Block, level: int) -> Html:
    match block:
        case Section():
            return _section(block, level)
        case Paragraph(line):
            return tag("p", inline(line))
        case Bullets(items):
            return tag("ul", *(tag("li", inline(item)) for item in items))
        case Facts(pairs):
            return tag("dl", *(piece for name, line in pairs for piece in (tag("dt", name), tag("dd", inline(line)))))
        case Command(text):
            return tag("pre", tag("code", text), class_=None if "\n" in text else "one")
        case Notice(kind, line):
            return tag("p", inline(line), class_=f"notice {kind}", role="status" if kind == "good" else "alert")
        case Table():
            return _table(block)
        case Card(badges, title, inner):
            gravest = slug(badges[0].verdict) if badges else ""
            shown = join((*(_inline(b) for b in badges), inline(title)), " ")
            return tag(
                "article", tag("p", shown, class_="title"), *_blocks(inner, level), class_=f"card {gravest}".strip()
            )
        case Fold(summary, inner):
            return tag("details", tag("summary", summary), *_blocks(inner, level))
        case Plot():
            return _figure(block)


def _table(table: Table) -> Html:
    def cell(kind: str, column: int, line: Line) -> Html:
        return tag(kind, inline(line), class_="num" if column in table.numeric else None)

    head = tag("thead", tag("tr", *(cell("th", i, line) for i, line in enumerate(table.head))))
    rows = [tag("tr", *(cell("td", i, line) for i, line in enumerate(row))) for row in table.rows]
    body = tag("table", head, tag("tbody", *rows))
    # A wide table scrolls in its own box, which the keyboard can reach; its caption and the page do not.
    box = tag("div", body, class_="table", tabindex="0", role="region", aria_label=table.caption or None)
    return join([tag("p", table.caption, class_="caption"), box]) if table.caption else box


def _figure(plot: Plot) -> Html:
    drawn = tag("div", *(svg.panel(plot, p) for p in plot.panels), class_="panels")
    marks = [p for panel in plot.panels for s in panel.series for p in (*s.points, *s.loose)]
    entries = [tag("li", svg.swatch(i), name) for i, name in plot.shown]
    entries += [tag("li", sample, text) for sample, text in svg.key(p.verdict for p in marks)]
    return tag("figure", tag("figcaption", plot.note), drawn, tag("ul", *entries, class_="legend"))
