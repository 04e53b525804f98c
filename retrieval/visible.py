"""Text from files made safe for a terminal, where control characters would act."""

from __future__ import annotations

import re

# Controls but tab and newline, what turns the direction of text, and halves of characters.
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""The text with each control character as an escape such as \x1b."""
    return HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
