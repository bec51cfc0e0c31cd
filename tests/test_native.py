"""The fused CPU kernels against float64 autograd, and the same numbers without them."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F

from deberta_ds import native
from deberta_ds.errors import UserError
from deberta_ds.model.attention.dropout import drop_threshold
from deberta_ds.model.dropout import Dropout, ResidualNorm
from deberta_ds.model.keep import Keep, draw_keep

KEEP = Keep(123_456_789, 4_000_000_000, round(0.1 * 2**32))
HALF, SINGLE = torch.bfloat16, torch.float32


@pytest.fixture
def without_kernels(monkeypatch):
    monkeypatch.setattr(native, "takes", lambda *tensors: False)


def test_kernels_are_built_here():
    assert native.library() is not None


def norm_and_gradients(norm, update, hidden, out_grad, seed):
    torch.manual_seed(seed)
    leaves = [x.detach().clone().requires_grad_() for x in (update, hidden)]
    out, _ = norm(*leaves)
    return out, torch.autograd.grad(out, [*leaves, norm.weight, norm.bias], out_grad)


def distance(found, expected) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("rows, size", [(1, 7), (65, 100), (300, 384), (129, 1000)])
@pytest.mark.parametrize("kinds, within", [((SINGLE, SINGLE), 5e-7), ((HALF, SINGLE), 5e-7),
                                           ((HALF, HALF), 6e-3)])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_residual_norm_is_the_formula(rows, size, kinds, within, dropout):
    torch.manual_seed(rows)
    update, hidden = (torch.randn(rows, size).to(kind) for kind in kinds)
    out_grad = torch.randn(rows, size).to(kinds[1])
    norm = ResidualNorm(size, 1e-7, dropout).train()
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    if kinds == (HALF, HALF):
        norm.to(HALF)
    found, gradients = norm_and_gradients(norm, update, hidden, out_grad, seed=3)
    torch.manual_seed(3)
    grown = torch.ones(rows, size).double()
    if dropout:
        keep = draw_keep(dropout)
        grown = keep.mask(grown.float()).double() * keep.scale
    leaves = [x.detach().double().requires_grad_()
              for x in (update, hidden, norm.weight, norm.bias)]
    total = leaves[0] * grown + leaves[1]
    exact = F.layer_norm(total, (size,), leaves[2], leaves[3], 1e-7)
    assert distance(found, exact) < within
    for mine, right in zip(gradients, torch.autograd.grad(exact, leaves, out_grad.double()),
                           strict=True):
        # a 16-bit gradient is as exact as its type
        assert distance(mine, right) < (within if mine.dtype == SINGLE else 6e-3)


def test_without_kernels_the_same_elements_are_dropped(without_kernels):
    torch.manual_seed(0)
    update, hidden, out_grad = (torch.randn(70, 33) for _ in range(3))
    norm = ResidualNorm(33, 1e-7, 0.3).train()
    plain = norm_and_gradients(norm, update, hidden, out_grad, seed=5)
    native.takes = lambda *tensors: True
    fused = norm_and_gradients(norm, update, hidden, out_grad, seed=5)
    assert distance(fused[0], plain[0]) < 3e-7
    for mine, right in zip(fused[1], plain[1], strict=True):
        assert distance(mine, right) < 3e-7


def test_rows_come_out_alike_in_any_number_of_threads():
    update, hidden, out_grad = (torch.randn(515, 48) for _ in range(3))
    norm = ResidualNorm(48, 1e-7, 0.1).train()
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(norm_and_gradients(norm, update, hidden, out_grad, seed=1))
    finally:
        torch.set_num_threads(before)
    (one, one_gradients), (three, three_gradients) = found
    assert torch.equal(one, three)
    assert all(map(torch.equal, one_gradients[:2], three_gradients[:2]))
    for mine, other in zip(one_gradients[2:], three_gradients[2:], strict=True):
        torch.testing.assert_close(mine, other)


def test_a_forked_process_has_threads_of_its_own():
    before, rows = torch.get_num_threads(), []
    try:
        torch.set_num_threads(2)
        both = threading.Barrier(2)  # or one thread might do both parts
        native.over_rows(256, lambda *_: both.wait(20))
        child = os.fork()
        if not child:
            signal.alarm(20)
            native.over_rows(256, lambda first, last, _: rows.extend(range(first, last)))
            os._exit(len(set(rows)) != 256)
    finally:
        torch.set_num_threads(before)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(bad):
    update, hidden = torch.randn(4, 40), torch.randn(4, 40)
    update[1, 3] = bad
    out, _ = ResidualNorm(40, 1e-7, 0.0).train()(update, hidden)
    assert out[1].isnan().all() and out[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_dropout_keeps_its_share_and_the_mean(share):
    torch.manual_seed(0)
    layer, ones = Dropout(share).train(), torch.ones(1000, 1000)
    dropped = layer(ones)
    assert ((dropped == 0).float().mean() - share).abs() < 2e-3
    assert (dropped.mean() - 1).abs() < 3e-3
    # columns and rows are dropped independently of each other, and of the next draw
    kept, again = (dropped > 0).float(), (layer(ones) > 0).float()
    for other in (kept.roll(1, 1), kept.roll(1, 0), kept.roll(4, 1), again):
        both = (kept * other).mean()
        assert (both - (1 - share) ** 2).abs() < 2e-3
    assert layer.eval()(ones) is ones


def test_no_compiler_is_said_once_and_torch_computes(tmp_path):
    code = """if True:
        import logging, torch
        logging.basicConfig(level="INFO", format="%(message)s")
        from deberta_ds.model.dropout import ResidualNorm
        norm = ResidualNorm(8, 1e-7, 0.1).train()
        for _ in range(2):
            assert norm(torch.randn(3, 8), torch.randn(3, 8))[0].isfinite().all()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={"CC": "/bin/false", "XDG_CACHE_HOME": str(tmp_path), "PATH": ""})
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("could not be built (/bin/false: 1)") == 1


