"""Markup whose text cannot become markup: children that are plain strings are escaped, `Html` passes as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape


class Html(str):
    """Text that is markup already; made by `tag`, `join` and constants of this package only."""

    __slots__ = ()


_VOID = frozenset({"meta", "br", "line", "circle", "path", "rect", "polyline", "use"})


def tag(name: str, /, *children: str, **attributes: str | float | None) -> Html:
    """One element. ``class_`` is ``class``, other underscores are hyphens; an attribute that is None is left out."""
    written = "".join(f' {_name(k)}="{escape(_value(v))}"' for k, v in attributes.items() if v is not None)
    if name in _VOID and not children:
        return Html(f"<{name}{written}/>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def join(children: Iterable[str], separator: str = "") -> Html:
    """Children one after another, escaped unless they are markup."""
    return Html(separator.join(child if isinstance(child, Html) else escape(clean(child)) for child in children))


# Controls but for tab and newline, and lone surrogates.
_FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def clean(text: str) -> str:
    """Without characters that no page may hold (controls, lone surrogates)."""
    return _FORBIDDEN.sub("\ufffd", text)


def _name(key: str) -> str:
    return "viewBox" if key == "viewBox" else key.rstrip("_").replace("_", "-")


def _value(value: str | float) -> str:
    return (
        clean(value)
        if isinstance(value, str)
        else f"{value:g}"
        if isinstance(value, int)
        else f"{value:.2f}".rstrip("0").rstrip(".")
    )
