"""The page of a report: what is in the HTML, and what it does in a real browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
import zlib
from html.parser import HTMLParser

import pytest

from retrieval.reporting.page import embedded, render, sentence

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(2)>",
    '"><svg onload=alert(3)>',
    "' onmouseover='alert(4)",
    "<!-- {{ 7*7 }} & \u2028 \ud800",
]
MARGIN = 28  # of the map, as in map.js


def png(n: int, more: int = 0) -> str:
    """A square of one colour; `more` bytes behind its end make it as large as a photograph."""
    pixel = bytes([60 + 37 * n % 180, 60 + 91 * n % 180, 60 + 53 * n % 180])
    rows = (b"\0" + pixel * 16) * 16

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", 16, 16, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows))
    return (
        "data:image/png;base64,"
        + base64.b64encode(data + chunk(b"IEND", b"") + bytes(more)).decode()
    )


def scores(base: float, intervals: bool) -> dict:
    recall = {"1": base, "2": base + 0.1, "4": base + 0.15, "8": base + 0.2}
    span = {k: [v - 0.03, v + 0.02] if intervals else None for k, v in recall.items()}
    seeds = {"mean": 0.8, "std": 0.02, "values": [0.78, 0.8, 0.82]}
    return {
        "recall": recall,
        "recall_ci": span,
        "mrr": 0.81,
        "mrr_ci": [0.8, 0.82] if intervals else None,
        "r_precision": 0.5,
        "r_precision_ci": None,
        "map_at_r": None,
        "map_at_r_ci": None,
        "nmi": seeds,
        "ami": seeds | {"std": None, "values": [0.8]},
        "tied_queries": 0,
    }


def make_view(
    items: int = 60,
    names: list[str] | None = None,
    images: bool = True,
    intervals: bool = True,
    paths: list[str] | None = None,
) -> dict:
    """Items go round the classes; every other query has rank 1, the fifth nothing to find."""
    names = names or ["ant", "bee", "cat", "dog"]
    C = len(names)
    paths = paths or [f"photos/{n % C}/img_{n:04}.jpg" for n in range(items)]
    near = [[(n + step) % items for step in (C, 1, 2, 2 * C, 3, 5, 6, 7)] for n in range(items)]
    score = [0.98, 0.91, 0.86, 0.8, 0.71, 0.7, 0.64, -0.1]
    ranks = [0 if n == 5 else 1 if n % 2 == 0 else 3 + n for n in range(items)]
    queries = [{"item": n, "rank": ranks[n], "near": near[n], "score": score} for n in range(items)]
    ks = [1, 2, 3, 5, 8, 13, 21, 34, 55]
    curve = [0.7 + 0.03 * n for n in range(len(ks))]
    bins = [0.05, 0.15, 0.3, 0.3, 0.15, 0.05]
    return {
        "title": "late.h5",
        "created": "2026-11-16 10:00 UTC",
        "dmltool": "0.1.0",
        "result": {
            "version": 1,
            "protocol": "leave-one-out",
            "queries": items,
            "gallery": items,
            "classes": C,
            "dim": 64,
            "distances": {"cos": scores(0.78, intervals), "l2": scores(0.68, intervals)},
            "checks": {"nonfinite_rows": 0, "tied_queries": 2, "conflicting_duplicates": 0},
            "settings": {"level": 0.95, "recall_at": [1, 2, 4, 8]},
            "source": {"file": "late.h5"},
        },
        "warnings": ["2 queries are decided by a tie, which counts against them."],
        "provenance": [["model", "glyphs-ce"], ["model_sha256", "9f" * 32]],
        "curve": {
            d: {
                "k": ks,
                "recall": [c - drop for c in curve],
                "low": [c - drop - 0.03 for c in curve] if intervals else None,
                "high": [c - drop + 0.03 for c in curve] if intervals else None,
            }
            for d, drop in (("cos", 0.0), ("l2", 0.1))
        },
        "distance": "cos",
        "classes": {
            "name": names,
            "items": [items // C] * C,
            "recall": [None, *(n / C for n in range(1, C))],
            "spread": [0.2 + 0.05 * n for n in range(C)],
            "nearest": [(n + 1) % C if C > 1 else -1 for n in range(C)],
            "gap": [0.5 - 0.1 * n if C > 1 else None for n in range(C)],
        },
        "items": {
            "class": [n % C for n in range(items)],
            "path": list(paths),
            "thumb": list(range(items)) if images else [-1] * items,
            "row": list(range(items)),
            "side": [0] * items,
        },
        "queries": queries,
        "tabs": {
            "random": list(range(30)),
            "worst": [n for n in range(items) if ranks[n] > 1],
            "best": [n for n in range(items) if ranks[n] == 1][:10],
        },
        "total_queries": 60_502,
        "confused": [
            {
                "a": 0,
                "b": C - 1,
                "count": 12,
                "share": 0.3,
                "examples": [[0, 1, 0.91], [4, 5, 0.9], [8, 9, 0.88]],
            }
        ],
        "duplicates": [[0, 1, 0.999], [2, 3, 0.99]],
        "histograms": {
            "cos": {
                "edges": [-0.2, 0, 0.2, 0.4, 0.6, 0.8, 1.0],
                "positive": bins,
                "negative": bins[::-1],
                "overlap": 0.07,
            },
            "l2": {
                "edges": [0, 1, 2, 3, 4, 5, 6],
                "positive": bins,
                "negative": [0] * 6,
                "overlap": None,
            },
        },
        "map": {
            "method": "t-SNE",
            "query": list(range(items)),
            "x": [(n % 8) / 7 for n in range(items)],
            "y": [(n // 8) / 7 for n in range(items)],
        },
        "thumbs": {"side": 16, "images": [png(n) for n in range(items)] if images else []},
        "compare": [],
        "run": None,
    }


def with_everything(view: dict) -> dict:
    row = {"a": 0.7, "b": 0.78, "difference": 0.08, "ci": [0.05, 0.1], "p": 0.0004}
    unsure = {"a": 0.7, "b": 0.69, "difference": -0.01, "ci": [-0.05, 0.03], "p": 0.4}
    unknown = {"a": 0.7, "b": 0.6, "difference": -0.1, "ci": None, "p": None}
    flip = {
        "item": 0,
        "ours": [4, 1, 2, 3, 5, 6, 7, 9],
        "theirs": [1, 2, 3, 5, 6, 7, 9, 10],
        "rank": 1,
        "their_rank": 12,
        "score": [0.9] * 8,
        "their_score": [0.8] * 8,
    }
    view["compare"] = [
        {
            "file": "early.h5",
            "distances": {"cos": {"recall@1": row, "mrr": unsure}, "l2": {"nmi": unknown}},
            "gained": 120,
            "lost": 80,
            "flips": [
                flip | {"kind": "gained"},
                flip | {"kind": "lost", "item": 3, "rank": 4, "their_rank": 1},
            ],
        }
    ]
    view["run"] = {
        "name": "glyphs-ce",
        "epochs": [1, 2, 3],
        "scores_of": "val",
        "settings": 'loss = "ce"\n',
        "lines": {
            "loss": [3.1, None, 1.2],
            "parts": {"pull": [1, 2, 3], "push": [3, 2, 1]},
            "recall_cos": [0.4, 0.6, 0.7],
            "recall_l2": [None, None, None],
        },
    }
    return view


class Reader(HTMLParser):
    """Tags, attributes and text; ids must be unique and tags closed in order."""

    VOID = frozenset(["meta", "link", "input", "img", "br"])

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.texts: list[str] = []
        self.scripts: dict[str, str] = {}
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] == "script":
            kind = self.tags[-1][1].get("type", "script")
            self.scripts[kind] = self.scripts.get(kind, "") + data
        elif not self._open or self._open[-1] != "style":
            self.texts.append(data)

    def ids(self) -> list[str]:
        return [attrs["id"] for _, attrs in self.tags if "id" in attrs]

    def text(self) -> str:
        return " ".join("".join(self.texts).split())


VIEWS = {
    "usual": lambda: make_view(),
    "everything": lambda: with_everything(make_view()),
    "no images": lambda: make_view(images=False),
    "no intervals": lambda: make_view(intervals=False),
    "one class": lambda: make_view(names=["only"], intervals=False),
    "no paths": lambda: (
        make_view(images=False)
        | {"items": make_view()["items"] | {"path": [None] * 60, "thumb": [-1] * 60}}
    ),
    "no map": lambda: make_view() | {"map": None},
    "bare": lambda: (
        make_view()
        | {
            "map": None,
            "queries": [],
            "tabs": {},
            "confused": [],
            "duplicates": [],
            "histograms": {},
            "curve": {},
            "warnings": [],
            "provenance": [],
            "classes": {k: [] for k in ("name", "items", "recall", "spread", "nearest", "gap")},
        }
    ),
    "hostile": lambda: hostile_view(),
}


def hostile_view() -> dict:
    view = with_everything(
        make_view(
            names=HOSTILE,
            images=False,
            paths=[f"{HOSTILE[n % 5]}/{HOSTILE[n % 4]}" for n in range(60)],
        )
    )
    view["title"] = view["compare"][0]["file"] = view["run"]["name"] = HOSTILE[1]
    view["run"]["settings"] = HOSTILE[0]
    view["warnings"] = HOSTILE
    view["provenance"] = [[one, one] for one in HOSTILE]
    view["run"]["lines"]["parts"] = {one: [1, 2, 3] for one in HOSTILE}
    view["thumbs"]["images"] = ["javascript:alert(5)"]
    view["items"]["thumb"] = [0] * 60
    return view


@pytest.fixture(params=VIEWS, ids=str)
def view(request):
    return VIEWS[request.param]()


def test_html_is_closed_and_its_ids_are_unique_and_there(view):
    page = Reader(render(view))
    ids = page.ids()
    assert len(ids) == len(set(ids))
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a"]
    assert links
    assert {link.removeprefix("#") for link in links} <= set(ids)


def test_nothing_is_loaded_from_elsewhere(view):
    page = Reader(render(view))
    for tag, attrs in page.tags:
        for name in ("src", "href", "srcset", "data", "action", "poster", "xlink:href"):
            if name in attrs:
                assert attrs[name].startswith(("#", "data:")), (tag, attrs)
        assert not any(name.startswith("on") for name in attrs), (tag, attrs)
    text = render(make_view())
    assert "http://" not in text
    assert "https://" not in text
    assert "url(" not in text
    assert "@import" not in text


def test_policy_allows_the_script_of_the_page_and_no_other(view):
    page = Reader(render(view))
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv"))
    digest = base64.b64encode(hashlib.sha256(page.scripts["script"].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_view_comes_back_from_the_page_unchanged(view):
    assert json.loads(Reader(render(view)).scripts["application/json"]) == view


def test_embedded_json_holds_no_sign_that_html_reads():
    text = embedded({"a": "<>&\u2028\u2029é"})
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == {"a": "<>&\u2028\u2029é"}


def test_sections_without_data_are_left_out():
    sections = {i for i in Reader(render(VIEWS["bare"]())).ids() if i.isalpha()}
    assert sections & {"rows", "fails", "distances", "map", "compare", "run"} == set()
    assert {"numbers", "about"} <= sections
    full = Reader(render(VIEWS["everything"]())).ids()
    assert {"rows", "fails", "distances", "map", "compare", "run"} <= set(full)


def test_numbers_are_in_the_html_with_intervals_and_spread():
    text = Reader(render(with_everything(make_view()))).text()
    for wanted in (
        "Recall@1 · cosine 78.00 %",
        "95% interval 75.00 to 80.00",
        "68.00 65.00 to 70.00",
        "± 2.00 (3 seeds)",
        "R-precision 50.00",
        "decided by a tie",
        "overlap by 7.0 %",
        "+8.00 +5.00 to +10.00",
        "< 0.001",
        "gains 120 queries and loses 80",
        "Validation Recall@1",
    ):
        assert wanted.replace(" ", "") in text.replace(" ", ""), wanted
    assert "MAP@R 0" not in text


def test_sure_differences_are_told_from_unsure_ones():
    page = render(with_everything(make_view()))
    assert re.findall(r'<tr class="(\w*)"><th scope="row">(?:Recall@1|MRR|NMI)', page) == [
        "",
        "better",
        "unsure",
    ]


def test_lone_surrogates_do_not_stop_the_page():
    render(hostile_view()).encode()


def test_one_query_is_not_called_queries():
    text = render(
        make_view(items=1, intervals=False)
        | {"map": {"method": "PCA", "x": [0.5], "y": [0.5], "query": [0]}}
    )
    assert "1 query laid out by" in text
    assert text.count("no interval: queries of one class") == 2


def test_query_gallery_is_said_in_a_sentence():
    result = make_view()["result"] | {"protocol": "query-gallery", "queries": 14_218}
    assert "14,218 queries against a gallery of 60 items." in sentence(result)
    assert "1 query against a gallery of 1 item." in sentence(result | {"queries": 1, "gallery": 1})
    assert "against 59 others" in sentence(make_view()["result"])
    assert "against 1 other," in sentence(make_view()["result"] | {"gallery": 2})


# In the browser


@pytest.fixture
def opened(browser, tmp_path):
    def show(view: dict, **size: int):
        page = tmp_path / "report.html"
        page.write_text(render(view), encoding="utf-8")
        browser.media(prefers_reduced_motion="reduce")  # scrolling at once; frames take long here
        browser.open(page, **size)
        return browser

    return show


def count(browser, selector: str) -> int:
    return browser.js(f"document.querySelectorAll({json.dumps(selector)}).length")


def text(browser, selector: str) -> str:
    return browser.js(f"document.querySelector({json.dumps(selector)}).innerText")


def selected(browser, tabs: str = "#row-tabs") -> str:
    return browser.js(f"document.querySelector('{tabs} [aria-selected=true]').id").split("-")[-1]


def point(browser, view: dict, n: int) -> tuple[float, float]:
    """Where on the screen the map's n-th point is before any zoom."""
    browser.centre("#map-canvas")
    x, y, width, height = browser.js(
        "(b => [b.x, b.y, b.width, b.height])"
        "(document.querySelector('#map-canvas').getBoundingClientRect())"
    )
    side = min(width, height) - 2 * MARGIN
    return (
        x + width / 2 + (view["map"]["x"][n] - 0.5) * side,
        y + height / 2 + (view["map"]["y"][n] - 0.5) * side,
    )


