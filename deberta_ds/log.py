"""How a run speaks: the console (rank 0), metrics.jsonl and TensorBoard.

Every record goes to metrics.jsonl as one JSON line; the console shows the same records as aligned
columns of at most 100 characters. A resumed run first calls `truncate(step)`, so that the file
holds what an unbroken run would have written, plus the event lines, which are the run's history.
torch is imported only when the first TensorBoard value is written.
"""

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from deberta_ds.errors import UserError, naming
from deberta_ds.files import write_atomic

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIRECTORY = "tensorboard"
KINDS = ("train", "eval", "event")
HEADER_EVERY_LINES = 20

_DIM, _BOLD, _GREEN, _RED, _CYAN = "\033[2m", "\033[1m", "\033[32m", "\033[31m", "\033[36m"
_RESET = "\033[0m"


def show_choices() -> None:
    """Print what the library chose for this machine (logger "deberta_ds") as it is chosen."""
    logger = logging.getLogger("deberta_ds")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def format_count(value: float) -> str:
    """Return a count with three significant digits and a unit: 940, 12.4k, 3.28M, 1.05B, 2.10T."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        # 0.9995: a value that rounds to 1000 of the smaller unit is one of the larger.
        if abs(value) >= 0.9995 * factor:
            scaled = value / factor
            digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
            return f"{scaled:.{digits}f}{unit}"
    return f"{value:.0f}"


def format_duration(seconds: float) -> str:
    """Return a time span in its two largest units: 42s, 3m 05s, 2h 10m, 4d 03h."""
    whole = int(round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl in file order; UserError on a line that breaks it."""
    lines = _read_lines(Path(path))
    return [_parse(Path(path), number, line) for number, line in enumerate(lines, start=1)]


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split("\n")[:-1] + _torn_tail(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give a directory a run has written to") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; the file is damaged") from None


def _torn_tail(path: Path) -> list[str]:
    """Return the text after the last newline as a list: empty for a file that ends well."""
    tail = path.read_text(encoding="utf-8").rpartition("\n")[2]
    return [tail] if tail else []


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    place = f"{path}, line {number}"
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{place}: not a whole JSON object ({error.msg}, column {error.colno}); "
            "resume the run, which cuts a half-written last line, or delete the line"
        ) from None
    if not isinstance(record, dict) or record.get("kind") not in KINDS:
        raise UserError(f'{place}: must be an object with "kind" one of {", ".join(KINDS)}')
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise UserError(f'{place}: "step" must be a whole number >= 0, it is {step!r}')
    for key, value in record.items():
        text = key in ("kind", "event", "detail")
        if text != isinstance(value, str) or not isinstance(value, str | int | float | None):
            raise UserError(f'{place}: "{key}" must be {"text" if text else "a number or null"}')
    return record


@dataclass(frozen=True)
class _Column:
    title: str
    width: int
    text: Callable[[dict[str, Any]], str]


def _number(key: str, spec: str) -> Callable[[dict[str, Any]], str]:
    return lambda record: "-" if record.get(key) is None else format(record[key], spec)


def _human(key: str, form: Callable[[float], str]) -> Callable[[dict[str, Any]], str]:
    return lambda record: "-" if record.get(key) is None else form(record[key])


def _columns(record: dict[str, Any], total_steps: int | None) -> list[_Column]:
    """Return the console columns for records like this one: RTD or MLM, MFU or plain FLOP/s."""
    total = f"/{total_steps:,}" if total_steps else ""
    step_width = max(7, 2 * len(total) - 1 if total else 10)
    columns = [_Column("step", step_width, lambda r: f"{r['step']:,}{total}")]
    if "discriminator_loss" in record:
        columns += [
            _Column("gen.loss", 9, _number("generator_loss", ".4f")),
            _Column("disc.loss", 9, _number("discriminator_loss", ".4f")),
            _Column("gain", 7, _number("discriminator_gain", "+.4f")),
        ]
    else:
        columns.append(_Column("loss", 9, _number("loss", ".4f")))
    columns.append(_Column("tok/s", 7, _human("tokens_per_second", format_count)))
    if record.get("mfu") is not None:
        columns.append(_Column("MFU", 7, _number("mfu", ".1%")))
    else:
        columns.append(_Column("GFLOP/s", 8, _human("flops_per_second", _giga)))
    return columns + [
        _Column("lr", 9, _number("learning_rate", ".2e")),
        _Column("grad", 7, _human("grad_norm", lambda value: f"{value:.4g}")),
        _Column("ETA", 8, _human("eta_seconds", format_duration)),
    ]


def _giga(flops_per_second: float) -> str:
    value = flops_per_second / 1e9
    return f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


