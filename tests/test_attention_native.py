"""Attention in C (bf16, AMX) against float64, and against torch's own operators."""

import pytest
import torch
from attention_cases import HOLES, PACKED, SMALL_BUCKETS, V1, V3, Case, relative_errors, run

from deberta_ds import native
from deberta_ds.model.attention import attend, native_spans

IS_HERE = native.library() is not None and native.has_amx()
pytestmark = pytest.mark.skipif(not IS_HERE, reason="needs AMX and a C compiler")
HALF = torch.bfloat16


@pytest.fixture
def calls(monkeypatch):
    """The names of the kernels that were called."""
    called, run_kernel = [], native_spans._Call.run

    def counted(self, name, *rest):
        called.append(name)
        run_kernel(self, name, *rest)

    monkeypatch.setattr(native_spans._Call, "run", counted)
    return called


def ones(batch, length):
    return torch.ones(batch, length, dtype=torch.int32)


CASES = [
    *(Case(V3, ones(2, length), dropout=0.1) for length in (1, 31, 32, 33, 129, 512)),
    *(Case(SMALL_BUCKETS, ones(1, 300), terms=terms) for terms in ("both", "key", "query", "none")),
    *(Case(V3, ones(1, 70), size=size, dropout=0.1) for size in (8, 48, 64, 128)),
    Case(V1, PACKED[:, 72:], dropout=0.3),  # a mask, and queries without keys
    Case(V1, HOLES, dropout=0.1),
    Case(SMALL_BUCKETS, PACKED, dropout=0.5, size=64),  # spans of several lengths
    Case(V3, PACKED[[0, 1, 0, 0, 1, 2, 1]], heads=1),  # more chunks of rows than heads
    # the decoder's queries, several at one column, more than there are keys, a row without
    *(Case(V3, ones(2, 129), num_queries=50, terms=terms, dropout=0.1)
      for terms in ("both", "key", "query", "none")),
    Case(SMALL_BUCKETS, ones(3, 20), num_queries=70, size=48),
    Case(V1, PACKED, num_queries=90, dropout=0.3),
    Case(V3, HOLES, num_queries=7),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_the_formula_and_no_less_exact_than_torchs_operators(case, calls, monkeypatch):
    truth = run(case, "reference", torch.float64)
    found = run(case, "tiled", HALF)
    assert calls == ["attend_forward", "attend_backward"]
    again = run(case, "tiled", HALF)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    monkeypatch.setattr(native, "takes", lambda *tensors: False)
    fused, plain = (relative_errors(x, truth) for x in (found, run(case, "tiled", HALF)))
    print(fused, plain)
    assert max(fused) < 8e-3
    assert all(mine <= 1.05 * other for mine, other in zip(fused, plain, strict=True))


@pytest.mark.parametrize("case, dtype", [(Case(V3, ones(1, 513)), HALF),
                                         (Case(V3, ones(1, 40)), torch.float32)], ids=str)
def test_what_the_kernels_cannot_do_is_left_to_torch(case, dtype, calls):
    run(case, "tiled", dtype)
    assert not calls


def test_the_same_pairs_are_dropped_as_elsewhere(calls):
    case = Case(V3, ones(2, 100), dropout=0.4, terms="none", size=100)
    q, k = (x.to(HALF) for x in case.tensors()[:2])
    values = torch.eye(100, dtype=HALF).expand(2, 3, 100, 100)  # the context is the probabilities
    dropped = [attend(q, k, values, None, None, geometry=V3, segments=ones(2, 100), dropout=0.4,
                      seed=7, mode=mode) == 0 for mode in ("tiled", "reference")]
    assert calls == ["attend_forward"]
    assert torch.equal(*dropped)
    assert abs(dropped[0].float().mean() - 0.4) < 0.01


def test_softmax_of_any_range():
    """Scores from equal to hundreds apart: each probability is as exact as its type."""
    torch.manual_seed(0)
    scores = (torch.randn(64, 64) * torch.logspace(-3, 2.3, 64)[:, None]).to(HALF)
    q, k = scores[None, None] * 8, torch.eye(64, dtype=HALF)[None, None]  # 1 / sqrt(64) is exact
    found = attend(q, k, k, None, None, geometry=V3, segments=ones(1, 64), mode="tiled")
    found, exact = found[0, :, 0].double(), torch.softmax(scores.double(), -1)
    large = exact > 1e-30
    assert ((found - exact).abs() < 4e-3 * exact)[large].all()
    assert found[~large].max() < 1.1e-30


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("segments", [ones(2, 20), PACKED[:2, 55:75]])
def test_what_is_not_finite_is_not_hidden(bad, segments):
    case = Case(V3, segments)
    q, k, v, pos_key, pos_query, _ = (x.to(HALF) for x in case.tensors())
    q[0, 1, 3, 2] = bad
    out = attend(q, k, v, pos_key, pos_query, geometry=V3, segments=segments, mode="tiled")
    assert out[0, 3, 1].isnan().all()
    assert out.isnan().sum() == case.size


@pytest.mark.parametrize("segments, num_queries", [(ones(5, 70), None), (PACKED, None),
                                                   (PACKED, 40)])
def test_any_number_of_threads_gives_the_same(segments, num_queries, monkeypatch):
    case, found = Case(V3, segments, dropout=0.2, num_queries=num_queries), []
    for parts in (1, 5):
        monkeypatch.setattr(native, "parts_of", lambda rows, least, parts=parts: parts)
        found.append(run(case, "tiled", HALF))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_without_gradients_the_context_is_the_same():
    case = Case(V1, PACKED, dropout=0.1)
    with_gradients = run(case, "tiled", HALF)[0]
    inputs = [x.to(HALF) for x in case.tensors()[:5]]
    alone = attend(*inputs, geometry=V1, segments=PACKED, dropout=0.1, seed=5, mode="tiled")
    assert torch.equal(alone, with_gradients)


def test_operands_lie_as_the_model_has_them():
    """Heads side by side in a row of a projection, and a gradient that was expanded."""
    case = Case(V3, ones(2, 50), heads=2, size=32)
    flat, apart = [], []
    for x in case.tensors()[:3]:
        flat.append(x.to(HALF).transpose(1, 2).contiguous().transpose(1, 2).requires_grad_())
        apart.append(x.to(HALF).requires_grad_())
    found = []
    for leaves in (flat, apart):
        out = attend(*leaves, None, None, geometry=V3, segments=ones(2, 50), mode="tiled")
        found.append([out, *torch.autograd.grad(out.sum(), leaves)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_torchs_own_tiles_are_left_as_they_were():
    """Both libraries configure the processor's tiles; each must find them as it wants them."""
    case, (left, right) = Case(V3, ones(2, 64)), torch.randn(2, 192, 192).to(HALF)
    before = left @ right
    for _ in range(3):
        run(case, "tiled", HALF)
        assert torch.equal(left @ right, before)
