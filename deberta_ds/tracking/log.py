"""How a run speaks: the console (rank 0), metrics.jsonl and the trackers (TensorBoard and others).

metrics.jsonl has one JSON object a line: `kind` train, eval or event, `step`, and numbers. Rank 0
appends to it. A resumed run first cuts what comes after its checkpoint, so that the file holds what
an unbroken run would have written, plus the event lines, which are the run's history.

The console shows the records of metrics.jsonl as aligned columns of at most 80 characters. Which
numbers, the caller says: the metrics that its objective declares (`objectives.base.Metric`).
torch is imported only when the first TensorBoard value is written.
"""

import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from deberta_ds.base.errors import UserError, naming, tell
from deberta_ds.base.files import parse_json, write_atomic
from deberta_ds.base.numbers import fill, format_count, format_duration, format_value
from deberta_ds.tracking import trackers

METRICS_FILE = "metrics.jsonl"
KINDS = ("train", "eval", "event")
_TEXT_KEYS = ("kind", "event", "detail", "kernels")
_LARGEST = 1e300  # beyond it means and sums of doubles overflow
HEADER_EVERY_LINES = 20
WIDTH = 80
_TIME = 10  # characters of a time and two spaces

_DIM, _BOLD, _GREEN, _RED, _CYAN = "\033[2m", "\033[1m", "\033[32m", "\033[31m", "\033[36m"
_RESET = "\033[0m"


def non_default_texts(values: dict, origins: dict[str, str], top: str) -> list[str]:
    """Return a text for each origin of values {"section.key": value} that are no defaults: a
    paragraph per section. `top` names what lies in no section.
    """
    groups: dict[str, dict[str, list[str]]] = {}
    for key, origin in origins.items():
        if key in values and origin != "default":
            section, _, name = key.rpartition(".")
            pair = f"{name} = {json.dumps(values[key], ensure_ascii=False)}"
            groups.setdefault(origin, {}).setdefault(section or top, []).append(
                pair.replace(" ", "\0") if len(pair) < 53 else pair)  # what fits in a line is kept
    return ["\n".join([f"set by {origin}:", *(
        fill(f"{'':10}{section:<15} {', '.join(pairs)}", 79, hanging=26).replace("\0", " ")
        for section, pairs in sections.items())]) for origin, sections in groups.items()]


@dataclass(frozen=True)
class _Column:
    title: str
    width: int
    text: Callable[[float], str]
    key: str
    signed: bool = False  # green above zero, red below


_LOSS = _Column("loss", 9, "{:.4f}".format, "loss")
_SPEED = _Column("tok/s", 5, format_count, "tokens_per_second")
_PEAK_SHARE = _Column("MFU", 6, "{:.1%}".format, "mfu")
_FLOPS = _Column("GFLOP/s", 7, lambda value: f"{value / 1e9:,.{int(value < 99.95e9)}f}",
                 "flops_per_second")
_PROGRESS = (_Column("lr", 6, lambda value: format_value(value, "rate"), "learning_rate"),
             _Column("grad", 6, lambda value: f"{value:.3g}" if value < 1e3
                     else format_count(value), "grad_norm"),
             _Column("ETA", 6, lambda value: format_duration(value).replace(" ", ""),
                     "eta_seconds"))


def _columns(metrics: Sequence, record: dict[str, Any]) -> list[_Column]:
    """Return the console columns of training records: what `metrics` declare, speed, progress."""
    learned = [_Column(metric.on_console, 7 if metric.unit == "gain" else
                       max(8, len(metric.on_console)),
                       ("{:+.4f}" if metric.unit == "gain" else "{:.4f}").format, metric.key,
                       metric.unit == "gain")
               for metric in metrics if metric.on_console]
    share = _FLOPS if record.get("mfu") is None else _PEAK_SHARE
    return [*(learned or [_LOSS]), _SPEED, share, *_PROGRESS]


