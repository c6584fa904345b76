"""Figures as SVG: about as much as they need, with text that stays text and colours that follow the page's own.

Drawn here and not by matplotlib: colours are CSS variables, so that one drawing serves light, dark and print; marks
carry tooltips; a panel takes about ten kilobytes; and a report needs no plotting library.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from properties.judge.verdict import Verdict
from reports.content.wording import figure, plural, power
from reports.page.document import Panel, Plot, Point, Scale, Series
from reports.page.markup import Html, tag

WIDTH, HEIGHT = 380.0, 268.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 12.0, 30.0, 44.0
BAND = 16.0
"""Height of the strips above and below the axis for values that it cannot show: inf and 0."""
COLOURS, SHAPES = 6, 5
_SHARE_TICKS = (0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999)
_CROSSED = {Verdict.FAIL.value, Verdict.ERROR.value, Verdict.WAIVED.value}
# Marks that are not simply filled: nothing is promised, nothing is proven, nothing could be decided.
_KINDS = {Verdict.EXEMPT.value: "hollow", Verdict.VACUOUS.value: "pale", Verdict.UNDECIDED.value: "unsure"}


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from value to place; ``low`` and ``high`` in transformed units, places in drawing units."""

    scale: Scale
    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        """Where a value stands; values off the axis stand at its edge."""
        share = (transformed(self.scale, value) - self.low) / (self.high - self.low)
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)


def transformed(scale: Scale, value: float) -> float:
    """log10, or log odds for shares (kept within 1e-4 of 0 and 1)."""
    if scale == "share":
        kept = min(1 - 1e-4, max(1e-4, value))
        return math.log10(kept / (1 - kept))
    return math.log10(value) if value > 0 else -math.inf


def axes(plot: Plot) -> tuple[Axis, Axis]:
    """The axes that all panels of a figure share."""
    marks = [p for panel in plot.panels for s in panel.series for p in (*s.points, *s.loose)]
    xs = [t for p in marks if math.isfinite(t := transformed(plot.x_scale, p.x))]
    low_y, high_y = plot.y_range
    ys = [math.log10(min(high_y, max(low_y, p.y))) for p in marks if p.y is not None and 0 < p.y < math.inf]
    if plot.reference is not None:
        ys.append(math.log10(plot.reference[0]))
    low, high = _span(xs, pad=0.06)
    low_tick, high_tick = _span(ys, pad=0.04)
    if high_tick - low_tick > 1.2:
        low_tick, high_tick = math.floor(low_tick + 0.1), math.ceil(high_tick - 0.1)
    return (
        Axis(plot.x_scale, low, high, LEFT + BAND, WIDTH - RIGHT),
        Axis("log", low_tick, high_tick, HEIGHT - BOTTOM - BAND, TOP + BAND),
    )


def _span(values: list[float], *, pad: float) -> tuple[float, float]:
    if not values:
        return -1.0, 1.0
    low, high = min(values), max(values)
    extra = max(pad * (high - low), 0.15)
    return low - extra, high + extra


def panel(plot: Plot, drawn: Panel) -> Html:
    """One panel, with axes, grid, the reference line and the marks of every series; failures on top."""
    x, y = axes(plot)
    lines: list[Html] = []
    marks: list[Html] = []
    crosses: list[Html] = []
    for series in drawn.series:
        index = plot.names.index(series.name)
        lines.append(_line(series, x, y, index))
        for point, loose in [(p, False) for p in series.points] + [(p, True) for p in series.loose]:
            target = crosses if point.verdict in _CROSSED else marks
            target.append(_mark(point, x, y, index, plot, series.name, loose=loose))
    label = f"{plot.title}, {drawn.title}: {plot.y_label} against {plot.x_label}"
    return tag(
        "svg",
        *_grid(plot, x, y),
        *_edges(plot, drawn, x, y),
        *lines,
        *marks,
        *crosses,
        tag("text", drawn.title, x=WIDTH - RIGHT, y=16.0, class_="name", text_anchor="end"),
        tag("text", plot.y_label, x=2.0, y=16.0, class_="axis"),
        tag("text", plot.x_label, x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 6, class_="axis", text_anchor="middle"),
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        role="img",
        aria_label=label,
    )


