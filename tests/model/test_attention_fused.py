"""The Triton kernels without a GPU: right in the interpreter, and compiled for real ones.

FULL_TABLE=1 adds longer sequences, and all tiles of all architectures.
"""

import json
import math
import os
from itertools import product

import pytest
import torch
from launching import ROOT, python

pytest.importorskip("triton", reason="the fused kernels need the triton package")

from deberta_ds.model import choose as choosing  # noqa: E402
from deberta_ds.model.attention import attend  # noqa: E402
from deberta_ds.model.attention.geometry import Geometry  # noqa: E402
from deberta_ds.model.attention.reference import reference_attention  # noqa: E402
from deberta_ds.model.kernels import checks  # noqa: E402
from deberta_ds.model.kernels.attention import _facts, _facts_once, tiles  # noqa: E402

WORKERS = ROOT / "tests/workers"
TOLERANCES = {"float32": 2e-6, "float16": 1.5e-3, "bfloat16": 1.2e-2}
FLASH = ["forward", "query", "key"]


def run_worker(name: str, *arguments: str, timeout: int) -> list[dict]:
    done = python(WORKERS / name, *arguments, timeout=timeout)
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(lines: list[dict]) -> None:
    for line in lines:
        print(line["name"], line["dtype"], [f"{error:.0e}" for error in line["errors"]])
        assert all(e < TOLERANCES[line["dtype"]] for e in line["errors"]), line["name"]


def test_interpreter_equals_the_reference():
    """With memory that nobody wrote filled with NaN: every element that is read has a writer."""
    full = bool(os.environ.get("FULL_TABLE"))
    lines = run_worker("fused_interpreter.py", *["--more"] * full, timeout=1200)
    check(lines)
    assert len(lines) == (29 if full else 15)
    assert [line["repeats"] for line in lines if "repeats" in line] == [True] * 3


def test_interpreter_on_random_packings():
    count = ["20", "--more"] if os.environ.get("FULL_TABLE") else ["3"]
    check(run_worker("fused_interpreter.py", "--random", *count, timeout=1200))


def test_large_scores_in_fp16_do_not_overflow_into_nan():
    """Finite as long as the scores are, and nowhere worse than Hugging Face's fp16.

    Each term of the bias is rounded, and their sum once more.
    """
    *lines, largest = run_worker("large_scores.py", timeout=120)
    for line in lines:
        print(line)
        for name in ("ours", "kept"):
            assert all(a < 0.85 * b for a, b in zip(line[name], line["theirs"], strict=True))
    for name in ("ours", "kept"):
        context, *gradients = largest[name]  # its softmax is one-hot: the gradients vanish
        assert context < 1e-2 and all(error < 10 for error in gradients)  # NaN is in no range


@pytest.mark.parametrize(("architecture", "kernels"), [
    ("90", [*FLASH, "bias", "rows", "content", "table", "columns", "skew", "spread"]),
    ("80", ["key"])])
def test_compiles_for_a_gpu(architecture, kernels):
    """No spills, no two-byte access in a loop, and for sm_90 few instructions and barriers."""
    arguments = [architecture, "--sizes", "64", "--lengths", "900", "--kernels", *kernels]
    lines = run_worker("fused_compile.py", *arguments, timeout=300)
    assert [line["kernel"] for line in lines] == kernels
    assert [line["faults"] for line in lines] == [[]] * len(lines), lines


def test_kernels_of_short_sequences_and_gathered_queries_compile_for_a_gpu():
    arguments = ["90", "--sizes", "64", "--lengths", "512", "--kernels", "forward", "key"]
    for more in ([], ["--gathered"]):
        lines = run_worker("fused_compile.py", *arguments, *more, timeout=300)
        assert [line["faults"] for line in lines] == [[]] * 2, lines


