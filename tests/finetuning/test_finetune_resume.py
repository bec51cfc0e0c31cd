"""A fine-tuning run that was killed ends as if it had not been; bad steps change no weight."""

import contextlib
import dataclasses
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import rank_helpers
import torch
from launching import ROOT, deepspeed_json
from superglue_helpers import SAMPLE
from test_finetune_loop import QUICK, common, plan
from test_metrics_references import task_of

from deberta_ds.base.errors import UserError
from deberta_ds.checkpoint import find
from deberta_ds.finetuning import inputs as encoding
from deberta_ds.finetuning import loop, sweep
from deberta_ds.finetuning.inputs import digest
from deberta_ds.finetuning.models import find_finetuned
from deberta_ds.tasks.layouts import Example, TextSpan
from deberta_ds.training.step import train_step

WORKER = ROOT / "tests/workers/finetune_killed.py"
# Four updates an epoch, with dropout; the best evaluation is the third of four.
SETTINGS = ("--all.learning_rate=4e-3", "--all.epochs=2", "--all.evals_per_epoch=2",
            "--all.global_batch_size=6", "--all.micro_batch_size=3", "--all.train_rows=24",
            "--all.patience=2")


def start(out: Path, step: int, *more: str, nan_row: int = -1) -> list[int]:
    """Return the exit codes of two ranks, of which one is killed before update `step`."""
    arguments = [str(step), str(nan_row), *common(out), "--task", "CB", *SETTINGS, *more]
    return rank_helpers.wait(rank_helpers.start(2, arguments, out / "log", WORKER))


def everything(out: Path) -> tuple[dict, dict[str, bytes]]:
    """Return a run's result without its time, and its files."""
    run = out / "CB" / "seed-1"
    result = json.loads((run / "result.json").read_text())
    files = {path.relative_to(run).as_posix(): path.read_bytes() for path in run.rglob("*")
             if path.is_file() and path.name != "result.json"}
    return result | {"seconds": 0}, files


class Killed(BaseException):
    """Stands for a kill where the test's own process goes on."""


def run_here(out: Path, monkeypatch, step: int = -1, due=lambda *_: False, given=QUICK
             ) -> list[str]:
    """Return what a run in this process says, which is killed before update `step`; due: whether a
    save is, which the best evaluation gets in any case."""
    def step_or_die(engine, batches, **options):
        assert engine.module.training  # with dropout, also after an evaluation
        if options["step"] == step:
            raise Killed
        return train_step(engine, batches, **options)

    monkeypatch.setattr(loop, "train_step", step_or_die)
    monkeypatch.setattr(loop, "is_save_due", due)
    said: list[str] = []
    with contextlib.nullcontext() if step < 0 else pytest.raises(Killed):
        sweep.run_all(plan(out, num_seeds=1, given=given, say=said.append))
    return said


def test_a_run_killed_twice_ends_with_the_same_weights_history_and_scores(
        process_group, tmp_path, monkeypatch):
    out = tmp_path / "killed"
    run_here(tmp_path / "whole", monkeypatch, given=SETTINGS)
    for step, due, found in ((3, lambda *_: True, 3), (5, lambda *last: last[-1], 4)):
        run_here(out, monkeypatch, step, due, SETTINGS)
        assert not (out / "CB" / "seed-1" / "result.json").exists()
        newest, _ = loop.newest(out / "CB" / "seed-1")
        assert newest.name == f"step-{found:08d}"
    said = run_here(out, monkeypatch, given=SETTINGS)
    assert any(f"goes on after step {found}, from {newest}" in line for line in said)
    (result, files), killed = everything(tmp_path / "whole"), everything(out)
    assert killed == (result, files) and not [name for name in files if name.startswith("resume")]
    assert (result["best_step"], result["history"][-1]["step"]) == (2, 6)
    scores = [result["history"][0][name] for name in ("macro_f1", "accuracy")]
    assert result["score"] == pytest.approx(sum(scores) / 2)  # both are without dropout


@pytest.mark.multi
@pytest.mark.slow
def test_two_ranks_of_which_one_is_killed(tmp_path):
    more = ("--all.sift_weight=1.0", "--deepspeed_config",
            str(deepspeed_json(tmp_path / "ds.json", 3)))
    assert not any(start(tmp_path / "whole", -1, *more))
    out = tmp_path / "killed"
    assert any(start(out, 3, *more)) and not (out / "CB" / "seed-1" / "result.json").exists()
    newest, _ = loop.newest(out / "CB" / "seed-1")
    assert newest.name == "step-00000003" and not any(start(out, -1, *more))
    assert f"goes on after step 3, from {newest}" in (out / "log").read_text()
    assert everything(tmp_path / "whole") == everything(out)


