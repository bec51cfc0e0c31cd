"""The report page: parses, stands alone, has every section, tells the numbers it was given."""

import json
import math
import random
import re
from html.parser import HTMLParser

import pytest

from deberta_ds.errors import UserError
from deberta_ds.report import write_report
from deberta_ds.report.charts import Chart, Series, draw, summarize, value_text
from deberta_ds.report.rundata import read_run

SECTIONS = ["Learning curves", "What was learned", "Course of the run", "Evaluation", "SuperGLUE",
            "From raw text to scores", "Configuration"]  # fmt: skip
VOID = {"meta", "br", "line", "path", "link", "img"}


def make_records(steps=400, log_every=5, eval_every=50, resume=200, two_networks=True):
    noise = random.Random(0)
    records = [event(0, 0.0, "start")]
    for step in range(1, steps + 1):
        seconds = 0.9 * (step if step <= resume else step - resume)
        rise = 1 - math.exp(-step / 140)
        if step % log_every == 0:
            records.append(
                {"kind": "train", "step": step, "rows_seen": 16 * step, "tokens_seen": 2040 * step,
                 "seconds": seconds, "generator_loss": 9.0 - 4.2 * rise + noise.gauss(0, 0.08),
                 "discriminator_loss": 0.36 + 0.4 * math.exp(-step / 12) - 0.07 * rise
                 + noise.gauss(0, 0.008),
                 "discriminator_gain": 0.07 * rise - 0.4 * math.exp(-step / 12)
                 + noise.gauss(0, 0.006), "loss": 25.0,
                 "learning_rate": 5e-4 * min(step / 40, (steps - step) / (steps - 40)),
                 "grad_norm": 1 + 3 * math.exp(-step / 30) + noise.random(),
                 "tokens_per_second": 2260 + noise.gauss(0, 40), "flops_per_second": 4.31e10,
                 "mfu": None, "eta_seconds": 0.9 * (steps - step)}
            )  # fmt: skip
        if step % eval_every == 0:
            records.append(
                {"kind": "eval", "step": step, "seconds": seconds,
                 "generator_loss": 9.0 - 4.0 * rise, "generator_accuracy": 0.05 + 0.21 * rise,
                 "generator_perplexity": math.exp(9.0 - 4.0 * rise), "unigram_accuracy": 0.0541,
                 "discriminator_loss": 0.365 + 0.4 * math.exp(-step / 12) - 0.07 * rise,
                 "discriminator_accuracy": 0.881 + 0.0173 * rise, "prior_accuracy": 0.881,
                 "discriminator_gain": 0.07 * rise - 0.4 * math.exp(-step / 12),
                 "roc_auc": 0.5 + 0.27 * rise, "average_precision": 0.119 + 0.24 * rise}
            )  # fmt: skip
        if step % 100 == 0:
            records.append(event(step, seconds, "save"))
        if step == resume:
            records += [event(step, seconds, "stop"), event(step, 0.0, "resume")]
    records.append(event(steps, 0.9 * (steps - resume), "end"))
    if not two_networks:
        drop = ("discriminator", "roc_auc", "average", "prior")
        records = [{k: v for k, v in r.items() if not k.startswith(drop)} for r in records]
    return records


def event(step, seconds, name):
    return {"kind": "event", "step": step, "seconds": seconds, "event": name, "detail": name}


