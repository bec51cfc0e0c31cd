"""The paths without a gather, tiled and dense, against the reference in float64."""

import math

import pytest
import torch
from attention_cases import HOLES, PACKED, SMALL_BUCKETS, V1, V3, Case, relative_errors, run
from transformers import DebertaV2Config
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention

from deberta_ds.model.attention import Geometry, attend, tiled


def ones(batch, length):
    return torch.ones(batch, length, dtype=torch.int32)


# Short documents that end elsewhere in the next row, in spans of the same columns.
ALIKE = torch.tensor([[1] * 40 + [2] * 40 + [0] * 60, [1] * 30 + [2] * 50 + [0] * 60])
CASES = [
    Case(V3, ones(2, 1)),
    Case(V3, ones(2, 37)),
    Case(V3, ones(2, 128)),
    Case(V3, ones(1, 700), dropout=0.1),
    Case(SMALL_BUCKETS, ones(1, 601)),  # most columns are beyond the table's reach
    Case(SMALL_BUCKETS, ones(1, 333), terms="key"),
    Case(SMALL_BUCKETS, ones(1, 333), terms="query", dropout=0.2),
    Case(SMALL_BUCKETS, ones(2, 65), terms="none"),
    Case(V1, ones(2, 200), dropout=0.1),
    Case(SMALL_BUCKETS, PACKED, dropout=0.1),
    Case(V1, PACKED),
    Case(V1, HOLES, dropout=0.1),
    Case(V3, PACKED[:, 72:], dropout=0.1),  # short rows: all at once, under a mask
    Case(V3, ones(2, 200), num_queries=30),
    Case(SMALL_BUCKETS, PACKED, num_queries=30, dropout=0.1),
    Case(V1, HOLES, num_queries=30),
    Case(SMALL_BUCKETS, PACKED, num_queries=7, terms="key", size=64),
    Case(V1, PACKED[:, 55:150], num_queries=7, terms="query", size=128, heads=2, dropout=0.1),
    Case(V3, ALIKE, heads=1),
]
MODES = pytest.mark.parametrize("mode", ["tiled", "dense"])


