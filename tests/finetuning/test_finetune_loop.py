"""Fine-tuning: exact at any world size, resumable, honest about failures, heads kept by name."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import rank_helpers
import torch
from launching import ROOT, deepspeed_json, python
from report_cases import make_result
from superglue_helpers import SAMPLE, read_lines, save_random, tiny_start, tokenizer_path
from test_metrics_references import task_of

from deberta_ds.base.errors import UserError
from deberta_ds.cluster import lock
from deberta_ds.engine.ds_config import DeepSpeedConfig
from deberta_ds.finetuning import loop, sweep
from deberta_ds.finetuning.models import (
    build_model,
    find_finetuned,
    finetuned_model,
    keep_head,
    load_finetuned,
    open_start,
)
from deberta_ds.tasks.settings import Settings, load
from deberta_ds.tasks.task import TASK_NAMES, TASKS, task_named

QUICK = ("--all.learning_rate=2e-3", "--all.epochs=2", "--all.global_batch_size=6",
         "--all.dropout=0.0", "--all.head_dropout=0.0")


def common(out: Path, *more: str) -> list[str]:
    return ["--model", "random:tiny", "--tokenizer", tokenizer_path(), "--data", str(SAMPLE),
            "--any_size", "--out", str(out), *more]


def test_lower_layers_learn_slower(process_group, tmp_path):
    """One update of Adam moves a weight by its learning rate, less what eps takes."""
    model = build_model(task_named("CB"), tiny_start(), Settings(), 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given = ("--all.epochs=1", "--all.global_batch_size=36", "--all.train_rows=36",
             "--all.dropout=0.0", "--all.warmup_share=0.0", "--all.weight_decay=0.0",
             "--all.learning_rate=1e-3", "--all.layer_decay=0.5", "--all.clip_norm=0.0")
    sweep.run_all(plan(tmp_path, given=given, num_seeds=1))
    after = load_finetuned(tmp_path / "CB" / "seed-1" / "model").weights

    def moved(name: str) -> float:
        return float((after[name] - before[name]).abs().max()) / 1e-3

    assert moved("head.classifier.weight") == pytest.approx(1.0, rel=0.15)
    layers = "backbone.trunk.encoder.layers"
    assert moved(f"{layers}.1.ffn_in.weight") == pytest.approx(0.5, rel=0.15)
    assert moved(f"{layers}.0.ffn_in.weight") == pytest.approx(0.25, rel=0.15)
    assert moved("backbone.trunk.input.norm.weight") == pytest.approx(0.125, rel=0.15)


SHARED = ("--tasks", "RTE", "ReCoRD", "CB", *QUICK, "--all.epochs=1", "--all.train_rows=12",
          "--CB.sift_weight=1.0", "--CB.sift_noise=0.0", "--CB.sift_step=0.1")


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """Return the output of three tasks on one rank, without a launcher or ZeRO."""
    out = tmp_path_factory.mktemp("alone")
    python("launch/superglue.py", *common(out), *SHARED, timeout=300)
    return out


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "stage", "extra"), [
    (2, 3, "--all.micro_batch_size=1"), (3, 1, "--all.eval_batch_size=2")])
def test_any_world_and_zero_stage_trains_and_predicts_alike(ranks, stage, extra, alone, tmp_path):
    """ReCoRD's two validation queries leave ranks without a batch, and CB trains adversarially,
    whose inner gradient must leave the partitions alone. Nothing is doubled, nothing is lost."""
    words = [*common(tmp_path), *SHARED, extra, "--deepspeed_config",
             str(deepspeed_json(tmp_path / "ds.json", stage))]
    rank_helpers.run(ranks, words, tmp_path / "log", ROOT / "launch/superglue.py")
    for name in ("RTE", "ReCoRD", "CB"):
        one, other = (read_lines(out / name / "seed-1" / "val_predictions.jsonl")
                      for out in (alone, tmp_path))
        for first, second in zip(one, other, strict=True):
            assert first["key"] == second["key"] and first["prediction"] == second["prediction"]
            np.testing.assert_allclose(first["scores"], second["scores"], atol=1e-3)
        file = Path(name) / "seed-1" / "submission" / f"{name}.jsonl"
        assert (alone / file).read_text() == (tmp_path / file).read_text()


def plan(tmp_path, tasks=("CB",), given=QUICK, **changes) -> sweep.Sweep:
    """Return a sweep over tasks of SuperGLUE, by name, or of one's own."""
    opened = tuple(task_named(task) if isinstance(task, str) else task for task in tasks)
    tables = load(None, given, (*TASK_NAMES, *(task.name for task in opened)))
    found = sweep.Sweep(
        tasks=opened, num_seeds=2, start=tiny_start(), data=str(SAMPLE), out=tmp_path,
        deepspeed=DeepSpeedConfig(), device=torch.device("cpu"), settings=tables, any_size=True,
        say=lambda text: None)
    return dataclasses.replace(found, **changes)