def _grid(plot: Plot, x: Axis, y: Axis) -> Iterator[Html]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for value, label in y_ticks(y):
        at = y.place(value)
        yield tag("line", x1=LEFT, x2=right, y1=at, y2=at, class_="grid")
        yield tag("text", label, x=LEFT - 6, y=at + 4, class_="tick", text_anchor="end")
    for value, label in x_ticks(plot, x):
        at = x.place(value)
        yield tag("line", x1=at, x2=at, y1=TOP, y2=bottom, class_="grid")
        yield tag("text", label, x=at, y=bottom + 16, class_="tick", text_anchor="middle")
    yield tag("rect", x=LEFT, y=TOP, width=right - LEFT, height=bottom - TOP, class_="frame")
    if plot.reference is not None:
        at = y.place(plot.reference[0])
        yield tag("line", x1=LEFT, x2=right, y1=at, y2=at, class_="bound")
        yield tag("text", plot.reference[1], x=right - 4, y=at - 4, class_="bound-name", text_anchor="end")


def _edges(plot: Plot, drawn: Panel, x: Axis, y: Axis) -> Iterator[Html]:
    """Names of the strips for 0 and inf, where a mark of this panel stands in one."""
    marks = [p for s in drawn.series for p in (*s.points, *s.loose)]
    low, high = 10**y.low, 10**y.high
    if any(p.y is None or p.y > high for p in marks):
        yield tag("text", "more, ∞", x=LEFT - 6, y=TOP + BAND / 2 + 2, class_="tick", text_anchor="end")
    if any(p.y is not None and p.y < low for p in marks):
        yield tag("text", "less, 0", x=LEFT - 6, y=HEIGHT - BOTTOM - 4, class_="tick", text_anchor="end")
    if plot.x_scale == "log" and any(p.x <= 0 for p in marks):
        yield tag("text", "0", x=LEFT + BAND / 2, y=HEIGHT - BOTTOM + 16, class_="tick", text_anchor="middle")


def y_ticks(axis: Axis) -> list[tuple[float, str]]:
    """Powers of ten, at most seven; 1-2-5 steps where the axis spans less than a decade and a half."""
    if axis.high - axis.low < 1.5:
        candidates = [m * 10.0**e for e in range(math.floor(axis.low), math.ceil(axis.high) + 1) for m in (1, 2, 5)]
        return [(v, figure(v)) for v in candidates if axis.low <= math.log10(v) <= axis.high]
    return _decades(axis, 7)


def _decades(axis: Axis, most: int) -> list[tuple[float, str]]:
    first, last = math.ceil(axis.low), math.floor(axis.high)
    step = max(1, math.ceil((last - first + 1) / most))
    return [(10.0**e, _decade(e)) for e in range(first, last + 1) if e % step == 0]


def _decade(exponent: int) -> str:
    return figure(10.0**exponent) if -2 <= exponent <= 3 else power(exponent)


def x_ticks(plot: Plot, axis: Axis) -> list[tuple[float, str]]:
    """The places of the data where these are few, else powers of ten; usual shares on a share axis."""
    if plot.x_scale == "share":
        return [(v, f"{v:g}") for v in _SHARE_TICKS if axis.low <= transformed("share", v) <= axis.high]
    places = sorted({p.x for d in plot.panels for s in d.series for p in s.points if p.x > 0})
    if 1 <= len(places) <= 6 and all(v == int(v) and v < 1e6 for v in places):
        return [(v, f"{v:.0f}") for v in places]
    return _decades(axis, 6)


def _at(point: Point, x: Axis, y: Axis) -> tuple[float, float]:
    across = LEFT + BAND / 2 if x.scale == "log" and point.x <= 0 else x.place(point.x)
    if point.y is None or math.isnan(point.y) or point.y > 10**y.high:
        return across, TOP + BAND / 2
    if point.y < 10**y.low:
        return across, HEIGHT - BOTTOM - BAND / 2
    return across, y.place(point.y)