class RunLog:
    """The one voice of a run. All methods do nothing on ranks where `is_main` is false.

    A record that cannot be written (a full disk) does not end the run at once: `problem` says why,
    nothing more is written, and the loop saves a checkpoint before it calls `check`.
    """

    def __init__(self, out_dir: str | Path, is_main: bool, *, metrics: Sequence = (),
                 total_steps: int | None = None, stream: TextIO | None = None,
                 track: Sequence[trackers.Open] = (trackers.tensorboard,)) -> None:
        """`metrics` are objectives.base.Metric; `track` gets every record that has numbers."""
        self.path = Path(out_dir) / METRICS_FILE
        self.problem = ""
        self._is_main = is_main
        self._metrics = tuple(metrics)
        self._total = f" of {format_count(total_steps)}" if total_steps else ""
        self._stream = stream or sys.stdout
        self._colored = self._stream.isatty() and "NO_COLOR" not in os.environ
        self._track = track
        self._trackers: list[trackers.Tracker] | None = None
        self._purge_step: int | None = None
        self._lines_until_header = 0
        if is_main:
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def info(self, text: str) -> None:
        """Print the time, then `text`: one line in a file, as many as it needs on a terminal."""
        if self._is_main:
            if self._stream.isatty() and "\n" not in text:
                text = fill(" " * _TIME + text, WIDTH, _TIME)[_TIME:]
            self._print(self._time() + f"  {text}")
            self._lines_until_header = 0

    def metrics(self, record: dict[str, Any]) -> None:
        """Append one record to metrics.jsonl and show it; what is not `finite` becomes null."""
        if not self._is_main:
            return
        with self._writing():
            append_record(self.path, record)
        record = finite(record)
        self._show(record)
        if record["kind"] != "event":
            with self._writing():
                if self._trackers is None:
                    self._trackers = [begin(self.path.parent, self._purge_step)
                                      for begin in self._track]
                for tracker in self._trackers:
                    tracker.write(record)

    def check(self) -> None:
        """Raise UserError if a record could not be written."""
        if self.problem:
            raise UserError(self.problem)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Keep what fails for `check`; what follows is not written, but shown."""
        try:
            with naming(self.path.parent):
                yield
        except UserError as error:
            self.problem = self.problem or f"{error}; the run stopped, run it again to go on"

    def truncate(self, step: int) -> None:
        """Cut what comes after `step`; call it once, before the first record of a resumed run."""
        self._purge_step = step + 1
        if self._is_main and self.path.exists():
            truncate_records(self.path, step)

    def close(self) -> None:
        """Flush and close the trackers."""
        with self._writing():
            for tracker in self._trackers or ():
                tracker.close()
        self._trackers = None

    def _show(self, record: dict[str, Any]) -> None:
        if record["kind"] == "event":
            if record["event"] == "fail":
                return  # the error itself is printed
            detail = f" ({record['detail']})" if record.get("detail") else ""
            # In the background a checkpoint of an earlier step is written.
            what = "checkpoint written by" if record["event"] == "save" else \
                f"{record['event']} at"
            self.info(f"{what} step {record['step']:,}{detail}")
        elif record["kind"] == "train":
            self._show_train(record)
        else:
            self._show_eval(record)

    def _show_train(self, record: dict[str, Any]) -> None:
        columns = _columns(self._metrics, record)
        if self._lines_until_header == 0:
            titles = " ".join(f"{column.title:>{column.width}}" for column in columns)
            self._print(self._paint(_DIM, f"time{'step' + self._total:>14} {titles}"))
            self._lines_until_header = HEADER_EVERY_LINES
        self._lines_until_header -= 1
        cells = [self._time(), f"{record['step']:,}".rjust(9)]
        for column in columns:
            value = record.get(column.key)
            cell = ("-" if value is None else column.text(value)).rjust(column.width)
            if column.signed and value is not None:
                cell = self._paint(_GREEN if value > 0 else _RED, cell)
            cells.append(cell)
        self._print(" ".join(cells))

    def _show_eval(self, record: dict[str, Any]) -> None:
        """Show an evaluation as a table: network, metric, value and baseline."""
        self._print(self._time() + self._paint(_BOLD + _CYAN,
                                               f"  evaluation at step {record['step']:,}"))
        network = ""
        for metric in self._metrics:
            if record.get(metric.key) is None:
                continue
            name, network = metric.network * (metric.network != network), metric.network
            value, baseline = record[metric.key], metric.baseline_of(record)
            line = f"{'':10}{name:<14}{metric.short_title:<20}" \
                   f"{format_value(value, metric.unit):>10}"
            if baseline is not None:
                line += f"   {metric.baseline[0]} {format_value(baseline, metric.unit)}"
            self._print(line)
        for name in corpora_of(record):
            shown = [f"{metric.title} {format_value(record[key], metric.unit)}".replace(" ", "\0")
                     for metric in self._metrics
                     if record.get(key := f"{metric.key}/{name}") is not None]
            lines = textwrap.wrap("   ".join(shown), WIDTH - 24, break_long_words=False,
                                  break_on_hyphens=False)
            self._print("\n".join(f"{'':10}{name * (not k):<13} {line}"
                                  for k, line in enumerate(lines)).replace("\0", " "))
        self._lines_until_header = 0

    def _time(self) -> str:
        return self._paint(_DIM, time.strftime("%H:%M:%S"))

    def _paint(self, code: str, text: str) -> str:
        return f"{code}{text}{_RESET}" if self._colored else text

    def _print(self, line: str) -> None:
        tell(line, self._stream)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl in file order; UserError on a line that breaks it.

    A last line that a kill or a crash of the host cut short, so that it has no end, is left out.
    """
    return [parse(Path(path), number, line)
            for number, line in enumerate(_whole_lines(Path(path)), start=1)]