def test_runs_that_were_begun_with_torchs_operators_keep_them():
    ones = torch.ones(64, 64)
    torch.manual_seed(0)
    expected = F.dropout(ones, 0.2)
    try:
        native.follow(1)
        torch.manual_seed(0)
        assert torch.equal(Dropout(0.2).train()(ones), expected)
        norm = ResidualNorm(64, 1e-7, 0.2).train()
        torch.manual_seed(0)
        right = F.layer_norm(expected + ones, (64,), eps=1e-7)
        torch.testing.assert_close(norm(ones, ones)[0], right)
    finally:
        native.follow(native.RULES)
    with pytest.raises(UserError, match="CPU rules 6: this program knows 1 to 5"):
        native.follow(6)


@pytest.mark.parametrize("feature, dtype, first", [
    ("avx512", torch.float32, 3), ("avx512_bf16", torch.bfloat16, 4), ("avx2", torch.float32, 5)])
def test_vectors_multiply_in_runs_that_began_with_them(feature, dtype, first, monkeypatch):
    monkeypatch.setattr(native, "has", lambda asked: asked == feature)
    for rules in range(1, native.RULES + 1):
        monkeypatch.setattr(native, "_followed", rules)
        takes = [x for x in (torch.float32, torch.bfloat16) if native.multiplies(x)]
        assert takes == ([dtype] if rules >= first else [])


@pytest.mark.parametrize("dropout", [1 - 1e-10, 1 - 1e-12, 1 - 2**-53])
def test_a_rate_just_below_one_drops_nearly_all(dropout):
    torch.manual_seed(0)
    keep = draw_keep(dropout)
    assert 2.0**31 < keep.scale <= 2.0**32
    assert not keep.apply(torch.ones(1000)).isnan().any()
    assert drop_threshold(dropout) <= 2**31 - 1
