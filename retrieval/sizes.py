"""Read sizes such as 2GB, of options and environment variables."""

from __future__ import annotations

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
LEAST, MOST = 64 << 20, 1 << 50


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