def test_page_opens_without_error_request_or_alert(opened, view):
    browser = opened(view)
    browser.js("scrollTo(0, document.body.scrollHeight)")
    browser.settle()
    assert browser.errors == []
    assert browser.dialogs == []
    outside = [u for u in browser.requests if not u.startswith(("data:", "file:"))]
    assert outside == []
    assert len([u for u in browser.requests if u.startswith("file:")]) == 1


def test_hostile_labels_show_as_text(opened):
    browser = opened(hostile_view())
    assert text(browser, "h1") == HOSTILE[1]
    assert HOSTILE[0] in text(browser, "#row-list")
    assert HOSTILE[0] in text(browser, "#class-table")
    assert count(browser, "img") == 0
    assert count(browser, "script") == 2
    browser.click("#compare .tabs [role=tab]:nth-child(2)")
    browser.click("#row-list button.frame")
    browser.wait("document.querySelector('#detail').open")
    browser.settle()
    assert browser.dialogs == []
    assert browser.errors == []


def test_page_never_scrolls_sideways(opened, view):
    browser = opened(view, width=360)
    browser.js("for (const one of document.querySelectorAll('details')) one.open = true")
    for width in (360, 768, 1280):
        browser.size(width)
        browser.settle()
        assert browser.js("document.documentElement.scrollWidth") <= width


