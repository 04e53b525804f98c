"""What a report gathers of one file or two, of little, odd and hostile data."""

from dataclasses import replace
from importlib.metadata import version

import numpy as np
import pytest

from retrieval import DmlError, clustering
from retrieval.reporting import gather, sampling, thumbs
from retrieval.reporting.gather import Options, shown
from retrieval.reporting.page import render
from tests.retrieval.made import file, names
from tests.retrieval.reporting.views import QUICK, SOURCE, noise, shop, view_of


@pytest.mark.parametrize("noise", [0, 10])
def test_the_result_is_that_of_eval_and_the_curve_agrees(clustered, noise, rng):
    from retrieval import evaluate

    X, labels = clustered
    given = X + noise * rng.standard_normal(X.shape), labels
    view = view_of(file(*given))
    expected = evaluate(*given, nmi=False)
    assert view["result"]["distances"] == expected["distances"]
    assert view["result"]["source"] == SOURCE
    for d, scores in expected["distances"].items():
        curve = view["curve"][d]
        assert curve["k"] == [1, 2, 3, 5, 8, 13, 21, 34, 55, 59]
        for k in (1, 2, 8):
            value, *span = (curve[name][curve["k"].index(k)] for name in ("recall", "low", "high"))
            assert value == pytest.approx(scores["recall"][str(k)], abs=1e-6)
            assert span == pytest.approx(scores["recall_ci"][str(k)], abs=1e-6)


@pytest.mark.parametrize("items", [1, 2, 3])
@pytest.mark.parametrize("method", ["tsne", "pca"])
def test_a_handful_of_items_is_shown(items, method):
    view = view_of(
        file(np.eye(3, 2)[:items], np.zeros(items, int)), options=replace(QUICK, map=method)
    )
    assert len(view["queries"]) == items
    assert [len(q["near"]) for q in view["queries"]] == [items - 1] * items
    assert view["map"]["method"] == "PCA"
    assert view["classes"]["gap"] == [None]
    assert view["classes"]["nearest"] == [-1]
    assert view["curve"]["cos"]["low"] is None
    assert view["histograms"]["cos"]["overlap"] is None


@pytest.mark.parametrize(
    "vectors",
    [np.zeros((30, 4)), np.ones((30, 1)), np.arange(30.0)[:, None], np.eye(30) * 1e30],
    ids=["zeros", "equal", "a line", "huge"],
)
@pytest.mark.parametrize("distance", ["cos", "l2"])
def test_degenerate_vectors_are_shown(vectors, distance):
    options = replace(QUICK, map="tsne", distance=distance)
    view = view_of(file(vectors, np.arange(30) % 5), options=options)
    points = np.array([view["map"]["x"], view["map"]["y"]])
    assert ((points >= 0) & (points <= 1)).all()


@pytest.mark.parametrize("queries", [60, 30])
def test_items_keep_their_rows_and_paths_where_others_are_left_out(clustered, rng, queries):
    X, labels = clustered
    second, third = (rng.permuted(X, axis=0) for _ in range(2))
    X[[0, 7]], second[20], third[33] = np.nan, np.inf, np.nan
    data, *others = (
        file(each, labels, names(60)) if queries == 60 else shop(each, labels, queries, names(60))
        for each in (X, second, third)
    )
    view = view_of(data, *others, options=replace(QUICK, drop_nonfinite=True))
    assert view["result"]["checks"]["nonfinite_rows"] == 2
    assert view["warnings"][0] == "rows with NaN or Inf, left out: 2"
    assert "items with NaN or Inf in another file only, left out: 2" in view["warnings"]
    items = view["items"]
    rows = [row + queries * side for row, side in zip(items["row"], items["side"], strict=True)]
    assert sorted(rows) == [n for n in range(60) if n not in (0, 7, 20, 33)]
    assert items["path"] == [names(60)[n] for n in rows]
    assert items["class"] == [labels[n] for n in rows]


