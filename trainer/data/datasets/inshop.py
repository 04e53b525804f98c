"""DeepFashion In-Shop Clothes Retrieval (Liu et al. 2016), with query and gallery splits."""

from pathlib import Path

from retrieval.errors import DmlError
from trainer.data.datasets import layout
from trainer.data.datasets.records import DataSet

EXPECTED = {"train": (25_882, 3_997), "query": (14_218, 3_985), "gallery": (12_612, 3_985)}
LIST = "list_eval_partition.txt"
OFFICIAL = sum(images for images, _ in EXPECTED.values())
FORM = "image item_id train|query|gallery"


def read(root: Path, *, allow_incomplete: bool = False) -> DataSet:
    """Read list_eval_partition.txt (also in Eval/ or Anno/) and img/ (also in Img/)."""
    folder = layout.locate(root, "In-Shop", LIST, inside=["Eval", "Anno"])
    source = folder / LIST
    images = next((p for p in (root, root / "Img") if (p / "img").is_dir()), root)
    rows, count = [], None
    for line, text in layout.lines(source):
        if line == 1 and len(text.split()) == 1:
            count = layout.number(source, line, text)
            continue
        path, label, split = layout.fields(source, line, text, 3, FORM)
        if split in EXPECTED:
            rows.append((layout.relative(path, source, line), label, split))
        elif line > 2:  # the second line is the header
            what = f"{split[:40]!r} is not train, query or gallery."
            raise layout.unofficial(source, line, what)
    if count != len(rows) and not allow_incomplete:
        raise DmlError(
            f"{source} was cut short or changed.",
            f"Its first line promises {'no count' if count is None else f'{count:,} images'}, "
            f"it names {len(rows):,}; the official file has {OFFICIAL:,}.",
            layout.GO_ON,
        )
    return layout.official("inshop", images, rows, EXPECTED, allow_incomplete, source)