def test_tabs_change_by_click_and_by_arrow_keys(opened):
    browser = opened(make_view())
    assert selected(browser) == "random"
    browser.click("#row-tabs-worst")
    assert selected(browser) == "worst"
    assert "nearest positive at rank" in text(browser, "#row-list .row")
    browser.press("ArrowRight")
    assert selected(browser) == "best"
    assert "right at rank 1" in text(browser, "#row-list .row")
    browser.press("End")
    assert selected(browser) == "all"
    browser.press("ArrowRight")
    assert selected(browser) == "random"
    assert browser.js("document.activeElement.id") == "row-tabs-random"
    browser.press("ArrowLeft")
    assert selected(browser) == "all"
    browser.press("Home")
    assert selected(browser) == "random"
    assert count(browser, "#row-tabs [tabindex='0']") == 1


def test_right_and_wrong_neighbours_are_marked_by_more_than_colour(opened):
    browser = opened(make_view())
    row = "#row-list .row:first-child .near li"
    assert text(browser, f"{row}:nth-child(1) .mark") == "✓"
    assert text(browser, f"{row}:nth-child(2) .mark") == "✗"
    style = "getComputedStyle(document.querySelector('{} .frame')).borderTopStyle"
    assert browser.js(style.format(f"{row}:nth-child(1)")) == "solid"
    assert browser.js(style.format(f"{row}:nth-child(2)")) == "dashed"
    assert text(browser, f"{row}:nth-child(8) .score") == "-0.100"