@pytest.mark.parametrize("wrong", [{"map": "umap"}, {"distance": "cosine"}])
def test_maps_and_distances_that_do_not_exist_are_refused(wrong):
    with pytest.raises(DmlError, match=f"{next(iter(wrong.values()))!r} is not"):
        Options(**wrong)


def test_no_map_and_no_nmi_where_they_are_not_wanted(clustered):
    view = view_of(file(*clustered), options=Options(nmi=False, map="none"))
    assert view["map"] is None
    assert "nmi" not in view["result"]["distances"]["cos"]
    assert view["warnings"] == []


def test_long_k_means_is_left_out_and_said(clustered, monkeypatch):
    quick = view_of(file(*clustered), options=Options(map="none"))
    assert quick["result"]["distances"]["cos"]["nmi"]["mean"] > 0
    monkeypatch.setattr(clustering, "SPEED", 1000)
    view = view_of(file(*clustered), options=Options(map="none"))
    assert "nmi" not in view["result"]["distances"]["cos"]
    [warning] = view["warnings"]
    assert "--nmi" in warning
    forced = view_of(file(*clustered), options=Options(map="none", nmi=True))
    assert forced["result"]["distances"]["cos"]["nmi"] == quick["result"]["distances"]["cos"]["nmi"]


# Texts


HOSTILE = [
    "<script>alert(1)</script>",
    "../../etc/passwd",
    "x" * 10_000,
    "a\x00b\u202ec",
    "\udcff",
    "</script><!--",
    "",
]


def test_hostile_labels_and_paths_are_carried_as_text(rng):
    labels = np.array([HOSTILE[n % len(HOSTILE)] for n in range(42)])
    view = view_of(file(rng.standard_normal((42, 4)), labels, labels))
    texts = {*view["classes"]["name"], *view["items"]["path"]}
    assert {"<script>alert(1)</script>", "../../etc/passwd", "a\\x00b\\u202ec", "\\udcff"} <= texts
    assert max(map(len, texts)) == 300
    "".join(texts).encode()


def test_metadata_stand_apart_from_the_settings_of_the_evaluation(clustered):
    taken = {"gallery": {"vectors": "g.npy", "labels": "y.txt"}, "query": {}}
    source = SOURCE | {
        "taken": taken,
        "attrs": {"dmltool": "0.0.1", "seed": 5, "format": "mine", "x": None},
    }
    view = gather.gather(file(*clustered), source, (), QUICK)
    assert view["provenance"] == [
        ["file", "a.h5"],
        ["format", "hdf5"],
        ["gallery", "vectors from g.npy; labels from y.txt"],
        ["dmltool", "0.0.1"],
        ["seed", "5"],
        ["format", "mine"],
        ["x", "null"],
    ]
    text = render(view)
    about = text[text.index('id="about"') :]
    own, settings = about.split("Settings of the evaluation")
    assert "<dt>dmltool</dt><dd>0.0.1</dd>" in own
    assert f"<dt>dmltool</dt><dd>{version('dmltool')}</dd>" in settings


def test_long_texts_lose_their_middle():
    assert shown("a" * 300) == "a" * 300
    text = shown("<" + "a" * 9998 + ">")
    assert (len(text), text[0], text[-1], "…" in text) == (300, "<", ">", True)
    assert len(shown("\x00" * 1000)) == 300
    assert shown(b"\xff<b>") == "\ufffd<b>"


@pytest.mark.parametrize(
    "text", ["ن\u200cک", "क्\u200dष", "🐈\u200d⬛", "東京\u3000駅", "Vrai\xa0?"]
)
def test_texts_of_any_script_are_shown_as_they_are(text):
    assert shown(text) == text
    assert shown(f"{text}\u202e\u200b") == f"{text}\\u202e\\u200b"


def test_labels_get_the_names_of_the_file(clustered):
    X, labels = clustered
    named = file(X, labels, label_names=np.array([f"class <{c}>" for c in range(6)]))
    assert view_of(named)["classes"]["name"] == [f"class <{c}>" for c in range(6)]
    short = file(X, labels, label_names=np.array(["one"]))
    assert view_of(short)["classes"]["name"] == ["one", "1", "2", "3", "4", "5"]


