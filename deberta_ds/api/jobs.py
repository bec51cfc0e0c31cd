"""What the commands do, from Python: train, finetune, predict, export.

Each function is what the script of its name calls, or calls the same. In a notebook it is one
process; for several, put the call into a script and start that by deepspeed or torchrun.
"""

import argparse
import itertools
import json
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deberta_ds.base import user_code
from deberta_ds.base.errors import UserError
from deberta_ds.base.files import write_atomic
from deberta_ds.base.numbers import counted
from deberta_ds.checkpoint import find
from deberta_ds.checkpoint.find import BEST
from deberta_ds.cluster import dist, signals
from deberta_ds.config import run_config
from deberta_ds.config.toml_files import as_override
from deberta_ds.engine import ds_config
from deberta_ds.engine.engine import init_distributed
from deberta_ds.finetuning import options, sweep
from deberta_ds.finetuning.models import MODEL, RESULTS_FILE, find_finetuned, load_finetuned
from deberta_ds.finetuning.predict_file import predict_file, scores_file
from deberta_ds.publish.convert import Summary, convert
from deberta_ds.release import shape
from deberta_ds.report import run_pages
from deberta_ds.report.model_card import (
    Publisher,
    check_publisher,
    write_card,
    write_finetuned_card,
)
from deberta_ds.report.rundata import Sweep, read_checked
from deberta_ds.tasks.task import Task
from deberta_ds.tracking.log import METRICS_FILE, read_metrics
from deberta_ds.training import loop, meters

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class TrainingResult:
    """A run that ended; `finished` is False if a signal (Ctrl-C) stopped it at a checkpoint."""

    out_dir: Path
    finished: bool

    @property
    def metrics(self) -> "pandas.DataFrame":
        """All records of metrics.jsonl: a row per record; `kind` is train, eval or event."""
        import pandas

        return pandas.DataFrame(read_metrics(self.out_dir / METRICS_FILE))

    @property
    def checkpoint(self) -> Path:
        """The best checkpoint if train.best_metric is set, else the newest; UserError if none."""
        best = self.out_dir / BEST
        return best if best.exists() else find.newest(self.out_dir)

    def model(self):
        """Return that checkpoint, loaded."""
        from deberta_ds.api.model import load

        return load(self.checkpoint)


def train(run: str | Path, overrides: Mapping[str, Any] | None = None, *,
          deepspeed_config: str | Path = "ds_configs/zero1_fp32.json", resume: str = "auto",
          callbacks: Sequence[Callable[[dict[str, Any]], None]] = ()) -> TrainingResult:
    """Train the run of a TOML file from its newest checkpoint (or step 0) to its end.

    overrides: {"train.steps": 1000, ...}, over the values of the file. resume: "auto", "never" or
    a checkpoint. Each of `callbacks` gets every train and eval record of metrics.jsonl as a dict,
    on the first rank; what it raises ends the run. Ctrl-C (a notebook's "interrupt") finishes the
    step, saves and returns. Call it from the main thread, on every rank. UserError as the command.

    Examples:
        >>> result = train(RUN, {"train.steps": 2}, callbacks=[lambda record: None])
        >>> result.finished, len(result.metrics.query("kind == 'train'"))
        (True, 2)
    """
    if threading.current_thread() is not threading.main_thread():
        raise UserError("train: call it from the main thread; others cannot listen to signals")
    meters.count_from_here()
    user_code.forget()  # a notebook's may have been edited
    lines = [as_override(key, value) for key, value in (overrides or {}).items()]
    config, origins = run_config.load(run, lines, partial(shape.complete, resume=resume))
    ds = ds_config.load(str(deepspeed_config))
    with signals.handlers_kept():
        code = loop.pretrain(config, ds, resume=resume, place=str(run), origins=origins,
                             callbacks=callbacks)
    return TrainingResult(Path(config.out_dir), code == 0)


@dataclass(frozen=True)
class FinetuningResult:
    """summary: medians over seeds by task; runs: the result of every (task, seed)."""

    summary: dict[str, Any]
    runs: list[dict[str, Any]]
    out: Path

    def __str__(self) -> str:
        return sweep.table(self.summary)

    @property
    def models(self) -> list[Path]:
        """The fine-tuned models that were kept, in the order of `runs`."""
        places = [self.out / run["task"] / f"seed-{run['seed']}" / MODEL for run in self.runs]
        return [place for place in places if place.is_dir()]


