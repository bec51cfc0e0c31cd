"""One gradient for both uses of a word table: the sum of what autograd makes of each."""

import torch
import torch.nn.functional as F

from deberta_ds.model.embeddings import WordEmbedding
from deberta_ds.model.table_gradient import TableGradient


def gradients(words, ids, labels, bias, gradient, times=1):
    vectors = words(ids, gradient=gradient)
    loss, *_ = words(torch.tanh(vectors), labels_T=labels, bias_V=bias, gradient=gradient, chunk=8)
    for _ in range(times):
        words.weight.grad = None
        loss.backward(retain_graph=True)
    return words.weight.grad


def test_both_uses_are_summed_as_autograd_sums_them():
    torch.manual_seed(0)
    words, bias = WordEmbedding(40, 6).double(), torch.randn(40, dtype=torch.float64)
    torch.nn.init.normal_(words.weight)
    ids = torch.tensor([3, 3, 3, 39, 0, 17])  # one word several times
    labels = torch.tensor([0, 39, 3, 3, 8, 20])
    vectors = words.weight[ids]
    loss = F.cross_entropy(torch.tanh(vectors) @ words.weight.t() + bias, labels, reduction="sum")
    exact, = torch.autograd.grad(loss, words.weight)
    for gradient in (None, TableGradient()):
        for times in (1, 2):  # of the same graph
            torch.testing.assert_close(gradients(words, ids, labels, bias, gradient, times), exact)


def test_a_look_up_alone_has_its_own_gradient():
    words = WordEmbedding(10, 4)
    torch.nn.init.normal_(words.weight)
    words(torch.tensor([1, 1, 5]), gradient=TableGradient()).sum().backward()
    expected = torch.zeros(10, 4)
    expected[1], expected[5] = 2, 1
    assert torch.equal(words.weight.grad, expected)


def test_a_table_that_is_not_trained_gets_none():
    words = WordEmbedding(10, 4).requires_grad_(False)
    torch.nn.init.normal_(words.weight)
    assert not words(torch.tensor([1]), gradient=TableGradient()).requires_grad