@MODES
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference(case, mode):
    truth = run(case, "reference", torch.float64)
    assert max(relative_errors(run(case, mode, torch.float64), truth)) < 1e-14
    single = run(case, mode, torch.float32)
    assert max(relative_errors(single, truth)) < 2e-6
    again = run(case, mode, torch.float32)
    assert all(torch.equal(first, second) for first, second in zip(single, again, strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_random_packings(seed):
    generator = torch.Generator().manual_seed(seed)
    length = int(torch.randint(1, 700, (), generator=generator))
    cuts = torch.rand(2, length, generator=generator) < 4 / length
    segments = cuts.cumsum(1) + 1
    segments[1, length - int(torch.randint(0, length, (), generator=generator)) :] = 0
    case = Case(V3 if seed % 2 else V1, segments, dropout=0.1 * (seed % 3), heads=2)
    truth = run(case, "reference", torch.float64)
    assert max(relative_errors(run(case, "tiled", torch.float32), truth)) < 2e-6


@MODES
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("segments", [ones(2, 20), PACKED[:2, 55:75]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_is_not_hidden(bad, segments, dtype, mode):
    case = Case(V3, segments)
    q, k, v, pos_key, pos_query, _ = (x.to(dtype) for x in case.tensors())
    q[0, 1, 3, 2] = bad
    out = attend(q, k, v, pos_key, pos_query, geometry=V3, segments=segments, mode=mode)
    assert out[0, 3, 1].isnan().all()
    assert out.isnan().sum() == case.size


def test_without_gradients_the_context_is_the_same():
    case = Case(V1, PACKED, dropout=0.1)
    with_gradients = run(case, "tiled", torch.float32)[0]
    inputs = [x.float() for x in case.tensors()[:5]]
    alone = attend(*inputs, geometry=V1, segments=PACKED, dropout=0.1, mode="tiled",
                   seed=torch.tensor([5]))
    assert torch.equal(alone, with_gradients)


@MODES
@pytest.mark.parametrize("segments", [ones(1, 40), PACKED, HOLES])
def test_positions_may_be_of_32_bits(segments, mode):
    case = Case(V3, segments, num_queries=9)
    inputs = [x.float() for x in case.tensors()[:5]]
    long, short = [attend(*inputs, geometry=V3, segments=segments, mode=mode,
                          query_positions_BQ=case.columns().to(kind))
                   for kind in (torch.int64, torch.int32)]
    assert torch.equal(long, short)


@pytest.mark.parametrize("queries", [None, 30])
def test_long_rows_are_recomputed_tile_by_tile(monkeypatch, queries):
    case = Case(SMALL_BUCKETS, ones(1, 300), dropout=0.1, num_queries=queries)
    whole = run(case, "tiled", torch.float64)
    monkeypatch.setattr(tiled, "KEEP_LENGTH", 64)
    monkeypatch.setitem(tiled.groups.__globals__, "_TILE_BYTES", 300 * 70 * 8)
    monkeypatch.setitem(tiled.groups.__globals__, "_KEY_ROWS", 64)
    parts = run(case, "tiled", torch.float64)
    assert max(relative_errors(parts, whole)) < 1e-14


def test_a_tables_gradient_is_summed_in_fp32_over_many_tiles(monkeypatch):
    case = Case(SMALL_BUCKETS, ones(200, 16), heads=1)
    monkeypatch.setitem(tiled.groups.__globals__, "_TILE_BYTES", 16 * 16 * 2)
    errors = relative_errors(run(case, "tiled", torch.bfloat16),
                             run(case, "reference", torch.float64))
    assert max(errors[-2:]) < 1e-2  # of bf16 inputs 6e-3; of sums in bf16 2e-2


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("planes", [1, 2, 7])
def test_rows_together_in_tiles_of_any_size(monkeypatch, planes, packed):
    segments = PACKED[[0, 1, 2, 0, 1], 100:190] if packed else ones(5, 90)
    case = Case(SMALL_BUCKETS, segments, dropout=0.1)
    whole = run(case, "tiled", torch.float64)
    monkeypatch.setitem(tiled.groups.__globals__, "_TILE_BYTES", 90 * 90 * planes * 8)
    assert max(relative_errors(run(case, "tiled", torch.float64), whole)) < 1e-14


def test_a_mask_without_reading_segments_is_the_same(monkeypatch):
    """As for segments in two parts: whole rows under a mask."""
    case = Case(SMALL_BUCKETS, PACKED, dropout=0.1)
    cut = run(case, "tiled", torch.float64)
    spans = tiled.split_into_spans.__globals__

    def whole_rows(segments, columns):
        return [spans["_span"](segments, columns, row, 0, segments.shape[1], False, True)
                for row in range(len(segments))]

    monkeypatch.setattr(tiled, "split_into_spans", whole_rows)
    assert max(relative_errors(run(case, "tiled", torch.float64), cut)) < 1e-14


@MODES
def test_autocast_and_checkpointing(mode):
    case = Case(SMALL_BUCKETS, PACKED, dropout=0.3)
    *inputs, grad = case.tensors()
    leaves = [x.float().requires_grad_() for x in inputs]
    projection = torch.eye(case.size, requires_grad=True)

    def layer(*tensors):
        tensors = [x @ projection for x in tensors]
        return attend(
            *tensors, geometry=case.geometry, segments=PACKED, dropout=0.3, mode=mode,
            seed=torch.tensor([9]))

    results = []
    for recompute in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if recompute:
                context = torch.utils.checkpoint.checkpoint(layer, *leaves, use_reentrant=False)
            else:
                context = layer(*leaves)
        assert context.dtype == torch.bfloat16
        results.append([context, *torch.autograd.grad(context, leaves, grad.bfloat16())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@MODES
def test_bf16_error_is_not_above_that_of_hugging_face(mode):
    torch.manual_seed(3)
    heads, size, length = 4, 32, 256
    hidden = heads * size
    config = DebertaV2Config(hidden_size=hidden, num_attention_heads=heads, relative_attention=True,
                             pos_att_type=["c2p", "p2c"], position_buckets=256,
                             max_relative_positions=512, share_att_key=True,
                             attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
    module = DisentangledSelfAttention(config)
    x, table = torch.randn(2, length, hidden), torch.randn(512, hidden)
    grad = torch.randn(2, length, hidden)
    mask = torch.ones(2, 1, 1, length, dtype=torch.bool)

    def heads_of(tensor):
        return tensor.unflatten(-1, (heads, size)).transpose(-2, -3)

    def run_layer(ours, dtype):
        layer = module.to(dtype)
        inputs = [x.to(dtype).requires_grad_(), table.to(dtype).requires_grad_()]
        if ours:
            key, query = layer.key_proj, layer.query_proj
            projected = [heads_of(p(inputs[0])) for p in (query, key, layer.value_proj)]
            context = attend(
                *projected, heads_of(key(inputs[1])), heads_of(query(inputs[1])),
                geometry=Geometry(512, 256), segments=ones(2, length), mode=mode).flatten(2)
        else:
            context = layer(inputs[0], mask, rel_embeddings=inputs[1])[0]
        return [context, *torch.autograd.grad(context, inputs, grad.to(dtype))]

    truth = run_layer(False, torch.float64)
    theirs = relative_errors(run_layer(False, torch.bfloat16), truth)
    ours = relative_errors(run_layer(True, torch.bfloat16), truth)
    print("relative bf16 errors, ours then Hugging Face:", ours, theirs)
    assert max(theirs) < math.inf
    assert all(mine <= other * 1.02 for mine, other in zip(ours, theirs, strict=True))


def test_nan_in_any_tensor_is_no_small_error():
    """max() of 0.0 and NaN is 0.0, so a kernel could return NaN for all gradients but the first."""
    exact, broken = torch.ones(2), torch.tensor([1.0, torch.nan])
    assert relative_errors([exact, broken], [exact.double()] * 2) == [0.0, math.inf]
