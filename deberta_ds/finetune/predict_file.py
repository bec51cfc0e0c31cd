"""A table -> a file of predictions: streamed, in order, on any number of ranks; labels are scored.

Rows are read in blocks; a block is encoded, its batches are dealt to the ranks, and the first rank
writes it before the next one is read, so neither file need fit into memory. Of labelled rows,
labels and predictions are kept to be scored at the end.
"""

import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import expit, softmax

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import atomic_path, write_atomic
from deberta_ds.cluster import dist
from deberta_ds.finetune.answers import MARGIN, answer_place
from deberta_ds.finetune.directory import Finetuned
from deberta_ds.finetune.faults import Faults
from deberta_ds.finetune.features import Feature, count_unknown, encode
from deberta_ds.finetune.labels import is_ignored, without_label
from deberta_ds.finetune.layouts import Example, examples_of, is_labelled
from deberta_ds.finetune.metrics import Prediction
from deberta_ds.finetune.predict import entities_in, num_scores, predictions_of, score_split
from deberta_ds.finetune.run import finetuned_model
from deberta_ds.finetune.scores import as_text, scores_of
from deberta_ds.finetune.submission import as_written
from deberta_ds.finetune.tables import each_row, to_line
from deberta_ds.finetune.tasks import Task
from deberta_ds.tokenizer import unknown_pieces

BLOCK_ROWS = 4096
Row = tuple[str, dict[str, Any] | UserError]
_OURS = ("idx", "error", "prediction", "probabilities", "start", "end", "no_answer_margin")
_OWN_LINES = ("copa", "multirc", "record", "wic", "wsc")  # layouts that are no plain table


def predict_file(
    saved: Finetuned, data: Path, out: Path, device: torch.device, *, global_batch_size: int,
    max_length: int, keep: Sequence[str] = (), max_bad: int = 0, encoding: str = "",
) -> int:
    """Write a JSON line for each row of `data` to `out`; return how many.

    A line holds "idx", the columns in `keep`, "prediction" and, where there are classes, their
    probabilities; of answers, their characters [start, end) and the margin of no answer; of tags in
    a text, the entities. A row that cannot be used has "error" instead. Where rows have labels,
    their scores are printed and written beside `out`, with the ending .scores.json. Raises
    UserError naming the rows that cannot be used where they are more than `max_bad`; then `out` is
    not written.
    """
    if taken := [name for name in keep if name in _OURS]:
        raise UserError(f"--keep {taken[0]}: predictions have a value of that name; rename the "
                        "table's column")
    if out.is_dir():  # the rename at the end would fail
        raise UserError(f"--out {out}: is a directory; name a file to write")
    if out.exists() and data.exists() and out.samefile(data):
        raise UserError(f"--out {out}: is the table that is predicted; name another file")
    model = finetuned_model(saved, device)
    task = replace(saved.task, form=replace(saved.task.form, encoding=encoding))
    saved = replace(saved, task=task)
    bad = Faults(max_bad, out.with_name(f"{out.name}.bad_rows.txt"))
    labelled: list[tuple[Example, Prediction]] = []
    unread: list[str] = []  # what is wrong with labels that cannot be read
    given = (saved, model, data, each_row(data, form=task.form), global_batch_size, max_length,
             keep, bad, labelled, unread)
    if not dist.is_main():
        return _on_all_ranks(*given, None)
    with atomic_path(out) as temporary, open(temporary, "w", encoding="utf-8") as file:
        count = _on_all_ranks(*given, file)
    scores_file = out.with_suffix(".scores.json")
    scores_file.unlink(missing_ok=True)  # of what stood in `out` before
    if unread:
        print(f"  {len(unread):,} rows are not scored, as their label cannot be read: {unread[0]}",
              file=sys.stderr)
    if labelled:
        examples, guesses = zip(*labelled, strict=True)
        scores = scores_of(saved.task, examples, guesses)
        scores["unlabelled"] = count - len(labelled)
        write_atomic(scores_file, json.dumps(scores, indent=1) + "\n")
        print(f"{as_text(str(data), scores)}\n\nwrote {scores_file}")
    return count


def _check_positions(saved: Finetuned, features: Iterable[Feature], data: Path) -> None:
    """Raise UserError where a row is longer than the model's absolute positions."""
    longest = max((len(row) for feature in features for row in feature.sequences), default=0)
    if saved.config.absolute_input and longest > (limit := saved.config.max_position):
        raise UserError(f"{data}: the longest row has {longest} tokens, but the model has {limit} "
                        f"absolute positions. Set --max_length {limit} to cut it")


