"""Read and write TOML: settings of a run, and values of --set.

Files that are much larger or deeper than settings are refused instead of parsed.
"""

import json
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrieval.errors import DmlError

MAKE_ONE = "Make one: dmltool train --preset glyphs-ce --dry-run > my.toml"
LARGEST = 100_000  # bytes of a configuration; ours have some 3,000
_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_NAME = re.compile(rf"""(?<![\w-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{16}}""")
# How `write_text` escapes bytes that are not UTF-8.
_STRAY = re.compile(rb"\\udc[89a-f][0-9a-f]")


def read(path: Path, what: str = "configuration", fix: str = MAKE_ONE) -> dict[str, Any]:
    """The tables of a file; DmlError if it cannot be read or is none in TOML.

    what, fix: what the file is, and how to get one, for messages.
    """
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except FileNotFoundError:
        raise DmlError(f"There is no {what} {path}.", "A file in TOML was expected.", fix) from None
    except OSError as error:
        raise DmlError(f"{path} cannot be read.", f"{error.strerror}.", "Name a file.") from error
    if len(data) > LARGEST:
        raise DmlError(f"{path} is not a {what}.", f"It is larger than {LARGEST:,} bytes.", fix)
    try:
        return parse(data.decode("utf-8"))
    except ValueError as error:  # of TOML, or of UTF-8
        if stray := _STRAY.search(data):
            line = data.count(b"\n", 0, stray.start()) + 1
            raise DmlError(
                f"{path}, line {line}: the name of a file or folder is not UTF-8.",
                "TOML cannot hold such a name.",
                "Rename the file or folder, and write its new name into that line.",
            ) from error
        raise DmlError(f"{path} is not TOML.", f"{error}.", "Correct that line.") from error


def parse(text: str) -> dict[str, Any]:
    """Parse a text; ValueError also for what takes tomllib minutes: names of thousands of parts."""
    if _LONG_NAME.search(text):
        raise ValueError("It holds a name of more than 16 parts, such as a.b.c")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("Its lists or tables are nested too deeply") from None


def parse_value(text: str) -> Any:
    """The value of a setting; what is not TOML is a text."""
    if text in ("True", "False"):  # as Python spells them
        return text == "True"
    try:
        return parse(f"value = {text}")["value"]
    except ValueError:
        return text


def render(value: Any) -> str:
    """A value on one line of TOML."""
    if isinstance(value, Mapping):
        pairs = (
            f"{key if key.isidentifier() else render(key)} = {render(item)}"
            for key, item in value.items()
        )
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(render, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # The strings and numbers of JSON are those of TOML, but for its escape of DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def render_tables(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of a file of tables."""
    texts = (
        "\n".join([f"[{name}]", *(f"{key} = {render(value)}" for key, value in table.items())])
        for name, table in tables.items()
    )
    return "\n\n".join(texts) + "\n"
