"""What only a GPU can show; skipped without one. benchmarks/gpu_all.sh runs it first.

DeepSpeed's engine on a GPU is benchmarks/gpu_train.sh.
"""

import shutil

import pytest
import torch
from attention_cases import SMALL_BUCKETS, V1, V3, Case, relative_errors, run

from deberta_ds.config.model import MODELS
from deberta_ds.config.run_config import ModelConfig
from deberta_ds.model.choose import Request
from deberta_ds.model.kernels import checks
from deberta_ds.model.linear_cross_entropy import linear_cross_entropy

pytestmark = [pytest.mark.gpu,
              pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
TWO_ROWS = torch.tensor([[1] * 300 + [2] * 130 + [0] * 82, [1] * 512])


def worst(case: Case, dtype=torch.bfloat16, mode="fused", keep=False, device="cuda",
          reference="cpu") -> float:
    """Return the largest relative error of two runs, which are equal bit for bit."""
    truth = [x.cpu() for x in run(case, "reference", torch.float64, reference)]
    result, again = (run(case, mode, dtype, device, keep) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(result, again, strict=True))
    return max(relative_errors(result, truth))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("size", "queries"), [(64, None), (64, 40), (32, None), (128, None)])
def test_attention_in_bf16(size, queries, keep):
    for geometry in (SMALL_BUCKETS, V1):
        case = Case(geometry, TWO_ROWS, num_queries=queries, dropout=0.1, size=size)
        assert worst(case, keep=keep) < 1.5e-2


@pytest.mark.parametrize("queries", [None, 40])
@pytest.mark.parametrize(("geometry", "length"), [(V3, 512), (V3, 901), (V1, 300)])
def test_what_runs_without_triton(geometry, length, queries):
    segments = torch.tensor([[1] * (length - 90) + [2] * 50 + [0] * 40, [1] * length])
    case = Case(geometry, segments, num_queries=queries, dropout=0.1)
    for dtype, allowed in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        assert worst(case, dtype, "dense") < allowed


@pytest.mark.parametrize("heads", [1, 2, 16])  # Triton would compile 1 and 16 otherwise
@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_rows_within_the_relative_table(size, heads):
    segments = torch.tensor([[1] * 200 + [2] * 80 + [0] * 20, [1] * 300])
    assert worst(Case(V3, segments, dropout=0.1, heads=heads, size=size)) < 1.5e-2


@pytest.mark.parametrize("terms", ["key", "query", "none"])
def test_single_terms_in_fp16(terms):
    case = Case(SMALL_BUCKETS, TWO_ROWS, dropout=0.1, size=16, terms=terms)
    assert worst(case, torch.float16) < 2e-3


# Tiles change at 640 and 1,024.
@pytest.mark.parametrize(("length", "more"), [
    (641, {}), (1000, {}), (2048, {}), (8192, {}), (2048, {"num_queries": 300, "dropout": 0.0})])
def test_long_rows_in_bf16(length, more):
    row = torch.ones(1, length, dtype=torch.int32)
    case = Case(V3, row, **{"dropout": 0.1, "heads": 1, "size": 64} | more)
    assert worst(case, reference="cuda") < 1.5e-2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_card_than_the_current_one():
    case = Case(V3, torch.ones(1, 300, dtype=torch.int32), dropout=0.1, size=64)
    with torch.cuda.device(0):
        assert worst(case, device="cuda:1") < 1.5e-2


@pytest.mark.parametrize("chunk", [None, 512])
def test_the_masked_lms_loss_in_fp32(chunk):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*shape, generator=generator) for shape in
               ((77, 48), (5000, 48), (5000,))]
    labels = torch.randint(0, 5000, (77,), generator=generator)
    found = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        leaves = [x.to(device, dtype).requires_grad_() for x in tensors]
        loss = linear_cross_entropy(*leaves, labels.to(device), chunk=chunk)[0]
        found.append([loss, *torch.autograd.grad(loss, leaves)])
    for exact, result in zip(*found, strict=True):
        assert (result.cpu().double() - exact).norm() < 1e-5 * exact.norm()


@pytest.mark.parametrize("width", [100, 384, 768, 1536])
@pytest.mark.parametrize(("update", "hidden"), [
    (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16), (torch.float32, torch.float32)])
def test_layer_norm_and_gelu(update, hidden, width):
    request = Request(torch.device("cuda"), (update, hidden), width)
    error, where = checks.worst(checks.norm(request))
    assert error <= checks.TOLERANCES[update], where


def test_the_check_of_auto_passes_in_seconds(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for when in ("compiles", "compiled", "kept"):
        found = checks.check(Request(torch.device("cuda"), (torch.bfloat16,), 64, (True, True)),
                             ".kernels.checks:attention")
        print(f"{when}: {found}")
        checks.check.cache_clear()
        if when == "compiles":
            shutil.rmtree(next(tmp_path.rglob("kernels")))


def test_linear_cross_entropy_in_bf16():
    from deberta_ds.model.kernels.fused_cross_entropy import fused_linear_cross_entropy

    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 768, generator=generator) for n in (500, 30_000))
    labels = torch.randint(0, 30_000, (500,), generator=generator).cuda()
    uniforms = torch.rand(500, generator=generator).cuda()
    results = []
    for function in (linear_cross_entropy, fused_linear_cross_entropy, fused_linear_cross_entropy):
        leaves = [hidden, weight * 0.02, torch.zeros(30_000)]
        leaves = [x.to("cuda", torch.bfloat16).requires_grad_() for x in leaves]
        loss, _, drawn = function(*leaves, labels, uniforms)
        results.append([loss, *torch.autograd.grad(loss, leaves), drawn])
    chunked, fused, again = results
    for a, b in zip(fused[:4], chunked[:4], strict=True):
        assert (a - b).norm() < 1e-2 * b.norm()
    assert (fused[4] == chunked[4]).float().mean() > 0.99
    assert all(torch.equal(a, b) for a, b in zip(fused, again, strict=True))


def test_two_runs_give_the_same_bits():
    """Replaced-token detection, five steps, dropout on: every parameter bit for bit."""
    from benchmarks.train_step import make_batch, make_step, our_loss

    shape = MODELS["deberta-v3-xsmall"] | {"num_layers": 3, "attention": "fused"}
    config = ModelConfig(**shape)
    batch = make_batch(config, 4, 512).to("cuda")
    ends = []
    for _ in range(2):
        torch.manual_seed(0)
        model, loss = our_loss(config, "rtd", 2, batch)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        step = make_step(loss, optimizer, "cuda", half=True)
        losses = [step().item() for _ in range(5)]
        ends.append((losses, [p.detach().cpu() for p in model.parameters()]))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True))
