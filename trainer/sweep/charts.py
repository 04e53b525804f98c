"""Draw the settings of a sweep as SVG: a curve, a heat map or parallel coordinates."""

import math
from collections.abc import Sequence

from markupsafe import Markup, escape

from retrieval.metrics import title_of
from retrieval.number_format import four_digits, percent
from retrieval.reporting.charts import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Axis,
    as_percent,
    frame,
    plain,
    svg,
    ticks,
    upward,
)
from trainer import toml
from trainer.results import SettingResult, SweepResult
from trainer.sweep.results import CRITERION, mean_of, recall_of

MOST_LABELS = 12  # on an axis
MOST_CELLS = 12  # rows or columns of a heat map
LOG_FROM = 30  # a ratio of largest and smallest value from which an axis is logarithmic
WIDE = 1000

TITLE = title_of(CRITERION[1])


def chart(found: SweepResult) -> Markup | None:
    """The chart that fits the number of parameters; None if there is nothing to draw."""
    rows = [row for row in found["rows"] if row["validation"]]
    keys = found["parameters"]
    if not rows or not keys:
        return None
    if len(keys) == 1:
        return curve(rows, keys[0])
    sizes = [len({row["values"][key] for row in rows}) for key in keys]
    if len(keys) == 2 and max(sizes) <= MOST_CELLS and found["method"] == "grid":
        return heat_map(rows, keys[0], keys[1])
    return parallel(rows, keys)


def score(row: SettingResult) -> tuple[float, float]:
    """Mean and standard deviation of the score that orders the settings."""
    value = mean_of(row)
    return value["mean"], value["std"] or 0.0


class Scale:
    """Coordinates of the values of a parameter: by their size, or evenly spaced if not numbers."""

    def __init__(self, texts: Sequence[str], start: float, end: float) -> None:
        values = {text: toml.parse_value(text) for text in texts}
        self.numbers = all(
            isinstance(v, int | float) and not isinstance(v, bool) for v in values.values()
        )
        self.texts = sorted(values, key=lambda t: values[t]) if self.numbers else list(values)
        self.values = values
        places = [values[t] if self.numbers else n for n, t in enumerate(self.texts)]
        low, high = min(places), max(places)
        self.log = low > 0 and self.numbers and high / low >= LOG_FROM
        self.axis = Axis(low, high, start, end, log=self.log)

    def __call__(self, text: str) -> float:
        return self.axis(self.values[text] if self.numbers else self.texts.index(text))

    def labels(self) -> list[tuple[float, str]]:
        """Coordinates and texts of the marks: every value, or round ones of many."""
        if len(self.texts) <= MOST_LABELS:
            return [(self(text), four_digits(text.strip('"'))) for text in self.texts]
        if not self.numbers:
            step = math.ceil(len(self.texts) / MOST_LABELS)
            return [(self(text), text.strip('"')) for text in self.texts[::step]]
        low, high = self.axis.low, self.axis.high
        if self.log:
            first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
            marks = [10.0**n for n in range(first, last + 1)]
        else:
            marks = ticks(low, high)
        return [(self.axis(m), plain(m)) for m in marks if low <= m <= high]


def curve(rows: Sequence[SettingResult], key: str) -> Markup:
    """The mean over one parameter with its standard deviation as a band, and a dot for each run."""
    x = Scale([row["values"][key] for row in rows], LEFT + 20, RIGHT - 20)
    ordered = sorted(rows, key=lambda row: x(row["values"][key]))
    runs = [(row, recall_of(run)) for row in ordered for run in row["runs"]]
    bands = {
        row["trial"]: (max(0.0, m - s), min(1.0, m + s)) for row in rows for m, s in [score(row)]
    }
    shown = [*(v for _, v in runs), *(end for band in bands.values() for end in band)]
    marks = ticks(min(shown), max(shown))
    y = upward(marks[0], marks[-1])
    parts = [frame(x.axis, y, [], marks, key, as_percent)]
    parts += [
        f'<path class="tick" d="M{at:.1f} {BOTTOM}v4"/>'
        f'<text class="middle" x="{at:.1f}" y="{BOTTOM + 19}">{escape(text)}</text>'
        for at, text in x.labels()
    ]
    places = [(x(row["values"][key]), score(row)[0], *bands[row["trial"]]) for row in ordered]
    upper = [f"{at:.1f} {y(high):.1f}" for at, _, _, high in places]
    lower = [f"{at:.1f} {y(low):.1f}" for at, _, low, _ in reversed(places)]
    parts.append(f'<path class="band cos" d="M{"L".join(upper + lower)}Z"/>')
    line = "L".join(f"{at:.1f} {y(m):.1f}" for at, m, _, _ in places)
    parts.append(f'<path class="line cos" d="M{line}"/>')
    parts += [
        f'<circle class="cos" cx="{x(row["values"][key]):.1f}" cy="{y(v):.1f}" r="2.6">'
        f"<title>{escape(row['values'][key])}: {percent(v)}</title></circle>"
        for row, v in runs
    ]
    return svg(parts, f"{TITLE} by {key}")