@pytest.mark.skipif(not os.environ.get("FULL_TABLE"), reason="half an hour of compiling")
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("architecture", ["80", "86", "89", "90", "100", "120"])
def test_every_tile_compiles_for_every_gpu(architecture, dtype, gathered):
    arguments = [architecture, "--dtype", dtype, *["--gathered"] * gathered]
    lines = run_worker("fused_compile.py", *arguments, timeout=3000)
    assert [line for line in lines if line["faults"]] == []


def test_the_other_kernels_compile_for_a_gpu():
    lines = run_worker("kernel_compile.py", "90", timeout=120)
    assert len(lines) == 12 and not any(line["faults"] for line in lines)


def test_steps_of_a_model_through_the_kernels_under_zero():
    """Beside torch's operators, with the same elements dropped."""
    [line] = run_worker("fused_zero.py", "1", timeout=300)
    assert line["loss_error"] < 1e-6 and line["error"] < 2e-4


def test_every_tile_is_in_the_table():
    for capability in ((8, 0), (9, 0), (10, 0)):
        for size in (16, 32, 64, choosing.LARGEST_HEAD):
            for length in (512, 8192):
                kinds = [*product(("forward", "key"), (False, True)), ("query", False)]
                for direction, gathered in kinds:
                    tile = tiles.choose_tile(capability, size, direction, length, gathered)
                    assert tile.block_m >= 16 and tile.block_n >= 16 and tile.warps in (4, 8)


@pytest.mark.parametrize("rows, length, geometry, wanted", [
    (2, 512, Geometry(512, 256), False), (33_000, 1, Geometry(512, 256), True),
    (2, 40_000, Geometry(40_000, 0), True)])
def test_what_the_choice_is_told(monkeypatch, rows, length, geometry, wanted):
    """Which terms there are, and more than a launch can have."""
    told = []

    def choose(*arguments):
        told.append(arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(choosing, "pick", choose)
    q = torch.zeros(1).expand(rows, 2, length, 64)
    with pytest.raises(KeyboardInterrupt):
        attend(q, q, q, torch.zeros(2, 4, 64), None, segments=torch.ones(1),
               geometry=geometry)
    (_, asked, _), = told
    assert bool(asked.obstacle) == wanted and asked.terms == (True, False)


def test_facts_begin_at_16_bytes():
    """Else Triton would compile other binaries for odd numbers of tokens, in mid-run."""
    for rows, length in ((1, 17), (3, 5), (2, 8), (1, 511)):
        segments = torch.ones(rows, length, dtype=torch.int32)
        segments[:, length // 2 :] = 2
        for facts in _facts(segments, None):
            assert facts.shape[1:] == (rows, length)
            for one in facts:
                assert one.is_contiguous() and one.storage_offset() % 4 == 0
                assert one.amax() <= length


def test_facts_of_segments_that_were_changed_in_place_are_made_again():
    segments = torch.ones(1, 8, dtype=torch.int32)
    first = _facts_once(segments, None)
    assert _facts_once(segments, None) is first
    segments[:, 4:] = 2
    assert all(map(torch.equal, _facts_once(segments, None), _facts(segments, None)))


def test_the_check_finds_a_wrong_kernel(monkeypatch):
    monkeypatch.setattr(checks, "ROWS", ((60, 2, 2),))
    asked = choosing.Request(torch.device("cpu"), (torch.bfloat16,), 16, (True, True))
    calls = []

    def compare(wrong):
        def fused(*tensors, keep_terms=False, **options):
            calls.append((options["dropout"], keep_terms))
            return wrong(reference_attention(*tensors, **options))

        monkeypatch.setattr(checks, "load", lambda _place: fused)
        return checks.worst(checks.attention(asked))[0]

    assert compare(lambda context: context) < 1e-2 < 9e-2 < compare(lambda context: context * 1.1)
    assert math.isnan(compare(lambda context: context * torch.nan))
    with pytest.raises(AssertionError, match="context"):
        compare(lambda context: context[:, :1])
    assert set(product((0.1, 0.0), (False, True))) == set(calls)
