"""python -m benchmarks.ensembles FOLDER: score ensembles of 2 and 5 networks.

FOLDER is that of `dmltool train --seeds 15`, with an embeddings.h5 for each seed (`dmltool export
FOLDER/seed-N --no-onnx --backend torch`). The networks are three groups of five. A group gives one
ensemble of five and two of two, which are compared with its five networks. Results go to
benchmarks/studies.json.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.studies import load as load_studies
from benchmarks.studies import rounded, write
from retrieval import evaluate, load
from retrieval.bootstrap import paired_runs
from retrieval.problem import from_arrays
from retrieval.ranking.ranks import count_ranks

GROUPS, NETWORKS = 3, 5


def main() -> None:
    folder = Path(sys.argv[1])
    files = [folder / f"seed-{seed}" / "embeddings.h5" for seed in range(GROUPS * NETWORKS)]
    splits = [load(file).splits["test"] for file in files]
    labels = np.unique(splits[0].labels, return_inverse=True)[1]
    unit = [s.vectors / np.linalg.norm(s.vectors, axis=1, keepdims=True) for s in splits]
    rows = [scored(size, unit, labels) for size in (1, 2, 5)]
    for row in rows[1:]:
        add_difference(row, rows[0], np.bincount(labels))
    write(
        load_studies() | {"ensembles": [{k: v for k, v in r.items() if k != "hits"} for r in rows]}
    )


def scored(size: int, unit: list[np.ndarray], labels: np.ndarray) -> dict[str, Any]:
    """Means over the ensembles of this size of every group: Recall@1, NMI, hits by class (S, C)."""
    row: dict[str, Any] = {"networks": size, "recall": [], "nmi": [], "hits": []}
    for first in range(0, GROUPS * NETWORKS, NETWORKS):
        found = []
        for start in range(first, first + NETWORKS - size + 1, size):
            joined = np.hstack(unit[start : start + size])
            rank = count_ranks(from_arrays(joined, labels))["cos"].rank
            nmi = evaluate(joined, labels, distances="cos", map_at_r=False, nmi=True, threads=1)
            found.append((rank == 1, nmi["distances"]["cos"]["nmi"]["mean"]))
            print(size, start, found[-1][0].mean(), found[-1][1], flush=True)
        hits = np.mean([hit for hit, _ in found], axis=0)
        row["hits"].append(np.bincount(labels, hits))
        row["recall"].append(float(hits.mean()))
        row["nmi"].append(float(np.mean([nmi for _, nmi in found])))
    return row


def add_difference(row: dict[str, Any], single: dict[str, Any], sizes: np.ndarray) -> None:
    """Compare ensembles with single networks: Recall@1 over groups and classes, NMI over groups."""
    mean, span, p = paired_runs(np.array(row["hits"]) - np.array(single["hits"]), sizes)
    row["difference"] = rounded(mean, *span, p)
    gain = np.array(row["nmi"]) - np.array(single["nmi"])
    half = stats.t.ppf(0.975, GROUPS - 1) * gain.std(ddof=1) / GROUPS**0.5
    row["nmi_difference"] = rounded(gain.mean(), gain.mean() - half, gain.mean() + half)


if __name__ == "__main__":
    main()