def corpora_of(record: dict[str, Any]) -> list[str]:
    """Return the names of the held-out corpora that an eval record has scores "SCORE/NAME" of."""
    return list(dict.fromkeys(key.partition("/")[2] for key in record if "/" in key))


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Write one record; a non-finite number becomes null (JSON has none, and fp16 skips steps).

    UserError if the file cannot be written; nothing is then lost but this record.
    """
    line = json.dumps(finite(record), allow_nan=False)
    parse(path, 0, line)
    with naming(path), open(path, "ab", buffering=0) as file:
        whole_bytes, rest = file.tell(), line.encode() + b"\n"
        try:
            while rest:
                rest = rest[file.write(rest):]
        except OSError:
            # Half a line would spoil the next one; cutting needs no room on the disk.
            file.truncate(whole_bytes)
            raise


def truncate_records(path: Path, step: int) -> None:
    """Cut train and eval records after `step`, and a half-written last line; events stay."""
    kept = []
    for number, line in enumerate(_whole_lines(path), start=1):
        record = parse(path, number, line)
        if record["kind"] == "event" or record["step"] <= step:
            kept.append(line + "\n")
    write_atomic(path, "".join(kept))


def finite(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with null for what is not finite, or is too large to be added up."""
    return {key: None if isinstance(value, float) and not abs(value) < _LARGEST else value
            for key, value in record.items()}


def _whole_lines(path: Path) -> list[str]:
    """Return the lines of a file; the last one may lack its end, if it lacks nothing else."""
    with naming(path):
        *lines, tail = path.read_bytes().decode("utf-8").split("\n")
    try:
        parse_json(tail, strict=False)
    except json.JSONDecodeError:
        return lines
    except ValueError:  # `parse` says what is wrong
        pass
    return [*lines, tail]


def parse(path: Path, number: int, line: str) -> dict[str, Any]:
    """Return the record of line `number`; UserError names the rule that it breaks."""
    place = f"{path}, line {number}"
    try:
        record = parse_json(line, strict=False)
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not a whole JSON object ({error.msg}, column {error.colno}); "
                        "delete the line") from None
    except ValueError as error:
        raise UserError(f"{place}: not a record ({error}); delete the line") from None
    if not isinstance(record, dict) or record.get("kind") not in KINDS:
        raise UserError(f'{place}: must be an object with "kind" one of {", ".join(KINDS)}')
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 53:
        raise UserError(f'{place}: "step" must be a whole number >= 0, it is {step!r:.40}')
    if record["kind"] == "event" and "event" not in record:
        raise UserError(f'{place}: an event must say which "event" it is')
    for key, value in record.items():
        if key in _TEXT_KEYS:
            if not isinstance(value, str):
                raise UserError(f'{place}: "{key}" must be text')
        elif value is not None and not (  # JSON's true is no number, nor is Python's NaN
                type(value) in (int, float) and -_LARGEST < value < _LARGEST):
            raise UserError(f'{place}: "{key}" must be a number or null (not {value!r:.40})')
    return record
