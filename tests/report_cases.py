"""Run and sweep directories for the tests of pages, written as the program writes them."""

import json
import math
import random
from html.parser import HTMLParser

VOID = {"meta", "br", "line", "path", "link", "img", "input"}


def make_records(steps=400, log_every=5, eval_every=50, resume=200, kind="rtd"):
    """Return the records of a run that learns."""
    noise = random.Random(0)
    records = [event(0, 0.0, "start")]
    network = "generator" if kind == "rtd" else "masked"
    for step in range(1, steps + 1):
        seconds = 0.9 * (step if step <= resume else step - resume)
        rise, fall = 1 - math.exp(-step / 140), 0.4 * math.exp(-step / 12)
        if step % log_every == 0:
            records.append(
                {"kind": "train", "step": step, "sequences_seen": 16 * step,
                 "tokens_seen": 2040 * step, "seconds": seconds,
                 f"{network}_loss": 9.0 - 4.2 * rise + noise.gauss(0, 0.08), "loss": 25.0,
                 "epochs": step / 300,
                 "learning_rate": 5e-4 * min(step / 40, (steps - step) / (steps - 40)),
                 "grad_norm": 1 + 3 * math.exp(-step / 30) + noise.random(),
                 "tokens_per_second": 2260 + noise.gauss(0, 40), "flops_per_second": 4.31e10,
                 "node_memory_bytes": 9e9 + 1e7 * step, "cpu_share": 0.9, "peak_memory_bytes": 2e9,
                 "mfu": 0.31, "eta_seconds": 0.9 * (steps - step)}
                | time_use(seconds)
                | kind_only(kind, {
                    "discriminator_loss": 0.36 + fall - 0.07 * rise + noise.gauss(0, 0.008),
                    "discriminator_gain": 0.07 * rise - fall + noise.gauss(0, 0.006)}))
        if step % eval_every == 0:
            records.append(
                {"kind": "eval", "step": step, "seconds": seconds,
                 f"{network}_loss": 9.0 - 4.0 * rise, f"{network}_accuracy": 0.05 + 0.21 * rise,
                 f"{network}_perplexity": math.exp(9.0 - 4.0 * rise), "unigram_accuracy": 0.0541,
                 "minimal_pairs": 0.5 + 0.1 * rise}
                | kind_only(kind, {
                    "discriminator_loss": 0.365 + fall - 0.07 * rise,
                    "discriminator_accuracy": 0.881 + 0.0173 * rise, "prior_accuracy": 0.881,
                    "discriminator_gain": 0.07 * rise - fall,
                    "roc_auc": 0.5 + 0.27 * rise, "average_precision": 0.119 + 0.24 * rise}))
        if step % 100 == 0:
            records.append(event(step, seconds, "save"))
        if step == resume:
            records += [event(step, seconds, "stop"), event(step, 0.0, "resume")]
    return [*records, event(steps, 0.9 * (steps - resume), "end")]


def time_use(seconds):
    """Return what a record says of the time until then: 20 s of starts and repeated steps."""
    saves, evaluations = 0.02 * seconds, 0.05 * seconds
    return {"saves_seconds": saves, "evaluations_seconds": evaluations, "restarts_seconds": 20.0,
            "goodput": (seconds - saves - evaluations) / (seconds + 20.0)}


def kind_only(kind, values):
    return values if kind == "rtd" else {}


def event(step, seconds, name):
    return {"kind": "event", "step": step, "seconds": seconds, "event": name, "detail": name}


def make_run(directory, records=None, name="demo", kind="rtd", extras=True, **run):
    """Write a run directory; `run` are further values of its run config."""
    directory.mkdir(parents=True)
    write_records(directory, make_records(kind=kind) if records is None else records)
    (directory / "config.json").write_text(json.dumps(make_config(name, kind, **run)))
    if extras:
        stages = [("corpus", "docstrings of the standard library and packages", "11.2 MB", 14.2),
                  ("tokenizer", "SentencePiece unigram, 8k pieces", "8,001 pieces", 21.0),
                  ("pretraining", "RTD + GDES under ZeRO-3 on 2 ranks", "400 steps", 371.0),
                  ("fine-tuning", "RTE and COPA <sample>", "0.60, 0.55", 64.5),
                  ("whole demo", "CPU processes: 2", "8m 1s", 0.0)]
        keys = ("stage", "what", "result", "seconds")
        rows = [dict(zip(keys, stage, strict=True)) for stage in stages]
        (directory / "summary.json").write_text(json.dumps(rows))
        make_sweep(directory / "superglue")
    return directory