def make_run(directory, records=None, name="demo", extras=True):
    directory.mkdir(parents=True)
    lines = [json.dumps(record) + "\n" for record in records or make_records()]
    (directory / "metrics.jsonl").write_text("".join(lines))
    config = {
        "run": {
            "name": name, "out_dir": f"runs/{name}",
            "model": {"vocab_size": 8064, "hidden_size": 256, "num_layers": 6, "num_heads": 4,
                      "intermediate_size": 1024, "position_buckets": 32,
                      "position_terms": ["c2p", "p2c"], "norm_eps": 1e-7},
            "objective": {"kind": "rtd", "embedding_sharing": "gdes", "rtd_weight": 50.0,
                          "mask": {"rate": 0.15, "max_ngram": 1}},
            "data": {"seq_len": 128, "tokenizer": "runs/demo/corpus/spm.model", "workers": 1,
                     "sources": [{"path": "runs/demo/corpus/packed-128", "weight": 1.0}]},
            "optim": {"lr": 5e-4, "betas": [0.9, 0.98], "eps": 1e-6, "warmup_steps": 40},
            "train": {"steps": 400, "global_batch_rows": 16, "log_every": 5},
        },
        "deepspeed": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": False}},
        "origins": {"model.hidden_size": "launch/runs/demo.toml", "train.steps": "command line"},
        "fingerprints": {"runs/demo/corpus/packed-128": "9f0c2e"}, "parameters": 13_596_289,
        "world_size": 2,
        "versions": {"python": "3.11.2", "torch": "2.13.0", "deepspeed": "0.19.8"},
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    if extras:
        stages = [("corpus", "docstrings of the standard library and packages", "11.2 MB", 14.2),
                  ("tokenizer", "SentencePiece unigram, 8k pieces", "8,001 pieces", 21.0),
                  ("pretraining", "RTD + GDES under ZeRO-3 on 2 ranks", "400 steps", 371.0),
                  ("export", "Hugging Face directory, compared", "max difference 2.4e-7", 9.0),
                  ("fine-tuning", "RTE and COPA <sample>", "0.60, 0.55", 64.5)]  # fmt: skip
        keys = ("stage", "what", "result", "seconds")
        rows = [dict(zip(keys, stage, strict=True)) for stage in stages]
        (directory / "summary.json").write_text(json.dumps(rows))
        (directory / "superglue").mkdir()
        tasks = {
            "RTE": {"score": {"median": 0.6137, "min": 0.58, "max": 0.634}, "baseline": 0.527,
                    "metrics": {"accuracy": {}}, "seeds": 3, "failed": 0},
            "CB": {"score": {"median": 0.54, "min": 0.51, "max": 0.6}, "baseline": 0.55,
                   "metrics": {"macro_f1": {}, "accuracy": {}}, "seeds": 3, "failed": 1},
        }  # fmt: skip
        (directory / "superglue/results.json").write_text(json.dumps({"tasks": tasks}))
    return directory


class Page(HTMLParser):
    """Checks that tags close in order; collects headings, tiles and data-value numbers."""

    def __init__(self, text):
        super().__init__()
        self.open, self.headings, self.tiles, self.values, self.text = [], [], {}, [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag not in VOID:
            self.open.append(tag)
        if "data-value" in attributes:
            self.values.append(float(attributes["data-value"]))
            if "data-key" in attributes:
                self.tiles[attributes["data-key"]] = self.values[-1]
        assert not {"src", "href", "srcset"} & set(attributes)

    def handle_startendtag(self, tag, attributes):
        assert tag in VOID

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if self.open and self.open[-1] not in ("style", "script") else ""
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)


def read_page(tmp_path, *directories):
    out = tmp_path / "report.html"
    write_report(out, list(directories))
    text = out.read_text()
    assert not re.search(r"https?://|//[a-z]|@import|url\(", text), "the page must stand alone"
    return text, Page(text)


def test_page_has_every_section_and_its_numbers_equal_the_input(tmp_path):
    records = make_records()
    text, page = read_page(tmp_path, make_run(tmp_path / "demo", records))
    assert page.headings == ["demo", *SECTIONS]
    last = [record for record in records if record["kind"] == "eval"][-1]
    for key in ("discriminator_gain", "roc_auc", "average_precision", "generator_accuracy"):
        assert page.tiles[key] == last[key]
    shown = {"discriminator_gain": "gain", "roc_auc": "number", "generator_accuracy": "share"}
    for key, unit in shown.items():
        assert f">{value_text(last[key], unit)}</b>" in text
    assert page.tiles["parameters"] == 13_596_289
    assert page.tiles["tokens_seen"] == 2040 * 400
    for record in (r for r in records if r["kind"] == "eval"):
        assert {v for k, v in record.items() if k not in ("kind", "step", "seconds")} \
            <= set(page.values)  # fmt: skip
    assert "macro f1, accuracy" in text and "3 (1 failed)" in text
    assert '<dd class="set" title="command line">400</dd>' in text
    assert {0.6137, 0.54, 0.527, 0.55, 371.0} <= set(page.values)
    assert "&lt;sample&gt;" in text and "<sample>" not in text
    assert text.count('class="resume"') == 9 and "resumed at step 200" in text


def test_mlm_run_has_no_discriminator_and_needs_no_extras(tmp_path):
    run = make_run(tmp_path / "mlm", make_records(two_networks=False), "mlm", extras=False)
    text, page = read_page(tmp_path, run)
    assert page.headings == ["mlm", *(s for s in SECTIONS if s not in SECTIONS[4:6])]
    visible = page.text.partition("Configuration")[0]
    assert "iscriminator" not in visible
    assert set(page.tiles) >= {"generator_accuracy", "generator_loss", "generator_perplexity"}
    assert 'data-chart="generator_loss"' in text and 'data-chart="roc_auc"' not in text


def test_runs_side_by_side(tmp_path):
    runs = [make_run(tmp_path / name, name=name) for name in ("gdes", "es", "nes")]
    text, page = read_page(tmp_path, *runs)
    assert page.headings[0] == "3 runs compared" and page.headings.count("Evaluation") == 3
    with pytest.raises(UserError, match="1 to 5 runs"):
        write_report(tmp_path / "none.html", [])


def test_null_numbers_leave_a_gap(tmp_path):
    records = make_records()
    for record in records[10:40] + [r for r in records if r["kind"] == "eval"][-1:]:
        record |= dict.fromkeys(set(record) - {"kind", "step", "event", "detail"})
    text, page = read_page(tmp_path, make_run(tmp_path / "gaps", records, extras=False))
    assert "None" not in page.text and "nan" not in text


def test_a_run_before_its_first_evaluation(tmp_path):
    records = [record for record in make_records()[:12] if record["kind"] != "eval"]
    text, page = read_page(tmp_path, make_run(tmp_path / "young", records, extras=False))
    assert "Not evaluated yet" in text and "In progress" in text


def test_training_time_adds_up_over_a_clock_that_restarts(tmp_path):
    run = read_run(make_run(tmp_path / "demo"))
    assert run.training_seconds() == pytest.approx(0.9 * 400)


@pytest.mark.parametrize(
    "file, content, words",
    [
        ("metrics.jsonl", '{"kind": "train", "step": 1}\n{"kind": "tr', "metrics.jsonl, line 2"),
        ("metrics.jsonl", '{"kind": "event", "step": 0, "event": "start"}\n', "no train or eval"),
        ("config.json", "{", "config.json: not valid JSON"),
        ("config.json", "[]", "config.json: must hold one JSON object"),
        ("config.json", '{"run": 1}', 'config.json: "run" must be an object'),
        ("summary.json", '[{"stage": "a"}]', "summary.json, row 1: misses result, seconds, what"),
        ("superglue/results.json", '{"tasks": {"RTE": {"score": {"median": 61}}}}', "task RTE"),
    ],
)
def test_damaged_input_is_named(tmp_path, file, content, words):
    run = make_run(tmp_path / "demo")
    (run / file).write_text(content)
    with pytest.raises(UserError, match=words):
        write_report(tmp_path / "report.html", [run])
    assert not (tmp_path / "report.html").exists()


def test_missing_files_are_named(tmp_path):
    with pytest.raises(UserError, match="metrics.jsonl: no such file"):
        write_report(tmp_path / "report.html", [tmp_path])


def test_long_series_are_binned_and_keep_their_mean_and_extremes():
    points = [(step, math.sin(step)) for step in range(12_345)]
    thin, trend, band = summarize(points)
    assert len(thin) == len(trend) == len(band) == 240
    assert min(low for _, low, _ in band) == min(y for _, y in points)
    assert max(high for *_, high in band) == max(y for _, y in points)


@pytest.mark.parametrize("values", [[0.5], [0.0, 0.0, 0.0], [-1e-9, 1e-9], [1e12, 2e12], [3, 3]])
def test_flat_tiny_and_huge_values_draw(values):
    series = [Series("x", list(enumerate(values)), "gen", "trend")]
    card = draw(Chart("x", "x", "", "number", series), [], len(values) - 1, "")
    assert "nan" not in card and "inf" not in card