@pytest.mark.multi
@pytest.mark.slow
def test_a_nan_on_one_rank_ends_the_run_on_all_and_names_the_example(tmp_path):
    assert not any(start(tmp_path, -1, nan_row=7))
    result, _ = everything(tmp_path)
    assert result["failed"] and result["error"].count("rank ") == 1
    assert f"{SAMPLE}/CB/train.jsonl:8" in result["error"]


@pytest.fixture
def killed(process_group, tmp_path, monkeypatch) -> Path:
    """Return the directory of a run that was killed after its first evaluation."""
    run_here(tmp_path, monkeypatch, 8)
    monkeypatch.setattr(loop, "train_step", train_step)
    return tmp_path / "CB" / "seed-1"


def test_a_checkpoint_of_another_run_is_not_taken(killed, tmp_path):
    path, _ = loop.newest(killed)
    with pytest.raises(UserError, match=f"{path}: this run had settings = .*'epochs': 2.*or delete "
                       f"{killed} to run it again"):
        sweep.run_all(plan(tmp_path, num_seeds=1, given=(*QUICK, "--all.epochs=1")))
    state = path / "rank-00000.safetensors"
    state.write_bytes(state.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"(?s)no whole checkpoint to resume from.*truncated"):
        sweep.run_all(plan(tmp_path, num_seeds=1))


def test_the_checkpoint_of_the_best_evaluation_stays_until_there_is_a_better_one(
        killed, tmp_path, monkeypatch):
    (killed / "resume/best").unlink()
    run_here(tmp_path, monkeypatch, 9, lambda *_: True)
    assert [find.step_of(path) for path in find.list_finished(killed / "resume")] == [6, 9]
    with pytest.raises(UserError, match="has not ended .no result.json.; run its command to the e"):
        find_finetuned(killed)
    monkeypatch.setattr(loop.Progress, "accept", lambda *_: False)
    monkeypatch.setattr(loop, "train_step", train_step)
    best = find.path_of(killed / "resume", 6)
    best.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="step-00000006: is gone or damaged .*delete .*resume to"):
        sweep.run_all(plan(tmp_path, num_seeds=1))
    (tmp_path / "elsewhere").rename(best)
    sweep.run_all(plan(tmp_path, num_seeds=1))
    assert json.loads((killed / "result.json").read_text())["best_step"] == 6


def test_a_gradient_that_is_not_finite_changes_no_weight(process_group, tmp_path, monkeypatch):
    build, seen = loop.build, []

    def build_with_hook(job, optim):
        engine = build(job, optim)
        weight = engine.module.head.classifier.weight
        weight.register_hook(lambda gradient: gradient * torch.nan)
        seen.extend([engine.module, {name: value.clone() for name, value
                                     in engine.module.state_dict().items()}])
        return engine

    monkeypatch.setattr(loop, "build", build_with_hook)
    (result,) = sweep.run_all(plan(tmp_path, num_seeds=1))
    module, before = seen
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert result["failed"] and "step 1: the gradient is not finite" in result["error"]
    assert "first at head.classifier.weight" in result["error"]
    assert "CB/train.jsonl:" in result["error"] and "and 2 more" in result["error"]


def test_every_split_is_encoded_once_for_all_seeds(process_group, tmp_path, monkeypatch):
    encoded, encode = Counter(), encoding.encode

    def count(task, examples, *arguments, **options):
        examples = list(examples)
        encoded[examples[0].place] += 1
        return encode(task, examples, *arguments, **options)

    monkeypatch.setattr(encoding, "encode", count)
    sweep.run_all(plan(tmp_path, given=(*QUICK, "--all.epochs=1")))
    assert set(encoded.values()) == {1} and len(encoded) == 3  # train, val, test


def test_when_a_checkpoint_is_due():
    due = loop.is_save_due
    assert due(0, 0, True) and not due(0, 0, False)
    # Saves of 20 s, every 400 s, take a twentieth of the time.
    assert not due(399, 20, True) and due(400, 20, True) and due(400, 20, False)


def test_the_best_evaluation_is_the_first_of_equal_ones_and_never_nan():
    progress = loop.Progress({}, 1)
    taken = []
    for step, score in enumerate((float("nan"), 0.5, 0.5, 0.7, 0.6), 1):
        progress.step = step
        taken.append(progress.accept(score, step / 10))
    assert taken == [False, True, False, True, False]
    assert (progress.best, progress.best_step, progress.since_best) == (0.7, 4, 1)
    assert progress.threshold == 0.4


def test_a_run_stands_only_for_one_of_the_same_texts_labels_and_answers():
    example = Example((0,), (("a",),), 1)
    changes = ({"sequences": (("b",),)}, {"label": 0}, {"spans": (TextSpan(0, 0, 1),)},
               {"names": ("a",)}, {"gold": ("a",)})
    examples = [example, *(dataclasses.replace(example, **change) for change in changes)]
    task = task_of("accuracy", labels="ab")
    found = {digest(task, SimpleNamespace(examples=[one])) for one in examples}
    assert len(found) == len(examples)
