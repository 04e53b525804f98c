"""A retrieval problem: queries, gallery, class codes, and which pairs are left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple
from zlib import crc32

import numpy as np

from retrieval.embeddings import Embeddings, scored_splits
from retrieval.errors import DmlError, listed
from retrieval.formats import arrays
from retrieval.formats import labels as label_arrays
from retrieval.formats.arrays import gathered
from retrieval.formats.labels import alike
from retrieval.resources import blocks, processors, run_all
from retrieval.results import LEAVE_ONE_OUT, QUERY_GALLERY
from retrieval.rows.identical import row_groups
from retrieval.rows.scan import Scan, scan


@dataclass(frozen=True)
class Problem:
    """Queries are searched in the gallery; under leave-one-out, each among all other items."""

    protocol: str
    queries: np.ndarray | None  # (Q, D); None: the queries are all gallery items
    query_codes: np.ndarray  # (Q,) int64, index into names
    query_rows: np.ndarray  # (Q,) row of each query in its file
    gallery: np.ndarray  # (G, D)
    gallery_codes: np.ndarray  # (G,) int64
    gallery_rows: np.ndarray  # (G,) row of each gallery item in its file
    names: np.ndarray  # (C,) the labels as given, sorted
    self_ids: np.ndarray  # (Q,) the gallery row that is the query itself, -1: none
    nonfinite: int = 0  # rows left out because they hold NaN or Inf
    dropped: int = 0  # all rows left out: also those of items that hold NaN or Inf in another file
    split: str = ""  # of the file that the queries are from
    drawing_order: np.ndarray | None = None  # (Q,) queries in the order for `sample`; None: as is
    query_scan: Scan | None = None  # where there are `queries`, of a dtype that is scanned
    gallery_scan: Scan | None = None

    @property
    def query_vectors(self) -> np.ndarray:
        """(Q, D), also where the queries are the gallery."""
        return self.gallery if self.queries is None else self.queries

    @cached_property
    def positive_counts(self) -> np.ndarray:
        """(Q,) int64, how many positives of each query the gallery holds."""
        sizes = np.bincount(self.gallery_codes, minlength=len(self.names))
        own = (self.self_ids >= 0) & (self.gallery_codes[self.self_ids] == self.query_codes)
        return sizes[self.query_codes] - own

    @cached_property
    def gallery_groups(self) -> np.ndarray:
        """(G,) int64, the first gallery row that is identical to each row."""
        return row_groups(self.gallery, scans=[self.gallery_scan])

    def checksum(self) -> int:
        """A number that differs for other files; it covers all classes and all vectors."""
        total = crc32(repr((self.protocol, self.query_vectors.shape, self.gallery.shape)).encode())
        for codes in (self.query_codes, self.gallery_codes):
            total = crc32(codes.tobytes(), total)
        for rows in (self.gallery,) if self.queries is None else (self.queries, self.gallery):
            total = crc32(_checksums(rows).tobytes(), total)
        return total

    def select(self, rows: np.ndarray) -> Problem:
        """The same gallery with some of the queries."""
        scanned = self.gallery_scan if self.queries is None else self.query_scan
        selected = replace(
            self,
            query_scan=scanned and scanned.take(rows),
            queries=self.query_vectors[rows],
            query_codes=self.query_codes[rows],
            query_rows=self.query_rows[rows],
            self_ids=self.self_ids[rows],
            drawing_order=None,
        )
        if "gallery_groups" in vars(self):  # computed once for a gallery
            vars(selected)["gallery_groups"] = self.gallery_groups
        return selected


def from_embeddings(
    data: Embeddings, *, drop_nonfinite: bool = False, beside: Sequence[Embeddings] = ()
) -> Problem:
    """Make a problem of a file: queries and gallery if it holds both, else its test split.

    beside: embeddings of the same items in the same order; with `drop_nonfinite`, items that have
    NaN or Inf in any of them are left out.
    """
    names = scored_splits(data.splits)
    if not names and len(data.splits) == 1:
        names = list(data.splits)
    if not names:
        raise DmlError(
            f"{data.source}: cannot tell what to evaluate.",
            f"It holds {', '.join(data.splits)}; eval needs `test`, or `query` and `gallery`.",
            "Pick one, for example `dmltool eval FILE::KEY`; `dmltool inspect FILE` lists them.",
        )
    arrays = [each for name in names for each in (data.splits[name].vectors, _labels(data, name))]
    problem = from_arrays(
        *arrays,
        drop_nonfinite=drop_nonfinite,
        source=str(data.source),
        beside=[[other.splits[name].vectors for other in beside] for name in names],
    )
    return replace(problem, split=names[0])


def _labels(data: Embeddings, split: str) -> np.ndarray:
    labels = data.splits[split].labels
    if labels is None:
        option = "--gallery-labels" if split == "gallery" else "--labels"
        raise DmlError(
            f"{data.source}: the {split} items have no labels.",
            "Scores compare labels, so every item needs one.",
            f"Give them in a file of their own, one per row: {option} labels.npy (or .txt, .csv).",
        )
    return labels


def from_arrays(
    vectors: np.ndarray,
    labels: np.ndarray,
    gallery: np.ndarray | None = None,
    gallery_labels: np.ndarray | None = None,
    *,
    drop_nonfinite: bool = False,
    source: str = "",
    beside: Sequence[Sequence[np.ndarray]] = ((), ()),
) -> Problem:
    """Make a problem of arrays: check shapes, code labels, drop rows with NaN or Inf if allowed.

    source: the file that the arrays are from, for messages; beside: for the vectors and for the
    gallery, arrays of the same items whose rows with NaN or Inf are dropped as well.
    """
    if (gallery is None) != (gallery_labels is None):
        raise DmlError(
            "A gallery and its labels come together.",
            "Only gallery_labels is given." if gallery is None else "Only gallery is given.",
            "Pass both, or neither to search each item among all others.",
        )
    drop = beside if drop_nonfinite else (None, None)
    own = _side(vectors, labels, "embeddings", drop[0], source)
    if gallery is None or gallery_labels is None:
        names, codes = np.unique(own.labels, return_inverse=True)
        return Problem(
            protocol=LEAVE_ONE_OUT,
            queries=None,
            query_codes=codes,
            query_rows=own.rows,
            gallery=own.vectors,
            gallery_codes=codes,
            gallery_rows=own.rows,
            names=names,
            self_ids=np.arange(len(codes)),
            nonfinite=own.nonfinite,
            dropped=own.dropped,
            gallery_scan=own.scan,
        )
    other = _side(gallery, gallery_labels, "gallery embeddings", drop[1], source)
    Q, D = own.vectors.shape
    if other.vectors.shape[1] != D:
        raise DmlError(
            f"Queries have {D} dimensions, the gallery {other.vectors.shape[1]}.",
            "Vectors of different spaces cannot be compared.",
            "Embed both with the same model.",
        )
    both = np.concatenate(alike(own.labels, other.labels))
    names, codes = np.unique(both, return_inverse=True)
    return Problem(
        protocol=QUERY_GALLERY,
        queries=own.vectors,
        query_codes=codes[:Q],
        query_rows=own.rows,
        gallery=other.vectors,
        gallery_codes=codes[Q:],
        gallery_rows=other.rows,
        names=names,
        self_ids=np.full(Q, -1),
        nonfinite=own.nonfinite + other.nonfinite,
        dropped=own.dropped + other.dropped,
        query_scan=own.scan,
        gallery_scan=other.scan,
    )


def sample(problem: Problem, queries: int, seed: int) -> Problem:
    """The same gallery with `queries` of its queries, drawn at random."""
    Q = len(problem.query_codes)
    if queries >= Q:
        return problem
    drawn = np.random.default_rng(seed).choice(Q, queries, replace=False)
    if problem.drawing_order is not None:
        drawn = problem.drawing_order[drawn]
    return problem.select(np.sort(drawn))


def require_common_label(problem: Problem) -> None:
    """Refuse a problem in which no query has a label of the gallery: there is nothing to find."""
    if np.isin(problem.query_codes, problem.gallery_codes).any():
        return
    labels, gallery_labels = (
        problem.names[codes] for codes in (problem.query_codes, problem.gallery_codes)
    )
    raise DmlError(
        "Queries and gallery have no label in common.",
        f"Queries have labels such as {_some(labels)}, the gallery {_some(gallery_labels)}: "
        "there is nothing to find.",
        "Check that both are labelled by the same list of classes.",
    )


def _checked(vectors: np.ndarray, labels: np.ndarray, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Vectors of a dtype that ranking takes, and labels as they would be read from a file."""
    vectors = arrays.vectors(_unmasked(vectors, what), f"The array of {what}")
    if isinstance(labels, list | tuple):  # NumPy alone would merge 1 and "1"
        labels = np.array(labels, object)
    labels = _unmasked(labels, f"labels of the {what}")
    if labels.shape != (len(vectors),):
        raise DmlError(
            f"{len(vectors)} {what} but labels of shape {labels.shape}.",
            "Every item needs one label.",
            "Check that both come from the same list of items, in the same order.",
        )
    where = f"The array of labels of the {what}"
    if labels.dtype.kind != "O":
        return vectors, label_arrays.labels(labels, where)
    values = [value.item() if isinstance(value, np.generic) else value for value in labels]
    return vectors, label_arrays.from_values(values, where)


