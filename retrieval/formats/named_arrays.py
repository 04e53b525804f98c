"""Find out which arrays of a file are the vectors, the labels and the paths."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from retrieval.embeddings import HELD_OUT, SPELLINGS, Embeddings, Split, Wanted, to_read
from retrieval.errors import DmlError, listed
from retrieval.formats import arrays
from retrieval.formats import labels as label_arrays


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


VECTOR_NAMES = _words("""
    embeddings embedding embs emb features feature feats feat vectors vector vecs descriptors
    x data
""")
LABEL_NAMES = _words("""
    labels label targets target y class classes class_id class_ids class_label class_name label_id
    label_ids category category_id identity identities pid pids person_id item_id product_id
    ground_truth gt
""")
PATH_NAMES = _words("""
    paths path filepath filepaths file_path filename filenames file_name file_names file files
    image_path image_paths img_path img_paths image images image_name url uri
""")
LISTED = 20


@dataclass(frozen=True)
class Entry:
    """An array that has been described but not yet read."""

    shape: tuple[int, ...]
    dtype: str  # as shown to the user
    kind: str  # NumPy's letter: f, i, u, b; S for text; ? for anything else
    read: Callable[[], np.ndarray]
    error: DmlError | None = None
    """Why it cannot be read, if that is known."""

    @property
    def vectors_like(self) -> bool:
        return len(self.shape) == 2 and self.kind in "fiu"

    @property
    def label_like(self) -> bool:
        flat = len(self.shape) == 1 or (len(self.shape) == 2 and self.shape[1] == 1)
        return flat and self.kind in "iubS"


@dataclass(frozen=True)
class Choice:
    vectors: str
    labels: str | None = None
    paths: str | None = None


def described(shape: tuple[int, ...], dtype: np.dtype, read: Callable[[], np.ndarray]) -> Entry:
    """An entry of a dtype that NumPy has."""
    if dtype == arrays.BFLOAT16:
        return Entry(shape, "bfloat16", "f", read)
    kind = dtype.kind if dtype.kind in "fiub" else "S" if dtype.kind in "SUT" else "?"
    return Entry(shape, dtype.name, kind, read)


def entry(array: np.ndarray) -> Entry:
    """An entry for an array that is at hand."""
    return described(array.shape, array.dtype, lambda: array)


def refused(shape: tuple[int, ...], dtype: str, error: DmlError | None = None) -> Entry:
    """An entry for an array that cannot be read: reading it raises the error."""

    def fail() -> np.ndarray:
        if error:
            raise error
        return np.empty(0, object)  # whose dtype is then refused

    return Entry(shape, dtype, "?", fail, error)


def parts(key: str) -> tuple[str | None, str]:
    """`query_embeddings`, `embeddings.query` and `query/embeddings` -> (query, embeddings)."""
    tokens = [token for token in re.split(r"[/._\-\s]+", key.lower()) if token]
    split = next((SPELLINGS[token] for token in tokens if token in SPELLINGS), None)
    return split, "_".join(token for token in tokens if token not in SPELLINGS)


@dataclass(frozen=True)
class Catalogue:
    """The arrays of a file, or of one split in it. What can be read in two ways is an error."""

    entries: dict[str, Entry]
    source: Path

    def describe(self) -> str:
        lines = [f"{name or '(unnamed)'}  {e.shape} {e.dtype}" for name, e in self.entries.items()]
        return "It holds:\n  " + listed(lines, LISTED, "\n  ") if lines else "It holds no arrays."

    def _fail(self, what: str, fix: str) -> NoReturn:
        raise DmlError(f"{self.source} {what}.", self.describe(), fix)

    def _named(self, name: str) -> str:
        return f"{self.source}::{name}" if name else str(self.source)

    def choose(self, key: str | None, with_labels: bool = True) -> dict[str, Choice]:
        """The arrays of each split."""
        if key:
            return self._choose_by_key(key, with_labels)
        groups: dict[str | None, dict[str, Entry]] = {}
        for name, e in self.entries.items():
            groups.setdefault(parts(name)[0], {})[name] = e
        with_vectors = [s for s in groups if any(e.vectors_like for e in groups[s].values())]
        chosen: list[str | None] = [split for split in with_vectors if split]
        if None in with_vectors and not set(HELD_OUT) & set(chosen):
            chosen = [None, *chosen]
        if not chosen:
            self._fail_without_vectors()
        result = {}
        for split in chosen:
            group = replace(self, entries=groups[split])
            result[split or "test"] = group._complete(group._vectors(), None, with_labels)
        return result

    def _fail_without_vectors(self) -> NoReturn:
        """Raise the error about an array that may be meant but cannot be read, or is missing."""
        for e in self.entries.values():
            if e.error and len(e.shape) != 1:  # () where not even the shape can be read
                raise e.error
        if any(len(e.shape) == 2 for e in self.entries.values()):
            dtypes = "float16, bfloat16, float32, float64 or integers"
            self._fail("has no 2-D array of a dtype that is read", f"Convert it to {dtypes}.")
        shape = "a row for each item, a column for each dimension"
        self._fail("has no 2-D array of numbers", f"Save the embeddings as one array: {shape}.")

    def _choose_by_key(self, key: str, with_labels: bool) -> dict[str, Choice]:
        """`vectors`, `vectors,labels`, `,labels`, or a group or split that holds them."""
        wanted, _, label = key.partition(",")
        if label:
            self._existing(label)
        if wanted in self.entries:
            return {"test": self._complete(wanted, label or None, with_labels)}
        starts = tuple(wanted + sign for sign in "/._")
        inside = {name: e for name, e in self.entries.items() if name.startswith(starts)}
        if wanted and not inside:
            self._existing(wanted)
        found = replace(self, entries=inside or self.entries).choose(
            None, with_labels and not label
        )
        if len(found) == 1:
            (choice,) = found.values()
            return {"test": replace(choice, labels=label or choice.labels)}
        if label:
            self._fail("holds several sets of vectors", f"Choose one: {self.source}::KEY,{label}")
        return found

    def _existing(self, key: str) -> str:
        if key in self.entries:
            return key
        from retrieval.registry import nearest

        near = nearest(key, self.entries)
        hint = f"Did you mean {near}?" if near else f"Choose one of these: {self.source}::KEY"
        self._fail(f"has no array called {key}", hint)

    def _vectors(self) -> str:
        fits = {name: e for name, e in self.entries.items() if e.vectors_like}
        # (N, 1) integers called `labels` are labels, not vectors of one dimension.
        wide = [n for n, e in fits.items() if e.shape[1] != 1 or parts(n)[1] not in LABEL_NAMES]
        names = wide or list(fits)
        known = [name for name in names if parts(name)[1] in VECTOR_NAMES]
        pool = known or [name for name in names if fits[name].kind == "f"] or names
        lengths = {e.shape[0] for e in self.entries.values() if e.label_like}
        labelled = [name for name in pool if fits[name].shape[0] in lengths and not known]
        for narrowed in (pool, labelled):
            if len(narrowed) == 1:
                return narrowed[0]
        self._fail(
            "holds several arrays that could be the embeddings",
            f"Choose one: {shlex.quote(f'{self.source}::{pool[0]}')}",
        )

    def _complete(self, vectors: str, label: str | None, with_labels: bool) -> Choice:
        """Labels and paths of the same length beside the vectors."""
        split, count = parts(vectors)[0], self.entries[vectors].shape[0]
        beside = {n: e for n, e in self.entries.items() if parts(n)[0] in (split, None)}
        flat = {
            name: e
            for name, e in beside.items()
            if name != vectors and e.shape and e.shape[0] == count
        }
        paths = [n for n, e in flat.items() if parts(n)[1] in PATH_NAMES and e.kind in "S?"]
        paths = [name for name in paths if name != label]
        path = paths[0] if len(paths) == 1 else None
        if label or not with_labels:
            return Choice(vectors, label, path)
        called = {n: e for n, e in flat.items() if parts(n)[1] in LABEL_NAMES and len(e.shape) <= 2}
        known = [name for name, e in called.items() if e.label_like or e.kind == "f"]
        others = [name for name, e in flat.items() if e.label_like and name not in paths]
        for fits in (known, others):
            same = [name for name in fits if parts(name)[0] == split] or fits
            if len(same) == 1:
                return Choice(vectors, same[0], path)
            if same:
                self._fail(
                    f"holds several arrays that could be the labels of {vectors}",
                    f"Choose one: {shlex.quote(f'{self.source}::{vectors},{same[0]}')}",
                )
        for name, e in flat.items():
            if e.dtype == "object" and len(e.shape) == 1 and name not in paths:
                e.read()  # raises: it may be the labels, and says how to save them
        unfit = [name for name in beside if parts(name)[1] in LABEL_NAMES]
        if unfit and unfit != [vectors]:
            raise DmlError(
                f"{self.source}::{unfit[0]} cannot be the labels of {vectors}.",
                f"Labels are {count:,} integers or strings, one for each vector. {self.describe()}",
                "Give the labels in another file: --labels FILE",
            )
        return Choice(vectors, None, path)

    def choose_labels(self, key: str | None) -> str:
        """The one array of a labels file."""
        if key:
            return self._existing(key)
        like = [name for name, e in self.entries.items() if e.label_like]
        fits = [
            n for n, e in self.entries.items() if n in like or (e.kind == "f" and len(e.shape) == 1)
        ]
        known = [name for name in fits if parts(name)[1] in LABEL_NAMES]
        for narrowed in (fits, known, like, list(self.entries)):
            if len(narrowed) == 1:
                return narrowed[0]
        if not fits:
            self._fail("holds no 1-D array of labels", "Give a file that holds the labels.")
        example = f"Choose one: --labels '{self.source}::{(known or fits)[0]}'"
        self._fail("holds several arrays that could be labels", example)

    def read(self, key: str | None, wanted: Wanted, format: str) -> Any:
        """Choose the arrays of each split and read them, or the one array of labels."""
        if wanted == "labels":
            name = self.choose_labels(key)
            return label_arrays.labels(self.entries[name].read(), self._named(name))
        return self.read_chosen(self.choose(key, wanted == "all"), format)

    def read_chosen(
        self, chosen: dict[str, Choice], format: str, attrs: dict[str, object] | None = None
    ) -> Embeddings:
        splits = {}
        for split in to_read(chosen):
            choice = chosen[split]
            where = self._named(choice.vectors)
            vectors = arrays.vectors(self.entries[choice.vectors].read(), where)
            beside: dict[str, np.ndarray] = {}
            for role, convert in (("labels", label_arrays.labels), ("paths", label_arrays.paths)):
                if (name := getattr(choice, role)) is None:
                    continue
                beside[role] = convert(self.entries[name].read(), where := self._named(name))
                if len(beside[role]) != len(vectors):
                    raise DmlError(
                        f"{where} has {len(beside[role]):,} {role} for {len(vectors):,} vectors.",
                        self.describe(),
                        "Give one for each vector; labels may be in another file: --labels FILE",
                    )
            taken = {role: name for role, name in vars(choice).items() if name}
            splits[split] = Split(vectors, **beside, taken=taken)
        return Embeddings(self.source, format, splits, None, attrs or {})