@pytest.fixture(scope="module")
def swept(process_group, tmp_path_factory) -> tuple[Path, list[dict]]:
    """Return (the output, the results) of two seeds of CB."""
    out = tmp_path_factory.mktemp("swept")
    return out, sweep.run_all(plan(out))


@pytest.fixture
def first(swept, tmp_path) -> list[dict]:
    """Return the results of a sweep, of which tmp_path is a copy."""
    shutil.copytree(swept[0], tmp_path, dirs_exist_ok=True)
    return swept[1]


def test_a_killed_sweep_continues_where_it_was(first, tmp_path):
    kept = (tmp_path / "CB" / "seed-1" / "result.json").stat().st_mtime_ns
    (tmp_path / "CB" / "seed-2" / "result.json").unlink()  # as if killed before the end
    again = sweep.run_all(plan(tmp_path))
    assert (tmp_path / "CB" / "seed-1" / "result.json").stat().st_mtime_ns == kept
    assert [old | {"seconds": 0} for old in first] == [new | {"seconds": 0} for new in again]
    with pytest.raises(UserError, match="this run had settings = .* choose another --out"):
        sweep.run_all(plan(tmp_path, given=("--all.learning_rate=1e-5",)))
    (tmp_path / "CB" / "seed-1" / "result.json").unlink()
    lock.take(tmp_path / "CB" / "seed-1" / lock.NAME, dataclasses.replace(
        lock.this_process(), pid=os.getppid(), started=lock.started_at(os.getppid())))
    with pytest.raises(UserError, match="another job writes there"):
        sweep.run_all(plan(tmp_path))


def test_a_finished_seed_keeps_no_lock_of_a_dead_job(first, tmp_path):
    path, mine = tmp_path / "CB/seed-1" / lock.NAME, lock.this_process()
    for change, stays in (({"started": mine.started + 1}, False),
                          ({"machine": "another"}, True)):
        path.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(mine, **change))))
        sweep.run_all(plan(tmp_path, num_seeds=1))
        assert path.exists() == stays  # a job on another machine may live


def test_another_start_or_test_table_is_not_taken_for_the_same(first, tmp_path):
    result, one = tmp_path / "CB" / "seed-1" / "result.json", plan(tmp_path, num_seeds=1)
    other = dataclasses.replace(tiny_start(), weights={"a": torch.ones(2)})
    with pytest.raises(UserError, match="this run had start_weights"):
        sweep.run_all(dataclasses.replace(one, start=other))
    values = json.loads(result.read_text())
    for change, said in (({"tests": {"CB": "0"}}, "test.jsonl has changed since it was predicted"),
                         ({"tests": [values["tests"]]}, "damaged .tests: .*to run this seed again"),
                         ({"labels_and_texts": "0"}, "this run had labels_and_texts = '0'")):
        result.write_text(json.dumps(values | change))
        with pytest.raises(UserError, match=said):
            sweep.run_all(one)
    result.write_text(json.dumps(values))
    shutil.rmtree(result.parent / "model")
    said = []
    sweep.run_all(dataclasses.replace(one, say=said.append))
    assert any("without its model, which was not kept" in line for line in said)
    result.write_text("{")
    with pytest.raises(UserError, match="not valid JSON.*to run this seed again"):
        sweep.run_all(one)


def test_texts_that_do_not_fit_end_a_sweep_before_its_first_run(process_group, tmp_path):
    given = (*QUICK, "--WSC.max_length=8", "--WiC.max_length=9")
    with pytest.raises(UserError, match="texts do not fit") as caught:
        sweep.run_all(plan(tmp_path, ("CB", "WSC", "WiC"), given=given))
    problems = str(caught.value).splitlines()[1:]
    assert len(problems) == 6  # train, val and test of two tasks, at once
    assert all("Set --W" in line and ".jsonl:" in line for line in problems)
    assert not (tmp_path / "CB").exists()


