"""Where a run's numbers go beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow.

A tracker is opened with the run's directory and, on a resumed run, the first step to write anew;
it then gets every train and eval record. The two services are used through their own libraries,
which are not installed with this package.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TENSORBOARD_DIRECTORY = "tensorboard"


@dataclass(frozen=True)
class Tracker:
    """What takes records: `write` each of them, `close` at the end."""

    write: Callable[[dict[str, Any]], None]
    close: Callable[[], None]


Open = Callable[[Path, int | None], Tracker]


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """Return {"train/loss": 2.1, ...} of a record, without its step and without nulls."""
    return {f"{record['kind']}/{key}": value for key, value in record.items()
            if key not in ("kind", "step") and value is not None}


def tensorboard(out_dir: Path, purge_step: int | None) -> Tracker:
    """Write event files to out_dir/tensorboard; steps from `purge_step` on are hidden first."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(out_dir / TENSORBOARD_DIRECTORY), purge_step=purge_step)

    def write(record: dict[str, Any]) -> None:
        for name, value in numbers(record).items():
            writer.add_scalar(name, value, record["step"])
        if record["kind"] == "eval":
            writer.flush()

    return Tracker(write, writer.close)
