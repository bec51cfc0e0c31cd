"""ROC-AUC and average precision against scikit-learn, with and without ties."""

import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from deberta_ds.train.evaluate import areas


@pytest.mark.parametrize("levels", [2, 5, 1000, 1 << 40])
def test_areas_are_scikit_learns(levels):
    generator = torch.Generator().manual_seed(levels)
    labels = torch.rand(3000, generator=generator) < 0.15
    scores = torch.randint(levels, (3000,), generator=generator) / levels + 0.3 * labels
    roc_auc, precision = areas(labels, scores)
    assert roc_auc == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert precision == pytest.approx(average_precision_score(labels, scores), abs=1e-12)


def test_all_scores_equal():
    labels = torch.tensor([True, False, False, False])
    assert areas(labels, torch.zeros(4)) == (0.5, 0.25)