def test_rows_longer_than_the_absolute_positions_are_named_before_training(process_group, tmp_path):
    start = tiny_start("absolute")
    start = dataclasses.replace(start, config=dataclasses.replace(start.config, max_position=28))
    with pytest.raises(UserError, match=r"has 28 absolute positions. Set --CB.max_length=28"):
        sweep.run_all(plan(tmp_path, start=start))
    given = (*QUICK, "--CB.max_length=28", "--all.epochs=1")
    assert sweep.run_all(plan(tmp_path, start=start, given=given, num_seeds=1))


def test_the_result_is_the_score_of_the_kept_weights(first, tmp_path):
    result = first[0]
    best = max(result["history"], key=lambda entry: entry["macro_f1"] + entry["accuracy"])
    assert result["best_step"] == best["step"]
    assert result["score"] == pytest.approx((best["macro_f1"] + best["accuracy"]) / 2)
    assert sum(map(sum, result["confusion"])) == 12
    saved = load_finetuned(tmp_path / "CB" / "seed-1" / "model")
    model = finetuned_model(saved, torch.device("cpu"))
    assert not model.training and saved.task.labels == ("contradiction", "neutral", "entailment")


def test_a_diverged_run_is_counted_and_the_sweep_goes_on(process_group, tmp_path):
    bad = ("--all.learning_rate=10.0", "--all.weight_decay=10.0", "--all.clip_norm=0.0",
           "--all.epochs=6", "--all.global_batch_size=6", "--all.warmup_share=0.0")
    results = sweep.run_all(plan(tmp_path, given=bad))
    assert [result["failed"] for result in results] == [True, True]
    for result in results:
        assert result["score"] == 0.0 and "the loss is" in result["error"]
        assert "best_step" not in result and result["history"] == []
    summary = sweep.summarize([task_named("CB")], results)
    assert summary["tasks"]["CB"]["failed"] == 2
    assert "2/2" in sweep.table(summary)


