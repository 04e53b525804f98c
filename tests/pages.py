"""Blocks of code on the pages of the documentation, and the commands in them."""

import re
import shlex

from docs.generate import ROOT

README = ROOT / "README.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
SEPARATORS = {"&&", "||", ";", "|"}


def blocks(page, *languages):
    """(language, text) of the blocks of a page."""
    found = BLOCK.findall(page.read_text())
    return [(lang, text) for lang, text in found if not languages or lang in languages]


def commands(text):
    """(words, file that takes the output or None) of every command in lines of shell."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words, target, before = [], None, ""
        for word in [*lexer, ";"]:
            if word in SEPARATORS:
                if words:
                    yield words, target
                words, target = [], None
            elif before == ">":
                target = word
            elif word not in "<>":
                words.append(word)
            before = word
