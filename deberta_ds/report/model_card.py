"""The model card of an exported or fine-tuned directory: README.md, which the Hub shows.

Facts come from the checkpoint and its run's metrics.jsonl, from a fine-tuned run's result.json, and
from the directory itself; what is not known is left out. License, languages and names of the data
are the publisher's to say (`Publisher`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from safetensors import safe_open

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import read_json, write_atomic
from deberta_ds.base.numbers import counted, format_value
from deberta_ds.base.version import __version__
from deberta_ds.checkpoint.find import RunRecord, local_copy, newest, read_run_record
from deberta_ds.config.model import RANDOM
from deberta_ds.config.options import validate
from deberta_ds.data.shards import read_manifest
from deberta_ds.finetuning.models import FACTS, MODEL, RESULT, Result, find_finetuned, is_finetuned
from deberta_ds.objectives.build import objective_named
from deberta_ds.publish.convert import Summary
from deberta_ds.publish.hf import GENERATOR_DIRECTORY
from deberta_ds.release.model_files import SAFETENSORS
from deberta_ds.release.reader import SIDE_FILE
from deberta_ds.report.pages import template
from deberta_ds.report.rundata import baseline_name, read_checked
from deberta_ds.tasks.task import TEST, Task
from deberta_ds.tracking.log import METRICS_FILE, read_metrics

CARD = "README.md"
_PIPELINES = {"Model": "feature-extraction", "ForSequenceClassification": "text-classification",
              "ForTokenClassification": "token-classification",
              "ForQuestionAnswering": "question-answering"}
_KINDS = {"multilabel": "multilabel classification", "regress": "regression", "tags": "tagging",
          "choice": "multiple choice", "answer": "question answering"}  # the others: classification
_METRICS = {"f1": "f1", "accuracy": "accuracy", "em": "exact_match", "pearson": "pearsonr",
            "spearman": "spearmanr", "matthews": "matthews_correlation"}  # to the Hub's names


@dataclass(frozen=True)
class Publisher:
    """What a publisher says of a model: an identifier of the Hub, its languages (ISO 639), and the
    names of the data, one for each corpus of the run in its order.
    """

    license: str = ""
    language: Sequence[str] = ()
    dataset: Sequence[str] = ()

    @property
    def sample(self) -> tuple[str, str]:
        """A sentence and the word to mask; digits are of every language."""
        return (("Paris is the capital of France.", "capital") if list(self.language[:1]) == ["en"]
                else ("1, 2, 3, 4, 5", "3"))


_SILENT = Publisher()


@dataclass
class Training:
    """What a source says of how its model came about; empty where it says nothing."""

    record: RunRecord | None = None  # of a checkpoint, and its corpora
    data: list[tuple[str, ...]] = field(default_factory=list)
    scores: list[tuple[str, str, str]] = field(default_factory=list)  # name, value, baseline
    scores_note: str = ""
    results: list[dict] = field(default_factory=list)  # as the Hub's model-index has them
    about: str = ""  # the task of a fine-tuned model, and the others below
    settings: list[tuple[str, object]] = field(default_factory=list)
    base_model: str = ""
    failure: str = ""
    pipeline_options: str = ""


def write_finetuned_card(out: Path, task: str, seed: int) -> None:
    """Write the card of a run's model/, if that was kept and has none: it may have been edited."""
    name = Path(task, f"seed-{seed}", MODEL)
    if is_finetuned(out / name) and not (out / name / CARD).exists():
        write_card(out / name, out / name, Summary((), (), ()), str(name))


def write_card(source: str | Path, out: Path, summary: Summary, repository: str = "",
               publisher: Publisher = _SILENT) -> Path:
    """Write the card of `out`, which was exported from `source`; return its path.

    repository: the name under which others will load it.
    """
    source, name, path = local_copy(source), repository or str(out), out / CARD
    generator, side_file = out / GENERATOR_DIRECTORY, out / SIDE_FILE
    values = read_json(out / "config.json")
    architecture = values["architectures"][0]
    write_atomic(path, template("model_card.md").render(
        name=Path(name).parent.as_posix() if source == out else Path(name).name,
        directory=name, publisher=publisher, architecture=architecture, values=values,
        head=architecture.removeprefix("DebertaV2").removeprefix("Deberta"),
        pipelines=_PIPELINES, onnx=(out / "onnx").is_dir(), version=__version__,
        is_discriminator=any("replaced-token head" in note for note in summary.notes),
        parameters=count_parameters(out / SAFETENSORS),
        generator=count_parameters(generator / SAFETENSORS) if generator.is_dir() else 0,
        side_file=f"{side_file.stat().st_size / 1e6:,.1f} MB" if side_file.is_file() else "",
        checks=summary.checks, heads_of=lambda kind: objective_named(kind).HEADS,
        **vars(_of_source(source, publisher))))
    return path


def check_publisher(source: str | Path, publisher: Publisher) -> None:
    """UserError if a run has another number of corpora than `publisher` names."""
    if not publisher.dataset:
        return
    paths = [row[0] for row in _of_source(local_copy(source), _SILENT).data]
    if paths and len(paths) != len(publisher.dataset):
        raise UserError(f"--dataset gives {counted(len(publisher.dataset), 'name')}, but the run "
                        f"has {len(paths)} (data.sources: {', '.join(paths)}); give one for each, "
                        "in this order")