def _unmasked(given: np.ndarray, what: str) -> np.ndarray:
    """A plain array, also of a matrix or of a masked array of which nothing is masked."""
    if np.ma.is_masked(given):
        raise DmlError(
            f"{np.ma.count_masked(given):,} values of the {what} are masked.",
            "A masked value has no distance and no label.",
            "Leave out these rows, or fill in what is meant: `array.filled(0)`.",
        )
    return np.asarray(given)


def _some(labels: np.ndarray) -> str:
    return ", ".join(repr(label) for label in np.unique(labels)[:3].tolist())


def finite_rows(vectors: np.ndarray) -> np.ndarray:
    """(N,) whether all numbers of a row are finite."""
    finite = np.empty(len(vectors), bool)
    for part in blocks(vectors):
        finite[part] = np.isfinite(vectors[part]).all(axis=1)
    return finite


class _Side(NamedTuple):
    """The finite rows of the queries or of the gallery."""

    vectors: np.ndarray
    labels: np.ndarray
    rows: np.ndarray  # of the array that was given
    scan: Scan | None
    nonfinite: int = 0
    dropped: int = 0


def _checksums(rows: np.ndarray) -> np.ndarray:
    """A checksum of each block of rows."""
    parts = list(blocks(rows))
    sums = np.zeros(len(parts), np.uint32)

    def add(n: int) -> None:
        sums[n] = crc32(rows[parts[n]].tobytes())

    run_all(add, range(len(parts)), processors())
    return sums


