"""Sections as GitHub-flavoured Markdown. All text is `escaped`, or in a code span or guard that it cannot leave."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

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
from reports.page.markup import clean

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$!&])")
_MARKS = {"good": "✅", "bad": "❌", "warn": "⚠️", "info": "ℹ️"}


def page(title: str, sections: Sequence[Section]) -> str:
    """The whole report."""
    pieces = [f"# {escaped(title)}", *(_section(s, 2) for s in sections)]
    return "\n\n".join(pieces) + "\n"


def escaped(text: str) -> str:
    """Text with nothing in it that Markdown or HTML would read as markup, on one line."""
    flat = " ".join(clean(text).split())
    # A number and dot, a dash or a plus start a list, and only at the start of a line.
    flat = re.sub(r"^(\d+)([.)])(?= )", r"\1\\\2", flat)
    return re.sub(r"^([-+])(?= |$)", r"\\\1", _SPECIAL.sub(r"\\\1", flat))


def code(text: str) -> str:
    """A code span that its text cannot end."""
    flat = " ".join(clean(text).split()) or " "
    guard = "`" * (_longest_run(flat) + 1)
    pad = " " if flat.startswith("`") or flat.endswith("`") else ""
    return f"{guard}{pad}{flat}{pad}{guard}"


def guarded(text: str) -> str:
    """A block of code that its text cannot end."""
    guard = "`" * max(3, _longest_run(text) + 1)
    return f"{guard}sh\n{clean(text)}\n{guard}"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)


def inline(line: Line) -> str:
    """A line of text."""
    return "".join(_inline(p) for p in parts(line))


def _inline(piece: Inline) -> str:
    match piece:
        case str():
            # Spaces at the seams between pieces are meant.
            body = escaped(piece)
            return (" " if piece[:1].isspace() else "") + body + (" " if piece[-1:].isspace() and body else "")
        case Code(text):
            return code(text)
        case Strong(text):
            return f"**{escaped(text)}**" + (" " if text.endswith(" ") else "")
        case Link(text, href):
            return f"[{escaped(text)}]({href})" if safe_link(href) else escaped(text)
        case Badge(verdict, count):
            label = verdict if count is None else f"{verdict} {count}"
            return (
                f"**{escaped(label)}**" if verdict in ("FAIL", "ERROR", "STALE_WAIVER", "UNDECIDED") else escaped(label)
            )


def safe_link(href: str) -> bool:
    """Whether a link stays within the page or is a plain https address."""
    return bool(re.fullmatch(r"#[a-z0-9-]+|https://[^\s()<>\[\]\"']+", href))


def _blocks(blocks: Iterable[Block], level: int) -> str:
    return "\n\n".join(piece for block in blocks if (piece := _block(block, level)))


def _section(section: Section, level: int) -> str:
    # The same anchors as in the HTML page, for links from the matrix.
    heading = f"{'#' * min(level, 6)} {escaped(section.title)}"
    return f'<a id="{section.id}"></a>\n\n{heading}\n\n{_blocks(section.blocks, level + 1)}'


def _block(block: Block, level: int) -> str:
    match block:
        case Section():
            return _section(block, level)
        case Paragraph(line):
            return inline(line)
        case Bullets(items):
            return "\n".join(f"- {inline(item)}" for item in items)
        case Facts(pairs):
            return "\n".join(f"- {escaped(name)}: {inline(line)}" for name, line in pairs)
        case Command(text):
            return guarded(text)
        case Notice(kind, line):
            return f"> {_MARKS[kind]} {inline(line)}"
        case Table():
            return _table(block)
        case Card(badges, title, inner):
            badge = " ".join(_inline(b) for b in badges)
            return "\n\n".join(p for p in (f"{badge} {inline(title)}".strip(), _blocks(inner, level)) if p)
        case Fold(summary, inner):
            return f"**{escaped(summary)}**\n\n{_blocks(inner, level)}"
        case Plot():
            return inline(block.note) + " (Drawn in the HTML report.)"


def _table(table: Table) -> str:
    rule = ["---:" if i in table.numeric else "---" for i in range(len(table.head))]
    rows = [[_cell(c) for c in table.head], rule, *([_cell(c) for c in row] for row in table.rows)]
    text = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"{escaped(table.caption)}:\n\n{text}" if table.caption else text


def _cell(line: Line) -> str:
    pieces = []
    for piece in parts(line):
        text = _inline(piece)
        # In a table a bar ends the cell even inside a code span; plain text has its bars escaped already.
        pieces.append(text.replace("|", "\\|") if isinstance(piece, Code) else text)
    return "".join(pieces)
