"""The Triton kernels without a GPU: right in the interpreter, and compiled for real ones."""

import json
import os
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the fused kernels need the triton package")

from deberta_ds.config.run_config import ModelConfig  # noqa: E402
from deberta_ds.model import encoder
from deberta_ds.model.attention import dispatch  # noqa: E402
from deberta_ds.model.attention.geometry import Geometry  # noqa: E402
from deberta_ds.model.attention.reference import reference_attention  # noqa: E402
from deberta_ds.model.init import init_parameters  # noqa: E402
from deberta_ds.model.kernels import (  # noqa: E402
    attention_check,
    fused_checks,
    kernel_check,
    kernel_table,
)
from deberta_ds.model.kernels.attention import _facts, ops  # noqa: E402

WORKERS = Path(__file__).parents[1] / "workers"
ROOT = Path(__file__).parents[2]
TOLERANCES = {"float32": 2e-6, "float16": 1.5e-3, "bfloat16": 1.2e-2}
KERNELS = ["forward", "query", "key"]


def run_worker(name: str, *arguments: str, timeout: int) -> list[dict]:
    environment = dict(os.environ, PYTHONPATH=str(ROOT), PYTHONWARNINGS="ignore")
    command = [sys.executable, WORKERS / name, *arguments]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
    return [json.loads(line) for line in process.stdout.splitlines()]


def check(lines: list[dict]) -> None:
    for line in lines:
        print(line["name"], line["dtype"], [f"{error:.0e}" for error in line["errors"]])
        assert all(e < TOLERANCES[line["dtype"]] for e in line["errors"]), line["name"]


def test_interpreter_equals_the_reference():
    lines = run_worker("fused_interpreter.py", timeout=300)
    check(lines)
    assert len(lines) == 24
    assert [line["repeats"] for line in lines if "repeats" in line] == [True] * 3


def test_interpreter_on_random_packings():
    check(run_worker("fused_interpreter.py", "--random", "5", timeout=300))


def test_large_scores_in_fp16_do_not_overflow_into_nan():
    """Finite as long as the scores are, and nowhere worse than Hugging Face's fp16."""
    *lines, largest = run_worker("large_scores.py", timeout=120)
    for line in lines:
        print(line)
        assert all(a < 0.7 * b for a, b in zip(line["ours"], line["theirs"], strict=True))
    context, *gradients = largest["ours"]  # its softmax is one-hot: the gradients vanish
    assert context < 1e-2 and all(error < 10 for error in gradients)  # NaN is in no range


@pytest.mark.parametrize(("architecture", "kernels"), [("90", KERNELS), ("80", KERNELS[2:])])
def test_compiles_for_a_gpu(architecture, kernels):
    """Some kernels; `tests/workers/fused_compile.py 90` does all of them, with the same rules."""
    arguments = [architecture, "--sizes", "64", "--lengths", "900", "4096", "--kernels", *kernels]
    lines = run_worker("fused_compile.py", *arguments, timeout=60)
    assert [line["kernel"] for line in lines] == kernels * 2
    assert [line["faults"] for line in lines] == [[]] * len(lines), lines


def test_gathered_queries_compile_for_a_gpu():
    arguments = ["90", "--sizes", "64", "--lengths", "512", "--kernels", "forward", "--gathered"]
    [line] = run_worker("fused_compile.py", *arguments, timeout=60)
    assert line["gathered"] and line["faults"] == []


def test_the_other_kernels_compile_for_a_gpu():
    lines = run_worker("kernel_compile.py", "90", timeout=120)
    assert len(lines) == 10 and not any(line["faults"] for line in lines)


def test_steps_of_a_model_through_the_kernels_under_zero():
    """Beside torch's operators, with the same elements dropped."""
    [line] = run_worker("fused_zero.py", "1", timeout=300)
    assert line["loss_error"] < 1e-6 and line["error"] < 2e-4


def test_every_tile_is_in_the_table():
    for capability in ((8, 0), (9, 0), (10, 0)):
        for size in (16, 32, 64, kernel_table.LARGEST_HEAD):
            for length in (512, 8192):
                for direction, gathered in product(("forward", "query", "key"), (False, True)):
                    tile = ops.choose_tile(capability, size, length, direction, gathered)
                    assert tile.block_m >= 16 and tile.block_n >= 16 and tile.warps in (4, 8)


@pytest.mark.parametrize("rows, length, geometry, wanted", [
    (2, 512, Geometry(512, 256), (False, False)), (2, 513, Geometry(512, 256), (True, False)),
    (2, 512, Geometry(64, 0), (True, False)), (33_000, 1, Geometry(512, 256), (False, True)),
    (2, 40_000, Geometry(40_000, 0), (True, True))])
