"""A table -> a file of predictions: streamed, in order, on any number of ranks; labels are scored.

Rows are read in blocks; a block is encoded, its batches are dealt to the ranks, and the first rank
writes it before the next one is read, so neither file need fit into memory. Of labeled rows,
labels and predictions are kept to be scored at the end.
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from scipy.special import expit, softmax

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import atomic_path, write_atomic
from deberta_ds.cluster import dist
from deberta_ds.finetuning.features import Feature, count_unknown, encode
from deberta_ds.finetuning.heads import MARGIN
from deberta_ds.finetuning.models import Finetuned, finetuned_model
from deberta_ds.finetuning.predict import (
    answer_place,
    as_text,
    entities_in,
    predictions_of,
    score_split,
)
from deberta_ds.tasks.labels import is_ignored, to_line, without_label
from deberta_ds.tasks.layouts import Example, examples_of, is_labeled
from deberta_ds.tasks.metrics import Prediction, scores_of
from deberta_ds.tasks.submission import as_written
from deberta_ds.tasks.tables import Faults, each_row
from deberta_ds.tasks.task import Task
from deberta_ds.tokenizer import unknown_tokens

BLOCK_ROWS = 4096
Row = tuple[str, dict[str, Any] | UserError]
_OURS = ("idx", "error", "prediction", "probabilities", "start", "end", "no_answer_margin")
_OWN_LINES = ("copa", "multirc", "record", "wic", "wsc")  # layouts that are no plain table


def predict_file(
        saved: Finetuned, data: Path, out: Path, device: torch.device, *, global_batch_size: int,
        max_length: int, keep: Sequence[str] = (), max_bad: int = 0, encoding: str = "") -> int:
    """Write a JSON line for each row of `data` to `out`; return how many.

    A line holds "idx", the columns in `keep`, "prediction" and, where there are classes, their
    probabilities; of answers, their characters [start, end) and the margin of no answer; of tags in
    a text, the entities. A row that cannot be used has "error" instead. Where rows have labels,
    their scores are printed and written next to `out`, with the ending .scores.json. Raises
    UserError naming the rows that cannot be used where they are more than `max_bad`; then `out` is
    not written.
    """
    dist.together(lambda: _check_options(data, out, keep))
    dist.check_alike({f"hash of the model's {name}": digest
                      for name, digest in saved.identity.items()})
    model = finetuned_model(saved, device)
    task = replace(saved.task, form=replace(saved.task.form, encoding=encoding))
    bad = Faults(max_bad, out.with_name(f"{out.name}.bad_rows.txt"))
    labeled: list[tuple[Example, Prediction]] = []
    unread: list[str] = []  # what is wrong with labels that cannot be read
    count, cut, unknown, began = 0, 0, np.zeros(2, int), time.monotonic()
    rows = each_row(data, form=task.form)
    written = atomic_path(out) if dist.is_main() else nullcontext(os.devnull)
    with written as temporary, open(temporary, "w", encoding="utf-8") as file:
        while True:
            block: list[Row] = dist.together(lambda: list(itertools.islice(rows, BLOCK_ROWS)))
            dist.check_alike({f"hash of {data} from row {count:,} on": xxhash.xxh3_128_hexdigest(
                repr(block).encode("utf-8", "surrogatepass"))})
            if not block:
                break
            examples = list(_examples(task, block, count, keep, bad, unread))
            features = encode(task, examples, saved.tokenizer, max_length=max_length,
                              window_overlap=saved.settings.window_overlap,
                              truncation=saved.settings.truncation, faults=bad)
            first, count = count, count + len(block)
            if len(bad.errors) > bad.most:
                continue  # nothing is written, but all of them are to be named
            examples = [examples[feature.position] for feature in features]
            _check_positions(saved, features, data)
            cut += sum(feature.cut_tokens > 0 for feature in features)
            unknown += count_unknown(features, saved.tokenizer)
            scores = score_split(model, task, examples, features,
                                 global_batch_size=global_batch_size, device=device)
            guesses = predictions_of(task, examples, scores, saved.threshold)
            labeled += [(replace(example, sequences=(), spans=()), guess) for example, guess in
                         zip(examples, guesses, strict=True) if is_labeled(example)]
            found = zip(examples, guesses, scores, strict=True)
            for line in _lines(task, block, first, keep, bad, found):
                # A kept column may hold a date, or another thing JSON has not.
                file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
            _say(f"{count:,} rows, {count / (time.monotonic() - began):,.0f} per second")
        _say(bad.check(count, bad.fit(task, "--")))
    _say(f"{cut:,} of {count:,} texts were cut at {max_length} tokens" if cut else "")
    if lost := unknown_tokens(*unknown):
        _say(f"{lost}; the model was not trained on text like this")
    if unread:
        _say(f"{len(unread):,} rows are not scored, as their label cannot be read: {unread[0]}")
    if dist.is_main():
        _write_scores(task, data, scores_file(out), labeled, count)
    return count


def scores_file(out: Path) -> Path:
    """Return where the scores of predictions go: a name may have a dot, as preds-0.1 has."""
    stem = out.stem if out.suffix in (".jsonl", ".json", ".txt") else out.name
    return out.with_name(f"{stem}.scores.json")


def _say(text: str) -> None:
    if text and dist.is_main():
        print(f"  {text}", file=sys.stderr, flush=True)


def _check_options(data: Path, out: Path, keep: Sequence[str]) -> None:
    if taken := [name for name in keep if name in _OURS]:
        raise UserError(f"--keep {taken[0]}: predictions have a value of that name; rename the "
                        "table's column")
    if out.is_dir():  # the rename at the end would fail
        raise UserError(f"--out {out}: is a directory; name a file to write")
    if out.exists() and data.exists() and out.samefile(data):
        raise UserError(f"--out {out}: is the table that is predicted; name another file")


def _check_positions(saved: Finetuned, features: Iterable[Feature], data: Path) -> None:
    """Raise UserError where a row is longer than the model's absolute positions."""
    longest = max((len(row) for feature in features for row in feature.sequences), default=0)
    if saved.config.absolute_input and longest > (limit := saved.config.max_position):
        raise UserError(f"{data}: the longest row has {longest} tokens, but the model has {limit} "
                        f"absolute positions. Set --max_length {limit} to cut it")