def test_rows_come_a_page_at_a_time(opened):
    browser = opened(make_view())
    assert count(browser, "#row-list .row") == 20
    browser.click("#row-panel .more")
    assert count(browser, "#row-list .row") == 30
    assert count(browser, "#row-panel .more") == 0


def test_class_filter_and_search_narrow_the_rows(opened):
    browser = opened(make_view())
    browser.click("#row-tabs-all")
    browser.type("#row-class", "bee")
    browser.wait("document.querySelector('#row-count').textContent.startsWith('15 of 60')")
    names = "[...document.querySelectorAll('#row-list .row-head .class')].map(e => e.textContent)"
    assert set(browser.js(names)) == {"bee"}
    browser.type("#row-search", "IMG_0009")
    browser.wait("document.querySelectorAll('#row-list .row').length === 1")
    browser.type("#row-search", "nowhere")
    browser.wait("document.querySelector('#row-list .empty')")
    assert count(browser, "#row-classes option") == 4


def test_filter_without_match_in_a_tab_leads_to_all(opened):
    browser = opened(make_view())
    browser.type("#row-search", "img_0058")
    browser.wait("document.querySelector('#row-list .empty button')")
    browser.click("#row-list .empty button")
    assert selected(browser) == "all"
    assert count(browser, "#row-list .row") == 1


