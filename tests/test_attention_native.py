"""Attention in C (bf16, fp32) against float64 and torch's own operators."""

import os
import subprocess
import sys

import pytest
import torch
from attention_cases import HOLES, PACKED, SMALL_BUCKETS, V1, V3, Case, relative_errors, run

from deberta_ds import native
from deberta_ds.model.attention import Geometry, attend, native_spans

HALF, FULL = torch.bfloat16, torch.float32
KINDS = {HALF: "bf16", FULL: "fp32"}  # as the kernels' names have them
LARGEST_ERROR = {HALF: 8e-3, FULL: 2e-6}
OF_TORCHS = {HALF: 1.05, FULL: 1.5}  # errors of some rounding of 1e-7 scatter


def needs(dtype, *values):
    """Parameters of a test of the kernels for this dtype, where they are."""
    has = native.library() is not None and native.multiplies(dtype)
    return pytest.param(*values, dtype, id=f"{'-'.join(map(str, values))}-{dtype}",
                        marks=pytest.mark.skipif(not has, reason="needs a C compiler, AVX-512 or "
                                                 "AVX2 for fp32, AMX or AVX-512-BF16 for bf16"))


def both(*values):
    return [needs(dtype, *values) for dtype in (HALF, FULL)]


@pytest.fixture
def calls(monkeypatch):
    """The names of the kernels that were called."""
    called, run_kernel = [], native.run_units

    def counted(name, *rest):
        called.append(name)
        run_kernel(name, *rest)

    monkeypatch.setattr(native, "run_units", counted)
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
    # distances that share rows of the table, in some spans and not in others
    *(Case(V3, ones(1, 400), terms=terms, num_queries=queries)
      for terms in ("both", "key", "query") for queries in (None, 40)),
    Case(SMALL_BUCKETS, torch.cat([PACKED, PACKED + 3 * (PACKED > 0)], 1), dropout=0.1, size=24),
    Case(Geometry(3, 2), ones(2, 333), num_queries=90, size=80),
]


@pytest.mark.parametrize("case, dtype", [one for case in CASES for one in both(case)])
def test_is_the_formula_and_no_less_exact_than_torchs_operators(case, dtype, calls, monkeypatch):
    truth = run(case, "reference", torch.float64)
    found = run(case, "tiled", dtype)
    tables = ["attend_table"] * {"both": 2, "key": 1, "query": 1}.get(case.terms, 0)
    assert calls == [f"{name}_{KINDS[dtype]}"
                     for name in ("attend_forward", "attend_backward", *tables)]
    again = run(case, "tiled", dtype)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    monkeypatch.setattr(native, "takes", lambda *tensors: False)
    fused, plain = (relative_errors(x, truth) for x in (found, run(case, "tiled", dtype)))
    print(fused, plain)
    assert max(fused) < LARGEST_ERROR[dtype]
    assert all(mine <= OF_TORCHS[dtype] * other for mine, other in zip(fused, plain, strict=True))


@pytest.mark.parametrize("length, dtype, rules", [
    (513, HALF, native.RULES), (513, FULL, native.RULES), (40, torch.float64, native.RULES),
    (40, FULL, 2), pytest.param(40, HALF, 3, marks=pytest.mark.skipif(
        native.library() is not None and native.has("amx"), reason="AMX came with rules 2"))],
    ids=str)
def test_what_the_kernels_cannot_do_is_left_to_torch(length, dtype, rules, calls, monkeypatch):
    """Nor does a run that began by earlier rules change its numbers."""
    monkeypatch.setattr(native, "_followed", rules)
    run(Case(V3, ones(1, length)), "tiled", dtype)
    assert not calls


@pytest.mark.parametrize("num_queries", [None, 30])
@pytest.mark.parametrize("geometry", [V3, SMALL_BUCKETS, V1], ids=str)
@pytest.mark.parametrize("dtype", [needs(FULL)])
def test_distances_that_share_a_row_change_no_context(geometry, num_queries, dtype, monkeypatch):
    case = Case(geometry, ones(2, 500), dropout=0.1, num_queries=num_queries)
    shared = run(case, "tiled", dtype)
    monkeypatch.setattr(native_spans, "_SHARED", 0.0)
    alone = run(case, "tiled", dtype)
    assert torch.equal(shared[0], alone[0])
    assert not torch.equal(shared[-1], alone[-1])  # of a table: summed up in another order
    assert max(relative_errors(shared, [x.double() for x in alone])) < 2e-6
    if native.has("avx512"):
        monkeypatch.undo()
        monkeypatch.setattr(native, "_followed", 4)  # a run that began without
        assert all(torch.equal(x, y) for x, y in zip(run(case, "tiled", dtype), alone, strict=True))


def test_on_processors_without_avx512(tmp_path):
    """This file's tests of fp32 again, with kernels compiled for AVX2."""
    if not (native.library() and (native.has("avx512") or native.has("avx2"))):
        pytest.skip("needs a C compiler and AVX2")
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CC", "cc")} "$@" -march=haswell\n')
    compiler.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "float32", __file__],
        env=os.environ | {"CC": str(compiler), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True, text=True)
    assert not done.returncode and " passed" in done.stdout, done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.parametrize("dtype", both())