def test_patience_stops_and_micro_batches_change_nothing(swept, tmp_path):
    given = (*QUICK, "--all.micro_batch_size=4")
    parts = sweep.run_all(plan(tmp_path / "b", num_seeds=1, given=given))
    for one, other in zip(swept[1][0]["history"], parts[0]["history"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=2e-4)
    given = ("--all.learning_rate=1e-9", "--all.epochs=9", "--all.patience=2")
    early = sweep.run_all(plan(tmp_path / "c", num_seeds=1, given=given))
    assert len(early[0]["history"]) == 3 and early[0]["failed"]


def test_the_summary_is_medians_and_the_leaderboards_mean():
    results = []
    for task in TASKS:
        if task.predicted_by:
            continue
        for seed, value in ((1, 0.5), (2, 0.7), (3, 0.6)):
            diagnostics = {"AX-b": {"matthews": 0.1}, "AX-g": {"gender_parity": 0.9,
                           "accuracy": 0.5}} if task.name == "RTE" else {}
            results.append(make_result(
                task.name, seed, score=value, failed=seed == 1, failure="too bad",
                metrics=dict.fromkeys(task.metrics, value), diagnostics=diagnostics))
    summary = sweep.summarize(TASKS, results)
    assert summary["mean"] == pytest.approx(0.6) and summary["mean_of"] == 8
    row = summary["tasks"]["MultiRC"]
    assert row["score"] == {"median": 0.6, "min": 0.5, "max": 0.7} and row["failed"] == 1
    text = sweep.table(summary, summary)
    assert "AX-g" in text and "gender_parity 90.0" in text and "SuperGLUE, all of 8" in text
    assert max(map(len, text.splitlines())) <= 115
    few = [result for result in results if result["task"] in ("RTE", "CB")]
    assert "2 of 8 tasks" in sweep.table(sweep.summarize(TASKS, few))
    assert row["labels"] == ["0", "1"]


def test_an_nli_head_is_kept_row_by_row_by_label_name(tmp_path):
    start, settings = tiny_start(), Settings()
    mnli = save_random(tmp_path, task_named("MNLI"))
    saved = load_finetuned(tmp_path)
    assert find_finetuned(tmp_path) == tmp_path
    rte = build_model(task_named("RTE"), start, settings, 2)
    fresh = rte.head.classifier.weight[0].clone()
    note = keep_head(rte, task_named("RTE"), saved)
    assert "labels kept: entailment; fresh: not_entailment" in note
    assert torch.equal(rte.head.classifier.weight[1], mnli.head.classifier.weight[2])
    assert torch.equal(rte.head.classifier.weight[0], fresh)
    assert torch.equal(rte.head.pooler.dense.weight, mnli.head.pooler.dense.weight)
    copa = build_model(task_named("COPA"), start, settings, 2)
    assert "fresh: choice1, choice2" in keep_head(copa, task_named("COPA"), saved)
    assert torch.equal(copa.head.pooler.dense.weight, mnli.head.pooler.dense.weight)
    wsc = build_model(task_named("WSC"), start, settings, 2)
    assert "all of the head is fresh" in keep_head(wsc, task_named("WSC"), saved)
    head = {"head." + key: value + 1 for key, value in copa.head.state_dict().items()}
    scored = dataclasses.replace(saved, task=dataclasses.replace(task_named("COPA"), name="SWAG"),
                                 weights=dict(saved.weights) | head)
    assert "and the scorer" in keep_head(copa, task_named("COPA"), scored)
    assert torch.equal(copa.head.classifier.weight, head["head.classifier.weight"])
    labels = ("neutral", "entailment", "contradiction")
    renamed = dataclasses.replace(saved, task=dataclasses.replace(saved.task, labels=labels))
    cb = build_model(task_named("CB"), start, settings, 2)
    keep_head(cb, task_named("CB"), renamed)
    assert torch.equal(cb.head.classifier.weight[2], mnli.head.classifier.weight[1])


def test_init_from_runs_and_the_backbone_is_the_other_tasks(first, tmp_path):
    source = tmp_path / "CB" / "seed-1"
    said: list[str] = []
    results = sweep.run_all(plan(tmp_path / "rte", ("RTE",), num_seeds=1, say=said.append,
                                 init_from={"RTE": str(source)}))
    assert results[0]["init_from"].endswith("model")
    assert any("labels kept: entailment" in line for line in said)
    assert not any("by the size of the encoder" in line for line in said)
    assert results[0]["settings"]["learning_rate"] == 2e-3  # as it was given
    assert set(results[0]["diagnostics"]) == {"AX-b", "AX-g"}
    again = open_start(str(source / "model"))
    model = build_model(task_named("WiC"), again, Settings(), 1)
    saved = load_finetuned(source / "model")
    assert torch.equal(model.backbone.words.weight, saved.weights["backbone.words.weight"])
    shutil.rmtree(source)
    assert sweep.run_all(plan(tmp_path / "rte", ("RTE",), num_seeds=1,
                              init_from={"RTE": str(source)}))[0] == results[0]


def test_random_starts_differ_by_seed_and_only_by_seed():
    start, task = tiny_start(), task_named("RTE")
    one, same, two = (build_model(task, start, Settings(), seed) for seed in (1, 1, 2))
    assert torch.equal(one.head.classifier.weight, same.head.classifier.weight)
    assert torch.equal(one.backbone.words.weight, same.backbone.words.weight)
    assert not torch.equal(one.backbone.words.weight, two.backbone.words.weight)


def test_the_best_evaluation_is_that_of_the_metric_that_was_asked_for(monkeypatch):
    scores, values = [], {"accuracy": 0.9, "f1": 0.2}
    progress = SimpleNamespace(step=4, losses=[(0.5, 0.25)], history=[], seconds=1.0,
                               accept=lambda *found: scores.append(found))
    settings = SimpleNamespace(best_metric="f1", global_batch_size=8, sift_weight=0.0)
    job = SimpleNamespace(task=task_of("accuracy"), settings=settings, seed=0, say=print)
    monkeypatch.setattr(loop, "_evaluate", lambda job, engine: (values, 0.5))
    loop.evaluate(job, None, progress, 8, 16)
    assert scores == [(0.2, 0.5)] and progress.losses == []
    assert progress.history == [{"step": 4, "epoch": 2.0, "loss": 0.5} | values]


def test_a_class_of_one_example_weighs_as_many_times_as_it_is_rarer():
    rows = [SimpleNamespace(label=label) for label in (0, 0, 0, 1)]
    found = loop.weights_of_classes(task_of("accuracy", labels="abc"),
                                    SimpleNamespace(class_weights="balanced"), rows)
    assert found == [4 / 9, 4 / 3, 4 / 3]  # scikit-learn's; a class without examples counts as one


def test_the_time_of_a_run_is_that_of_all_starts():
    settings, progress = Settings(learning_rate=1e-3), loop.Progress({}, 1, seconds=50.0)
    job = SimpleNamespace(task=task_of("accuracy"), seed=1, settings=settings)
    loop._updates(job, None, settings.optim(1), [SimpleNamespace(num_tokens=3)], 0, progress)
    assert progress.seconds > 50
