"""The pages: they parse, stand alone, have every section, and tell the numbers they were given."""

import dataclasses
import json
import re
from functools import partial
from pathlib import Path

import pytest
from report_cases import (
    Page,
    event,
    make_config,
    make_records,
    make_result,
    make_run,
    make_sweep,
    write_records,
)

from deberta_ds.base.errors import UserError
from deberta_ds.base.numbers import format_value
from deberta_ds.base.user_code import digest
from deberta_ds.cluster import lock
from deberta_ds.report import charts, run_pages, tables
from deberta_ds.report.run_pages import filled_masks
from deberta_ds.report.rundata import read_run

SECTIONS = ["Learning curves", "What was learned", "Hardware and optimizer", "Where the time went",
            "Evaluation", "SuperGLUE", "From raw text to scores", "Configuration"]


def read_page(tmp_path, *directories, write=run_pages.write_runs):
    out = tmp_path / "report.html"
    write(out, list(directories))
    text = out.read_text()
    assert not re.search(r"https?://|//[a-z]|@import|url\(", text), "the page must stand alone"
    page = Page(text)
    assert not {"src", "href", "srcset"} & page.attributes
    return text, page


def test_page_has_every_section_and_its_numbers_equal_the_input(tmp_path):
    records = make_records()
    records[60:60] = [event(30, 1.0, "resume"), event(30, 1.0, "resume")]
    text, page = read_page(tmp_path, make_run(tmp_path / "demo", records))
    assert page.headings == ["demo", *SECTIONS]
    last = [record for record in records if record["kind"] == "eval"][-1]
    for key, unit in (("discriminator_gain", "gain"), ("roc_auc", "number"),
                      ("generator_accuracy", "share")):
        assert page.tiles[key] == last[key]
        assert f">{format_value(last[key], unit)}</b>" in text
    assert page.tiles["parameters"] == 13_596_289
    assert page.tiles["tokens_seen"] == 2040 * 400
    assert "attention.kernel" in page.text and "cross-entropy.why" in page.text
    # 0.9 s a step, of which 2 % are saves and 5 % evaluations, and 20 s of restarts. The clock of
    # this run begins again at its resume, so its newest record has seen half of its steps.
    assert page.tiles["goodput"] == pytest.approx(0.93 * 180 / 200)
    assert "steps 83.7%, 2m 47s" in page.text and "saves 1.8%, 4s" in page.text
    assert "starts and repeated steps 10.0%, 20s" in page.text
    shown = set(page.values)
    for record in (r for r in records if r["kind"] == "eval"):
        assert {v for k, v in record.items() if k not in ("kind", "step", "seconds")} <= shown
    assert "macro f1, accuracy" in page.text and "1 of 3" in page.text
    assert "1.33 epochs" in page.text
    assert '<dd class="set" title="command line">400</dd>' in text
    assert {0.527, 371.0} <= shown
    assert "&lt;sample&gt;" in text and "<sample>" not in text
    assert "resumed at step 30 (twice), 200" in page.text
    assert text.count('class="mark"') == 2 * text.count('<span class="mark-label"') > 0
    assert ">0s<" not in text and text.count('class="dur"') == 4  # of 5 stages; one has no time