def test_the_same_pairs_are_dropped_as_elsewhere(dtype, calls):
    case = Case(V3, ones(2, 100), dropout=0.4, terms="none", size=100)
    q, k = (x.to(dtype) for x in case.tensors()[:2])
    values = torch.eye(100, dtype=dtype).expand(2, 3, 100, 100)  # the context is the probabilities
    dropped = [attend(q, k, values, None, None, geometry=V3, segments=ones(2, 100), dropout=0.4,
                      seed=7, mode=mode) == 0 for mode in ("tiled", "reference")]
    assert calls == [f"attend_forward_{KINDS[dtype]}"]
    assert torch.equal(*dropped)
    assert abs(dropped[0].float().mean() - 0.4) < 0.01


@pytest.mark.parametrize("dtype", both())
def test_softmax_of_any_range(dtype):
    """Scores from equal to hundreds apart: each probability is as exact as its type."""
    torch.manual_seed(0)
    scores = (torch.randn(64, 64) * torch.logspace(-3, 2.3, 64)[:, None]).to(dtype)
    q, k = scores[None, None] * 8, torch.eye(64, dtype=dtype)[None, None]  # 1 / sqrt(64) is exact
    found = attend(q, k, k, None, None, geometry=V3, segments=ones(1, 64), mode="tiled")
    found, exact = found[0, :, 0].double(), torch.softmax(scores.double(), -1)
    large = exact > 1e-30
    assert ((found - exact).abs() < (4e-3 if dtype == HALF else 1e-5) * exact)[large].all()
    assert found[~large].max() < 1.1e-30


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("segments", [ones(2, 20), PACKED[:2, 55:75]])
@pytest.mark.parametrize("dtype", both())
def test_what_is_not_finite_is_not_hidden(bad, segments, dtype):
    case = Case(V3, segments)
    q, k, v, pos_key, pos_query, _ = (x.to(dtype) for x in case.tensors())
    q[0, 1, 3, 2] = bad
    out = attend(q, k, v, pos_key, pos_query, geometry=V3, segments=segments, mode="tiled")
    assert out[0, 3, 1].isnan().all()
    assert out.isnan().sum() == case.size


@pytest.mark.parametrize("segments, num_queries", [(ones(5, 70), None), (PACKED, None),
                                                   (PACKED, 40)])
@pytest.mark.parametrize("dtype", both())
def test_any_number_of_threads_gives_the_same(segments, num_queries, dtype, monkeypatch):
    case, found = Case(V3, segments, dropout=0.2, num_queries=num_queries), []
    for parts in (1, 5):
        monkeypatch.setattr(native, "parts_of", lambda rows, least, parts=parts: parts)
        found.append(run(case, "tiled", dtype))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", both())
def test_without_gradients_the_context_is_the_same(dtype):
    case = Case(V1, PACKED, dropout=0.1)
    with_gradients = run(case, "tiled", dtype)[0]
    inputs = [x.to(dtype) for x in case.tensors()[:5]]
    alone = attend(*inputs, geometry=V1, segments=PACKED, dropout=0.1, seed=5, mode="tiled")
    assert torch.equal(alone, with_gradients)


@pytest.mark.parametrize("segments", [ones(1, 40), PACKED, HOLES])
@pytest.mark.parametrize("dtype", both())
def test_positions_may_be_of_32_bits(segments, dtype):
    case = Case(V3, segments, num_queries=9)
    inputs = [x.to(dtype) for x in case.tensors()[:5]]
    long, short = [attend(*inputs, geometry=V3, segments=segments, mode="tiled",
                          query_positions_BQ=case.columns().to(kind))
                   for kind in (torch.int64, torch.int32)]
    assert torch.equal(long, short)


@pytest.mark.parametrize("dtype", both())
def test_operands_lie_as_the_model_has_them(dtype):
    """Heads side by side in a row of a projection, and a gradient that was expanded."""
    case = Case(V3, ones(2, 50), heads=2, size=32)
    flat, apart = [], []
    for x in case.tensors()[:3]:
        flat.append(x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2).requires_grad_())
        apart.append(x.to(dtype).requires_grad_())
    found = []
    for leaves in (flat, apart):
        out = attend(*leaves, None, None, geometry=V3, segments=ones(2, 50), mode="tiled")
        found.append([out, *torch.autograd.grad(out.sum(), leaves)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [needs(HALF)])
def test_torchs_own_tiles_are_left_as_they_were(dtype):
    """Both libraries configure the processor's tiles; each must find them as it wants them."""
    case, (left, right) = Case(V3, ones(2, 64)), torch.randn(2, 192, 192).to(dtype)
    before = left @ right
    for _ in range(3):
        run(case, "tiled", dtype)
        assert torch.equal(left @ right, before)