def test_neighbour_that_is_a_query_opens_its_row_and_escape_closes(opened):
    browser = opened(make_view())
    browser.click("#row-list .row:first-child .near li:nth-child(2) button")
    assert browser.js("document.querySelector('#detail').open")
    assert text(browser, "#detail-title") == "bee"
    browser.click("#detail .near li:nth-child(2) button")
    assert text(browser, "#detail-title") == "cat"
    browser.click("#detail-back")
    assert text(browser, "#detail-title") == "bee"
    browser.press("Escape")
    browser.wait("!document.querySelector('#detail').open")


def test_class_table_sorts_and_searches_with_unknown_last(opened):
    browser = opened(make_view())
    first = "[...document.querySelectorAll('#class-table tbody tr')].map(r => r.cells[0].innerText)"
    assert browser.js(first) == ["bee", "cat", "dog", "ant"]
    browser.click("#class-table th:nth-child(2) button")
    assert browser.js(first) == ["dog", "cat", "bee", "ant"]
    assert count(browser, "#class-table th[aria-sort=descending]") == 1
    browser.type("#class-search", "a")
    browser.wait("document.querySelectorAll('#class-table tbody tr').length === 2")
    browser.click("#class-table tbody tr:first-child .link")
    assert text(browser, "#row-count").startswith("15 of 60")


