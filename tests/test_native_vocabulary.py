"""The vocabulary's loss in C (bf16, AMX) against float64, and against torch's own operators."""

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import chisquare

from deberta_ds import native
from deberta_ds.model import native_vocabulary
from deberta_ds.model.linear_cross_entropy import linear_cross_entropy

IS_HERE = native.library() is not None and native.has("amx")
pytestmark = pytest.mark.skipif(not IS_HERE, reason="needs AMX and a C compiler")
HALF, SINGLE = torch.bfloat16, torch.float32


def leaves_and_labels(rows, size, words, table=SINGLE, valid=None):
    torch.manual_seed(rows)
    leaves = [torch.randn(rows, size).to(HALF), (torch.randn(words, size) * 0.3).to(table),
              torch.randn(words)]
    return [x.requires_grad_() for x in leaves], torch.randint(0, valid or words, (rows,))


def exact(leaves, labels, valid):
    """In float64, of the numbers that are multiplied: the table is cast to bf16."""
    hidden, weight, bias = leaves
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight.to(HALF), bias)]
    logits = leaves[0] @ leaves[1][:valid].t() + leaves[2][:valid]
    loss = F.cross_entropy(logits, labels, reduction="sum")
    return loss, torch.autograd.grad(loss, leaves), logits


SHAPES = [(1, 8, 50, 50, 16), (70, 48, 1000, 960, 256), (257, 96, 5000, 5000, 1024),
          (513, 64, 3001, 3001, 900), (40, 128, 700, 700, 4096)]


@pytest.mark.parametrize("rows, size, words, valid, chunk", SHAPES)
@pytest.mark.parametrize("table", [SINGLE, HALF])
def test_is_the_formula(rows, size, words, valid, chunk, table, monkeypatch):
    leaves, labels = leaves_and_labels(rows, size, words, table, valid)
    expected, gradients, logits = exact(leaves, labels, valid)
    loss, correct, ids = linear_cross_entropy(*leaves, labels, torch.rand(rows), chunk=chunk,
                                              valid_vocab=valid)
    assert abs(loss / expected - 1) < 1e-6
    assert correct == (logits.argmax(-1) == labels).sum()
    assert 0 <= ids.min() and ids.max() < valid
    for mine, right in zip(torch.autograd.grad(3 * loss, leaves), gradients, strict=True):
        error = (mine.double() - 3 * right).norm() / (3 * right).norm()
        assert error < (2 / 256 if mine.dtype == HALF else 2e-3)  # rounded twice, or summed
        assert not mine[valid:].any() or len(mine) == rows


def test_labels_may_be_of_32_bits():
    leaves, labels = leaves_and_labels(70, 48, 1000)
    losses = [linear_cross_entropy(*leaves, each)[0] for each in (labels, labels.int())]
    assert losses[0] == losses[1]


def test_equal_logits_count_the_lowest_id():
    hidden, bias = torch.ones(3, 32, dtype=HALF), torch.zeros(600)
    weight, labels = torch.ones(600, 32), torch.tensor([0, 1, 599])
    assert linear_cross_entropy(hidden, weight, bias, labels, chunk=256)[1] == 1


@pytest.mark.parametrize("temperature", [1.0, 0.8])
@pytest.mark.parametrize("chunk", [32, 256])
def test_draws_follow_the_softmax(temperature, chunk):
    draws, words = 20_000, 256
    torch.manual_seed(5)
    hidden = torch.randn(1, 32).to(HALF).expand(draws, 32)
    weight, labels = torch.randn(words, 32) * 0.2, torch.zeros(draws, dtype=torch.int64)
    ids = linear_cross_entropy(hidden, weight, torch.zeros(words), labels, torch.rand(draws),
                               temperature, chunk=chunk)[2]
    logits = hidden[0].double() @ weight.to(HALF).double().t() / temperature
    expected = logits.softmax(-1) * draws
    assert chisquare(torch.bincount(ids, minlength=words).numpy(),
                     expected.numpy()).pvalue > 1e-3


def test_any_number_of_threads_gives_the_same(monkeypatch):
    leaves, labels = leaves_and_labels(300, 64, 9000)
    uniforms, found = torch.rand(300), []
    for parts in (1, 5):
        monkeypatch.setattr(native, "parts_of", lambda rows, least, parts=parts: parts)
        loss, correct, ids = linear_cross_entropy(*leaves, labels, uniforms, chunk=500)
        found.append([loss, correct, ids, *torch.autograd.grad(loss, leaves)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_hidden(bad):
    leaves, labels = leaves_and_labels(40, 32, 500)
    with torch.no_grad():
        leaves[0][7, 3] = bad
    assert not linear_cross_entropy(*leaves, labels)[0].isfinite()


def test_without_the_kernels_the_loss_is_the_same(monkeypatch):
    leaves, labels = leaves_and_labels(100, 64, 3000)
    fused = linear_cross_entropy(*leaves, labels)[0]
    monkeypatch.setattr(native_vocabulary, "fits", lambda *tensors: False)
    assert abs(fused / linear_cross_entropy(*leaves, labels)[0] - 1) < 1e-3