def test_what_the_choice_is_told(monkeypatch, rows, length, geometry, wanted):
    """Long rows, or short ones beyond a short table's reach; more than a launch can have."""
    told = []

    def choose(*arguments):
        told.append(arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(kernel_table, "pick", choose)
    q = torch.zeros(1).expand(rows, 2, length, 64)
    with pytest.raises(KeyboardInterrupt):
        dispatch.attend(q, q, q, torch.zeros(2, 4, 64), None, segments=torch.ones(1),
                        geometry=geometry)
    (_, asked, _), = told
    assert (asked.long, bool(asked.obstacle)) == wanted and asked.terms == (True, False)


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


def test_check_on_the_card_finds_a_wrong_kernel_and_keeps_a_pass(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("SHORT", "LONG"):  # of as many problems, but small ones
        monkeypatch.setattr(attention_check, name, tuple(
            rows._replace(length=60, batch=2, heads=2, gathered=rows.gathered and 10)
            for rows in getattr(attention_check, name)))
    calls = []

    def fused(*tensors, wrong=lambda context: context, keep_terms=False, **options):
        calls.append(options | {"keep_terms": keep_terms})
        return wrong(reference_attention(*tensors, **options))

    def check(function, dtype=torch.bfloat16, long=False):
        return attention_check.check(torch.device("cpu"), dtype, 16, long, function)

    for wrong, named in ((lambda c: c * 1.1, "off by 1.0e-01"), (lambda c: c * torch.nan, "nan"),
                         (lambda c: c[:, :1], "RuntimeError")):
        verdict = check(partial(fused, wrong=wrong))
        assert not verdict.passed and named in verdict.text
    for problem in (torch.OutOfMemoryError, torch.AcceleratorError):  # of a card that others use
        def full(*_, problem=problem, **__):
            raise problem("CUDA")
        with pytest.raises(problem):
            check(full)
    assert not kernel_check.results_file().exists()
    assert check(fused).passed and len(calls) > 3
    before = len(calls)
    assert check(fused).passed and len(calls) == before  # from the file
    assert check(fused, torch.float16).passed and check(fused, long=True).passed
    assert len(calls) == before + len(attention_check.SHORT) + len(attention_check.LONG)
    kernel_check.results_file().write_text("not json")
    before = len(calls)
    assert check(fused).passed and len(calls) == before + len(attention_check.SHORT)
    asked = [(call["dropout"], call["keep_terms"]) for call in calls[before:]]
    assert {(0.1, False), (0.0, False), (0.1, True)} == set(asked)


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_the_check_leaves_a_checkpointed_forward_pass_alone(monkeypatch, tmp_path, checkpointing):
    """The first layer asks for the check, inside the hooks of activation checkpointing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    verdicts = []

    def fused(*tensors, keep_terms=False, **options):
        return reference_attention(*tensors, **options)

    def attend(*tensors, **options):  # as dispatch's "auto", which asks at its first call
        if not verdicts:
            device = torch.device("cpu")
            verdicts.append(attention_check.check(device, torch.float32, 8, False, fused))
        return dispatch.attend(*tensors, **options)

    results = []
    for asks in (False, True):
        if asks:
            verdicts.clear()
            monkeypatch.setattr(encoder, "attend", attend)
        torch.manual_seed(0)
        config = ModelConfig(vocab_size=64, hidden_size=16, num_layers=2, num_heads=2,
                             intermediate_size=32, max_position=32, position_buckets=8,
                             hidden_dropout=0.0, attention_dropout=0.0, attention="reference")
        model = encoder.Encoder(config)
        model.checkpointing = checkpointing
        init_parameters(model, 0.02, 0)
        inputs = torch.randn(2, 12, 16, requires_grad=True)
        model(inputs, torch.ones(2, 12, dtype=torch.int32)).square().sum().backward()
        results.append([inputs.grad, *(p.grad for p in model.parameters())])
    assert verdicts[0].passed, verdicts[0].text
    for plain, checked in zip(*results, strict=True):
        torch.testing.assert_close(plain, checked, rtol=1e-6, atol=1e-7)


def test_checks_depend_on_files_that_exist():
    lists = (attention_check.SOURCES, fused_checks.LOSS_SOURCES, fused_checks.NORM_SOURCES)
    assert all(path.is_file() for sources in lists for path in sources)
    names = {path.name for path in attention_check.SOURCES}
    assert {"backward.py", "forward.py", "position_bias.py", "tiles.json", "dropout.py"} <= names