def finetune(tasks: str | Path | Sequence[str | Task], model: str | Path, out: str | Path, *,
             settings: Mapping[str, Any] | Sequence[str] = (),
             init_from: Mapping[str, str] | Sequence[str] | str = "", save_models: bool = True,
             show_scores: bool = False, compare_with: Path | None = None, **given: Any
             ) -> FinetuningResult:
    """Fine-tune a model on one or several tasks; finished (task, seed) runs in `out` are reused.

    tasks: names of SuperGLUE or GLUE tasks, or TOML files of your own (docs/how-to/fine-tune.md).
    model: as `load`. settings: {"epochs": 3, "RTE.learning_rate": 1e-5}. init_from: {task:
    fine-tuned directory}, or one for the only task. `given` are the options of
    launch/finetune.py: seeds, data, config, deepspeed_config, max_bad, ... Call it on every rank.

    Examples:
        >>> result = finetune(TASK, MODEL, OUT, settings={"epochs": 1, "max_length": 32})
        >>> list(result.summary["tasks"])
        ['mood']
    """
    if isinstance(settings, Mapping):
        settings = [as_override(key if "." in key else f"all.{key}", value)
                    for key, value in settings.items()]
    parser = argparse.ArgumentParser()
    options.add_options(parser)
    known = parser.parse_args(["--model", str(model), "--out", str(out)])
    if unknown := given.keys() - vars(known).keys():
        raise UserError(f"finetune: no option {min(unknown)}; there are {', '.join(vars(known))}")
    vars(known).update({key: str(value) if isinstance(value, Path) else value
                        for key, value in given.items()})
    if known.seeds < 1:
        raise UserError(f"finetune: seeds = {known.seeds}: must be at least 1")
    named = [tasks] if isinstance(tasks, str | Path) else tasks
    plan = options.build_sweep(
        known, list(settings), [str(task) if isinstance(task, Path) else task for task in named],
        init_from, save_models, show_scores=show_scores)
    compare = dist.together(lambda: read_results(compare_with) if compare_with else None)
    results = sweep.run_all(plan)
    summary = sweep.summarize(plan.tasks, results)
    if dist.is_main():
        runs, summary = sweep.merged(plan, results)
        options.say("\n" + sweep.table(summary, compare))
        whole = {"model": known.model, "data": known.data} | summary | {"runs": runs}
        table, page = known.out / RESULTS_FILE, known.out / run_pages.PAGE
        write_atomic(table, json.dumps(whole, indent=1) + "\n")
        run_pages.write_sweep(page, [known.out, *([compare_with] if compare_with else [])])
        for one in runs:
            write_finetuned_card(known.out, one["task"], one["seed"])
        print(f"\nwrote {table} and {page}")
    return FinetuningResult(summary, results, known.out)


def read_results(out: Path) -> dict:
    """Return another sweep's results.json."""
    path = out / RESULTS_FILE
    if not path.is_file():
        raise UserError(f"--compare {out}: no results.json there; finish that sweep first")
    return read_checked(path, Sweep)[1]


@dataclass(frozen=True)
class Predictions:
    """rows: a dict per row, as launch/predict.py writes it; scores: of labeled rows, or None."""

    rows: list[dict[str, Any]]
    scores: dict[str, Any] | None


Rows = Iterable[Mapping[str, Any] | str | Sequence[str]]


def predict(model: str | Path, rows: "Rows | pandas.DataFrame", *, batch_size: int = 32,
            max_bad: int = 0) -> Predictions:
    """Predict rows with a fine-tuned model (or the run that wrote it), in order.

    rows: dicts, or a DataFrame, with the columns of the task; with a label column, they are scored.
    A row may also be its text, or of several columns of text a tuple, in the order of the task.
    A row that cannot be used is an error, or, up to `max_bad` of them, has "error" in its dict.
    Tables on disk of any size: launch/predict.py. One process.

    Examples:
        >>> predict(FINETUNED, ["A good day."]).rows[0]["prediction"] in ("good", "bad")
        True
    """
    if hasattr(rows, "to_dict"):
        frame: Any = rows  # whose NaN is no JSON
        rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    if batch_size < 1:
        raise UserError(f"predict: batch_size = {batch_size}: must be at least 1")
    saved = load_finetuned(find_finetuned(str(model)))
    columns = [saved.task.columns.get(name, name) for name in saved.task.texts]
    if isinstance(rows, str):
        raise UserError("predict: rows is one text; write a list of them, predict(model, [text])")

    def as_dict(number: int, row: Any) -> dict:
        if isinstance(row, Mapping):
            return dict(row)
        texts = [row] if isinstance(row, str) else list(row)
        if len(texts) != len(columns):
            raise UserError(f"predict: row {number} has {counted(len(texts), 'text')}, and a row "
                            f"of {saved.task.name} is {', '.join(columns)}")
        return dict(zip(columns, texts, strict=True))

    with tempfile.TemporaryDirectory() as scratch:
        table, out = Path(scratch) / "rows.jsonl", Path(scratch) / "out.jsonl"
        table.write_text("".join(json.dumps(row, default=str) + "\n"
                                 for row in map(as_dict, itertools.count(), rows)))
        try:
            predict_file(saved, table, out, init_distributed(), global_batch_size=batch_size,
                         max_length=saved.settings.max_length, max_bad=max_bad)
        except UserError as error:  # without the names of files that are gone when it is read
            text = str(error).replace(f"\n  (all in {out}.bad_rows.txt)", "")
            raise UserError(text.replace(str(table), "rows")) from None
        scores, text = scores_file(out), out.read_text("utf-8").replace(str(table), "rows")
        return Predictions([json.loads(line) for line in text.split("\n") if line],
                           json.loads(scores.read_text()) if scores.is_file() else None)


def export(run: str | Path, out: str | Path, *, tokenizer: str | Path | None = None,
           onnx: str | None = None, precision: str = "", repository: str = "",
           license: str = "", language: Sequence[str] = (), dataset: Sequence[str] = ()
           ) -> Summary:
    """Write a run, checkpoint or model as a Hugging Face directory with a model card; check it.

    onnx: "fp32" or "int8" adds ONNX files. precision: "fp32", "bf16" or "fp16" rounds the weights
    to it (default: as the source has them). `repository` is its name on the Hub, for the card, as
    are license ("apache-2.0"), language (["de"]) and dataset, a name for each corpus of the run.
    Returns notes, checks and warnings. UserError if it cannot be read, or a check fails.

    Examples:
        >>> export(MODEL, OUT + "/exported").checks != ()
        True
    """
    publisher = Publisher(license, *([value] if isinstance(value, str) else value
                                     for value in (language, dataset)))
    check_publisher(run, publisher)
    return convert(run, out, "hf", tokenizer=tokenizer, onnx=onnx, precision=precision,
                   finish=lambda fresh, summary: write_card(summary.place or run, fresh, summary,
                                                            repository or str(out), publisher))
