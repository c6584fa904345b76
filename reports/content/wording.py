"""How figures read: three digits, powers of ten where they help, exact values in decimal and in hex."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

NOTHING = "–"
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def figure(value: float | None) -> str:
    """Three significant digits; a dash for None."""
    if value is None:
        return NOTHING
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        text = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    else:
        mantissa, exponent = f"{value:.1e}".split("e")
        text = power(int(exponent)) if mantissa in ("1.0", "-1.0") else f"{mantissa}×{power(int(exponent))}"
        text = f"-{text}" if mantissa == "-1.0" else text
    return text.replace("-", "−") if text.startswith("-") else text


def power(exponent: int) -> str:
    """Ten to this power."""
    return "10" + str(exponent).translate(_SUPERSCRIPT)


def count(value: int) -> str:
    """Thousands apart."""
    return f"{value:,}"


def plural(value: int, one: str, many: str = "") -> str:
    """A number and its noun."""
    return f"{count(value)} {one if value == 1 else many or one + 's'}"


def exact_value(text: object) -> str:
    """A float given in hex, as decimal and hex: ``0.3515625 (0x1.68p-2)``; other text as it is."""
    try:
        value = float.fromhex(str(text))
    except (ValueError, OverflowError):
        return str(text)
    return f"{value!r} ({text})" if math.isfinite(value) else str(value)


def difference(observed: object, exact: object, exact_low: object = None) -> float | None:
    """observed - (exact + exact_low), None where one of them is no finite number."""
    try:
        values = [float.fromhex(str(observed)), float.fromhex(str(exact))]
        low = 0.0 if exact_low is None else float.fromhex(str(exact_low))
    except (ValueError, OverflowError):
        return None
    result = (values[0] - values[1]) - low
    return result if math.isfinite(result) else None


_SHAPE = re.compile(r"\[([0-9, ]+)\]")


def case_size(description: str) -> int:
    """How many numbers a case holds, read from its description; unknown ones count as largest."""
    total = 0
    for shape in _SHAPE.findall(description):
        total += math.prod(int(n) for n in shape.split(",") if n.strip())
    return total or 2**62


def listed(items: Iterable[str]) -> str:
    """``a, b and c``."""
    words = list(items)
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def slug(*words: str) -> str:
    """An anchor: small letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-") or "section"
