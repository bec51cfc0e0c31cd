"""What a process on a CPU sets: oneDNN for fp32 matmuls only where it is as exact, and its heap."""

import os
import platform
import subprocess
import sys

import pytest
import torch
from attention_cases import V3, Case, relative_errors, run

from deberta_ds.model import cpu
from deberta_ds.model.attention import attend

ZEN5 = {"cpu_name": "AMD EPYC", "avx512_bw": True, "avx512_dq": True, "avx512_vl": True,
        "amx_tile": False}


@pytest.fixture(autouse=True)
def _as_torch_comes(monkeypatch):
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(cpu, "_chosen", False)
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def pretend(monkeypatch, **features):
    """Make this processor look like a Zen 5 with `features` changed."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: ZEN5 | features, raising=False)


@pytest.mark.parametrize(("features", "before"), [
    ({"cpu_name": "Intel Xeon"}, "highest"), ({"amx_tile": True}, "highest"),
    ({"avx512_vl": False}, "highest"), ({}, "high")])
def test_other_processors_and_a_precision_chosen_before_keep_mkl(monkeypatch, features, before):
    pretend(monkeypatch, **features)
    torch.set_float32_matmul_precision(before)
    assert not cpu.use_onednn()
    assert torch.get_float32_matmul_precision() == before


def test_a_choice_by_the_newer_names_is_left_alone(monkeypatch):
    pretend(monkeypatch)
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        assert not cpu.use_onednn()
        with cpu.mkl_matmuls():
            assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"


def test_mkl_matmuls_ends_where_it_began(monkeypatch):
    monkeypatch.setattr(cpu, "_chosen", True)
    torch.set_float32_matmul_precision("medium")
    with pytest.raises(KeyError), cpu.mkl_matmuls():
        assert torch.get_float32_matmul_precision() == "highest"
        raise KeyError
    assert torch.get_float32_matmul_precision() == "medium"


def test_less_exact_products_are_refused(monkeypatch):
    """A processor that looks right but multiplies in bf16 keeps MKL."""
    exact = torch.bmm

    def rounded(left, right):
        if left.dtype != torch.float32:
            return exact(left, right)
        return exact(left.bfloat16().float(), right.bfloat16().float())

    pretend(monkeypatch)
    monkeypatch.setattr(torch, "bmm", rounded)
    assert not cpu.use_onednn()
    assert torch.get_float32_matmul_precision() == "highest"


def test_products_here_keep_24_bits():
    """Whatever is chosen on this machine: 1 + 2^-23 survives a product by 1."""
    chosen = cpu.use_onednn()
    assert torch.get_float32_matmul_precision() == ("medium" if chosen else "highest")
    number = 1 + 2.0**-23
    for rows, columns in ((32, 144), (256, 1536), (512, 64)):
        identity = torch.eye(rows)
        assert (torch.full((rows, rows), number) * identity @ identity).diagonal().eq(number).all()
        wide = torch.full((4, rows, columns), number)
        assert torch.bmm(identity.expand(4, -1, -1).contiguous(), wide).eq(number).all()


@pytest.mark.parametrize(("pieces", "precision"), [([160], "medium"), ([100, 60], "highest")])
def test_ragged_pieces_are_left_to_mkl(monkeypatch, pieces, precision):
    """In attention's forward and backward: a piece's length may never come again."""
    monkeypatch.setattr(cpu, "_chosen", True)
    torch.set_float32_matmul_precision("medium")
    seen, product = set(), torch.baddbmm

    def recorded(*arguments, **options):
        seen.add(torch.get_float32_matmul_precision())
        return product(*arguments, **options)

    monkeypatch.setattr(torch, "baddbmm", recorded)
    q, k, v = (torch.randn(1, 2, 160, 16, requires_grad=True) for _ in range(3))
    segments = torch.repeat_interleave(torch.arange(1, len(pieces) + 1), torch.tensor(pieces))
    context = attend(q, k, v, None, None, geometry=V3, segments=segments[None],
                     mode="tiled")
    context.sum().backward()
    assert seen == {precision}
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize("length", [128, 300, 512])
def test_attention_on_whole_rows_is_exact_with_the_choice_made_here(length):
    """Context and all gradients against float64 of the reference: 2e-6 relative."""
    cpu.use_onednn()
    case = Case(V3, torch.ones(2, length, dtype=torch.int32), heads=2, size=32)
    truth = run(case, "reference", torch.float64)
    assert max(relative_errors(run(case, "tiled", torch.float32), truth)) <= 2e-6


STEPS = """
import resource, torch
from deberta_ds.model.cpu import keep_heap

def step():
    held = [torch.ones(size << 20) for size in (1, 2, 3, 4, 5, 6, 60)]  # MiB, four bytes each
    del held

print(said := keep_heap())
if not said:
    raise SystemExit(print(0))
for _ in range(24):  # a heap grows a little in the first few, seldom later
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize())
"""


def pages_of_steps(**variables) -> tuple[str, int]:
    """Return what `keep_heap` said, and the bytes of fresh pages in five steps of 324 MiB."""
    done = subprocess.run([sys.executable, "-c", STEPS], env=os.environ | variables, check=True,
                          capture_output=True, text=True)
    said, fresh = done.stdout.split()
    return said, int(fresh)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_steps_do_not_ask_for_their_pages_again():
    said, fresh = pages_of_steps()
    assert said == "True" and fresh < 16 << 20
    assert pages_of_steps(MALLOC_TRIM_THRESHOLD_="1000000")[0] == "False"  # the user's word
