"""What a task's tables hold as they are read, before anything is trained: `finetune.py --look`."""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from textwrap import shorten

from deberta_ds.base.errors import UserError
from deberta_ds.tasks.layouts import Example, is_labeled
from deberta_ds.tasks.metrics import spans_of
from deberta_ds.tasks.readers import Split, count_shared, read_split
from deberta_ds.tasks.tables import Faults, read_table
from deberta_ds.tasks.task import NoSplitError, Task

_ROWS, _WIDTH = 10, 76  # shown of each table, and characters of a text
_EVERY = 1 << 62
_DAMAGE = {"have characters that were lost (\ufffd)": "\ufffd",
           "look like UTF-8 that was read as Latin-1 (Ã¼)": "[ÂÃ][\x80-\xbf]",
           "have characters as HTML writes them (&amp;)": r"&(amp|lt|gt|quot|nbsp|#\d+);"}


def look(task: Task, data: str) -> Iterator[str]:
    """Yield the lines that tell how each table of a task is read, with its first rows."""
    train = None
    for name in ("train", "val", "test"):
        try:
            split = read_split(task, data, name, any_size=True, faults=Faults(_EVERY))
        except NoSplitError as error:
            share = task.val_share if name == "val" else 0
            lines = str(error).splitlines() if not task.files else ["none"]  # of a benchmark
            yield f"{name}: " + (f"{share:.0%} of train (val_share)" if share else lines[0])
            continue
        train = train or split
        yield f"\n{name}: {split.source}: {len(split.examples):,} examples"
        if name in task.files and task.layout in ("texts", "choices", "tags", "answers"):
            yield from _columns(task, name)
        for said in filter(None, split.left_out.split("; ")):
            yield f"  {said}"
        if split is not train and (shared := count_shared(train, split))[0]:
            yield f"  {shared[0]:,} of {len(split.examples):,} are in train, too ({shared[1]})"
        yield from _counts(split)
        for example in islice(split.examples, _ROWS):
            yield from _shown(task, example)


def _columns(task: Task, name: str) -> Iterator[str]:
    try:
        _, row = next(read_table(task.files[name], form=task.form))
    except (UserError, StopIteration):
        return
    names = {task.columns.get(field, field) for field in (*task.texts, *task.choices)}
    names |= {"is_impossible"} if task.layout == "answers" else set()
    names |= {*task.columns.values(), *task.label_columns}
    yield f"  read: {', '.join(name for name in row if name in names)}"
    if ignored := [name for name in row if name not in names and "." not in name]:
        yield f"  not read: {shorten(', '.join(ignored), _WIDTH)}"


def _counts(split: Split) -> Iterator[str]:
    task, examples = split.task, split.examples
    texts = Counter(text for example in examples for texts in example.sequences for text in texts)
    longest = max(map(len, texts), default=0)
    yield f"  texts: {len(texts):,} different, the longest has {longest:,} characters"
    for damage, pattern in _DAMAGE.items():
        if damaged := sum(re.search(pattern, text) is not None for text in texts):
            yield f"  {damaged:,} of them {damage}"
    labels: Counter[str] = Counter()
    for example in examples:
        names = _names(task, example)
        labels.update(["with a label" if is_labeled(example) else "without a label"]
                      if names is None else names)
    yield "  " + shorten(", ".join(f"{name}: {n:,}" for name, n in labels.most_common()), 400)


def _names(task: Task, example: Example) -> list[str] | None:
    """Return the names in the label of an example; None where it has none, or one without names."""
    label = example.label
    if task.head == "multilabel" and label is not None:
        return [name for name, one in zip(task.labels, label, strict=True) if one]
    if task.head == "tags" and label is not None:
        return [name for name, *_ in _spans(task, example)]
    return [task.labels[label]] if isinstance(label, int) and task.head != "choice" else None


def _spans(task: Task, example: Example) -> list[tuple[str, int, int]]:
    return spans_of([task.labels[number] for number in example.label])


def _shown(task: Task, example: Example) -> Iterator[str]:
    """Yield an example as the model will see it: entities and answers in [brackets]."""
    marks: list[tuple[int, int, int, str]] = []  # text, characters [start, end), name
    if task.head == "tags" and example.label is not None:
        marks = [(0, example.spans[first].start, example.spans[end - 1].end, name)
                 for name, first, end in _spans(task, example)]
    elif task.head in ("answer", "words", "spans", "mentions"):
        marks = [(span.text, span.start, span.end, "") for span in example.spans]
    for number, sequence in enumerate(example.sequences):
        shown = list(sequence)
        for text, start, end, name in sorted(marks, reverse=True):
            whole = shown[text]
            shown[text] = f"{whole[:start]}[{whole[start:end]}{name and '|' + name}]{whole[end:]}"
        is_right = task.head == "choice" and example.label == number
        yield f"  {'*' if is_right else '-'} " + " || ".join(
            shorten(text, _WIDTH, placeholder=" ...") for text in shown)
    names = _names(task, example) if task.head != "tags" else None
    if names is not None:
        yield f"      = {', '.join(names)}"
    elif task.head == "regress" and example.label is not None:
        yield f"      = {example.label:g}"
    elif task.head == "answer":
        yield f"      = {' / '.join(dict.fromkeys(example.gold)) or 'no answer'}"