def test_a_file_without_paths_has_rows_instead(clustered):
    view = view_of(file(*clustered), pictures=lambda path: 1 / 0)
    assert set(view["items"]["path"]) == {None}
    assert sorted(view["items"]["row"]) == list(range(60))
    assert view["thumbs"]["images"] == []


# Thumbnails


def test_rows_of_the_tabs_get_their_pictures_first(rng, monkeypatch):
    monkeypatch.setattr(sampling, "TAB", 3)
    monkeypatch.setattr(sampling, "RANDOM", 2)
    data = file(rng.standard_normal((400, 4)), np.arange(400) % 4, names(400))
    one = len(thumbs.thumbnails(["0.jpg"], noise).images[0])
    options = replace(QUICK, budget=80 * one)
    view = view_of(data, options=options, pictures=noise)
    wanted = {place for tab in view["tabs"].values() for place in tab}
    for place in wanted:
        query = view["queries"][place]
        assert all(view["items"]["thumb"][n] >= 0 for n in [query["item"], *query["near"]])
    assert sum(map(len, view["thumbs"]["images"])) <= 80 * one
    assert -1 in view["items"]["thumb"]


def test_without_pillow_there_is_text_and_a_warning(clustered, monkeypatch):
    monkeypatch.setattr(gather, "find_spec", lambda name: None)
    view = view_of(file(*clustered, names(60)), pictures=noise)
    assert view["thumbs"]["images"] == []
    assert "Pillow" in view["warnings"][0]


# Comparison


def test_a_comparison_says_what_ours_gained_whatever_the_order_of_rows(clustered, rng):
    X, labels = clustered
    better = (np.eye(6, 8)[labels] * 2 + X).astype(np.float32)
    order = rng.permutation(60)
    ours = file(better, labels, names(60), "runs/b/embeddings.h5")
    theirs = file(X[order], labels[order], names(60)[order], "runs/a/embeddings.h5")
    view = view_of(ours, theirs)
    [found] = view["compare"]
    assert (view["title"], found["file"]) == ("b/embeddings.h5", "a/embeddings.h5")
    alone = view_of(file(X, labels, names(60)))
    ranks = {alone["items"]["row"][q["item"]]: q for q in alone["queries"]}
    mine = {view["items"]["row"][q["item"]]: q["rank"] for q in view["queries"]}
    gained = {r for r in mine if mine[r] == 1 and ranks[r]["rank"] != 1}
    lost = {r for r in mine if mine[r] != 1 and ranks[r]["rank"] == 1}
    assert (found["gained"], found["lost"]) == (len(gained), len(lost))
    assert len(gained) > len(lost)
    rows = view["items"]["row"]
    flips = {rows[f["item"]]: f for f in found["flips"]}
    assert {r for r, f in flips.items() if f["kind"] == "gained"} == gained
    for row, flip in flips.items():
        assert (flip["rank"], flip["their_rank"]) == (mine[row], ranks[row]["rank"])
        near = [alone["items"]["row"][n] for n in ranks[row]["near"]]
        assert [rows[n] for n in flip["theirs"]] == near
        assert flip["their_score"] == ranks[row]["score"]
    scores = found["distances"]["cos"]["recall@1"]
    assert scores["difference"] == pytest.approx((len(gained) - len(lost)) / 60)


def test_files_of_other_items_are_not_compared(clustered):
    X, labels = clustered
    with pytest.raises(DmlError, match=r"test has 60 items in a.h5 and 50"):
        view_of(file(X, labels), file(X[:50], labels[:50]))


def test_files_with_other_lists_of_names_are_compared_by_name(clustered):
    X, labels = clustered
    classes = np.array([f"c{n}" for n in range(6)])
    view = view_of(
        file(X, labels, label_names=classes), file(X, 5 - labels, label_names=classes[::-1])
    )
    assert (view["compare"][0]["gained"], view["compare"][0]["lost"]) == (0, 0)
    assert view["compare"][0]["file"] == "a.h5"