class RunLog:
    """The one voice of a run. All methods do nothing on ranks where `is_main` is false.

    A record that cannot be written (a full disk) does not end the run at once: `problem` says why,
    nothing more is written, and the loop saves a checkpoint before it calls `check`.
    """

    def __init__(
        self,
        out_dir: str | Path,
        is_main: bool,
        *,
        total_steps: int | None = None,
        stream: TextIO | None = None,
        tensorboard: bool = True,
    ) -> None:
        self.path = Path(out_dir) / METRICS_FILE
        self.problem = ""
        self._is_main = is_main
        self._total_steps = total_steps
        self._stream = stream or sys.stdout
        self._colored = self._stream.isatty() and "NO_COLOR" not in os.environ
        self._tensorboard = tensorboard
        self._writer = None
        self._purge_step: int | None = None
        self._lines_until_header = 0
        if is_main:
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def info(self, text: str, **fields: Any) -> None:
        """Print one line: the time, `text`, then the fields as key=value."""
        if self._is_main:
            pairs = "".join(f" {key}={value}" for key, value in fields.items())
            self._print(self._paint(_DIM, time.strftime("%H:%M:%S")) + f"  {text}{pairs}")
            self._lines_until_header = 0

    def metrics(self, record: dict[str, Any]) -> None:
        """Append one record to metrics.jsonl and show it; a non-finite number is written as null.

        (JSON has no NaN; a non-finite gradient norm is normal for a step that fp16 skipped.)
        """
        if not self._is_main:
            return
        finite = {key: _finite_or_none(value) for key, value in record.items()}
        line = json.dumps(finite, allow_nan=False)
        _parse(self.path, 0, line)
        if not self.problem:  # a line after half of one would make the file unreadable
            with self._writing(self.path), open(self.path, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        if record["kind"] == "event":
            detail = f" ({record['detail']})" if record.get("detail") else ""
            self.info(f"{record['event']} at step {record['step']:,}{detail}")
            return
        self._show_train(finite) if record["kind"] == "train" else self._show_eval(finite)
        with self._writing(self.path.parent / TENSORBOARD_DIRECTORY):
            self._write_tensorboard(finite)

    def check(self) -> None:
        """Raise UserError if a record could not be written."""
        if self.problem:
            raise UserError(self.problem)

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            with naming(path):
                yield
        except UserError as error:
            self.problem = self.problem or f"{error}; the run stopped, run it again to go on"

    def truncate(self, step: int) -> None:
        """Cut what comes after `step`: train and eval records, and a half-written last line.

        Call it once, before the first record of a resumed run. Event records stay.
        """
        self._purge_step = step + 1
        if not self._is_main or not self.path.exists():
            return
        torn = len(_torn_tail(self.path))
        lines = _read_lines(self.path)
        kept = []
        for number, line in enumerate(lines[: len(lines) - torn], start=1):
            record = _parse(self.path, number, line)
            if record["kind"] == "event" or record["step"] <= step:
                kept.append(line + "\n")
        write_atomic(self.path, "".join(kept))

    def close(self) -> None:
        """Flush and close the TensorBoard file."""
        if self._writer is not None:
            with self._writing(self.path.parent / TENSORBOARD_DIRECTORY):
                self._writer.close()
            self._writer = None

    def _show_train(self, record: dict[str, Any]) -> None:
        columns = _columns(record, self._total_steps)
        if self._lines_until_header == 0:
            titles = " ".join(f"{column.title:>{column.width}}" for column in columns)
            self._print(self._paint(_DIM, f"{'time':>8} {titles}"))
            self._lines_until_header = HEADER_EVERY_LINES
        self._lines_until_header -= 1
        cells = [self._paint(_DIM, time.strftime("%H:%M:%S"))]
        for column in columns:
            cell = f"{column.text(record):>{column.width}}"
            if column.title == "gain" and record.get("discriminator_gain") is not None:
                cell = self._paint(_GREEN if record["discriminator_gain"] > 0 else _RED, cell)
            cells.append(cell)
        self._print(" ".join(cells))

    def _show_eval(self, record: dict[str, Any]) -> None:
        self._print(
            self._paint(_DIM, time.strftime("%H:%M:%S"))
            + self._paint(_BOLD + _CYAN, f"  evaluation at step {record['step']:,}")
        )
        titles = ("accuracy", "baseline", "loss")
        header = "".join(f"{title:>10}" for title in titles)
        self._print(self._paint(_DIM, f"{'':10}{'network':<13}{header}"))
        two = "discriminator_loss" in record
        network = "generator" if two else "masked"
        self._print(_eval_row(record, network, "generator" if two else "model", "unigram"))
        if two:
            self._print(_eval_row(record, "discriminator", "discriminator", "prior"))
        self._lines_until_header = 0

    def _write_tensorboard(self, record: dict[str, Any]) -> None:
        if not self._tensorboard or self.problem:
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(
                str(self.path.parent / TENSORBOARD_DIRECTORY), purge_step=self._purge_step
            )
        for key, value in record.items():
            if key not in ("kind", "step") and value is not None:
                self._writer.add_scalar(f"{record['kind']}/{key}", value, record["step"])
        if record["kind"] == "eval":
            self._writer.flush()

    def _paint(self, code: str, text: str) -> str:
        return f"{code}{text}{_RESET}" if self._colored else text

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def _eval_row(record: dict[str, Any], network: str, title: str, baseline: str) -> str:
    """Return one network's line of the evaluation: its accuracy beside its baseline's."""
    keys = (f"{network}_accuracy", f"{baseline}_accuracy", f"{network}_loss")
    cells = [_number(key, ".4f")(record) for key in keys]
    extra = {
        "unigram": f"perplexity {_number(f'{network}_perplexity', ',.1f')(record)}",
        "prior": f"gain {_number('discriminator_gain', '+.4f')(record)} nats"
        f"  ROC-AUC {_number('roc_auc', '.3f')(record)}"
        f"  AP {_number('average_precision', '.3f')(record)}",
    }[baseline]
    return f"{'':10}{title:<13}" + "".join(f"{cell:>10}" for cell in cells) + f"   {extra}"


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