def make_config(name, kind, **run):
    """Return the values of config.json; `run` are further values of its run config."""
    return {
        "run": {
            "name": name, "out_dir": f"runs/{name}",
            "model": {"vocab_size": 8064, "hidden_size": 256, "num_layers": 6, "num_heads": 4,
                      "intermediate_size": 1024, "position_buckets": 32,
                      "max_position": 512,
                      "position_terms": ["c2p", "p2c"], "norm_eps": 1e-7},
            "objective": {"kind": kind, "embedding_sharing": "gdes", "rtd_weight": 50.0,
                          "mask": {"rate": 0.15, "max_ngram": 1}},
            "data": {"seq_len": 128, "tokenizer": "runs/demo/corpus/spm.model", "workers": 1,
                     "sources": [{"path": "runs/demo/corpus/packed-128", "weight": 1.0}]},
            "optim": {"learning_rate": 5e-4, "betas": [0.9, 0.98], "eps": 1e-6, "warmup_steps": 40},
            "train": {"steps": 400, "global_batch_size": 16, "micro_batch_size": 8, "log_every": 5},
        } | run,
        "deepspeed": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": False}},
        "origins": {"model.hidden_size": "launch/runs/demo.toml", "train.steps": "command line"},
        "content_hashes": {"runs/demo/corpus/packed-128": "9f0c2e"}, "parameters": 13_596_289,
        "world_size": 2, "hardware": "AMD EPYC 9R14", "device": "cpu", "commit": "0123456789+",
        "branch": "longer",
        "kernels": {"attention": {"kernel": "tiled", "why": "not fused: no GPU"},
                    "cross-entropy": {"kernel": "chunked", "why": "not fused: no GPU"}},
        "versions": {"python": "3.11.2", "torch": "2.13.0", "deepspeed": "0.19.8"},
    }


def write_records(directory, records):
    lines = [json.dumps(record) + "\n" for record in records]
    (directory / "metrics.jsonl").write_text("".join(lines))


def make_result(task="CB", seed=1, **more):
    """Return result.json of a fine-tuning run."""
    return {"task": task, "seed": seed, "settings": {}, "init_from": "",
            "start": "/home/me/microsoft/deberta-v3-small", "train": ["/home/me/train.jsonl", 1250],
            "val": ["/home/me/val.jsonl", 56], "metrics": {"accuracy": 0.5, "macro_f1": 0.5},
            "score": 0.5, "baseline": 0.4, "failed": False, "failure": "", "diagnostics": {},
            "history": []} | more


def make_sweep(directory, model="runs/demo/hf", names=("RTE", "CB"), seeds=3, **changes):
    """Write results.json of a sweep; `changes` are further values at its top."""
    directory.mkdir(parents=True)
    labels = {"RTE": ["not_entailment", "entailment"],
              "CB": ["contradiction", "neutral", "entailment"]}
    metrics = {"RTE": ["accuracy"], "CB": ["macro_f1", "accuracy"]}
    summary, runs = {}, []
    for number, task in enumerate(names):
        keys, classes = metrics.get(task, ["accuracy"]), labels.get(task, ["no", "yes"])
        values = [0.54 + 0.03 * seed + 0.05 * number for seed in range(1, seeds + 1)]
        spread = {"median": sorted(values)[seeds // 2], "min": min(values), "max": max(values)}
        summary[task] = {"score": spread, "metrics": dict.fromkeys(keys, spread),
                         "baseline": 0.527, "seeds": seeds, "failed": number, "labels": classes,
                         "diagnostics": {"AX-b": {"matthews": spread}} if task == "RTE" else {}}
        for seed, value in enumerate(values, start=1):
            history = [{"epoch": float(epoch), "step": 8 * epoch, "loss": 1 / epoch}
                       | dict.fromkeys(keys, value - 0.05 / epoch) for epoch in range(1, 6)]
            runs.append(make_result(
                task, seed, score=value, failed=seed == 1 and number > 0, history=history,
                metrics=dict.fromkeys(keys, value), settings={"epochs": 5, "learning_rate": 2e-5},
                confusion=[[seed + 2] * len(classes)] * len(classes)))
    whole = {"model": model, "data": "superglue", "tasks": summary, "mean": 0.6,
             "mean_of": len(names), "runs": runs} | changes
    (directory / "results.json").write_text(json.dumps(whole))
    return directory


class Page(HTMLParser):
    """Checks that tags close in order; collects headings, tiles, data-value numbers and tags."""

    def __init__(self, text):
        super().__init__()
        self.open, self.headings, self.tiles, self.values, self.text = [], [], {}, [], ""
        self.tags, self.attributes = [], set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        self.attributes |= set(attributes)
        if tag not in VOID:
            self.open.append(tag)
        if "data-value" in attributes:
            self.values.append(float(attributes["data-value"]))
            if "data-key" in attributes:
                self.tiles[attributes["data-key"]] = self.values[-1]

    def handle_startendtag(self, tag, attributes):
        assert tag in VOID

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if self.open and self.open[-1] not in ("style", "script") else ""
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)