def test_class_table_says_how_many_classes_are_left(opened):
    browser = opened(make_view(items=140, names=[f"class {n}" for n in range(70)]))
    more = "#class-count + div .more"
    assert text(browser, more) == "Show 50 more of 58"
    browser.click(more)
    assert text(browser, more) == "Show 8 more of 8"
    assert browser.js("document.activeElement.className") == "more"
    browser.click(more)
    assert count(browser, "#class-table tbody tr") == 70
    assert count(browser, more) == 0


def test_map_shows_a_point_on_hover_and_its_neighbours_on_click(opened):
    view = make_view()
    browser = opened(view)
    x, y = point(browser, view, 9)
    browser.mouse("mouseMoved", x, y)
    browser.wait("!document.querySelector('#map-tip').hidden")
    assert "bee" in text(browser, "#map-tip")
    assert "img_0009.jpg" in text(browser, "#map-tip")
    assert count(browser, "#map-tip img") == 1
    browser.mouse("mouseMoved", x + 24, y + 24)
    browser.wait("document.querySelector('#map-tip').hidden")
    browser.click_at(x, y)
    assert count(browser, "#map-panel .near li") == 8
    assert text(browser, "#map-panel h3") == "bee"


def test_map_works_by_keyboard(opened):
    view = make_view()
    browser = opened(view)
    browser.js("document.querySelector('#map-canvas').focus()")
    browser.press("ArrowRight")
    browser.wait("!document.querySelector('#map-tip').hidden")
    here = int(browser.js("document.querySelector('#map-tip').dataset.point"))
    browser.press("ArrowLeft")
    assert browser.js("document.querySelector('#map-tip').dataset.point") == str(here - 1)
    browser.press("ArrowDown")
    assert browser.js("document.querySelector('#map-tip').dataset.point") == str(here + 7)
    browser.press("+")
    assert count(browser, "#map-canvas.zoomed") == 1
    browser.press("Enter")
    assert view["queries"][here + 7]["item"] == here + 7
    assert f"img_{here + 7:04}" in text(browser, "#map-panel .path")
    browser.press("0")
    assert count(browser, "#map-canvas.zoomed") == 0
    browser.press("Escape")
    assert count(browser, "#map-panel .near") == 0


def test_wheel_zooms_the_map_only_once_it_has_focus(opened):
    view = make_view()
    browser = opened(view)
    x, y = browser.centre("#map-canvas")
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-300)
    browser.wait("!document.querySelector('#map-hint').hidden")
    assert count(browser, "#map-canvas.zoomed") == 0
    x, y = browser.centre("#map-canvas")
    browser.click_at(x, y)
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-300)
    browser.wait("document.querySelector('#map-canvas.zoomed')")


def test_fingers_choose_a_point_and_pinch_the_map(opened):
    view = make_view()
    browser = opened(view, width=390, height=844)
    browser.call("Emulation.setTouchEmulationEnabled", enabled=True)
    try:
        x, y = point(browser, view, 20)
        browser.touch("touchStart", (x, y))
        browser.touch("touchEnd")
        browser.wait("document.querySelector('#map-panel .near')")
        assert "img_0020" in text(browser, "#map-panel .path")
        x, y = browser.centre("#map-canvas")
        browser.touch("touchStart", (x - 20, y), (x + 20, y))
        for gap in (40, 60, 80):
            browser.touch("touchMove", (x - gap, y), (x + gap, y))
        browser.touch("touchEnd")
        browser.wait("document.querySelector('#map-canvas.zoomed')")
    finally:
        browser.call("Emulation.setTouchEmulationEnabled", enabled=False)