def count_parameters(weights: Path) -> int:
    """Return the number of elements in a safetensors file, from its header."""
    with safe_open(weights, "numpy") as file:
        return sum(prod(file.get_slice(name).get_shape()) for name in file.keys())


def _of_source(source: Path, publisher: Publisher) -> Training:
    if (source / "run.json").is_file() or (source / "checkpoints").is_dir():
        return _of_checkpoint(newest(source), publisher)
    finetuned = find_finetuned(source)
    return _of_finetuned(finetuned) if is_finetuned(finetuned) else Training()


def _of_checkpoint(directory: Path, publisher: Publisher) -> Training:
    record = read_run_record(directory)
    sources = record.config["data"]["sources"]
    names = publisher.dataset or [_end(source["path"], 2) for source in sources]
    whole = sum(source["weight"] for source in sources)
    training = Training(record, [
        _corpus(source["path"], name, source["weight"] / whole,
                record.content_hashes.get(source["path"], ""))
        for source, name in zip(sources, names, strict=True)])
    metrics = directory.resolve().parent.parent / METRICS_FILE  # OUT/best is a link
    if metrics.is_file():
        _add_scores(training, read_metrics(metrics), record.step,
                    record.config["objective"]["kind"])
    return training


def _corpus(path: str, name: str, share: float, content_hash: str) -> tuple[str, ...]:
    """Return a row of the table; the counts are known where the shards still lie."""
    documents = tokens = "–"
    try:
        manifest = read_manifest(path)[0]
        documents, tokens = f"{manifest.documents:,}", f"{manifest.tokens:,}"
    except (UserError, OSError):
        pass  # trained elsewhere, or the shards are gone: the content hash stays
    return name, f"{share:.1%}", documents, tokens, content_hash


def _add_scores(training: Training, records: list[dict], step: int, kind: str) -> None:
    evaluations = [one for one in records if one["kind"] == "eval" and one["step"] <= step]
    if not evaluations:
        return
    last = max(evaluations, key=lambda one: one["step"])
    training.scores_note = f"On held-out sequences at step {last['step']:,}."
    metrics = objective_named(kind).METRICS
    measured = [metric for metric in metrics if last.get(metric.key) is not None]
    training.results.append({"dataset": {"type": "held-out", "name": "held-out sequences"},
                             "metrics": [{"type": metric.key, "name": metric.title,
                                          "value": round(last[metric.key], 6)}
                                         for metric in measured]})
    for metric in measured:
        baseline = metric.baseline_of(last)
        training.scores.append((metric.title, format_value(last[metric.key], metric.unit),
                                "" if baseline is None else
                                f"{baseline_name(metric)} {format_value(baseline, metric.unit)}"))


def _of_finetuned(directory: Path) -> Training:
    facts = read_json(directory / FACTS)
    task = validate(Task, facts["task"], f"{directory / FACTS}, task")
    training = Training(
        about=f"Fine-tuned on the task {task.name} ({_KINDS.get(task.head, 'classification')}).",
        failure=facts.get("failure", ""))
    if task.head == "tags":
        strategy = "simple" if task.words == "raw" else "first"
        training.pipeline_options = f', aggregation_strategy="{strategy}"'
    rows = training.settings = [("task", task.name)]
    if (directory.parent / RESULT).is_file():
        result = read_checked(directory.parent / RESULT, Result)[0]
        training.base_model, training.failure = _end(result.start, 2), result.failure
        rows += [("base model", training.base_model),
                 ("initialized from", _end(result.init_from, 3)), ("seed", f"{result.seed}"),
                 ("training data", f"{_end(result.train[0])}, {result.train[1]:,} examples")]
        _add_tables(training, task, result)
    if task.head not in ("regress", "choice", "answer", "mentions"):
        rows.append(("labels", ", ".join(task.labels)))
    rows += facts.get("settings", {}).items()
    return training


def _add_tables(training: Training, task: Task, result: Result) -> None:
    """Add the scores of a fine-tuned model's labeled tables, and the names of their files."""
    training.scores_note = ("With 95 % bootstrap intervals. The kept evaluation was chosen on the "
                            "validation set.")
    files = {key.removeprefix(TEST): file for key, file in task.files.items()}
    for key, table in result.scores.items():
        name, file = ("validation", result.val[0]) if key == "val" else (key, files.get(key, key))
        training.settings.append((f"{name} data", f"{_end(file)}, {table.examples:,} examples"))
        measured = []
        for metric, found in table.metrics.items():
            interval = f" ({found['low']:.4f} to {found['high']:.4f})" if "low" in found else ""
            training.scores.append((f"{name}: {metric}", f"{found['value']:.4f}{interval}",
                                    f"majority {table.majority[metric]:.4f}"))
            kind = next((kind for part, kind in _METRICS.items() if part in metric), metric)
            measured.append({"type": kind, "name": metric, "value": round(found["value"], 6)})
        dataset = {"type": task.hub_repository if task.hub else task.name, "name": task.name}
        training.results.append({"dataset": dataset | {"split": name}, "metrics": measured})


def _end(place: str, parts: int = 1) -> str:
    """Return the last parts of a path, which say nothing of the machine."""
    prefix = next((start for start in (RANDOM, "hub:") if place.startswith(start)), "")
    return prefix + "/".join(place.removeprefix(prefix).rstrip("/").split("/")[-parts:])
