"""Choose the queries that a report shows, and the pairs of its histograms."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from retrieval.distances import DISTANCES
from retrieval.metrics import occurrences
from retrieval.neighbours import pair_scores
from retrieval.problem import Problem
from retrieval.reporting.view import Histogram

MOST, TAB, RANDOM = 2000, 150, 300  # queries in all, in a tab of worst or best, and at random
PAIRS, BINS = 200_000, 60


@dataclass(frozen=True)
class Sample:
    queries: np.ndarray  # (n,) int64, each once
    tabs: dict[str, list[int]]  # indices into `queries`


def choose(ranks: np.ndarray, codes: np.ndarray, margin: np.ndarray, seed: int) -> Sample:
    """The worst and the best queries, some at random, and as many classes as there is room for."""
    rng = np.random.default_rng(seed)
    Q = len(ranks)
    shuffled = rng.permutation(Q)
    missed, found = np.flatnonzero(ranks > 1), np.flatnonzero(ranks == 1)
    tabs = {
        "random": shuffled[:RANDOM],
        "worst": missed[np.lexsort((margin[missed], -ranks[missed]))][:TAB],
        "best": found[np.argsort(-margin[found], kind="stable")][:TAB],
    }
    # Every class has its first turn before any has its second.
    by_turns = shuffled[np.argsort(occurrences(codes[shuffled]), kind="stable")]
    wanted = np.concatenate([*tabs.values(), by_turns])
    queries = list(dict.fromkeys(wanted.tolist()))[:MOST]
    index = {query: n for n, query in enumerate(queries)}
    shown = {name: [index[query] for query in tab.tolist()] for name, tab in tabs.items()}
    return Sample(np.array(queries), shown)


def histograms(problem: Problem, seed: int) -> dict[str, Histogram]:
    """Of positive and negative pairs, by each distance: shares of the pairs, and their overlap."""
    rng = np.random.default_rng(seed)
    pairs = _pairs(problem, rng)
    return {d: _histogram(*(pair_scores(problem, *two, d) for two in pairs)) for d in DISTANCES}


def _pairs(problem: Problem, rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    """Queries and items of positive pairs, then of negative ones: all, or PAIRS at random."""
    order = np.argsort(problem.gallery_codes, kind="stable")  # classes side by side
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    sizes = np.bincount(problem.gallery_codes, minlength=len(problem.names))
    starts = np.cumsum(sizes) - sizes
    codes, selfs = problem.query_codes, problem.self_ids
    own = np.where(selfs >= 0, position[selfs], -1)  # the index of the query itself in `order`
    queries, nth = _drawn(problem.positive_counts, rng)
    item = starts[codes[queries]] + nth
    item += (own[queries] >= 0) & (item >= own[queries])
    found = [(queries, order[item])]
    queries, nth = _drawn(len(order) - sizes[codes], rng)
    item = nth + np.where(nth >= starts[codes[queries]], sizes[codes[queries]], 0)
    return [*found, (queries, order[item])]


def _drawn(counts: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Owner of each pair, and its number among the owner's: all pairs, or PAIRS at random."""
    ends = np.cumsum(counts)
    total = int(ends[-1])
    number = np.arange(total) if total <= PAIRS else np.sort(rng.integers(0, total, PAIRS))
    owner = np.searchsorted(ends, number, side="right")
    return owner, number - (ends[owner] - counts[owner])


def _histogram(positive: np.ndarray, negative: np.ndarray) -> Histogram:
    both = np.concatenate([positive, negative])
    low, high = (float(both.min()), float(both.max())) if len(both) else (0.0, 1.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = max(0.01, 0.01 * abs(low))
        low, high = low - margin, high + margin
    edges = np.linspace(low, high, BINS + 1)
    shares = [
        np.histogram(values, edges)[0] / max(1, len(values)) for values in (positive, negative)
    ]
    known = len(positive) and len(negative)
    return {
        "edges": [float(f"{x:.5g}") for x in edges],
        "positive": shares[0].round(6).tolist(),
        "negative": shares[1].round(6).tolist(),
        "overlap": float(np.minimum(*shares).sum()) if known else None,
    }