def _line(series: Series, x: Axis, y: Axis, index: int) -> Html:
    places = " ".join("{:.1f},{:.1f}".format(*_at(p, x, y)) for p in series.points)
    return tag("polyline", points=places, class_=f"series {colour(index)}", stroke_dasharray=_dash(index))


def _mark(point: Point, x: Axis, y: Axis, index: int, plot: Plot, name: str, *, loose: bool) -> Html:
    across, down = _at(point, x, y)
    kinds = f"{colour(index)} {_KINDS.get(point.verdict, '')}".strip()
    pieces = [
        tag("title", _tooltip(point, plot, name)),
        tag("path", d=_STAR if loose else _PATHS[index % SHAPES], class_="mark"),
    ]
    if point.verdict in _CROSSED:
        pieces.append(_cross(point.verdict))
    return tag("g", *pieces, class_=kinds, transform=f"translate({across:.1f} {down:.1f})")


def _tooltip(point: Point, plot: Plot, name: str) -> str:
    value = "no value" if point.y is None else figure(point.y)
    return f"{name}: {point.verdict}, {value} at {figure(point.x)} ({plural(point.cases, 'case')})"


def colour(index: int) -> str:
    """The class of a series' colour."""
    return f"c{index % COLOURS}"


def _dash(index: int) -> str | None:
    return (None, "5 3", "1.5 2.5")[index // COLOURS % 3]


_PATHS = (
    "M0-3.6A3.6 3.6 0 1 1 0 3.6A3.6 3.6 0 1 1 0-3.6Z",
    "M-3.3-3.3H3.3V3.3H-3.3Z",
    "M0-4.4L4.2 3.2H-4.2Z",
    "M0-4.6L4.6 0L0 4.6L-4.6 0Z",
    "M0 4.4L4.2-3.2H-4.2Z",
)
_STAR = "M0-5.5L1.5-1.8L5.3-1.7L2.4.8L3.3 4.5L0 2.4L-3.3 4.5L-2.4.8L-5.3-1.7L-1.5-1.8Z"


def swatch(index: int) -> Html:
    """The legend's sample of a series."""
    return tag(
        "svg",
        tag("line", x1=1, x2=25, y1=6, y2=6, class_=f"series {colour(index)}", stroke_dasharray=_dash(index)),
        tag(
            "g", tag("path", d=_PATHS[index % SHAPES], class_="mark"), class_=colour(index), transform="translate(13 6)"
        ),
        viewBox="0 0 26 12",
        class_="swatch",
        aria_hidden="true",
    )


def key(verdicts: Iterable[str]) -> Iterator[tuple[Html, str]]:
    """Samples of the marks that need a word, for the verdicts that a figure shows."""
    shown = set(verdicts)
    for verdict, text in _KEY:
        if verdict in shown:
            kind = _KINDS.get(verdict)
            mark = tag("path", d=_PATHS[0], class_="mark") if kind else _cross(verdict)
            drawn = tag("g", mark, class_=f"{kind} ink" if kind else None, transform="translate(13 6)")
            yield tag("svg", drawn, viewBox="0 0 26 12", class_="swatch", aria_hidden="true"), text


_KEY = (
    (Verdict.FAIL.value, "FAIL"),
    (Verdict.ERROR.value, "ERROR"),
    (Verdict.WAIVED.value, "WAIVED"),
    (Verdict.UNDECIDED.value, "UNDECIDED"),
    (Verdict.VACUOUS.value, "VACUOUS: the bound would accept anything"),
    (Verdict.EXEMPT.value, "EXEMPT: no finite value is promised"),
)


def _cross(verdict: str) -> Html:
    return tag("path", d="M-5-5L5 5M-5 5L5-5", class_="cross waived" if verdict == Verdict.WAIVED.value else "cross")
