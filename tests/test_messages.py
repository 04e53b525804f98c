"""Error messages are full sentences: what happened, why, and what to do about it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("retrieval", "trainer", "exporter")
SOURCES = [ROOT / "cli.py", *(p for name in PACKAGES for p in sorted((ROOT / name).rglob("*.py")))]


def _piece(part: ast.expr) -> str | None:
    """A part of an f-string; what `describe` returns and the texts of another error are whole."""
    value = part.value if isinstance(part, ast.FormattedValue) else part
    if isinstance(value, ast.Constant):
        return str(value.value)
    called = value.func if isinstance(value, ast.Call) else value
    name = getattr(called, "id", getattr(called, "attr", ""))
    return "(text)." if name in ("describe", "what", "why") else None


def _texts(node: ast.expr) -> Iterator[list[str | None]]:
    """The pieces of each text that an expression may give; None for one known only at run time."""
    if isinstance(node, ast.Constant):
        yield [str(node.value)]
    elif isinstance(node, ast.JoinedStr):
        yield [_piece(part) for part in node.values]
    elif isinstance(node, ast.IfExp):
        yield from _texts(node.body)
        yield from _texts(node.orelse)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from ([*a, *b] for a in _texts(node.left) for b in _texts(node.right))
    else:
        yield [None]


def _fault(pieces: list[str | None], fix: bool) -> str | None:
    pieces = [piece for piece in pieces if piece != ""]
    if not any(pieces):  # known only at run time
        return None
    first, last = pieces[0], pieces[-1]
    if first is not None and first[:1].islower():
        return "begins with a small letter"
    whole = "".join("x" if piece is None else piece for piece in pieces)
    if fix and (
        ": " in whole or "? --" in whole
    ):  # a command is not followed by a full stop: it is copied
        return None
    return None if (last or "").endswith((".", "?")) else "ends without a full stop"


def _faults(path: Path) -> Iterator[str]:
    for call in ast.walk(ast.parse(path.read_text())):
        kind = getattr(call.func, "id", "") if isinstance(call, ast.Call) else ""
        if kind not in ("DmlError", "damaged"):  # the latter has a fix and may have a reason
            continue
        names = ("what", "why", "fix") if kind == "DmlError" else ("what",)
        if isinstance(call.args[0], ast.Starred):  # another error's parts
            continue
        given = dict(zip(names, call.args, strict=False)) | {k.arg: k.value for k in call.keywords}
        if missing := set(names) - set(given):
            yield f"{path.name}:{call.lineno}: {', '.join(missing)} missing"
        for name, node in given.items():
            if name in names:
                for pieces in _texts(node):
                    if fault := _fault(pieces, name == "fix"):
                        yield f"{path.name}:{node.lineno}: {name} {fault}"


COMMAND = re.compile(r"dmltool (?!list|reads)[a-z]+ [^.:]*$")  # what follows is an argument of it


def _unquoted(path: Path) -> Iterator[str]:
    """Values in commands of messages that are not quoted for the shell."""
    for text in ast.walk(ast.parse(path.read_text())):
        said = ""
        for part in text.values if isinstance(text, ast.JoinedStr) else ():
            if isinstance(part, ast.Constant):
                said += str(part.value)
            elif isinstance(part, ast.FormattedValue) and COMMAND.search(said):
                called = part.value.func if isinstance(part.value, ast.Call) else part.value
                if getattr(called, "id", getattr(called, "attr", "")) not in ("quote", "command"):
                    yield f"{path.name}:{part.lineno}: {ast.unparse(part.value)}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_messages_can_be_copied_into_a_shell(path: Path) -> None:
    assert not list(_unquoted(path))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_error_messages_are_full_sentences(path: Path) -> None:
    assert not list(_faults(path))
