"""Find out which arrays of a file are the vectors, the labels and the paths."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.embeddings import HELD_OUT, SPELLINGS, Embeddings, Split, to_read
from retrieval.errors import DmlError
from retrieval.formats import Wanted, arrays
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
    """An entry for an array that cannot be read: it fails when it is asked for."""

    def fail() -> np.ndarray:
        if error:
            raise error
        return np.empty(0, object)  # whose dtype is then refused

    return Entry(shape, dtype, "?", fail)


def parts(key: str) -> tuple[str | None, str]:
    """`query_embeddings`, `embeddings.query` and `query/embeddings` -> (query, embeddings)."""
    tokens = [token for token in re.split(r"[/._\-\s]+", key.lower()) if token]
    split = next((SPELLINGS[token] for token in tokens if token in SPELLINGS), None)
    return split, "_".join(token for token in tokens if token not in SPELLINGS)


def cut(lines: list[str]) -> list[str]:
    """The first lines, and how many more there are."""
    left = len(lines) - LISTED
    return [*lines[:LISTED], f"and {left} more"] if left > 0 else lines


def describe(entries: dict[str, Entry]) -> str:
    lines = [f"{name or '(unnamed)'}  {e.shape} {e.dtype}" for name, e in entries.items()]
    return "\n  ".join(["It holds:", *cut(lines)]) if lines else "It holds no arrays."


def _unclear(entries: dict[str, Entry], source: Path, what: str, fix: str) -> DmlError:
    """The error about arrays of which none, or more than one, can be taken."""
    return DmlError(f"{source} {what}.", describe(entries), fix)


def choose(
    entries: dict[str, Entry], key: str | None, source: Path, with_labels: bool = True
) -> dict[str, Choice]:
    """The arrays of each split. Whatever can be read in two ways is an error, not a guess."""
    if key:
        return _choose_by_key(entries, key, source, with_labels)
    groups: dict[str | None, dict[str, Entry]] = {}
    for name, e in entries.items():
        groups.setdefault(parts(name)[0], {})[name] = e
    named = [s for s in groups if s and any(e.vectors_like for e in groups[s].values())]
    rest = groups.get(None, {})
    chosen: list[str | None] = list(named)
    if not set(HELD_OUT) & set(named) and any(e.vectors_like for e in rest.values()):
        chosen = [None, *named]
    if not chosen:
        fix = "Save the embeddings as one array: a row for each item, a column for each dimension."
        raise _unclear(entries, source, "has no 2-D array of numbers", fix)
    result = {}
    for split in chosen:
        vectors = _vectors(groups[split], source)
        result[split or "test"] = _complete(groups[split], vectors, None, source, with_labels)
    return result


def _choose_by_key(
    entries: dict[str, Entry], key: str, source: Path, with_labels: bool
) -> dict[str, Choice]:
    """`vectors`, `vectors,labels`, `,labels`, or a group or split that holds them."""
    wanted, _, label = key.partition(",")
    if label:
        _existing(entries, label, source)
    if wanted in entries:
        return {"test": _complete(entries, wanted, label or None, source, with_labels)}
    inside = {n: e for n, e in entries.items() if n.startswith(tuple(wanted + c for c in "/._"))}
    if wanted and not inside:
        _existing(entries, wanted, source)
    found = choose(inside or entries, None, source, with_labels and not label)
    if len(found) == 1:
        (choice,) = found.values()
        return {"test": Choice(choice.vectors, label or choice.labels, choice.paths)}
    if label:
        fix = f"Choose one: {source}::KEY,{label}"
        raise _unclear(entries, source, "holds several sets of vectors", fix)
    return found


def _existing(entries: dict[str, Entry], key: str, source: Path) -> str:
    if key in entries:
        return key
    from retrieval.registry import nearest

    near = nearest(key, entries)
    hint = f"Did you mean {near}?" if near else f"Choose one of these: {source}::KEY"
    raise _unclear(entries, source, f"has no array called {key}", hint)


def _vectors(group: dict[str, Entry], source: Path) -> str:
    fits = [name for name, e in group.items() if e.vectors_like]
    # (N, 1) integers called `labels` are labels, not vectors of one dimension.
    fits = [n for n in fits if not (group[n].shape[1] == 1 and parts(n)[1] in LABEL_NAMES)] or fits
    known = [name for name in fits if parts(name)[1] in VECTOR_NAMES]
    pool = known or [name for name in fits if group[name].kind == "f"] or fits
    for narrowed in (pool, [] if known else _labelled(group, pool)):
        if len(narrowed) == 1:
            return narrowed[0]
    fix = f"Choose one: dmltool eval '{source}::{pool[0]}'"
    raise _unclear(group, source, "holds several arrays that could be the embeddings", fix)


def _labelled(group: dict[str, Entry], names: list[str]) -> list[str]:
    lengths = {e.shape[0] for e in group.values() if e.label_like}
    return [name for name in names if group[name].shape[0] in lengths]


def _complete(
    group: dict[str, Entry], vectors: str, label: str | None, source: Path, with_labels: bool
) -> Choice:
    """Labels and paths of the same length beside the vectors."""
    split, count = parts(vectors)[0], group[vectors].shape[0]
    flat = [
        name
        for name, e in group.items()
        if name != vectors and e.shape and e.shape[0] == count and parts(name)[0] in (split, None)
    ]
    paths = [n for n in flat if parts(n)[1] in PATH_NAMES and group[n].kind in "S?" and n != label]
    path = paths[0] if len(paths) == 1 else None
    if label or not with_labels:
        return Choice(vectors, label, path)
    known = [n for n in flat if parts(n)[1] in LABEL_NAMES and len(group[n].shape) <= 2]
    known = [n for n in known if group[n].label_like or group[n].kind == "f"]
    others = [n for n in flat if group[n].label_like and n not in paths]
    for fits in (known, others):
        same = [n for n in fits if parts(n)[0] == split] or fits
        if len(same) == 1:
            return Choice(vectors, same[0], path)
        if same:
            what = f"holds several arrays that could be the labels of {vectors}"
            fix = f"Choose one: dmltool eval '{source}::{vectors},{same[0]}'"
            raise _unclear(group, source, what, fix)
    for name in flat:
        if group[name].dtype == "object" and len(group[name].shape) == 1 and name not in paths:
            group[name].read()  # raises: it may be the labels, and says how to save them
    unfit = [n for n in group if parts(n)[1] in LABEL_NAMES and parts(n)[0] in (split, None)]
    if unfit and unfit != [vectors]:
        raise DmlError(
            f"{source}::{unfit[0]} cannot be the labels of {vectors}.",
            f"Labels are {count:,} integers or strings, one for each vector. {describe(group)}",
            "Give the labels in another file: --labels FILE",
        )
    return Choice(vectors, None, path)


def choose_labels(entries: dict[str, Entry], key: str | None, source: Path) -> str:
    """The one array of a labels file."""
    if key:
        return _existing(entries, key, source)
    fits = [n for n, e in entries.items() if e.label_like or (e.kind == "f" and len(e.shape) == 1)]
    known = [name for name in fits if parts(name)[1] in LABEL_NAMES]
    for narrowed in (fits, known, [name for name in fits if entries[name].label_like]):
        if len(narrowed) == 1:
            return narrowed[0]
    if len(entries) == 1:
        return next(iter(entries))
    if not fits:
        fix = "Give a file that holds the labels."
        raise _unclear(entries, source, "holds no 1-D array of labels", fix)
    fix = f"Choose one: --labels '{source}::{(known or fits)[0]}'"
    raise _unclear(entries, source, "holds several arrays that could be labels", fix)


def read(
    entries: dict[str, Entry], key: str | None, source: Path, wanted: Wanted, format: str
) -> Any:
    """Choose the arrays of each split and read them, or the one array of labels."""
    if wanted == "labels":
        name = choose_labels(entries, key, source)
        return label_arrays.labels(entries[name].read(), _where(source, name))
    return read_chosen(entries, choose(entries, key, source, wanted == "all"), source, format)


def _where(source: Path, name: str) -> str:
    return f"{source}::{name}" if name else str(source)


def read_chosen(
    entries: dict[str, Entry],
    chosen: dict[str, Choice],
    source: Path,
    format: str,
    attrs: dict[str, object] | None = None,
) -> Embeddings:
    splits = {}
    for split in to_read(chosen):
        choice = chosen[split]
        where = _where(source, choice.vectors)
        vectors = arrays.vectors(entries[choice.vectors].read(), where)
        beside: dict[str, np.ndarray] = {}
        for role, convert in (("labels", label_arrays.labels), ("paths", label_arrays.paths)):
            if (name := getattr(choice, role)) is None:
                continue
            beside[role] = convert(entries[name].read(), where := _where(source, name))
            if len(beside[role]) != len(vectors):
                raise DmlError(
                    f"{where} has {len(beside[role]):,} {role} for {len(vectors):,} vectors.",
                    describe(entries),
                    "Give one for each vector; labels may be in another file: --labels FILE",
                )
        taken = {role: name for role, name in vars(choice).items() if name}
        splits[split] = Split(vectors, **beside, taken=taken)
    return Embeddings(source, format, splits, None, attrs or {})
