"""The Triton kernels without a GPU: right in the interpreter, and compiled for real ones."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the fused kernels need the triton package")

from deberta_ds.model.attention import dispatch  # noqa: E402
from deberta_ds.model.attention.fused import tiles  # noqa: E402

WORKERS = Path(__file__).parent / "workers"
ROOT = Path(__file__).parents[1]
TOLERANCES = {"float32": 2e-6, "float16": 1.5e-3, "bfloat16": 1.2e-2}
KERNELS = ["forward", "query", "key"]


def run_worker(name: str, *arguments: str, timeout: int) -> list[dict]:
    environment = dict(os.environ, PYTHONPATH=str(ROOT), PYTHONWARNINGS="ignore")
    command = [sys.executable, WORKERS / name, *arguments]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment, check=False
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
    return [json.loads(line) for line in process.stdout.splitlines()]


def check(lines: list[dict]) -> None:
    for line in lines:
        print(line["name"], line["dtype"], [f"{error:.0e}" for error in line["errors"]])
        assert max(line["errors"]) < TOLERANCES[line["dtype"]], line["name"]


def test_interpreter_equals_the_reference():
    lines = run_worker("fused_interpreter.py", timeout=300)
    check(lines)
    assert len(lines) == 17
    assert [line["repeats"] for line in lines if "repeats" in line] == [True]


def test_interpreter_on_random_packings():
    check(run_worker("fused_interpreter.py", "--random", "5", timeout=300))


def test_large_scores_in_fp16_do_not_overflow_into_nan():
    """Finite as long as the scores are, and nowhere worse than Hugging Face's fp16."""
    *lines, largest = run_worker("large_scores.py", timeout=120)
    for line in lines:
        print(line)
        assert max(a / b for a, b in zip(line["ours"], line["theirs"], strict=True)) < 0.7
    context, *gradients = largest["ours"]  # its softmax is one-hot: the gradients vanish
    assert context < 1e-2 and all(error < 10 for error in gradients)  # NaN is in no range


@pytest.mark.parametrize(("architecture", "kernels"), [("90", KERNELS), ("80", KERNELS[2:])])
def test_compiles_for_a_gpu(architecture, kernels):
    """Some kernels; `tests/workers/fused_compile.py 90` does all of them, with the same rules."""
    arguments = [architecture, "--sizes", "64", "--lengths", "4096", "--kernels", *kernels]
    lines = run_worker("fused_compile.py", *arguments, timeout=60)
    assert [line["kernel"] for line in lines] == kernels
    assert [line["faults"] for line in lines] == [[]] * len(lines), lines


def test_picked_queries_compile_for_a_gpu():
    arguments = ["90", "--sizes", "64", "--lengths", "512", "--kernels", "forward", "--picked"]
    [line] = run_worker("fused_compile.py", *arguments, timeout=60)
    assert line["picked"] and line["faults"] == []


def test_every_tile_is_in_the_table():
    for capability in ((8, 0), (9, 0), (10, 0)):
        for size in dispatch.FUSED_SIZES:
            for length in (512, 8192):
                for direction, picked in product(("forward", "query", "key"), (False, True)):
                    tile = tiles.choose(capability, size, length, direction, picked)
                    assert tile.block_m >= 16 and tile.block_n >= 16 and tile.warps in (4, 8)


def test_choice_of_implementation(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    dispatch._choose.cache_clear()
    half, single = torch.bfloat16, torch.float32
    assert dispatch._choose("auto", "cpu", half, 64) == "tiled"
    assert dispatch._choose("auto", "cuda", half, 64) == "fused"
    assert dispatch._choose("auto", "cuda", half, 48) == "tiled"
    assert dispatch._choose("auto", "cuda", single, 64) == "tiled"
    with pytest.raises(ValueError, match="no GPU"):
        dispatch._choose("fused", "cpu", half, 64)
    with pytest.raises(ValueError, match="head size 48"):
        dispatch._choose("fused", "cuda", half, 48)
