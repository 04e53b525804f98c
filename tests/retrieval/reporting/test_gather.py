"""What the report says, held against brute force; what a hostile file does to it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from cli import main
from retrieval import DmlError, clustering
from retrieval.embeddings import Embeddings, Split
from retrieval.formats.hdf5.writing import write
from retrieval.reporting import gather, layout, nearest, sampling, thumbs
from retrieval.reporting.gather import Options, shown

SOURCE = {"file": "a.h5", "format": "hdf5", "attrs": {"model": "m"}}
QUICK = Options(nmi=False, map="pca")


def file(vectors, labels, paths=None, name="a.h5", **more):
    split = Split(np.asarray(vectors), np.asarray(labels), paths)
    return Embeddings(Path(name), "hdf5", {"test": split}, **more)


def shop(vectors, labels, queries, paths=None):
    parts = {"query": slice(None, queries), "gallery": slice(queries, None)}
    splits = {
        name: Split(vectors[part], labels[part], None if paths is None else paths[part])
        for name, part in parts.items()
    }
    return Embeddings(Path("shop.h5"), "hdf5", splits)


def view_of(data, *others, options=QUICK, **more):
    view = gather.gather(data, SOURCE, others, options, **more)
    json.dumps(view, allow_nan=False)
    return view


def names(n):
    return np.array([f"{i:03}.jpg" for i in range(n)])


def brute(queries, gallery, q_labels, g_labels, distance, leave_out):
    """Per query: its rank and all others in order; of equals the wrong ones first."""
    rows, ranks = [], []
    for i, query in enumerate(queries.astype(object)):  # whole numbers of any size
        keys = []
        for j, item in enumerate(gallery.astype(object)):
            if leave_out and i == j:
                continue
            right = q_labels[i] == g_labels[j]
            key = sum((query - item) ** 2) if distance == "l2" else -_cosine(query, item)
            keys.append((key, bool(right), j))
        keys.sort()
        rows.append(keys)
        rights = [key for key, right, _ in keys if right]
        ranks.append(
            1 + sum(not right and key <= rights[0] for key, right, _ in keys) if rights else 0
        )
    return np.array(ranks), rows


def _cosine(a, b):
    """cos^2 times |query|^2 with the sign of the cosine: orders the items of one query exactly."""
    from fractions import Fraction

    dot, length = int(sum(a * b)), int(sum(b * b))
    return Fraction(dot * abs(dot), length) if length else Fraction(0)


@pytest.fixture(params=["leave-one-out", "query-gallery"])
def tied(request, rng):
    """Small whole numbers: ties in plenty, zero rows, copies, and classes of one item."""
    X = rng.integers(-2, 3, (70, 3)).astype(np.float32)
    X[5] = 0
    labels = rng.integers(0, 9, 70)
    labels[7] = 99  # nothing to find
    leave_out = request.param == "leave-one-out"
    data = file(X, labels, names(70)) if leave_out else shop(X, labels, 30, names(70))
    sides = (X, X, labels, labels) if leave_out else (X[:30], X[30:], labels[:30], labels[30:])
    return data, sides, leave_out


@pytest.mark.parametrize("distance", ["cos", "l2"])
def test_rows_are_those_of_exact_brute_force_and_ties_never_help(tied, distance):
    data, sides, leave_out = tied
    view = view_of(data, options=replace(QUICK, distance=distance))
    ranks, rows = brute(*sides, distance, leave_out)
    items = view["items"]
    assert view["total_queries"] == len(view["queries"]) == len(ranks)
    assert sorted(items["row"][q["item"]] for q in view["queries"]) == list(range(len(ranks)))
    for query in view["queries"]:
        row = items["row"][query["item"]]
        assert query["rank"] == ranks[row]
        expected = rows[row][:8]
        assert len(query["near"]) == len(expected)
        keys = {j: key for key, _, j in rows[row]}
        assert [keys[items["row"][n]] for n in query["near"]] == [key for key, _, _ in expected]
        mine = items["class"][query["item"]]
        assert [items["class"][n] == mine for n in query["near"]] == [r for _, r, _ in expected]
        assert query["near"] == list(dict.fromkeys(query["near"]))
        assert leave_out is False or query["item"] not in query["near"]
        q, g = sides[0][row].astype(float), sides[1].astype(float)
        near = g[[items["row"][n] for n in query["near"]]]
        if distance == "l2":
            assert query["score"] == pytest.approx(np.linalg.norm(near - q, axis=1), rel=1e-4)
        else:
            lengths = np.linalg.norm(near, axis=1) * np.linalg.norm(q)
            cosine = np.divide(near @ q, lengths, out=np.zeros(len(near)), where=lengths > 0)
            assert query["score"] == pytest.approx(cosine, abs=1e-4)


def test_rows_follow_the_ranks_where_rounding_would_not():
    """Two distances that differ in the last bit only: the engine knows, and the row obeys."""
    row = [[(1.0, 10), (3.0, 11)], [(1.0, 20), (2.0, 21)]]
    assert nearest._merged(*row, rank=1, k=8) == [(1.0, 10), (1.0, 20), (2.0, 21), (3.0, 11)]
    assert nearest._merged(*row, rank=2, k=8) == [(1.0, 20), (1.0, 10), (2.0, 21), (3.0, 11)]
    assert nearest._merged(*row, rank=3, k=8) == [(1.0, 20), (2.0, 21), (1.0, 10), (3.0, 11)]
    assert nearest._merged([], row[1], rank=0, k=1) == [(1.0, 20)]


def test_collapsed_embeddings_show_only_wrong_items(rng):
    view = view_of(file(np.ones((40, 4), np.float32), np.arange(40) % 2, names(40)))
    for query in view["queries"]:
        classes_near = [view["items"]["class"][n] for n in query["near"]]
        assert view["items"]["class"][query["item"]] not in classes_near
    assert view["tabs"]["best"] == []
    assert len(view["tabs"]["worst"]) == 40


def test_tabs_hold_the_worst_and_the_best_without_lone_queries(clustered):
    X, labels = clustered
    labels = labels.copy()
    labels[0] = 50
    view = view_of(file(X, labels, names(60)))
    ranks = [q["rank"] for q in view["queries"]]
    worst, best = ([ranks[n] for n in view["tabs"][tab]] for tab in ("worst", "best"))
    assert worst == sorted((r for r in ranks if r > 1), reverse=True)
    assert best == [1] * sum(r == 1 for r in ranks)
    assert sorted(view["tabs"]["random"]) == list(range(60))
    assert ranks.count(0) == 1


def test_the_sample_is_bounded_and_reaches_every_class(rng):
    ranks, codes = rng.integers(0, 50, 30_000), np.arange(30_000) % 900
    sample = sampling.choose(ranks, codes, rng.standard_normal(30_000), seed=3)
    assert len(sample.queries) == len(set(sample.queries.tolist())) == sampling.MOST
    assert set(codes[sample.queries].tolist()) == set(range(900))
    assert len(sample.tabs["random"]) == sampling.RANDOM
    again = sampling.choose(ranks, codes, rng.standard_normal(30_000), seed=3)
    assert sample.tabs["random"] == again.tabs["random"]


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


@pytest.mark.parametrize("distance", ["cos", "l2"])
def test_classes_are_measured_as_by_hand(clustered, distance):
    X, labels = clustered
    data = shop(X, labels, 20) if distance == "l2" else file(X, labels)
    view = view_of(data, options=replace(QUICK, distance=distance))
    columns = view["classes"]
    X = X.astype(float)
    units = X / np.linalg.norm(X, axis=1, keepdims=True) if distance == "cos" else X
    means = np.stack([units[labels == c].mean(0) for c in range(6)])
    if distance == "cos":
        directions = means / np.linalg.norm(means, axis=1, keepdims=True)
        apart = 1 - directions @ directions.T
        spread = [np.mean(1 - units[labels == c] @ directions[c]) for c in range(6)]
    else:
        apart = np.linalg.norm(means[:, None] - means[None], axis=-1)
        spread = [np.linalg.norm(X[labels == c] - means[c], axis=1).mean() for c in range(6)]
    np.fill_diagonal(apart, np.inf)
    assert columns["spread"] == pytest.approx(spread, rel=1e-3)
    assert columns["nearest"] == apart.argmin(1).tolist()
    assert columns["gap"] == pytest.approx(apart.min(1), rel=1e-3)
    assert columns["items"] == [10] * 6
    assert columns["name"] == list("012345")


def test_confused_pairs_count_what_the_rows_show(clustered):
    X, labels = clustered
    X, labels = np.vstack([X, X[:1]]), np.append(labels, 6)  # the last has nothing to find
    view = view_of(file(X, labels, names(61)))
    items, counted = view["items"]["class"], {}
    for query in view["queries"]:
        if query["rank"] > 1:
            pair = items[query["item"]], items[query["near"][0]]
            counted[pair] = counted.get(pair, 0) + 1
    assert {(p["a"], p["b"]): p["count"] for p in view["confused"]} == counted
    counts = [p["count"] for p in view["confused"]]
    assert counts == sorted(counts, reverse=True)
    rows = {q["item"]: (q["near"][0], q["score"][0]) for q in view["queries"]}
    for pair in view["confused"]:
        assert pair["share"] == pytest.approx(pair["count"] / 10)
        assert len(pair["examples"]) == min(3, pair["count"])
        for item, found, score in pair["examples"]:
            assert (items[item], items[found]) == (pair["a"], pair["b"])
            assert rows[item] == (found, pytest.approx(score, abs=1e-4))


def test_near_duplicates_are_the_nearest_pairs_of_different_classes(rng):
    X = rng.standard_normal((80, 5)).astype(np.float32)
    labels = np.arange(80) % 4
    X[41] = X[10]  # classes 1 and 2
    view = view_of(file(X, labels, names(80)), options=replace(QUICK, distance="l2"))
    rows = view["items"]["row"]
    a, b, score = view["duplicates"][0]
    assert {rows[a], rows[b]} == {10, 41}
    assert score == 0
    pairs = [frozenset((a, b)) for a, b, _ in view["duplicates"]]
    assert len(set(pairs)) == len(pairs)
    scores = [score for _, _, score in view["duplicates"]]
    assert scores == sorted(scores)


@pytest.mark.parametrize("most", [200_000, 500])
def test_histograms_are_of_all_pairs_or_of_a_fair_sample(clustered, most, monkeypatch):
    monkeypatch.setattr(sampling, "PAIRS", most)
    X, labels = clustered
    found = view_of(file(X, labels))["histograms"]["l2"]
    apart = np.linalg.norm(X[:, None].astype(float) - X[None], axis=-1)
    same, others = labels[:, None] == labels, ~np.eye(60, dtype=bool)
    edges = np.array(found["edges"])
    middles = (edges[1:] + edges[:-1]) / 2
    for name, pairs in (("positive", same & others), ("negative", ~same)):
        assert sum(found[name]) == pytest.approx(1, abs=1e-4)
        tolerance = 0.01 if most > 500 else 0.05
        assert middles @ found[name] == pytest.approx(apart[pairs].mean(), rel=tolerance)
    assert found["overlap"] == pytest.approx(
        np.minimum(found["positive"], found["negative"]).sum(), abs=1e-4
    )


def test_pairs_of_histograms_are_right_wrong_and_never_the_item_itself(tied):
    from retrieval.problem import from_embeddings

    data, (_, _, q_labels, g_labels), leave_out = tied
    problem = from_embeddings(data)
    right, wrong = sampling._pairs(problem, np.random.default_rng(0))
    same = q_labels[:, None] == g_labels[None]
    if leave_out:
        np.fill_diagonal(same, False)
    assert sorted(zip(*right, strict=True)) == sorted(zip(*np.nonzero(same), strict=True))
    different = q_labels[:, None] != g_labels[None]
    assert sorted(zip(*wrong, strict=True)) == sorted(zip(*np.nonzero(different), strict=True))


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


def test_the_map_keeps_classes_together_and_repeats(rng):
    labels = np.arange(120) % 3
    X = 8 * np.eye(3, 20)[labels] + rng.standard_normal((120, 20))
    name, points = layout.plane(X, np.arange(120), "l2", "tsne", 1)
    assert name == "t-SNE"
    apart = np.linalg.norm(points[:, None] - points[None], axis=-1)
    np.fill_diagonal(apart, np.inf)
    assert (labels[apart.argmin(1)] == labels).mean() > 0.95
    np.testing.assert_array_equal(points, layout.plane(X, np.arange(120), "l2", "tsne", 1)[1])


def test_points_that_are_all_the_same_are_no_cloud():
    X = np.full((60, 8), 0.1, np.float32)
    for distance in ("cos", "l2"):
        name, points = layout.plane(X, np.arange(60), distance, "tsne", 0)
        assert name == "PCA"
        assert (points == 0.5).all()


@pytest.mark.parametrize("wrong", [{"map": "umap"}, {"distance": "cosine"}])
def test_maps_and_distances_that_do_not_exist_are_refused(wrong):
    with pytest.raises(DmlError, match=f"There is no .* {next(iter(wrong.values()))!r}"):
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


def test_k_means_of_sop_is_waited_for_if_one_clustering_serves_both_distances():
    seconds, sop = clustering.estimated_seconds, (60_502, 512, 11_316)
    assert seconds(*sop, runs=3) < clustering.LONG < seconds(*sop, runs=6)
    assert seconds(8_131, 2048, 98, runs=60) < clustering.LONG


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


def test_long_texts_lose_their_middle():
    assert shown("a" * 300) == "a" * 300
    text = shown("<" + "a" * 9998 + ">")
    assert (len(text), text[0], text[-1], "…" in text) == (300, "<", ">", True)
    assert len(shown("\x00" * 1000)) == 300
    assert shown(b"\xff<b>") == "\ufffd<b>"


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


def noise(path):
    seed = int(path.split(".")[0])
    return np.random.default_rng(seed).integers(0, 255, (90, 120, 3)).astype(np.uint8)


def test_thumbnails_are_small_shared_and_within_the_budget(tmp_path):
    import base64
    import io

    paths = [f"{n % 40}.jpg" for n in range(80)]
    made = thumbs.thumbnails(paths, noise)
    assert len(made.images) == len(made.of) == 40
    assert max(made.of.values()) == 39
    data = base64.b64decode(made.images[0].partition(",")[2])
    assert Image.open(io.BytesIO(data)).size == (64, 48)
    less = thumbs.thumbnails(paths, noise, budget=sum(map(len, made.images[:10])))
    assert less.images == made.images[:10]
    assert set(less.of) == {f"{n}.jpg" for n in range(10)}
    same = thumbs.thumbnails(["1.jpg", "2.jpg"], lambda _: noise("1.jpg"))
    assert (len(same.images), same.of) == (1, {"1.jpg": 0, "2.jpg": 0})


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


def test_unreadable_images_are_counted_not_fatal(clustered):
    def some(path):
        if path.startswith("00"):
            raise DmlError(f"{path} cannot be read as an image.", "there is no such file")
        return None if path.startswith("01") else noise(path)

    view = view_of(file(*clustered, names(60)), pictures=some)
    [warning] = view["warnings"]
    assert "20 of 60" in warning
    assert warning.endswith(".jpg: there is no such image") or "cannot be read" in warning
    for path, thumb in zip(view["items"]["path"], view["items"]["thumb"], strict=True):
        assert (thumb == -1) == path.startswith(("00", "01"))


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


# The command


def call(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args], catch_exceptions=False)


@pytest.fixture
def photos(tmp_path, clustered):
    """embeddings.h5 with paths that lead to images, to nothing, and out of the folder."""
    X, labels = clustered
    root = tmp_path / "photos"
    root.mkdir()
    paths = [f"{n:03}.png" for n in range(60)]
    for n, path in enumerate(paths[:50]):
        Image.new("RGB", (80, 60), (n, 2 * n, 200)).save(root / path)
    Image.new("RGB", (80, 60), (255, 0, 0)).save(tmp_path / "secret.png")
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "deep").mkdir()
    paths[50:56] = [
        "../secret.png",
        str(tmp_path / "secret.png"),
        "link.png",
        "a\x00b",
        "deep",
        "deep/../000.png",
    ]
    target = tmp_path / "a.h5"
    write(target, {"test": Split(X, labels, np.array(paths))}, None, {"model": "m"})
    return target


def page_view(path):
    text = path.read_text(encoding="utf-8")
    found = text.split('id="view"', 1)[1].split(">", 1)[1].split("</script>", 1)[0]
    return json.loads(found)


def test_the_command_writes_one_page_and_prints_its_path(photos, tmp_path):
    out = tmp_path / "page.html"
    args = ("report", photos, "--out", out, "--no-nmi", "--map", "pca", "--distance", "l2")
    result = call(*args, "--images", tmp_path / "photos")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{out}\n"
    view = page_view(out)
    assert view["distance"] == "l2"
    assert view["result"]["source"]["attrs"]["model"] == "m"
    assert ["model", "m"] in view["provenance"]
    again = call(*args)
    assert again.exit_code == 1
    assert "exists already" in again.stderr
    assert call(*args, "--force").exit_code == 0
    assert page_view(out)["thumbs"]["images"] == []


def test_images_outside_the_folder_are_never_shown(photos, tmp_path):
    out = tmp_path / "page.html"
    result = call(
        "report", photos, "--out", out, "--no-nmi", "--map", "none", "--images", tmp_path / "photos"
    )
    view = page_view(out)
    pictured = {
        path
        for path, thumb in zip(view["items"]["path"], view["items"]["thumb"], strict=True)
        if thumb >= 0
    }
    assert pictured == {f"{n:03}.png" for n in range(50)} | {"deep/../000.png"}
    assert len(view["thumbs"]["images"]) == 50
    assert "9 of 60" in result.stderr


def test_inputs_are_not_overwritten_and_mistakes_are_named(photos, tmp_path):
    before = photos.read_bytes()
    quick = ("--no-nmi", "--map", "none")
    for args, code, words in (
        ((photos, "--out", photos, "--force"), 1, "read and written"),
        ((tmp_path / "none.h5",), 1, "none.h5"),
        ((photos, "--images", tmp_path / "nowhere"), 1, "no folder"),
        ((photos, "--run", tmp_path), 1, "not a run folder"),
        ((photos, "--compare", tmp_path / "none.h5"), 1, "none.h5"),
        ((photos, "--distance", "dot"), 2, "dot"),
        ((photos, "--map", "umap"), 2, "umap"),
    ):
        out = () if "--out" in args else ("--out", tmp_path / "page.html")
        result = call("report", *quick, *args, *out)
        assert (result.exit_code, words in result.stderr) == (code, True), result.stderr
        assert result.stdout == ""
    np.save(tmp_path / "x.npy", np.eye(4))
    np.save(tmp_path / "y.npy", np.array([0, 0, 1, 1]))
    args = ("report", tmp_path / "x.npy", "--labels", tmp_path / "y.npy", *quick)
    result = call(*args, "--out", tmp_path / "page.html", "--images", tmp_path)
    assert result.exit_code == 1
    assert "holds no paths" in result.stderr
    assert photos.read_bytes() == before
    assert not (tmp_path / "page.html").exists()


def test_a_failed_write_leaves_the_old_page(photos, tmp_path, monkeypatch):
    import os

    out = tmp_path / "page.html"
    out.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
    result = call("report", photos, "--out", out, "--no-nmi", "--map", "none", "--force")
    assert result.exit_code == 1
    assert "No space left" in result.stderr
    assert out.read_text() == "old"
    assert [path.name for path in tmp_path.glob(".page*")] == []


def test_queries_and_gallery_may_come_from_two_files(tmp_path, clustered):
    X, labels = clustered
    for name, part in (("q", slice(None, 20)), ("g", slice(20, None))):
        np.save(tmp_path / f"{name}.npy", X[part])
        np.save(tmp_path / f"{name}_labels.npy", labels[part])
    out = tmp_path / "page.html"
    result = call(
        "report",
        tmp_path / "q.npy",
        "--labels",
        tmp_path / "q_labels.npy",
        "--gallery",
        tmp_path / "g.npy",
        "--gallery-labels",
        tmp_path / "g_labels.npy",
        "--out",
        out,
        "--no-nmi",
        "--map",
        "none",
    )
    assert result.exit_code == 0, result.stderr
    view = page_view(out)
    assert view["result"]["protocol"] == "query-gallery"
    sides = view["items"]["side"]
    assert all(sides[q["item"]] == 0 for q in view["queries"])
    assert all(sides[n] == 1 for q in view["queries"] for n in q["near"])
    for n, (side, row) in enumerate(zip(sides, view["items"]["row"], strict=True)):
        assert view["items"]["class"][n] == labels[row + 20 * side]
