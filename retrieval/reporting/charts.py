"""Draw charts as SVG text, so that the page shows them without a script.

Colours and fonts come from the page's style sheet; a series is told apart by its dashes too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from retrieval.metrics import title_of
from retrieval.number_format import percent
from retrieval.reporting.view import Curve, Histogram

WIDTH, HEIGHT = 480, 270
LEFT, RIGHT, TOP, BOTTOM = 48, 466, 12, 222
LABEL_ROOM = 40  # between the labels of an axis
SERIES = 6  # how many the style sheet tells apart
BINS = 20  # of a histogram

Points = Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Axis:
    """Map values to coordinates, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values from at most `low` to at least `high`, about `count` steps apart."""
    if not high > low:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, last + 1)]


def within(low: float, high: float, count: int = 5) -> list[float]:
    """Those of the `ticks` that are not below `low` or above `high`."""
    return [mark for mark in ticks(low, high, count) if low - 1e-9 <= mark <= high + 1e-9]


def recall_curve(curve: dict[str, Curve]) -> Markup:
    """Recall@K over log K of each distance, with its interval as a band."""
    shown = [v for one in curve.values() for v in (*one["recall"], *_known(one["low"]))]
    ks = sorted({k for one in curve.values() for k in one["k"]})
    low = ticks(min(shown), 1)[0]
    x = Axis(ks[0], ks[-1], LEFT + 8, RIGHT - 8, log=True)
    y = upward(low, 1)
    parts = [frame(x, y, _log_ticks(x), within(low, 1), "K", as_percent)]
    for name, one in curve.items():
        points = list(zip(one["k"], one["recall"], strict=True))
        told = [f"{name}: {title_of(f'recall@{k}')} {percent(recall)}" for k, recall in points]
        parts += [_band(one, x, y, name), _line(points, x, y, name)]
        parts += [_dots(points, told, x, y, name)]
    return svg(parts, "Recall at K over K, by distance")


def histogram(one: Histogram, title: str) -> Markup:
    """Shares of positive and negative pairs by distance."""
    edges = one["edges"]
    top = max([*one["positive"], *one["negative"]], default=0) or 1
    x = Axis(edges[0], edges[-1], LEFT, RIGHT)
    y = upward(0, top * 1.05)
    marks = within(edges[0], edges[-1])
    parts = [frame(x, y, marks, within(0, top, 4), title, as_percent)]
    parts += [
        _steps(edges, one["negative"], x, y, "negative"),
        _steps(edges, one["positive"], x, y, "positive"),
    ]
    return svg(parts, f"Pairs of one class and of two classes by {title}")


def recall_of_classes(recall: Iterable[float | None]) -> Markup:
    """Histogram of the recall of the classes."""
    counts = [0] * BINS
    for value in _known(recall):
        counts[min(BINS - 1, int(value * BINS + 1e-9))] += 1
    x, y = Axis(0, 1, LEFT, RIGHT), upward(0, max(counts) * 1.05)
    whole = [mark for mark in within(0, max(counts), 4) if mark == int(mark)]
    parts = [
        frame(
            x, y, [0, 0.2, 0.4, 0.6, 0.8, 1], whole, f"{title_of('recall@1')}, %", plain, as_percent
        )
    ]
    for n, count in enumerate(counts):
        left, right, low = x(n / BINS) + 1, x((n + 1) / BINS) - 1, 100 * n / BINS
        parts.append(
            f'<path class="column" d="M{left:.1f} {BOTTOM}V{y(count):.1f}H{right:.1f}V{BOTTOM}">'
            f"<title>{low:g} to {low + 100 / BINS:g}%: {count:,}</title></path>"
        )
    return svg(parts, f"Number of classes by {title_of('recall@1')}")


def scatter(spread: Sequence[float | None], gap: Sequence[float | None]) -> Markup:
    """A dot for each class: its spread, and the distance to the nearest other class."""
    pairs = [(s, g) for s, g in zip(spread, gap, strict=True) if s is not None and g is not None]
    across, up = (ticks(0, max(column) or 1) for column in zip(*pairs, strict=True))
    x, y = Axis(0, across[-1], LEFT, RIGHT), upward(0, up[-1])
    reach = min(across[-1], up[-1])
    path = "".join(f"M{x(s):.1f} {y(g):.1f}h0" for s, g in pairs)
    parts = [
        frame(x, y, across, up, "spread", plain),
        f'<path class="equal" d="M{x(0):.1f} {y(0):.1f}L{x(reach):.1f} {y(reach):.1f}"/>',
        f'<path class="dots" d="{path}" style="opacity:{max(0.25, 0.8 - len(pairs) / 4000):.2f}"/>',
        '<circle class="spot" r="6" cx="0" cy="0" visibility="hidden"/>',
    ]
    where = (
        f'data-plot="{LEFT} {RIGHT} {BOTTOM} {TOP}" data-across="{across[-1]!r}" '
        f'data-up="{up[-1]!r}"'
    )
    return svg(parts, "Spread of each class and distance to the nearest other", where)


def lines(
    across: Sequence[float], series: dict[str, Sequence[float | None]], percent: bool = False
) -> Markup:
    """Lines over epochs; a missing value is a gap."""
    values = [v for column in series.values() for v in _known(column)]
    marks = ticks(min(values), min(max(values), 1) if percent else max(values))
    x = Axis(across[0], across[-1], LEFT + 8, RIGHT - 8)
    y = upward(marks[0], marks[-1])
    whole = [mark for mark in within(across[0], across[-1], 6) if mark == int(mark)]
    form = as_percent if percent else plain
    parts = [frame(x, y, whole or [across[0]], marks, "epoch", form)]
    for n, (name, column) in enumerate(series.items()):
        kind = f"s{n % SERIES}"
        points = list(zip(across, column, strict=True))
        parts.append(_line(points, x, y, kind))
        if len(across) <= 40:
            known = [(epoch, value) for epoch, value in points if value is not None]
            told = [f"{name}, epoch {epoch:g}: {form(value)}" for epoch, value in known]
            parts.append(_dots(known, told, x, y, kind))
    return svg(parts, ", ".join(series) + " by epoch")


def whisker(difference: float, span: Sequence[float] | None, ends: tuple[float, float]) -> Markup:
    """A dot with its interval beside the line of zero; `ends` are those of the scale."""
    x = Axis(*ends, 5, 95)
    bar = "" if span is None else f'<path class="span" d="M{x(span[0]):.1f} 10H{x(span[1]):.1f}"/>'
    return Markup(
        '<svg class="whisker" viewBox="0 0 100 20" aria-hidden="true">'
        f'<path class="zero" d="M{x(0):.1f} 0V20"/>{bar}'
        f'<circle cx="{x(difference):.1f}" cy="10" r="3"/></svg>'
    )


def svg(parts: Iterable[str], label: str, more: str = "", width: int = WIDTH) -> Markup:
    """A chart of the parts, with a text for readers that do not see it."""
    return Markup(
        f'<svg class="chart" viewBox="0 0 {width} {HEIGHT}" role="img" '
        f'aria-label="{escape(label)}" {more}>{"".join(parts)}</svg>'
    )


def frame(
    x: Axis,
    y: Axis,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    title: str,
    form: Callable[[float], str],
    x_form: Callable[[float], str] | None = None,
) -> str:
    parts = [
        f'<path class="grid" d="M{LEFT} {y(v):.1f}H{RIGHT}"/>'
        f'<text class="end" x="{LEFT - 7}" y="{y(v):.1f}" dy=".34em">{form(v)}</text>'
        for v in y_ticks
    ]
    parts += [
        f'<path class="tick" d="M{x(v):.1f} {BOTTOM}v4"/>'
        f'<text class="middle" x="{x(v):.1f}" y="{BOTTOM + 19}">{(x_form or plain)(v)}</text>'
        for v in x_ticks
    ]
    parts.append(f'<path class="axis" d="M{LEFT} {BOTTOM}H{RIGHT}"/>')
    middle = (LEFT + RIGHT) / 2
    parts.append(
        f'<text class="middle title" x="{middle:.0f}" y="{HEIGHT - 8}">{escape(title)}</text>'
    )
    return "".join(parts)


def _band(one: Curve, x: Axis, y: Axis, name: str) -> str:
    rows = zip(one["k"], one["low"] or [], one["high"] or [], strict=False)
    known = [(k, low, high) for k, low, high in rows if low is not None and high is not None]
    if len(known) < 2:
        return ""
    upper = [f"{x(k):.1f} {y(high):.1f}" for k, _, high in known]
    lower = [f"{x(k):.1f} {y(low):.1f}" for k, low, _ in reversed(known)]
    return f'<path class="band {escape(name)}" d="M{"L".join(upper + lower)}Z"/>'


def _line(points: Points, x: Axis, y: Axis, name: str) -> str:
    path, pen = "", "M"
    for across, up in points:
        if up is None:
            pen = "M"
            continue
        path += f"{pen}{x(across):.1f} {y(up):.1f}"
        pen = "L"
    return f'<path class="line {escape(name)}" d="{path}"/>' if path else ""


def _dots(
    points: Sequence[tuple[float, float]], told: Sequence[str], x: Axis, y: Axis, name: str
) -> str:
    """A dot at each point, with the text that is shown over it."""
    return "".join(
        f'<circle class="{escape(name)}" cx="{x(across):.1f}" cy="{y(up):.1f}" r="2.5">'
        f"<title>{escape(text)}</title></circle>"
        for (across, up), text in zip(points, told, strict=True)
    )


def _steps(edges: Sequence[float], shares: Sequence[float], x: Axis, y: Axis, name: str) -> str:
    path = f"M{x(edges[0]):.1f} {y(0):.1f}"
    for share, right in zip(shares, edges[1:], strict=False):
        path += f"V{y(share or 0):.1f}H{x(right):.1f}"
    return f'<path class="steps {name}" d="{path}V{y(0):.1f}"/>'


def upward(low: float, high: float) -> Axis:
    return Axis(low, high, BOTTOM, TOP)


def _log_ticks(axis: Axis) -> list[int]:
    """1, 2, 5, 10, ... as far as there is room for their labels."""
    kept: list[int] = []
    for value in (m * 10**n for n in range(12) for m in (1, 2, 5)):
        if axis.low <= value <= axis.high and (
            not kept or axis(value) - axis(kept[-1]) >= LABEL_ROOM
        ):
            kept.append(value)
    return kept


def _known(values: Iterable[float | None] | None) -> list[float]:
    return [v for v in values or [] if v is not None]


def as_percent(value: float) -> str:
    return f"{100 * value:.6g}"


def plain(value: float) -> str:
    return f"{round(value, 10):,g}" if abs(value) < 1e6 else f"{value:.0e}"