def test_a_run_whose_own_objective_was_edited_has_no_page(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("from deberta_ds.objectives.rtd import *\n")
    directory = make_run(tmp_path / "demo", make_records())
    values = json.loads((directory / "config.json").read_text())
    values["run"]["objective"]["kind"] = str(own)
    for known, expected in ((digest("", str(own)), None), ("0" * 64, "own.py: has changed since")):
        (directory / "config.json").write_text(
            json.dumps(values | {"content_hashes": {str(own): known}}))
        if expected is None:
            read_run(directory)
        else:
            with pytest.raises(UserError, match=expected):
                read_run(directory)


def test_a_masked_lm_run_has_no_discriminator_and_needs_no_extras(tmp_path):
    records = make_records(kind="mlm")
    run = make_run(tmp_path / "mlm", records, "mlm", "mlm", extras=False)
    text, page = read_page(tmp_path, run)
    assert page.headings == ["mlm", *(s for s in SECTIONS if s not in SECTIONS[5:7])]
    visible = page.text.partition("Configuration")[0]
    assert "iscriminator" not in visible and "enerator" not in visible
    assert page.tiles["masked_accuracy"] == [r for r in records if r["kind"] == "eval"][-1][
        "masked_accuracy"]
    assert 'data-chart="masked_loss"' in text and 'data-chart="roc_auc"' not in text


def test_runs_side_by_side_say_what_differs_and_which_rows_are_drawn(tmp_path):
    runs = [make_run(tmp_path / "a", name="a"),
            make_run(tmp_path / "b", name="b", optim={"learning_rate": 1e-3}),
            make_run(tmp_path / "c", name="c", kind="mlm")]
    text, page = read_page(tmp_path, *runs)
    assert page.headings[0] == "3 runs compared" and page.headings.count("Evaluation") == 3
    assert "What differs" in page.headings and "optim.learning_rate" in page.text
    legends = re.findall(r'<p class="legend">(.*?)</p>', text)
    assert len(legends) == text.count("<figure") + len(runs)
    assert all("</i>" in legend for legend in legends)
    assert "Thin lines: training; dots: held out." in page.text


def test_a_comparison_draws_training_curves_and_held_out_points_of_any_number_of_runs(tmp_path):
    young = [record for record in make_records() if record["kind"] != "eval"]
    runs = [make_run(tmp_path / f"{n}", young if n == 10 else None, name=f"run {n}", extras=False)
            for n in range(11)]
    text, page = read_page(tmp_path, *runs)
    assert "--run10:hsl(" in text and page.text.count("run 10") > 10
    loss = next(chart for group in charts.groups([read_run(run) for run in (runs[0], runs[10])])
                for chart in group[-1] if chart.key == "generator_loss")
    assert [(s.label, s.style) for s in loss.series] == [
        ("run 0, training", "thin"), ("run 0", "dots"), ("run 10", "trend")]
    assert page.text.count("run 0, training") == 0  # named once
    # Of each point the script has step, text, value, tokens and seconds; steps take 0.9 s.
    step, text, value, tokens, seconds = json.loads(loss.data)[1]["points"][1]
    assert (step, tokens, seconds) == (100, 204_000, 90) and text == f"{value:.3f}"


def test_a_fold_shows_what_was_set_and_no_empty_values(tmp_path):
    run = make_run(tmp_path / "run", log={"wandb": "", "mlflow": ""})
    config = json.loads((run / "config.json").read_text())
    config["origins"] = {"log.wandb": "default", "log.mlflow": "default",
                         "optim.learning_rate": "default", "optim.warmup_steps": "run.toml"}
    (run / "config.json").write_text(json.dumps(config))
    text, _ = read_page(tmp_path, run)
    assert "<summary>Log<small>all defaults</small>" in text
    assert "<dt>wandb</dt><dd>&#34;&#34;</dd>" in text
    assert "<summary>Optim<small>warmup_steps 40</small>" in text
    assert "<summary>Software versions<small>python 3.11.2, " in text


def test_minimal_pairs_have_the_color_of_the_network_that_is_scored(tmp_path):
    for kind, networks in (("rtd", ["second", "main", "main"]), ("mlm", ["main", "main"])):
        run = read_run(make_run(tmp_path / kind, make_records(kind=kind), kind, kind))
        colors = {metric.network: charts.color_of(metric, run) for metric in run.metrics}
        assert list(colors.values()) == networks and "grammar" in colors


def test_null_numbers_leave_a_gap(tmp_path):
    records = make_records()
    for record in records[10:40] + [r for r in records if r["kind"] == "eval"][-1:]:
        record |= dict.fromkeys(set(record) - {"kind", "step", "event", "detail"})
    text, page = read_page(tmp_path, make_run(tmp_path / "gaps", records, extras=False))
    assert "None" not in page.text and "nan" not in text


def test_a_run_before_its_first_evaluation(tmp_path):
    records = [record for record in make_records()[:12] if record["kind"] != "eval"]
    text, page = read_page(tmp_path, make_run(tmp_path / "young", records, extras=False))
    assert "Not evaluated yet" in text and "0 checkpoints saved" in page.text


def test_a_run_that_broke_off_is_not_in_progress(tmp_path):
    """A killed job leaves no last word; only a job that holds the directory is in progress. Then a
    live page reloads itself."""
    records = make_records()[:60]
    records[-1:] = [event(30, 9.0, "skip"), event(40, 9.0, "skip"), event(41, 9.0, "rollback")]
    run = make_run(tmp_path / "run", records, extras=False)
    text, page = read_page(tmp_path, run)
    assert ">Interrupted</span>" in text and "pill bad" in text
    assert "2 checkpoints saved, 2 updates skipped, 1 rollback" in page.text
    live = partial(run_pages.write_runs, live_seconds=30)
    assert 'http-equiv="refresh"' not in read_page(tmp_path, run, write=live)[0]
    with lock.held(run):
        text, _ = read_page(tmp_path, run, write=live)
    assert ">In progress</span>" in text
    assert '<meta http-equiv="refresh" content="30">' in text
    holder = dataclasses.replace(lock.this_process(), started=1)  # a killed one leaves its lock
    (run / lock.NAME).write_text(json.dumps(dataclasses.asdict(holder)))
    assert ">Interrupted</span>" in read_page(tmp_path, run)[0]
    write_records(run, [*records, event(42, 9.0, "fail") | {"detail": "9 bad steps: <nan>"}])
    text, page = read_page(tmp_path, run)
    assert ">Failed</span>" in text and "9 bad steps: <nan>" in page.text


NOTHING = {"generator_accuracy": 0.0541, "discriminator_gain": -0.001, "roc_auc": 0.5,
           "average_precision": 0.119, "discriminator_accuracy": 0.881, "discriminator_loss": 0.37,
           "minimal_pairs": 0.5}


@pytest.mark.parametrize(("scores", "state", "pill", "shown"), [
    ({}, "Finished", "good", ""), (NOTHING, "Finished, but nothing was learned", "bad", ""),
    ({"discriminator_gain": -0.01}, "Finished, partly at its baselines", "wait", 'class="down"'),
    # Of 200 minimal pairs: noise around chance is neither red nor held against a run.
    ({"minimal_pairs": 0.449}, "Finished", "good", '<b class="" title="44.9%">'),
    ({"minimal_pairs": 0.551}, "Finished", "good", '<b class="" title="55.1%">'),
    ({"minimal_pairs": 0.40}, "Finished, partly at its baselines", "wait",
     '<b class="down" title="40.0%">')], ids=str)
def test_finished_is_green_only_if_something_was_learned(tmp_path, scores, state, pill, shown):
    records = [record | scores if record["kind"] == "eval" else record for record in make_records()]
    text, _ = read_page(tmp_path, make_run(tmp_path / "run", records))
    assert f">{state}</span>" in text and f"pill {pill}" in text and shown in text


def test_held_out_corpora_are_those_of_the_last_evaluation(tmp_path):
    run = read_run(make_run(tmp_path / "demo"))
    for name, record in zip(("old", "new"), run.evals[-2:], strict=True):
        record[f"roc_auc/{name}"] = 0.6
    table = tables.evaluation_by_corpus(run)
    assert [row[0].text for row in table.rows] == ["new"] and len(table.head) == 2


def test_time_adds_up_over_a_clock_that_restarts_and_counts_the_ranks_of_each_start(tmp_path):
    records = make_records(resume=200)
    starts = [record for record in records if record.get("event") in ("start", "resume")]
    for record, ranks in zip(starts, (8, 2), strict=True):
        record["world_size"] = ranks
    run = read_run(make_run(tmp_path / "new", records))
    assert run.training_seconds() == pytest.approx(0.9 * 400)
    assert run.rank_seconds() == pytest.approx((8 + 2) * 0.9 * 400 / 2)
    assert {tile.key: tile.note for tile in tables.tiles(run)}["seconds"].startswith("2 to 8 ")


def test_a_sweep_has_its_scores_curves_seeds_and_matrices(tmp_path):
    sweep = make_sweep(tmp_path / "a")
    other = make_sweep(tmp_path / "b", model="scratch", names=("RTE",))
    text, page = read_page(tmp_path, sweep, other, write=run_pages.write_sweep)
    assert page.headings == ["60.0%", "Tasks"]
    assert "2 of 8 tasks" in page.text and "median of scratch" in page.text
    assert all(f"seed {seed}" in page.text for seed in (1, 2, 3)) and "majority class" in page.text
    assert text.count('class="matrix"') == 2 and "not_entailment" in page.text
    assert "by the RTE models, medians: matthews 60.0%" in page.text
    values = json.loads((sweep / "results.json").read_text())["tasks"]["CB"]["score"]
    assert set(values.values()) <= set(page.values)


def test_a_sweep_whose_runs_all_diverged_is_drawn(tmp_path):
    runs = [make_result("RTE", seed, score=0.0, failed=True, metrics={"accuracy": 0.0},
                        baseline=None, error="nan") for seed in (1, 2)]
    zero = dict.fromkeys(("median", "min", "max"), 0.0)
    tasks = {"RTE": {"score": zero, "metrics": {"accuracy": zero}, "baseline": None, "seeds": 2,
                     "failed": 2, "diagnostics": {}}}
    sweep = make_sweep(tmp_path / "a", runs=runs, tasks=tasks)
    text, page = read_page(tmp_path, sweep, write=run_pages.write_sweep)
    assert "No evaluation was reached" in page.text and "2 of 2" in page.text


@pytest.mark.parametrize("file, content, words", [
    ("metrics.jsonl", '{"kind": "train", "step": 1}\n{"kind": "tr\n', "metrics.jsonl, line 2"),
    ("metrics.jsonl", '{"kind": "train", "step": 1, "loss": NaN}\n', 'line 1: "loss" must be'),
    ("metrics.jsonl", '{"kind": "train", "step": 1, "loss": 1e999}\n', '"loss" must be a num'),
    ("metrics.jsonl", '{"kind": "train", "step": 1, "loss": true}\n', '"loss" must be a numb'),
    ("metrics.jsonl", '{"kind": "train", "step": %s}\n' % ("9" * 5000), "line 1"),
    ("metrics.jsonl", '{"kind": "train", "step": %s}\n' % ("9" * 300), "too large a number"),
    ("metrics.jsonl", "[" * 100_000, "metrics.jsonl, line 1"),
    ("metrics.jsonl", "\n\n", "metrics.jsonl, line 1"),
    ("config.json", "[]", "config.json: the file: input should be an object"),
    ("config.json", '{"run": 1}', "config.json: run: input should be an object"),
    ("config.json", '{"run": {"objective": {"kind": "rtd"}}}', "run.name: field required"),
    ("config.json", json.dumps(make_config("demo", "x")), "objective.kind: .*'x' is unknown"),
    ("config.json", json.dumps(make_config("demo", "rtd", train={
        "steps": "9", "global_batch_size": 8, "micro_batch_size": 8})
                               | {"origins": {"a": 1}}), "run.train.steps: .*origins.a: "),
    ("config.json", "[" * 100_000, "config.json: not valid JSON"),
    ("summary.json", '[{"stage": "a"}]', "summary.json: 0.what: field required"),
    ("summary.json", '[{"stage": "a", "what": "", "result": "", "seconds": NaN}]', "summary"),
    ("superglue/results.json", '{"tasks": {"RTE": {"score": {"median": 61}}}}',
     "results.json: tasks.RTE.score.median: "),
    ("superglue/results.json", '{"tasks": []}', "results.json: tasks: "),
    ("superglue/results.json", "\xff", "results.json: ")], ids=str)
def test_damaged_input_is_named(tmp_path, file, content, words):
    run = make_run(tmp_path / "demo")
    (run / file).write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=words) as error:
        run_pages.write_runs(tmp_path / "report.html", [run])
    assert len(str(error.value)) < 700 and not (tmp_path / "report.html").exists()