def test_map_is_painted_at_the_resolution_of_the_screen(opened):
    view = make_view()
    browser = opened(view)
    browser.size(1270, 900, scale=2)
    point(browser, view, 0)
    canvas = "document.querySelector('#map-canvas')"
    browser.wait(f"Math.abs({canvas}.width - 2 * {canvas}.clientWidth) <= 2")
    painted = (
        f"(c => {{ const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        f" let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n; }})({canvas})"
    )
    assert browser.js(painted) > 1000


def test_theme_follows_the_system_until_the_button_is_used(opened):
    browser = opened(make_view())
    ground = "getComputedStyle(document.body).backgroundColor"
    browser.media(prefers_color_scheme="light")
    light = browser.js(ground)
    browser.media(prefers_color_scheme="dark")
    dark = browser.js(ground)
    assert light != dark
    browser.wait("document.querySelector('#theme').getAttribute('aria-label') === 'Light theme'")
    browser.click("#theme")
    assert browser.js(ground) == light
    browser.media(prefers_color_scheme="light")
    browser.click("#theme")
    assert browser.js(ground) == dark
    browser.js("localStorage.clear()")
    assert browser.errors == []


def test_page_works_where_storage_is_blocked(opened):
    browser = opened(make_view())
    block = "Object.defineProperty(window, 'localStorage', {get() { throw new Error('no') }})"
    added = browser.call("Page.addScriptToEvaluateOnNewDocument", source=block)
    browser.call("Page.reload")
    browser.wait("document.documentElement?.dataset.ready === ''")
    before = browser.js("getComputedStyle(document.body).backgroundColor")
    browser.click("#theme")
    assert browser.js("getComputedStyle(document.body).backgroundColor") != before
    assert browser.errors == []
    browser.call("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])


def test_comparison_shows_flipped_queries_side_by_side(opened):
    browser = opened(with_everything(make_view()))
    flips = "#compare .flips"
    assert count(browser, f"{flips} .versus .near") == 2
    assert "early.h5: ✗ nearest positive at rank 12" in text(browser, f"{flips} .row")
    browser.click("#flip-tabs-0-lost")
    assert "early.h5: ✓ right at rank 1" in text(browser, f"{flips} .row")


def test_paper_is_light_and_shows_no_controls(opened):
    browser = opened(make_view())
    browser.media("print", prefers_color_scheme="dark")
    assert browser.js("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.js("getComputedStyle(document.querySelector('.bar')).display") == "none"
    assert browser.call("Page.printToPDF")["data"].startswith("JVBERi")


def test_numbers_and_charts_show_without_a_script(browser, tmp_path):
    page = tmp_path / "report.html"
    page.write_text(render(make_view()), encoding="utf-8")
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.call("Page.navigate", url=page.as_uri())
        browser.wait("document.querySelector('footer')")
        assert "78.00" in text(browser, "#numbers")
        assert browser.js("document.querySelector('#numbers .chart').clientHeight") > 100
        assert "need JavaScript" in text(browser, "#rows")
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


def test_large_page_opens_quickly_and_draws_its_map_fast(opened):
    view = make_view(items=2000, names=[f"class {n}" for n in range(500)])
    view["thumbs"]["images"] = [png(n, more=7000) for n in range(2000)]
    browser = opened(view)
    took = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
    assert browser.js(took) < 5000
    assert count(browser, "#rows img") <= 20 * 9
    browser.centre("#map-canvas")
    browser.js("document.querySelector('#map-canvas').focus()")
    browser.press("ArrowRight")
    frame = (
        "new Promise(done => { let n = 0; const start = performance.now();"
        " const press = key => document.querySelector('#map-canvas').dispatchEvent("
        "new KeyboardEvent('keydown', {key}));"
        " const step = () => { press(n % 2 ? '+' : '-');"
        " if (++n > 30) done((performance.now() - start) / 30);"
        " else requestAnimationFrame(step); };"
        " step(); })"
    )
    assert browser.js(frame) < 100  # milliseconds a frame, on a slow machine without a GPU