def _on_all_ranks(saved, model, data, rows: Iterable[Row], global_batch_size, max_length, keep,
                  bad: Faults, labelled: list, unread: list[str], file) -> int:
    count, cut, unknown, began = 0, 0, np.zeros(2, int), time.monotonic()
    device = next(model.parameters()).device
    rows = iter(rows)
    while block := list(itertools.islice(rows, BLOCK_ROWS)):
        for place, row in block:
            if isinstance(row, dict) and (missing := [name for name in keep if name not in row]):
                raise UserError(f"{place}: --keep {missing[0]}: no such column; there are "
                                f"{', '.join(map(str, row))}")
        examples = list(_examples(saved.task, block, count, bad, unread))
        count += len(block)
        features = encode(saved.task, examples, saved.tokenizer, max_length=max_length,
                          window_overlap=saved.settings.window_overlap,
                          truncation=saved.settings.truncation, faults=bad)
        if len(bad.errors) > bad.most:
            continue  # nothing is written, but all of them are to be named
        examples = [examples[feature.position] for feature in features]
        _check_positions(saved, features, data)
        cut += sum(feature.cut_tokens > 0 for feature in features)
        unknown += count_unknown(features, saved.tokenizer)
        sizes = [num_scores(saved.task, example) for example in examples]
        scores = score_split(
            model, features, sizes, global_batch_size=global_batch_size, device=device
        )
        if file:
            guesses = predictions_of(saved.task, examples, scores, saved.threshold)
            labelled += [(replace(example, sequences=(), spans=()), guess)
                         for example, guess in zip(examples, guesses, strict=True)
                         if is_labelled(example)]
            lines = _lines(saved, examples, guesses, scores, block, keep)
            # A kept column may hold a date, or another thing JSON has not.
            for line in _with_errors(block, count - len(block), list(lines), keep, bad):
                file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
            rate = count / (time.monotonic() - began)
            print(f"  {count:,} rows, {rate:,.0f} a second", file=sys.stderr, flush=True)
    said = bad.check(count, bad.fit(saved.task, "--"))
    if file and said:
        print(f"  {said}", file=sys.stderr)
    if file and cut:
        print(f"  {cut:,} of {count:,} texts were cut at {max_length} tokens", file=sys.stderr)
    if file and (lost := unknown_pieces(*unknown)):
        print(f"  {lost}; the model was not trained on text like this", file=sys.stderr)
    return count


def _examples(task: Task, block: Iterable[Row], first: int, bad: Faults, unread: list[str]
              ) -> Iterator[Example]:
    """Yield the examples of a block; `unread` gets what is wrong with labels that are left out."""
    for number, (place, row) in enumerate(block, start=first):
        try:
            if isinstance(row, UserError):
                raise row
            bare = without_label(task, row)
            if is_ignored(task, row):
                row = bare
            try:
                found = _examples_of(task, place, row, number)
            except UserError as error:
                found = _examples_of(task, place, bare, number)
                unread.append(str(error).partition("\n")[0])
            yield from found
        except UserError as error:
            bad.add(place, error)


def _examples_of(task: Task, place: str, row: dict[str, Any], number: int) -> list[Example]:
    line = dict(row) if task.layout in _OWN_LINES else to_line(task, place, row, number)
    return examples_of(task, place, line, "test")


def _with_errors(block: Sequence[Row], first: int, lines: list[tuple[str, dict]],
                 keep: Sequence[str], bad: Faults) -> Iterator[dict[str, Any]]:
    """Yield the lines of a block's rows, in the order of the rows, with those of bad ones."""
    by_place: dict[str, list[dict]] = {}
    for place, line in lines:
        by_place.setdefault(place, []).append(line)
    for number, (place, row) in enumerate(block, start=first):
        if place in bad.errors:
            kept = {name: row[name] for name in keep} if isinstance(row, dict) else {}
            yield {"idx": number, **kept, "error": bad.errors[place].partition("\n")[0]}
        else:
            yield from by_place[place]


def _lines(
    saved: Finetuned, examples: Sequence[Example], guesses: Sequence[Prediction],
    scores: Sequence[np.ndarray], block: Sequence[Row], keep: Sequence[str],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file and line, what is written) of every example."""
    task = saved.task
    rows = {place: row for place, row in block if isinstance(row, dict)}
    for example, guess, values in zip(examples, guesses, scores, strict=True):
        line: dict[str, Any] = {"idx": example.key[0] if len(example.key) == 1 else example.key}
        row = rows[example.place]
        for name in keep:
            line[name] = row[name]
        line["prediction"] = as_written(task, guess)
        if task.head == "tags" and task.words != "text" and isinstance(row.get(task.texts[0]), str):
            line["prediction"] = entities_in(task, example, line["prediction"], values)
        if task.head == "answer":
            start, end = answer_place(example, values) if guess else (-1, -1)
            line |= {"start": start, "end": end}
            line["no_answer_margin"] = round(float(values[MARGIN]), 5)
        elif task.head == "multilabel":
            line["probabilities"] = dict(zip(task.labels, _rounded(expit(values)), strict=True))
        elif task.head not in ("regress", "tags", "mentions"):
            line["probabilities"] = dict(zip(task.labels, _rounded(softmax(values)), strict=True))
        yield example.place, line


def _rounded(values: np.ndarray) -> list[float]:
    return [round(float(value), 5) for value in values]
