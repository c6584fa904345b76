"""What a page is made of, before it is Markdown or HTML: a few frozen blocks that hold text and no markup.

A section is written once and rendered twice. All text here is plain: each renderer escapes it, in one place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Code:
    """Text to be shown as it is typed."""

    text: str


@dataclass(frozen=True, slots=True)
class Strong:
    text: str


@dataclass(frozen=True, slots=True)
class Link:
    """``href`` is ``#id`` of a section, or an https address that stands in this package or in a waiver."""

    text: str
    href: str


@dataclass(frozen=True, slots=True)
class Badge:
    """A verdict, with how often it was given."""

    verdict: str
    count: int | None = None


Inline = str | Code | Strong | Link | Badge
Line = Inline | tuple[Inline, ...]


@dataclass(frozen=True, slots=True)
class Paragraph:
    line: Line


@dataclass(frozen=True, slots=True)
class Bullets:
    items: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """``numeric``: indices of columns that are aligned to the right and do not wrap."""

    head: tuple[Line, ...]
    rows: tuple[tuple[Line, ...], ...]
    numeric: frozenset[int] = frozenset()
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and what they are."""

    pairs: tuple[tuple[str, Line], ...]


@dataclass(frozen=True, slots=True)
class Command:
    """A shell command that stands on its own lines, to be copied."""

    text: str


@dataclass(frozen=True, slots=True)
class Notice:
    kind: Literal["good", "bad", "warn", "info"]
    line: Line


@dataclass(frozen=True, slots=True)
class Card:
    """One finding: its verdicts, title and blocks, set apart from its neighbours."""

    badges: tuple[Badge, ...]
    title: Line
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Fold:
    """Blocks behind a summary: closed on a screen; on paper open, but for those of a card."""

    summary: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One mark: the gravest verdict and the worst ``y`` of ``cases`` at ``x``; y may be 0, inf or None."""

    x: float
    y: float | None
    verdict: str
    cases: int = 1


@dataclass(frozen=True, slots=True)
class Series:
    """The points of one target, x ascending; ``loose`` ones are of other inputs and not joined by a line."""

    name: str
    points: tuple[Point, ...]
    loose: tuple[Point, ...] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    series: tuple[Series, ...]


Scale = Literal["log", "share"]


@dataclass(frozen=True, slots=True)
class Plot:
    """One figure: a panel a dtype on common axes.

    names: all series that a figure of this run may show, so that a target looks the same in each. x_scale: ``log`` or
    ``share`` (log odds, for numbers between 0 and 1); y is logarithmic. y_range: values beyond it are drawn at
    the edge, marked so. reference: where a line stands, and its name.
    """

    id: str
    title: str
    note: str
    x_label: str
    y_label: str
    panels: tuple[Panel, ...]
    names: tuple[str, ...]
    x_scale: Scale = "log"
    y_range: tuple[float, float] = (1e-6, 1e6)
    reference: tuple[float, str] | None = None

    @property
    def shown(self) -> tuple[tuple[int, str], ...]:
        """The series that it does show, each with its place in ``names``."""
        present = {s.name for panel in self.panels for s in panel.series}
        return tuple((i, name) for i, name in enumerate(self.names) if name in present)


@dataclass(frozen=True, slots=True)
class Section:
    id: str
    title: str
    blocks: tuple[Block, ...] = field(default=())


Block = Paragraph | Bullets | Table | Facts | Command | Notice | Card | Fold | Plot | Section


def parts(line: Line) -> tuple[Inline, ...]:
    """The pieces of a line."""
    return line if isinstance(line, tuple) else (line,)


def joined(lines: tuple[Line, ...] | list[Line], separator: str) -> tuple[Inline, ...]:
    """Several lines as one, with a separator between them."""
    result: list[Inline] = []
    for line in lines:
        if result:
            result.append(separator)
        result.extend(parts(line))
    return tuple(result)
