"""Write the result of a sweep as one HTML page that works offline, and without scripts too."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

from retrieval.metrics import title_of
from retrieval.number_format import counted, percent
from retrieval.reporting.charts import whisker
from retrieval.reporting.page import assets, environment
from trainer import toml
from trainer.results import SettingResult, SweepResult
from trainer.sweep import charts
from trainer.sweep.results import mean_of, recall_of
from trainer.sweep.tables import COLUMNS, all_scores, texts, with_spread

PAGE = "sweep.html"


def render(found: SweepResult) -> str:
    """The page; every text is escaped."""
    good = [row for row in found["rows"] if row["validation"]]
    tested = [row["difference"] for row in good if row["difference"]]
    spans = [0.0, *(end for one in tested for end in (one["difference"], *(one["ci"] or ())))]
    ends = (min(spans), max(spans))
    best = good[0] if good else None
    drawn = charts.chart(found)
    distances, scores = all_scores(best["test"]) if best and best["test"] else ([], None)
    template = environment(Path(__file__).parent).get_template("page.html")
    return template.render(
        found=found,
        wide=drawn is not None and f"0 0 {charts.WIDE} " in drawn,
        version=version("dmltool"),
        **assets("theme.js"),
        sentence=sentence(found),
        best=best,
        lead=with_spread(mean_of(best)) if best else "",
        chart=drawn,
        titles=[f"{title_of(name)} {d}" for d, name in COLUMNS],
        rows=[_row(n, row, ends) for n, row in enumerate(found["rows"], 1)],
        test=scores,
        distances=distances,
        settings=toml.render_tables(found["settings"]),
    )


def sentence(found: SweepResult) -> str:
    """How many settings were trained, how often, and what their scores are."""
    seeds = len(found["seeds"])
    trained = f"{counted(len(found['rows']), 'setting')} ({found['method']})"
    if not seeds:
        return f"{trained}. No training succeeded."
    means = "means ± standard deviations over seeds, " if seeds > 1 else ""
    split = "validation classes" if found["split"] == "val" else "the test set"
    return f"{trained}, each trained with {counted(seeds, 'seed')}. Scores are {means}of {split}."


def _row(rank: int, row: SettingResult, ends: tuple[float, float]) -> dict[str, Any]:
    tested = row["difference"]
    scores = {run["seed"]: percent(recall_of(run)) for run in row["runs"] if run["validation"]}
    return texts(row) | {
        "rank": rank,
        "error": row["error"],
        "runs": ", ".join(f"seed {seed}: {score}" for seed, score in scores.items()),
        "whisker": whisker(tested["difference"], tested["ci"], ends) if tested else "",
    }
