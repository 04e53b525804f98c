"""Write the report of an embedding file as one HTML page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrieval.embeddings import Embeddings, provenance
from retrieval.files import PAGE, check_target, write_text
from retrieval.loading.load import loaded
from retrieval.reporting.gather import Beside, Options, gather
from retrieval.reporting.page import render
from retrieval.reporting.thumbs import Pictures
from retrieval.reporting.view import Run
from retrieval.resources import StageProgress


@dataclass(frozen=True)
class Report:
    """A page that was written, and what its reader should know."""

    path: Path
    warnings: list[str]


def report(
    data: Embeddings | str | Path,
    out: str | Path = "report.html",
    *,
    compare_with: Sequence[Embeddings | str | Path] = (),
    pictures: Pictures | None = None,
    run_view: Run | None = None,
    notes: Sequence[str] = (),
    force: bool = False,
    before_writing: Callable[[], object] = lambda: None,
    progress: StageProgress | None = None,
    **options: Any,
) -> Report:
    """Write a page with scores, retrieved rows, failures, distances and a map.

    Parameters
    ----------
    data : Embeddings, str or Path
        What to show: embeddings, or a file of them.
    out : str or Path
        The HTML file. It needs no other files and no network.
    compare_with : sequence of Embeddings, str or Path
        Other embeddings of the same items.
    pictures : function, optional
        Returns the image (H, W, 3) uint8 of a path. Without it, no images are shown.
    run_view : dict, optional
        Curves and settings of a training, from `trainer.reporting.run_view`.
    notes : sequence of str
        Sentences to show among the warnings.
    force : bool
        Overwrite a file that exists.
    before_writing : function
        Called before the page is written; what it raises prevents that.
    progress : function, optional
        Called with (stage, done, total).
    options
        Fields of `Options`: distance ("cos" or "l2"), nmi, map ("tsne", "pca" or "none"), seed,
        drop_nonfinite, device (that counts ranks, as in `Settings`).
    """
    data, *others = (loaded(each) for each in (data, *compare_with))
    target = check_target(out, PAGE, force, [Path(each.source) for each in (data, *others)])
    view = gather(
        data,
        provenance(data),
        others,
        Options(**options),
        Beside(pictures, run_view, notes),
        progress,
    )
    if progress:
        progress("page", 0, 1)
    page = render(view)
    before_writing()
    write_text(target, page, force)
    return Report(target, [*data.notes, *view["warnings"]])
