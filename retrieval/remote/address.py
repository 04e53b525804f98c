"""Addresses of files that are not on a local disk: `s3://bucket/x.npy::key` in its parts."""

from __future__ import annotations

import glob
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from retrieval.errors import DmlError

# What reads each kind of address by fsspec, and how to give it credentials.
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub", "http": "aiohttp"}
PACKAGES |= {"https": PACKAGES["http"], "memory": "fsspec"}
# Path() makes s3:/x of s3://x. Three slashes would leave out the bucket.
KNOWN = re.compile(rf"({'|'.join(PACKAGES)}):/{{1,2}}(?=[^/])", re.IGNORECASE)
ANY = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
WEB = ("http", "https")


@dataclass(frozen=True)
class Address:
    """One file, a folder or a pattern that fsspec opens."""

    scheme: str
    url: str
    """As fsspec takes it, a query of the web included."""
    key: str | None
    """What follows after `::`."""

    @property
    def shown(self) -> str:
        """The address for messages and results, without query and password, which may be secret."""
        if self.scheme not in WEB:
            return self.url
        parts = urlsplit(self.url)
        return f"{self.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    @property
    def root(self) -> str:
        """The folder above the file, or above the first part that is a pattern."""
        parts = self.shown.rstrip("/").split("/")
        patterns = [n for n, part in enumerate(parts) if self.is_pattern and glob.has_magic(part)]
        return "/".join(parts[: patterns[0] if patterns else -1])

    @property
    def name(self) -> str:
        """The last part: the name of the file."""
        return self.shown.rstrip("/").rpartition("/")[2]

    @property
    def is_pattern(self) -> bool:
        # ? begins the query of a web address.
        text = self.shown.replace("?", "") if self.scheme in WEB else self.shown
        return glob.has_magic(text)


# A password may hold / and @, and ends before the @ that a host follows. On the web, where paths
# hold @ too, up to five digits after a colon are a port; [ begins a host. The name of a user goes
# too: it can be a token.
NO_PORT = r"(?!\d{1,5}(?:[/?#\s]|$))"
NAME, REST = r"""(?!\[)[^/@:\s'"]*:""", r"""[^\s'"]*?"""
USER = re.compile(
    rf"""://(?:(?<=http://){NAME}{NO_PORT}{REST}|(?<=https://){NAME}{NO_PORT}{REST}"""
    rf"""|(?<!http://)(?<!https://){NAME}{REST}|[^/@\s'"]*)"""
    r"""@(?=[^/@\s?#'":]+(?:[/?#:\s'"]|$))""",
    re.IGNORECASE,
)
# In s3://, gs:// and hf:// addresses, a question mark is part of a pattern. A query ends before the
# last ::, after which a key follows, unless that looks like more of a query.
STORES = "|".join(scheme for scheme in PACKAGES if scheme not in WEB)
QUERY = re.compile(
    rf"""(\b(?!(?:{STORES})://)[a-z][a-z0-9+.-]*://[^\s?'"]*)"""
    r"""\?(?:[^\s'"]*(?=::[^\s'"&=]*(?:[\s'"]|$))|[^\s'"]*)""",
    re.IGNORECASE,
)


def without_secrets(text: str) -> str:
    """A text whose addresses, of any kind, lose users, passwords and queries."""
    return QUERY.sub(r"\1", USER.sub("://", text))


def is_address(source: str | Path) -> bool:
    """Whether a name is an address, of any kind."""
    text = str(source)
    return bool(KNOWN.match(text) or ANY.match(text))


def parse(source: str | Path) -> Address:
    """Split an address into its parts; an unknown kind is an error."""
    text = str(source)
    found = KNOWN.match(text)
    if not found:
        kind = text.partition("://")[0]
        if kind.lower() in PACKAGES:
            place = "server" if kind.lower() in WEB else "bucket"
            raise DmlError(
                f"{without_secrets(text)} names no {place}.",
                "A variable of the shell may not be set.",
                f"Give the whole address: {kind}://{place.upper()}/x.npy",
            )
        raise DmlError(
            f"{without_secrets(text.partition('::')[0])} cannot be opened.",
            f"These kinds of addresses are known: {', '.join(f'{name}://' for name in PACKAGES)}.",
            "Give the path alone: /folder/x.npy"
            if kind.lower() == "file"
            else "Download it by another program, and give the file.",
        )
    scheme, rest = found[1].lower(), text[found.end() :]
    host, slash, path = rest.partition("/")
    named = path if slash or scheme in WEB else host  # a host of the web can be [::1]
    key = ""
    if "::" in named:
        rest, _, key = rest.rpartition("::")
    return Address(scheme, f"{scheme}://{rest}", key or None)
