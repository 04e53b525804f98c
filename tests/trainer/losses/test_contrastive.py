"""The contrastive loss against loops over eq. 2 of Boudiaf et al., ECCV 2020."""

import pytest

from tests.trainer.losses.references import LABELS, distance, made, unit


def loop_contrastive(z, labels, margin):
    """Eq. 2."""
    n = len(z)
    tight = contrast = 0.0
    for i in range(n):
        for j in range(n):
            if labels[j] == labels[i]:
                tight += distance(z[i], z[j]) ** 2 / n
            else:
                contrast += max(0.0, margin - distance(z[i], z[j])) ** 2 / n
    return tight, contrast


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("margin", [0.5, 1.0, 2.5])
def test_contrastive_is_equation_2(exact, normalize, margin):
    z, labels = exact
    rows = [unit(row) for row in z.tolist()] if normalize else z.tolist()
    parts = made("contrastive", margin=margin, normalize=normalize).parts(z, labels)
    found = parts["tightness"].item(), parts["contrastive"].item()
    assert found == pytest.approx(loop_contrastive(rows, LABELS, margin), rel=1e-12)
