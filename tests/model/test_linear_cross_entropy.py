"""The chunked head against float64 F.cross_entropy, and its draws against the softmax."""

import pytest
import torch
import torch.nn.functional as F

from deberta_ds.model import linear_cross_entropy as head
from deberta_ds.model.linear_cross_entropy import linear_cross_entropy

ROWS, HIDDEN, VOCAB = 37, 24, 211


def _inputs(dtype=torch.float32, rows=ROWS):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64) * 0.3
    bias = torch.randn(VOCAB, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 200, (rows,), generator=generator)
    uniforms = torch.rand(rows, generator=generator)
    leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight, bias)]
    return leaves, labels, uniforms


def _oracle(leaves, labels, valid=VOCAB):
    leaves = [x.detach().double().requires_grad_() for x in leaves]
    logits = leaves[0] @ leaves[1][:valid].t() + leaves[2][:valid]
    loss = F.cross_entropy(logits, labels, reduction="sum")
    return loss, torch.autograd.grad(loss, leaves), logits


@pytest.fixture(params=["kept", "recomputed"])
def products(request, monkeypatch):
    """Both ways of backward: products kept from forward, and computed again."""
    if request.param == "recomputed":
        monkeypatch.setattr(head, "_SAVED_LOGITS", 0)


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("chunk", [None, 50, 64, 211])
@pytest.mark.parametrize("valid", [None, 203])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-13)])
def test_loss_and_gradients(chunk, valid, dtype, tolerance):
    leaves, labels, _ = _inputs(dtype)
    loss, correct, ids = linear_cross_entropy(*leaves, labels, chunk=chunk, valid_vocab=valid)
    expected, gradients, logits = _oracle(leaves, labels, valid or VOCAB)
    assert ids is None
    assert torch.allclose(loss.double(), expected, rtol=tolerance)
    assert correct == (logits.argmax(-1) == labels).sum()
    for ours, right in zip(torch.autograd.grad(3 * loss, leaves), gradients, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - 3 * right).norm() <= tolerance * 3 * right.norm()


@pytest.mark.parametrize("wrong", [-101, -1, 203, 210, VOCAB, 10**6])
def test_a_label_that_cannot_be_predicted_is_an_error(wrong):
    """It gave a loss like any other, and a gradient that pulled toward no id."""
    leaves, labels, _ = _inputs()
    labels[5] = wrong
    with pytest.raises(ValueError, match="not all in 0..202"):
        linear_cross_entropy(*leaves, labels, valid_vocab=203)


def test_bf16_is_as_good_as_plain_bf16():
    leaves, labels, _ = _inputs(torch.bfloat16)
    _, gradients, _ = _oracle(leaves, labels)
    plain = F.cross_entropy(
        (leaves[0] @ leaves[1].t() + leaves[2]).float(), labels, reduction="sum")
    loss = linear_cross_entropy(*leaves, labels, chunk=50)[0]
    assert loss.dtype == torch.float32
    ours_all, theirs_all = torch.autograd.grad(loss, leaves), torch.autograd.grad(plain, leaves)
    for ours, theirs, right in zip(ours_all, theirs_all, gradients, strict=True):
        assert (ours.double() - right).norm() <= 1.2 * (theirs.double() - right).norm()


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("chunk", [None, 50])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("valid", [None, 203])
def test_draw_is_the_inverse_cdf(chunk, temperature, valid):
    leaves, labels, uniforms = _inputs(torch.float64)
    uniforms[:2] = torch.tensor([0.0, 1.0 - 2.0**-24])
    _, _, ids = linear_cross_entropy(
        *leaves, labels, uniforms, temperature=temperature, chunk=chunk, valid_vocab=valid)
    logits = _oracle(leaves, labels, valid or VOCAB)[2]
    cumulative = (logits / temperature).softmax(-1).cumsum(-1)
    expected = torch.searchsorted(cumulative, uniforms.double()[:, None], right=True)[:, 0]
    assert torch.equal(ids, expected)


@pytest.mark.parametrize("chunk", [None, 50])
def test_no_rows_give_zero_gradients(chunk):
    leaves, labels, uniforms = _inputs(rows=0)
    loss, correct, ids = linear_cross_entropy(*leaves, labels, uniforms, chunk=chunk)
    loss.backward()
    assert loss == 0 and correct == 0 and ids.shape == (0,)
    assert all(leaf.grad.abs().sum() == 0 for leaf in leaves)


@pytest.mark.usefixtures("products")
def test_autocast_and_repeatability():
    leaves, labels, uniforms = _inputs()
    results = []
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, _, ids = linear_cross_entropy(*leaves, labels, uniforms, chunk=50)
        results.append((loss, ids, *torch.autograd.grad(loss, leaves)))
    assert results[0][2].dtype == torch.float32 and results[0][3].dtype == torch.float32
    assert all(torch.equal(first, again) for first, again in zip(*results, strict=True))


@pytest.mark.usefixtures("products")
def test_autocast_equals_a_head_of_half_precision():
    """The table is cast chunk by chunk; the result is that of a table cast at once, whose
    gradient is rounded to the table's type."""
    leaves, labels, _ = _inputs()
    narrow = [x.detach().bfloat16().requires_grad_() for x in leaves[:2]] + [leaves[2]]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(*leaves, labels, chunk=50)[0]
    whole = linear_cross_entropy(*narrow, labels, chunk=50)[0]
    assert loss == whole
    pairs = zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(whole, narrow), strict=True)
    assert all(torch.equal(ours.to(theirs.dtype), theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("rows", [1, 100, 1229, 4915, 9_830, 100_000])
def test_chunks_on_a_gpu_are_aligned(rows):
    """Products over another number of ids take an unaligned path there, several times slower."""
    assert head.chunk_for(rows, "cuda") % 128 == 0


def test_of_equal_logits_the_first_id_is_the_guess_and_samples_are_by_float64(monkeypatch):
    """Of several chunks as of one; an fp32 sum over 128,000 ids would bias rare ones."""
    monkeypatch.setattr(head, "chunk_for", lambda rows, device: 50)
    sums, kinds = head.running_sums, set()
    monkeypatch.setattr(head, "running_sums",
                        lambda values: kinds.add(values.dtype) or sums(values))
    for label, right in ((0, 3), (150, 0)):
        _, correct, _ = linear_cross_entropy(
            torch.zeros(3, HIDDEN), torch.zeros(VOCAB, HIDDEN), torch.zeros(VOCAB),
            torch.full((3,), label), uniforms_T=torch.rand(3), temperature=1.0)
        assert correct.item() == right
    assert kinds == {torch.float64}
