"""Run the demo: real commands on letters drawn from fonts."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from exporter.results import EXPORT
from retrieval.distances import DISTANCES
from retrieval.errors import DmlError
from retrieval.files import write_text
from retrieval.metrics import title_of
from retrieval.number_format import percent
from retrieval.run_files import BEST, EMBEDDINGS, LAST, MODEL, RESULT
from retrieval.tables import number_table
from trainer.results import BASELINES

LOSSES = ("ce", "spce", "group")
BATCH = 256
ONE_SEED = "Each network was trained once, with seed 0; NMI is a mean over 3 seeds of k-means."
MARK = "demo.json"  # marks a folder of the demo, and records its settings


@dataclass(frozen=True)
class Step:
    """A step of the demo; finished when `made` is complete and not older than `needs`."""

    args: tuple[str, ...]
    made: Path
    needs: tuple[Path, ...] = ()
    also: tuple[Path, ...] = ()
    """Other files that it makes for later steps."""

    @property
    def shown(self) -> bool:
        """Whether it is a command that the help lists."""
        return self.args[0] != "baselines"

    def finished(self) -> bool:
        if not all(path.exists() for path in (self.made, *self.also)):
            return False
        return _whole(self.made) and _newer(self.made, self.needs)

    def clear(self) -> None:
        """Remove a damaged result, and a training that cannot be resumed.

        A training cannot be resumed if it was killed before its first checkpoint, or if its result
        is there but its network is not.
        """
        if self.made.exists() and not _whole(self.made):
            self.made.unlink()
        run = self.made.parent
        lost = self.made.exists() and not all(path.exists() for path in self.also)
        goes_on = (run / LAST).exists() and not lost
        if self.args[0] == "train" and run.exists() and not goes_on:
            from trainer.run.folder import locked

            with locked(run):
                shutil.rmtree(run)

    def command(self) -> tuple[str, ...]:
        """The arguments to run it with now: resumed, or with permission to overwrite old files."""
        if self.args[0] == "train":
            run = self.made.parent
            return ("train", "--resume", str(run)) if (run / LAST).exists() else self.args
        if not self.shown:
            return self.args
        if self.made.exists():
            return (*self.args, "--force")
        begun = {
            "export": self.made.parent / MODEL,
            "embed": self.made.with_name(f"{self.made.name}.partial"),
        }.get(self.args[0])
        if begun is None or not begun.exists():
            return self.args
        return (*self.args, "--resume" if _newer(begun, self.needs) else "--force")


def _newer(path: Path, than: tuple[Path, ...]) -> bool:
    return all(path.stat().st_mtime >= other.stat().st_mtime for other in than)


def _whole(path: Path) -> bool:
    try:
        return path.suffix != ".json" or isinstance(_read(path), dict)
    except ValueError:
        return False


def open_folder(folder: Path, epochs: int | None) -> None:
    """Create the folder of the demo, or check that an earlier demo of these settings made it."""
    mark = folder / MARK
    if not folder.exists() or not any(folder.iterdir()):
        folder.mkdir(parents=True, exist_ok=True)
        write_text(mark, json.dumps({"epochs": epochs}) + "\n")
        return
    try:
        begun = _read(mark)["epochs"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DmlError(
            f"{folder} holds files that are not the demo's.",
            "The demo would mistake them for its own, or overwrite them.",
            "Choose a new folder: --out NAME",
        ) from error
    if begun != epochs:
        raise DmlError(
            f"The demo in {folder} was begun {_told(begun)}, not {_told(epochs)}.",
            "Finished steps are kept, so their numbers would be those of the other setting.",
            "Repeat the first setting, or choose a new folder: --out NAME",
        )


def _told(epochs: int | None) -> str:
    return "without --epochs" if epochs is None else f"with --epochs {epochs}"


def steps(folder: Path, losses: tuple[str, ...], epochs: int | None) -> list[Step]:
    """All steps in order, the baselines first."""
    first, *others = (folder / f"{name}.h5" for name in BASELINES)
    args: tuple[str, ...] = ("baselines", str(folder))
    found = [Step(args, first, also=tuple(others))]
    found += [_evaluate(folder / f"{name}.h5", folder / f"{name}.json") for name in BASELINES]
    for loss in losses:
        run, best = folder / loss, folder / loss / BEST
        short = () if epochs is None else ("--epochs", str(epochs))
        train = ("train", "--loss", loss, *short, "--out", str(run))
        model, rows, shop = run / MODEL, run / EMBEDDINGS, run / "shop.h5"
        found += [
            Step(train, run / RESULT, also=(best,)),
            Step(("export", str(run), "--onnx"), run / EXPORT, (best,), (model, rows)),
            Step(("embed", str(model), "glyphs:query", "--out", str(shop)), shop, (model,)),
            _evaluate(rows, run / "metrics.json"),
            _evaluate(shop, run / "shop.json", "--recall-at", "1,10,20", "--no-nmi"),
        ]
    first, *others = (folder / loss / EMBEDDINGS for loss in losses)
    for loss, other in zip(losses[1:], others, strict=True):
        result = folder / f"{losses[0]}-{loss}.json"
        args = ("compare", str(first), str(other), "--distance", "cos", "--out", str(result))
        found.append(Step(args, result, (first, other)))
    page, beside = folder / "report.html", others or [folder / "untrained.h5"]
    compared = [word for other in beside for word in ("--compare", str(other))]
    args = ("report", str(first), *compared, "--run", str(first.parent), "--out", str(page))
    return [*found, Step(args, page, (first, *beside))]


def _evaluate(source: Path, result: Path, *options: str) -> Step:
    return Step(("eval", str(source), *options, "--out", str(result)), result, (source,))


def write_baselines(folder: Path) -> None:
    """Write pixels.h5 and untrained.h5: embeddings of the test images without training."""
    import numpy as np
    import torch

    from retrieval.embeddings import Split
    from retrieval.formats.hdf5.writing import write
    from trainer.data.datasets import load
    from trainer.resolve import resolve
    from trainer.run.device import to_input
    from trainer.run.scoring import embed
    from trainer.run.setup import build_embedder

    data = load("glyphs")
    rows = data.rows("test")
    images = np.stack([data.image(row) for row in rows.tolist()])
    torch.manual_seed(0)
    network = build_embedder(resolve("glyphs-ce", None, {})[0], pretrained=True)
    batches = torch.from_numpy(images).permute(0, 3, 1, 2).split(BATCH)
    vectors = {
        "pixels": images[..., 0].reshape(len(rows), -1).astype(np.float32),  # letters are grey
        "untrained": embed(network, batches, lambda b: to_input(b, torch.device("cpu"))).numpy(),
    }
    names = np.array(data.label_names)
    labels, files = data.labels[rows], np.array([data.paths[row] for row in rows.tolist()])
    for name, title in BASELINES.items():
        attrs = {"model": title, "dataset": data.name}
        split = {"test": Split(vectors[name], labels, files)}
        write(folder / f"{name}.h5", split, names, attrs, force=True)


def summary(folder: Path, losses: tuple[str, ...]) -> Table:
    """One row for each baseline and each loss."""
    recalls = [f"{title_of('recall@1')} {d}" for d in DISTANCES]
    others = ["NMI cos", "query → gallery", "ONNX: same nearest", "images/s"]
    table = number_table("", *recalls, *others)
    table.caption, table.caption_justify = ONE_SEED, "left"
    for name, title in BASELINES.items():
        table.add_row(title, *_scores(_read(folder / f"{name}.json")), "", "", "")
    for loss in losses:
        run = folder / loss
        exported = _read(run / EXPORT)["model"]
        shop = _read(run / "shop.json")["distances"]["cos"]["recall"]["1"]
        speeds = [row["images_per_second"] for row in exported["precisions"]]
        table.add_row(
            loss,
            *_scores(_read(run / "metrics.json")),
            percent(shop),
            f"{percent(exported['parity']['agreement'])} %",
            f"{speeds[0]:,.0f}" if speeds else "",
        )
    return table


def _scores(result: dict[str, Any]) -> tuple[str, ...]:
    found = result["distances"]
    nmi = found["cos"].get("nmi")
    return (*(percent(found[d]["recall"]["1"]) for d in DISTANCES), percent(nmi and nmi["mean"]))


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