def test_missing_files_and_full_disks_are_named(tmp_path):
    with pytest.raises(UserError, match="metrics.jsonl: No such file"):
        run_pages.write_runs(tmp_path / "report.html", [tmp_path])
    with pytest.raises(UserError, match="results.json: No such file"):
        run_pages.write_sweep(tmp_path / "report.html", [tmp_path])
    run = make_run(tmp_path / "demo")
    with pytest.raises(OSError, match="/proc/none"):  # errors.exit_cleanly names it
        run_pages.write_runs("/proc/none/report.html", [run])
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked/metrics.jsonl").mkdir()
    with pytest.raises(UserError, match="metrics.jsonl: .*irectory"):
        run_pages.write_runs(tmp_path / "report.html", [tmp_path / "blocked"])


def test_masks_are_filled_by_the_trained_and_by_an_untrained_network(tmp_path):
    model = Path(__file__).parents[1] / "fixtures/tiny_run/rtd/export"
    table = filled_masks(model, ["the [MASK] and <b> a [MASK]", "[MASK]"])
    assert [[cell.text for cell in row[:2]] for row in table.rows] == [
        ["the [MASK] and <b> a [MASK]", "1"], ["", "2"], ["[MASK]", "1"]]
    for *_, untrained, trained in table.rows:
        assert untrained.text != trained.text and trained.text.count("%") == 4
    page = Page(run_pages.runs_page([read_run(make_run(tmp_path / "run"))], [table]))
    assert "Masks filled" in page.headings and "<b>" in page.text
    with pytest.raises(UserError, match=r"no \[MASK\] in the text"):
        filled_masks(model, ["nothing"])


