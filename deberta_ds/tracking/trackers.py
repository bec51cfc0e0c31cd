"""Where a run's numbers go next to metrics.jsonl: TensorBoard, Weights & Biases, MLflow.

A tracker is opened with the run's directory and, on a resumed run, the first step to write again;
it then gets every train and eval record. The two services are spoken to by their own libraries,
which are not installed with this package. What they cannot take is said once and the run goes on:
all numbers are in metrics.jsonl.
"""

import importlib.util
import json
import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deberta_ds.base import user_code
from deberta_ds.base.errors import UserError, first_line
from deberta_ds.config.run_config import LogConfig

TENSORBOARD_DIRECTORY = "tensorboard"
WANDB_RUN_FILE, MLFLOW_RUN_FILE = "wandb-run.txt", "mlflow-run.txt"  # the run's id there


@dataclass(frozen=True)
class Tracker:
    """What takes records: `write` each of them, `close` at the end."""

    write: Callable[[dict[str, Any]], None]
    close: Callable[[], None]


Open = Callable[[Path, int | None], Tracker]
_SILENT = Tracker(lambda record: None, lambda: None)


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """Return {"train/loss": 2.1, ...} of a record, without its step and without nulls."""
    return {f"{record['kind']}/{key}": value for key, value in record.items()
            if key not in ("kind", "step") and value is not None}


def _without_its_writers(before: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return a hook for what ends threads that leaves out a full disk in TensorBoard's: its next
    `flush` says the same, and so do the run's own records.
    """
    def hook(ended: Any) -> object:
        return None if type(ended.thread).__name__ == "_AsyncWriterThread" and isinstance(
            ended.exc_value, OSError) else before(ended)

    return hook


def tensorboard(out_dir: Path, purge_step: int | None) -> Tracker:
    """Write event files to out_dir/tensorboard; steps from `purge_step` on are hidden first."""
    from torch.utils.tensorboard import SummaryWriter

    threading.excepthook = _without_its_writers(threading.excepthook)
    writer = SummaryWriter(str(out_dir / TENSORBOARD_DIRECTORY), purge_step=purge_step)

    def write(record: dict[str, Any]) -> None:
        for name, value in numbers(record).items():
            writer.add_scalar(name, value, record["step"])
        if record["kind"] == "eval":
            writer.flush()

    return Tracker(write, writer.close)


def callback(function: Callable[[dict[str, Any]], None]) -> Open:
    """Hand every record to a function of the user's own; what it raises ends the run."""
    return lambda out_dir, purge_step: Tracker(function, lambda: None)


def wandb(project: str) -> Open:
    """Log to a project of Weights & Biases; WANDB_MODE=offline keeps it in out_dir/wandb."""
    def begin(out_dir: Path, purge_step: int | None) -> Tracker:
        import wandb as library

        known = _known_run(out_dir / WANDB_RUN_FILE, purge_step) or secrets.token_hex(8)
        (out_dir / WANDB_RUN_FILE).write_text(known + "\n")
        run = library.init(project=project, name=out_dir.resolve().name, dir=out_dir,
                           resume="allow", id=known, config=_config(out_dir))
        return Tracker(lambda record: run.log(numbers(record), step=record["step"]), run.finish)

    return _forgiving("Weights & Biases", begin)


def mlflow(experiment: str) -> Open:
    """Log to an experiment of the MLflow server or directory that MLFLOW_TRACKING_URI names."""
    def begin(out_dir: Path, purge_step: int | None) -> Tracker:
        import mlflow as library

        library.set_experiment(experiment)
        known = _known_run(out_dir / MLFLOW_RUN_FILE, purge_step)
        run = library.start_run(run_id=known, run_name=out_dir.resolve().name)
        (out_dir / MLFLOW_RUN_FILE).write_text(run.info.run_id + "\n")
        if not known:
            library.log_dict(_config(out_dir), "config.json")
        return Tracker(lambda record: library.log_metrics(numbers(record), step=record["step"]),
                       library.end_run)

    return _forgiving("MLflow", begin)


def _known_run(file: Path, purge_step: int | None) -> str | None:
    """Return the id under which a run that does not begin at its first step is known there."""
    return file.read_text().strip() if file.exists() and (purge_step or 0) > 1 else None


def _config(out_dir: Path) -> dict[str, Any]:
    file = out_dir / "config.json"
    return json.loads(file.read_text()) if file.exists() else {}


def _forgiving(name: str, begin: Open) -> Open:
    """Return `begin` whose failures, of whatever kind, are said once and end only the tracking."""
    def guarded_begin(out_dir: Path, purge_step: int | None) -> Tracker:
        tracker = _SILENT

        def attempt(act: Callable, *arguments) -> Any:
            nonlocal tracker
            try:
                return act(*arguments)
            except Exception as error:  # services fail in many ways, and none is the run's affair
                tracker = _SILENT
                logging.getLogger("deberta_ds").warning(
                    "WARNING: %s gets nothing more of this run: %s", name, first_line(error))

        tracker = attempt(begin, out_dir, purge_step) or _SILENT
        return Tracker(lambda record: attempt(tracker.write, record),
                       lambda: attempt(tracker.close))

    return guarded_begin


def trackers_of(log: LogConfig) -> list[Open]:
    """Return TensorBoard and what else is named; UserError if a service's library is missing."""
    found = [tensorboard, *(callback(user_code.function("log.callbacks", name))
                            for name in log.callbacks)]
    for name, value, service in (("wandb", log.wandb, wandb), ("mlflow", log.mlflow, mlflow)):
        if value and importlib.util.find_spec(name) is None:
            raise UserError(f"log.{name} = {value!r}: needs the package {name}, which is "
                            'missing here: pip install "deberta_ds[trackers]"')
        if value:
            found.append(service(value))
    return found
