"""Miners: each trains with the losses that take it, and changes what these see."""

import math

import pytest
import torch

from retrieval.errors import DmlError
from tests.trainer.losses.references import loop_multi_similarity, unit
from trainer.losses import build
from trainer.losses.miners import MINERS, add_miner, check
from trainer.losses.pml import classes

CLASSES, DIM = 5, 6


def batch(n=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, DIM, dtype=torch.float64, generator=generator)
    return z, torch.arange(n) % CLASSES


def mined(loss, miner, options=None, **loss_options):
    made = build(loss, CLASSES, DIM, **loss_options).double()
    add_miner(made, loss, miner, options or {})
    return made


def cosines(z):
    rows = [unit(row) for row in z.tolist()]
    return [[sum(a * b for a, b in zip(x, y, strict=True)) for y in rows] for x in rows]


@pytest.mark.parametrize("name", [*MINERS.names(), *(f"pml:{name}" for name in classes("miner"))])
@pytest.mark.parametrize("loss", ["triplet", "margin", "multi_similarity", "contrastive", "snca"])
def test_every_miner_trains_with_every_loss_of_pairs(name, loss):
    made = mined(loss, name)
    z, labels = batch()
    torch.manual_seed(0)
    value = made(z.requires_grad_(), labels)
    value.backward()
    assert value.isfinite()
    assert z.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in made.parameters())


def test_every_entry_has_a_summary_of_one_line():
    for entry in MINERS:
        assert entry.summary
        assert len(entry.summary) < 80


@pytest.mark.parametrize("epsilon", [0.05, 0.1, 0.4])
def test_multi_similarity_keeps_the_pairs_of_its_paper(epsilon):
    """Eqs. 7 and 8 of Wang et al., CVPR 2019, and the loss over what they leave."""
    z, labels = batch()
    s, y = cosines(z), labels.tolist()
    pairs = set()
    for i in range(len(y)):
        same = [j for j in range(len(y)) if j != i and y[j] == y[i]]
        other = [j for j in range(len(y)) if y[j] != y[i]]
        pairs |= {(i, j) for j in other if s[i][j] > min(s[i][k] for k in same) - epsilon}
        pairs |= {(i, j) for j in same if s[i][j] < max(s[i][k] for k in other) + epsilon}
    every = len(y) * (len(y) - 1)
    assert 0 < len(pairs) < every
    loss = mined("multi_similarity", "multi_similarity", {"epsilon": epsilon})
    parts = loss.parts(z, labels)
    expected = loop_multi_similarity(z.tolist(), y, 2, 50, 0.5, pairs)
    found = parts["tightness"].item(), parts["contrastive"].item()
    assert found == pytest.approx(expected, rel=1e-10)


def test_triplet_with_semihard_negatives_is_facenets():
    """Schroff et al., CVPR 2015: squared distances, negatives farther than the positive."""
    z, labels = batch()
    y, s = labels.tolist(), cosines(z)
    squared = [[2 - 2 * value for value in row] for row in s]
    terms = []
    for a in range(len(y)):
        for p in range(len(y)):
            for n in range(len(y)):
                if a == p or y[a] != y[p] or y[a] == y[n]:
                    continue
                gap = squared[a][n] - squared[a][p]
                if 0 < gap <= 0.2:
                    terms.append(0.2 - gap)
    assert terms
    distance = {"name": "LpDistance", "power": 2}
    loss = mined("triplet", "semihard", {"distance": distance}, distance=distance, margin=0.2)
    assert loss(z, labels).item() == pytest.approx(math.fsum(terms) / len(terms), rel=1e-9)


def test_triplet_with_the_hardest_of_the_batch_is_that_of_hermans():
    """Hermans et al., 2017, batch hard: softplus(farthest positive - nearest negative)."""
    z, labels = batch()
    y, rows = labels.tolist(), z.tolist()
    terms = []
    for a in range(len(y)):
        farthest = max(
            math.dist(rows[a], rows[p]) for p in range(len(y)) if p != a and y[p] == y[a]
        )
        nearest = min(math.dist(rows[a], rows[n]) for n in range(len(y)) if y[n] != y[a])
        terms.append(math.log1p(math.exp(farthest - nearest)))
    distance = {"name": "LpDistance", "normalize_embeddings": False}
    options = {"distance": distance, "smooth_loss": True, "margin": 0}
    loss = mined("triplet", "batch_hard", {"distance": distance}, **options)
    assert loss(z, labels).item() == pytest.approx(math.fsum(terms) / len(terms), rel=1e-9)