def heat_map(rows: Sequence[SettingResult], first: str, second: str) -> Markup:
    """A cell for each pair of values; the darker, the better."""
    down = Scale([row["values"][first] for row in rows], 0, 1).texts
    across = Scale([row["values"][second] for row in rows], 0, 1).texts
    means = [score(row)[0] for row in rows]
    left, top, right = LEFT + 62, TOP + 4, RIGHT
    width, height = (right - left) / len(across), (BOTTOM - top) / len(down)
    parts = []
    for row in rows:
        mean, std = score(row)
        share = (mean - min(means)) / ((max(means) - min(means)) or 1)
        x = left + across.index(row["values"][second]) * width
        y = top + down.index(row["values"][first]) * height
        spread = f" ± {percent(std)}" if len(row["runs"]) > 1 else ""
        middle, small = x + width / 2, height < 34
        parts.append(
            f'<rect class="cell" x="{x + 1:.1f}" y="{y + 1:.1f}" width="{width - 2:.1f}" '
            f'height="{height - 2:.1f}" style="--share:{12 + 63 * share:.0f}%"/>'
            f'<text class="middle value" x="{middle:.1f}" '
            f'y="{y + height / 2 + (4 if small else -3):.1f}">{percent(mean)}</text>'
        )
        if not small and width > 48:
            parts.append(
                f'<text class="middle value" x="{middle:.1f}" y="{y + height / 2 + 13:.1f}">'
                f"{spread}</text>"
            )
    for n, text in enumerate(down):
        y = top + (n + 0.5) * height
        parts.append(f'<text class="end" x="{left - 7}" y="{y + 4:.1f}">{escape(text)}</text>')
    for n, text in enumerate(across):
        x = left + (n + 0.5) * width
        parts.append(f'<text class="middle" x="{x:.1f}" y="{BOTTOM + 19}">{escape(text)}</text>')
    middle = (top + BOTTOM) / 2
    parts.append(
        f'<text class="middle" x="{(left + right) / 2:.0f}" y="{BOTTOM + 40}">{escape(second)}'
        f'</text><text class="middle" transform="translate(14 {middle:.0f}) rotate(-90)">'
        f"{escape(first)}</text>"
    )
    return svg(parts, f"{TITLE} by {first} and {second}")


def parallel(rows: Sequence[SettingResult], keys: Sequence[str]) -> Markup:
    """A line for each setting through its values and its score; the darker, the better."""
    lefts = [60 + n * (WIDE - 130) / len(keys) for n in range(len(keys) + 1)]
    scales = [Scale([row["values"][key] for row in rows], BOTTOM, TOP + 20) for key in keys]
    means = [score(row)[0] for row in rows]
    marks = ticks(min(means), max(means))
    y = Axis(marks[0], marks[-1], BOTTOM, TOP + 20)
    parts = []
    for row, mean in reversed(list(zip(rows, means, strict=True))):  # the best is drawn last
        ups = [scale(row["values"][key]) for scale, key in zip(scales, keys, strict=True)]
        points = zip(lefts, [*ups, y(mean)], strict=True)
        share = (mean - min(means)) / ((max(means) - min(means)) or 1)
        values = ", ".join(f"{key} = {text}" for key, text in row["values"].items())
        parts.append(
            f'<path class="setting" style="--share:{15 + 85 * share:.0f}%" '
            f'd="M{"L".join(f"{a:.1f} {b:.1f}" for a, b in points)}">'
            f"<title>{escape(values)}: {percent(mean)}</title></path>"
        )
    axes = [(key, scale.labels()) for key, scale in zip(keys, scales, strict=True)]
    axes.append((f"{TITLE}, %", [(y(m), as_percent(m)) for m in marks]))
    for left, (name, labels) in zip(lefts, axes, strict=True):
        parts.append(
            f'<path class="axis" d="M{left:.1f} {TOP + 14}V{BOTTOM + 6}"/>'
            f'<text class="middle" x="{left:.1f}" y="{TOP}">{escape(name)}</text>'
        )
        parts += [
            f'<text class="end label" x="{left - 6:.1f}" y="{at + 4:.1f}">{escape(text)}</text>'
            for at, text in labels
        ]
    return svg(parts, f"Settings and their {TITLE}", width=WIDE)