def _write_scores(task: Task, data: Path, file: Path,
                  labeled: Sequence[tuple[Example, Prediction]], count: int) -> None:
    file.unlink(missing_ok=True)  # of other predictions
    if labeled:
        scores = scores_of(task, *zip(*labeled, strict=True))
        scores["unlabelled"] = count - len({example.place for example, _ in labeled})
        write_atomic(file, json.dumps(scores, indent=1) + "\n")
        print(f"{as_text(str(data), scores)}\n\nwrote {file}")


def _examples(task: Task, block: Iterable[Row], first: int, keep: Sequence[str], bad: Faults,
              unread: list[str]) -> Iterator[Example]:
    """Yield the examples of a block; `unread` gets what is wrong with labels that are left out."""
    for number, (place, row) in enumerate(block, start=first):
        if isinstance(row, dict) and (missing := [name for name in keep if name not in row]):
            raise UserError(f"{place}: --keep {missing[0]}: no such column; there are "
                            f"{', '.join(map(str, row))}")
        try:
            if isinstance(row, UserError):
                raise row
            bare = without_label(task, row)
            try:
                found = _examples_of(task, place, bare if is_ignored(task, row) else row, number)
            except UserError as error:
                found = _examples_of(task, place, bare, number)
                unread.append(str(error).partition("\n")[0])
            yield from found
        except UserError as error:
            bad.add(place, error)


def _examples_of(task: Task, place: str, row: dict[str, Any], number: int) -> list[Example]:
    line = row if task.layout in _OWN_LINES else to_line(task, place, row, number)
    return examples_of(task, place, line, "test")


def _lines(task: Task, block: Sequence[Row], first: int, keep: Sequence[str], bad: Faults,
           found: Iterable[tuple[Example, Prediction, np.ndarray]]) -> Iterator[dict[str, Any]]:
    """Yield what is written of a block's rows, in their order, of bad ones the error."""
    by_place: dict[str, list[tuple[Example, Prediction, np.ndarray]]] = {}
    for part in found:
        by_place.setdefault(part[0].place, []).append(part)
    for number, (place, row) in enumerate(block, start=first):
        kept = {name: None if row[name] != row[name] else row[name]  # JSON has no NaN
                for name in keep} if isinstance(row, dict) else {}
        if place in bad.errors:
            yield {"idx": number, **kept, "error": bad.errors[place].partition("\n")[0]}
            continue
        for example, guess, values in by_place[place]:
            key = example.key[0] if len(example.key) == 1 else example.key
            yield {"idx": key, **kept} | _predicted(task, example, guess, values, row)


def _predicted(task: Task, example: Example, guess: Prediction, values: np.ndarray, row: Any
               ) -> dict[str, Any]:
    line: dict[str, Any] = {"prediction": as_written(task, guess)}
    if task.head == "tags" and task.words != "text" and isinstance(row.get(task.texts[0]), str):
        line["prediction"] = entities_in(task, example, line["prediction"], values)
    if task.head == "answer":
        start, end = answer_place(example, values) if guess else (-1, -1)
        line |= {"start": start, "end": end, "no_answer_margin": round(float(values[MARGIN]), 5)}
    elif task.head not in ("regress", "tags", "mentions"):
        shares = expit(values) if task.head == "multilabel" else softmax(values)
        line["probabilities"] = {label: round(float(share), 5) for label, share in
                                 zip(task.labels, shares, strict=True)}
    return line
