"""The reference attention against a formula loop (test_encoder_parity.py: against transformers)."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from deberta_ds.model.attention import Geometry, attend, attend_cls
from deberta_ds.model.attention.dropout import DIGIT_STEP, keep_pairs, random_bits

HEADS, SIZE = 2, 8


def _inputs(batch=2, length=11, slots=8, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, HEADS, length, SIZE)] * 3 + [(HEADS, slots, SIZE)] * 2
    return [torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def test_tables_have_the_rows_of_the_released_files():
    """rel_embeddings of microsoft/deberta-v3-base and of microsoft/deberta-base."""
    assert (Geometry(512, 256).num_slots, Geometry(512, 0).num_slots) == (512, 1024)


def test_no_geometry_has_a_bucket_that_differs_from_transformers():
    """In float64 several of these rows of buckets is off by one somewhere."""
    maxima = [17, 20, 26, 65, 81, 101, 128, 153, 197, 271, 362, 433, 512, 514, 641, 1024, 3000,
              4096, 8192]
    buckets = [*range(4, 74, 5), 6, 18, 20, 32, 33, 38, 62, 63, 128, 200, 256, 320, 512, 1024]
    for count, maximum in ((c, m) for c in buckets for m in maxima if m > c // 2 + 1):
        distances = torch.arange(1 - maximum, maximum)
        theirs = make_log_bucket_position(distances, count, maximum).long() + count
        ours = Geometry(maximum, count).slots(distances)
        assert torch.equal(ours, theirs.clamp(0, 2 * count - 1)), (count, maximum)
        # Beyond the maximum the official code clamps; Hugging Face runs into an untrained row.
        far = Geometry(maximum, count).slots(torch.tensor([-10, -1, 1, 10]) * maximum)
        assert torch.equal(far, ours[[0, 0, -1, -1]])


@pytest.mark.parametrize("geometry", [Geometry(512, 256), Geometry(16, 0), Geometry(20, 6)])
def test_reach_is_where_both_sides_saturate(geometry):
    slots = geometry.slots(torch.arange(-600, 601))
    reach = geometry.reach
    assert (slots[600 + reach :] == slots[-1]).all() and (slots[: 601 - reach] == slots[0]).all()
    assert slots[600 + reach - 1] != slots[-1] or slots[601 - reach] != slots[0]


@pytest.mark.parametrize("fake_first", [True, False])
def test_tables_made_without_numbers_are_kept_from_real_tensors(fake_first):
    """One use under FakeTensorMode, or a torch.export that failed, and each later call raised."""
    geometry = Geometry(77 + fake_first, 14)  # of no other test: nothing is kept of it yet
    inputs, segments = _inputs(slots=geometry.num_slots), torch.ones(2, 11, dtype=torch.int64)

    def run(*tensors, segments):
        return attend(*tensors, geometry=geometry, segments=segments, mode="reference")

    def run_fake():
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) for x in (*inputs, segments)]
            assert run(*fakes[:5], segments=fakes[5]).shape == (2, 11, HEADS, SIZE)
            assert geometry.reach > 1

    if fake_first:
        run_fake()
    first = run(*inputs, segments=segments)
    run_fake()
    assert torch.equal(run(*inputs, segments=segments), first)


@pytest.mark.parametrize("geometry", [Geometry(4, 0), Geometry(9, 4)])
@pytest.mark.parametrize("terms", ["both", "key", "query", "none"])
def test_formula_loop(geometry, terms):
    q, k, v, pos_key, pos_query = _inputs(slots=geometry.num_slots)
    pos_key = pos_key if terms in ("both", "key") else None
    pos_query = pos_query if terms in ("both", "query") else None
    segments = torch.tensor([[1] * 5 + [2] * 4 + [0] * 2, [1] * 11], dtype=torch.int32)
    ours = attend(
        q, k, v, pos_key, pos_query, geometry=geometry, segments=segments, mode="reference")
    scale = 1 / math.sqrt(SIZE * (1 + (pos_key is not None) + (pos_query is not None)))
    for b, h, i in [(b, h, i) for b in range(2) for h in range(HEADS) for i in range(11)]:
        keys = [j for j in range(11) if segments[b, j] == segments[b, i] != 0]
        scores = []
        for j in keys:
            slot = geometry.slots(torch.tensor(i - j))
            score = q[b, h, i] @ k[b, h, j]
            score += q[b, h, i] @ pos_key[h, slot] if pos_key is not None else 0
            score += k[b, h, j] @ pos_query[h, slot] if pos_query is not None else 0
            scores.append(score * scale)
        expected = torch.zeros(SIZE, dtype=torch.float64)
        if keys:
            expected = torch.stack(scores).softmax(0) @ v[b, h, keys]
        assert torch.allclose(ours[b, i, h], expected, atol=1e-12)


def test_fewer_queries_are_rows_of_the_full_answer():
    geometry = Geometry(9, 4)
    q, k, v, pos_key, pos_query = _inputs()
    segments = torch.tensor([[1] * 5 + [2] * 4 + [0] * 2, [1] * 11], dtype=torch.int32)
    common = dict(geometry=geometry, segments=segments, mode="reference")
    full = attend(q, k, v, pos_key, pos_query, **common)
    columns = torch.tensor([[1, 6, 8, 0], [10, 3, 3, 0]])
    picked = q.gather(2, columns[:, None, :, None].expand(2, HEADS, 4, SIZE))
    few = attend(picked, k, v, pos_key, pos_query, query_positions_BQ=columns, **common)
    assert torch.allclose(few, full.gather(1, columns[..., None, None].expand_as(few)), atol=1e-12)


def test_dropout_is_a_function_of_the_seed():
    geometry = Geometry(9, 4)
    tensors = _inputs(dtype=torch.float32)
    segments = torch.ones(2, 11, dtype=torch.int32)

    def run(seed):
        return attend(*tensors, geometry=geometry, segments=segments, dropout=0.3,
                      seed=None if seed is None else torch.tensor([seed]))

    first = run(7)
    torch.rand(5)
    assert torch.equal(first, run(7))
    assert not torch.equal(first, run(8))
    with pytest.raises(ValueError, match="seed"):
        run(None)


@pytest.mark.parametrize("dropout, numbers", [
    (0.1, 6554), (0.5, 1 << 15), (1e-9, 1), (1 - 1e-9, 65535)])
def test_a_pair_is_dropped_if_its_number_is_below_the_threshold(dropout, numbers):
    """Its number: bit j % 32 of 16 words, each "lowbias32" of the bits of query and block."""
    rows, columns = random_bits(torch.tensor([3]), 1, 1, 5, 70)
    kept = keep_pairs(torch.tensor([3]), 1, 1, 5, 70, dropout)
    for i in range(5):
        for j in range(70):
            value = 0
            for digit in range(16):
                word = rows[0, 0, i].item() + columns[0, 0, j // 32].item()
                word = (word + (digit + 1) * DIGIT_STEP) % (1 << 32)
                word = (word ^ word >> 16) * 0x21F0AAAD % (1 << 32)
                word = (word ^ word >> 15) * 0xD35A2D97 % (1 << 32)
                value |= ((word ^ word >> 15) >> j % 32 & 1) << digit
            assert kept[0, 0, i, j] == (value >= numbers)


def test_dropout_mask_has_no_visible_structure():
    probability, batch, heads, length = 0.1, 2, 4, 512
    shape = (batch, heads, length, length, probability)
    dropped = ~keep_pairs(torch.tensor([11]), *shape)
    deviation = math.sqrt(probability * (1 - probability))
    centered = (dropped.double() - probability) / deviation

    def sigmas(values):
        return values.mean().abs() * math.sqrt(values.numel())

    assert sigmas(centered) < 4
    # Rates of rows, columns and planes vary as independent coin flips would.
    for axes in ((-1,), (-2,), (-1, -2)):
        means = centered.mean(axes) * math.sqrt(math.prod(centered.shape[a] for a in axes))
        assert abs(means.var() - 1) < 6 * math.sqrt(2 / means.numel())
    # Neighbors, words, planes and the four corners of rectangles do not move together.
    assert sigmas(centered[..., 32:] * centered[..., :-32]) < 4
    assert sigmas(centered[..., 1:] * centered[..., :-1]) < 4
    assert sigmas(centered[..., 1:, :] * centered[..., :-1, :]) < 4
    assert sigmas(centered[:, 1:] * centered[:, :-1]) < 4
    corners = centered[..., ::2, ::2] * centered[..., 1::2, ::2]
    assert sigmas(corners * centered[..., ::2, 1::2] * centered[..., 1::2, 1::2]) < 4
    other = ((~keep_pairs(torch.tensor([12]), *shape)).double() - probability) / deviation
    assert sigmas(centered * other) < 4


def test_bf16_input_keeps_fp32_scores():
    geometry = Geometry(9, 4)
    tensors = _inputs(dtype=torch.bfloat16)
    segments = torch.ones(2, 11, dtype=torch.int32)
    low = attend(*tensors, geometry=geometry, segments=segments, mode="reference")
    high = attend(*(x.double() for x in tensors), geometry=geometry, segments=segments)
    assert low.dtype == torch.bfloat16
    assert (low.double() - high).abs().max() < 0.02


def test_impossible_arguments():
    tensors = _inputs()
    segments = torch.ones(2, 11, dtype=torch.int32)
    with pytest.raises(ValueError, match="query_positions"):
        attend(
            tensors[0][:, :, :3], *tensors[1:], geometry=Geometry(9, 4), segments=segments)
    with pytest.raises(AssertionError):  # the implementations disagree on the context's dtype
        attend(*tensors[:2], tensors[2].bfloat16(), *tensors[3:], geometry=Geometry(4, 0),
               segments=segments)


@pytest.mark.parametrize("geometry", [Geometry(9, 4), Geometry(64, 0)])
@pytest.mark.parametrize("terms", ["both", "key", "query", "none"])
def test_the_first_column_alone_is_that_of_whole_rows(geometry, terms):
    """Context and gradients of `attend_cls` in float64, with the very pairs dropped."""
    tensors = _inputs(3, 24, geometry.num_slots)
    tensors[3] = tensors[3] if terms in ("both", "key") else None
    tensors[4] = tensors[4] if terms in ("both", "query") else None
    leaves = [x for x in tensors if x is not None]
    segments = torch.tensor([[1] * 24, [1] * 9 + [0] * 15, [0] * 2 + [1] * 22])
    outs = []
    for first in (True, False):
        for leaf in leaves:
            leaf.requires_grad_().grad = None
        if first:
            out = attend_cls(tensors[0][:, :, :1], *tensors[1:], geometry=geometry,
                               segments_BL=segments, dropout=0.3, seed=torch.tensor([4]))
        else:
            out = attend(*tensors, geometry=geometry, segments=segments, dropout=0.3,
                         seed=torch.tensor([4]), mode="reference")[:, :1]
        (out * torch.arange(1.0, 1 + SIZE)).sum().backward()
        outs.append([out, *(leaf.grad for leaf in leaves)])
    for one, other in zip(*outs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert not outs[0][0][2].any()  # a row that begins with padding