def test_margin_learns_a_boundary_for_each_class():
    """Wu et al., ICCV 2017, on all triplets that a miner with fixed random numbers chose."""
    z, labels = batch()
    loss = mined("margin", "distance_weighted")
    assert [tuple(p.shape) for p in loss.parameters()] == [(CLASSES,)]
    beta = torch.linspace(0.9, 1.3, CLASSES, dtype=torch.float64)
    loss.loss.beta.data = beta.clone()
    torch.manual_seed(4)
    a, p, n = (index.tolist() for index in loss.miner(z, labels))
    total, active = 0.0, 0
    rows = [unit(row) for row in z.tolist()]
    for i, j, k in zip(a, p, n, strict=True):
        edge = beta[labels[i]].item()
        terms = (0.2 + math.dist(rows[i], rows[j]) - edge, 0.2 + edge - math.dist(rows[i], rows[k]))
        total += sum(max(0.0, term) for term in terms)
        active += sum(term > 0 for term in terms)
    torch.manual_seed(4)
    assert loss(z, labels).item() == pytest.approx(total / active, rel=1e-9)


def test_the_same_seed_chooses_the_same():
    loss, (z, labels) = mined("margin", "distance_weighted"), batch()
    values = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        values.append(loss(z, labels).item())
    assert values[0] == values[1] != values[2]


def test_adding_a_miner_draws_no_random_numbers():
    loss = build("triplet", CLASSES, DIM)
    before = torch.get_rng_state()
    add_miner(loss, "triplet", "distance_weighted", {})
    assert torch.equal(torch.get_rng_state(), before)
    assert not loss.state_dict()


@pytest.mark.parametrize("labels", [[0] * 6, list(range(5))])
@pytest.mark.parametrize("loss", ["triplet", "margin", "multi_similarity", "contrastive"])
@pytest.mark.parametrize("miner", ["multi_similarity", "semihard", "batch_hard"])
def test_batches_in_which_a_miner_finds_nothing_add_nothing(loss, miner, labels):
    made = mined(loss, miner)
    z = torch.randn(len(labels), DIM, dtype=torch.float64, requires_grad=True)
    value = made(z, torch.tensor(labels))
    value.backward()
    assert value.item() == 0
    assert not z.grad.any()


@pytest.mark.parametrize("loss", ["ce", "spce", "group", "center", "ranked_list"])
def test_a_loss_that_takes_no_miner_says_so(loss):
    with pytest.raises(DmlError) as caught:
        check(loss, {}, "semihard")
    assert repr(loss) in caught.value.what
    assert "triplet" in caught.value.fix


@pytest.mark.parametrize(
    ("miner", "options", "near"),
    [
        ("semi_hard", {}, "--miner semihard"),
        ("pml:MultiSimilarMiner", {}, "pml:MultiSimilarityMiner"),
        ("pml:BaseMiner", {}, "--miner pml:"),
        ("multi_similarity", {"epsilom": 1}, "loss.miner_options.epsilon"),
        ("semihard", {"distance": "Cosine"}, "CosineSimilarity"),
        ("semihard", {"distance": {"name": "LpDistance", "powr": 2}}, "powr"),
    ],
)
def test_wrong_names_of_miners_and_options_suggest_the_nearest(miner, options, near):
    with pytest.raises(DmlError) as caught:
        check("triplet", {}, miner, options)
    assert near in f"{caught.value.why} {caught.value.fix}"


@pytest.mark.parametrize(
    ("loss", "options", "miner", "given"),
    [
        ("soft_triple", {"gamma": 0}, "", {}),
        ("triplet", {}, "easy_positive", {"allowed_pos_range": [1]}),
        ("triplet", {}, "histogram", {"pos_per_bin": 0}),
    ],
)
def test_values_that_the_library_stumbles_over_are_refused(loss, options, miner, given):
    with pytest.raises(DmlError, match="refuses its options") as caught:
        check(loss, options, miner, given)
    assert next(iter({**options, **given})) in caught.value.fix


def test_the_name_of_an_object_is_a_text():
    with pytest.raises(DmlError, match="There is no distance '3'"):
        check("triplet", {"distance": {"name": 3}})
