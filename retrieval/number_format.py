"""Write numbers as text, the same in every table and message, and read sizes such as 2GB."""

from __future__ import annotations

import json
from collections.abc import Sequence

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
LEAST, MOST = 64 << 20, 1 << 50


def percent(value: float | None, digits: int = 2) -> str:
    """0.9312 -> "93.12"; empty for None."""
    return "" if value is None else f"{100 * value:.{digits}f}"


def interval(span: Sequence[float] | None) -> str:
    """(0.91, 0.95) -> "91.00 to 95.00"; empty for None."""
    return "" if span is None else f"{percent(span[0])} to {percent(span[1])}"


def points(difference: float) -> str:
    """0.012 -> "+1.20": a difference in percentage points."""
    return f"{100 * difference:+.2f}"


def points_interval(span: Sequence[float] | None) -> str:
    """(-0.01, 0.02) -> "-1.00 to +2.00"; empty for None."""
    return "" if span is None else f"{points(span[0])} to {points(span[1])}"


def p_value(p: float | None) -> str:
    """0.0123 -> "0.012", "< 0.001" below that; empty for None."""
    if p is None:
        return ""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def counted(number: int, noun: str, nouns: str = "") -> str:
    """(1, "query") -> "1 query"; (2000, "class", "classes") -> "2,000 classes"."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def level_name(level: float) -> str:
    """0.95 -> "95% interval"."""
    return f"{100 * level:g}% interval"


def four_digits(text: str) -> str:
    """Round "0.0017826497" to "0.001783"; other texts, and numbers of 8 characters, stay."""
    try:
        return f"{float(text):.4g}" if len(text) > 8 and not text.lstrip("-").isdigit() else text
    except ValueError:
        return text


def duration(seconds: float) -> str:
    """45 s, 10 min, 2.0 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.1f} h"


def as_text(value: object) -> str:
    """Text as it is; all else as JSON: 5 -> "5", None -> "null", [1, "a"] -> '[1, "a"]'."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def size(count: float) -> str:
    """512 B, 81.2 KB, 3.1 MB: bytes in decimal units."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} PB" if count < 999.5 else f"{count:,.0f} PB"


def parse_size(text: str) -> int:
    """Bytes of a size such as 2GB or 512MB; ValueError says what is wrong with it."""
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in UNITS else ""
    try:
        size = float(number.removesuffix(unit)) * UNITS[unit]
    except ValueError:
        raise ValueError(f"{text!r} is not a size such as 2GB or 512MB.") from None
    if not LEAST <= size < MOST:
        raise ValueError(f"{text!r} is not between 64MB and 1000TB.")
    return int(size)