def _side(
    vectors: np.ndarray,
    labels: np.ndarray,
    what: str,
    drop: Sequence[np.ndarray] | None,
    source: str,
) -> _Side:
    """drop: None if all rows have to be finite, else arrays whose rows have to be finite too."""
    vectors, labels = _checked(vectors, labels, what)
    scanned = scan(vectors)
    good = finite_rows(vectors) if scanned is None else np.isfinite(scanned.square)
    nonfinite = int(np.count_nonzero(~good))
    for other in drop or ():
        good &= finite_rows(other)
    rows, bad = np.flatnonzero(good), np.flatnonzero(~good)
    if not len(bad):
        return _Side(vectors, labels, rows, scanned)
    where = f"{source}: " if source else ""
    if drop is None:
        hold, numbered = ("holds", "row") if len(bad) == 1 else ("hold", "rows")
        raise DmlError(
            f"{where}{len(bad):,} of {len(good):,} {what} {hold} NaN or Inf "
            f"({numbered} {listed(bad)}, counted from 0).",
            "Their distances are undefined, so scores would be meaningless.",
            "Embed these items again, or leave them out: drop_nonfinite=True",
        )
    if not len(rows):
        raise DmlError(
            f"{where}All {len(good)} {what} hold NaN or Inf.",
            "Nothing is left to evaluate.",
            "Check the model that computed them.",
        )
    scanned = scanned and scanned.take(rows)
    return _Side(gathered(vectors, rows), labels[rows], rows, scanned, nonfinite, len(bad))
