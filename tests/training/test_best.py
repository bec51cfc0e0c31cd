"""The best evaluation's checkpoint is kept, and a run that gets no better ends."""

import dataclasses
import os
import types

import numpy as np
import pytest
import rank_helpers
from launching import deepspeed_json, make_run, options_of

from deberta_ds.base.errors import UserError
from deberta_ds.checkpoint.find import Best, list_finished, newest, step_of
from deberta_ds.config import run_config
from deberta_ds.objectives import rtd
from deberta_ds.tracking.log import read_metrics
from deberta_ds.training import best, loop
from deberta_ds.training.inputs import open_inputs
from deberta_ds.training.start import check_link


def evaluations(out) -> dict[int, float]:
    return {r["step"]: r["generator_loss"] for r in read_metrics(out / "metrics.jsonl")
            if r["kind"] == "eval"}


@pytest.mark.multi
def test_a_run_ends_when_it_gets_no_better_and_keeps_its_best(tmp_path):
    """At a learning rate that ruins the model; two ranks, one checkpoint kept besides the best."""
    run_file = make_run(tmp_path, learning_rate="1.0", warmup_steps="0", steps="120",
                        eval_every="2", save_every="3", keep="1")
    command = [*options_of(run_file, deepspeed_json(tmp_path / "ds.json", 1)),
               "--train.best_metric=generator_loss"]
    out = tmp_path / "out"
    text = rank_helpers.run(2, [*command, "--train.patience=3"], tmp_path / "first.log")
    scores = evaluations(out)
    step = min(scores, key=scores.get)
    assert max(scores) == step + 6 < 120, scores
    assert f"generator_loss = {scores[step]:.6g} at step {step}, kept as" in text
    assert "3 evaluations without a better score" in text
    kept = set(map(step_of, list_finished(out)))
    assert kept == {step, max(scores)}
    assert newest(out / "best").resolve().name == f"step-{step:08d}"  # what commands take

    (out / "best").unlink()  # as if a kill had come before it was made
    rank_helpers.run(2, [*command, "--train.patience=4"], tmp_path / "patient.log")
    assert os.readlink(out / "best").endswith(f"{step:08d}")
    assert {s: evaluations(out)[s] for s in scores} == scores
    assert max(evaluations(out)) >= step + 8


def test_a_best_of_other_rows_counts_no_more(tmp_path):
    overrides = ["--train.best_metric=generator_loss"]
    run, _ = run_config.load(make_run(tmp_path), overrides)
    held_out = open_inputs(run, {}, "").held_out
    scored = best.what_is_scored(run, held_out, [])
    rows = held_out[run.data.heldout]
    assert scored == best.what_is_scored(run, {"moved": rows}, [])
    others = [dataclasses.replace(row, labels=np.roll(row.labels, 1)) for row in rows]
    assert scored != best.what_is_scored(run, {"": others}, [])  # of other masks
    fewer = best.what_is_scored(run, {"": rows[:8]}, [])
    saved = Best("generator_loss", 1.5, 10, scored=scored)
    assert best.continued(run, saved, scored) == (saved, "")
    found, note = best.continued(run, saved, fewer)
    assert found == Best("generator_loss", scored=fewer)
    assert "generator_loss = 1.5 at step 10" in note
    other, _ = run_config.load(make_run(tmp_path), ["--train.best_metric=minimal_pairs"])
    assert best.continued(other, saved, "x") == (Best("minimal_pairs", scored="x"), "")
    pairs = [([5, 6], [5, 7])]
    assert best.what_is_scored(other, {}, pairs) != best.what_is_scored(other, held_out, [])


def test_a_directory_in_the_way_of_the_link_is_refused_at_the_start(tmp_path):
    run, _ = run_config.load(make_run(tmp_path), ["--train.best_metric=generator_loss"])
    check_link(run)
    (tmp_path / "out/best").mkdir(parents=True)
    with pytest.raises(UserError, match="is in the way"):
        check_link(run)


def test_a_link_that_is_not_there_is_not_promised(tmp_path):
    """--resume with the checkpoint of another run, and nothing better since."""
    run, _ = run_config.load(make_run(tmp_path), ["--train.best_metric=generator_loss"])
    said: list[str] = []
    trainer = types.SimpleNamespace(
        run=run, best=Best("generator_loss", 1.5, 10), _is_past_its_best=bool,
        log=types.SimpleNamespace(info=said.append),
        journal=types.SimpleNamespace(end=lambda *_: None))
    loop.Trainer._say_the_end(trainer, 20)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/best").symlink_to(tmp_path)
    loop.Trainer._say_the_end(trainer, 20)
    assert said == ["best: generator_loss = 1.5 at step 10, a checkpoint of the run from which "
                    "this one began",
                    f"best: generator_loss = 1.5 at step 10, kept as {tmp_path}/out/best"]


def test_what_is_better():
    metrics = {metric.key: metric for metric in rtd.METRICS}
    one = Best("roc_auc")
    assert one.accept(metrics["roc_auc"], 10, 0.6) and not one.accept(metrics["roc_auc"], 20, 0.6)
    assert not one.accept(metrics["roc_auc"], 30, None)
    assert not one.accept(metrics["roc_auc"], 40, float("nan"))
    assert (one.step, one.without) == (10, 3)
    assert one.accept(metrics["roc_auc"], 50, 0.61) and one.without == 0
    for key in ("generator_loss", "generator_perplexity", "discriminator_loss"):
        assert [metrics[key].is_better(x, 2.0) for x in (1.0, 2.0, 3.0)] == [True, False, False]
    for key in ("generator_accuracy", "average_precision", "discriminator_gain"):
        assert [metrics[key].is_better(x, 2.0) for x in (1.0, 2.0, 3.0)] == [False, False, True]


def test_a_score_that_is_not_measured_is_named(tmp_path):
    run, _ = run_config.load(make_run(tmp_path))

    def problems(eval_corpus=run.data.heldout, **train):
        return " ".join(best.problems(dataclasses.replace(
            run, train=dataclasses.replace(run.train, **train),
            data=dataclasses.replace(run.data, heldout=eval_corpus))))

    assert not problems() and not problems(best_metric="roc_auc", patience=2)
    assert "roc_auk" in problems(best_metric="roc_auk") and "roc_auc" in problems(
        best_metric="roc_auk")
    assert "evaluate.minimal_pairs" in problems(best_metric="minimal_pairs")
    assert "data.heldout" in problems(best_metric="roc_auc", eval_corpus="")
    several = {"de": "a", "en": "b"}
    assert not problems(best_metric="roc_auc/de", eval_corpus=several)
    assert "roc_auc/fr" in problems(best_metric="roc_auc/fr", eval_corpus=several)
    assert "roc_auc/de" in problems(
        best_metric="roc_auc/de", eval_corpus={"de": "a"})  # not written
    assert "minimal_pairs/de" in problems(best_metric="minimal_pairs/de", eval_corpus=several)
    assert "roc_auc/de" in problems(best_metric="roc_auc/de")
    assert "train.best_metric" in problems(patience=2)
    saved = Best("roc_auc", 0.6, 10, 2, scored="x")
    wanted = dataclasses.replace(run, train=dataclasses.replace(run.train, best_metric="roc_auc"))
    assert best.continued(wanted, saved, "x")[0].without == 2
    assert best.continued(run, saved, "") == (Best(), "") == best.continued(run, Best(), "")