def test_where_the_time_went_is_the_newest_record_and_left_out_where_nothing_says_it(tmp_path):
    records = [{"kind": "train", "step": 10, "seconds": 90.0, "saves_seconds": 2.0,
                "evaluations_seconds": 3.0, "restarts_seconds": 10.0, "loss": 1.0},
               event(10, 95.0, "save"),
               event(10, 100.0, "end") | {"saves_seconds": 5.0, "evaluations_seconds": 3.0,
                                          "restarts_seconds": 10.0}]
    run = make_run(tmp_path / "new", records, extras=False)
    text, page = read_page(tmp_path, run)
    assert "Where the time went" in page.headings and "saves 4.5%, 5s" in page.text
    assert sum(page.values[page.values.index(92.0):][:4]) == 110.0 and "0123456789+" in text
    tiles = {tile.key: tile for tile in tables.tiles(read_run(run), price=36.0)}
    assert tiles["goodput"].value == 92 / 110
    # Two ranks for 90 s of training (no record is later) and 10 s of starts.
    assert tiles["cost"].value == pytest.approx(36.0 * 2 * 100 / 3600)
    for broken in ({"saves_seconds": 200.0}, {"restarts_seconds": -1.0}, {"saves_seconds": None}):
        run = make_run(tmp_path / str(broken), [records[0] | broken], extras=False)
        assert "Where the time went" not in read_page(tmp_path, run)[1].headings
