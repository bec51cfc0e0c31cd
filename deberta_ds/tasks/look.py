"""What a task's tables hold as they are read, before anything is trained: `finetune.py --look`."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from textwrap import shorten

from deberta_ds.base.errors import UserError
from deberta_ds.tasks.layouts import Example, classes_of
from deberta_ds.tasks.metrics import spans_of
from deberta_ds.tasks.readers import Split, count_shared, has_split, read_split
from deberta_ds.tasks.tables import Faults, read_table
from deberta_ds.tasks.task import Task

_ROWS, _WIDTH = 10, 76  # shown of each table, and characters of a text
_EVERY = 1 << 62


def look(task: Task, data: str) -> Iterator[str]:
    """Yield the lines that tell how each table of a task is read, with its first rows."""
    train = None
    for name in ("train", "val", "test"):
        if not has_split(task, data, name):
            yield f"{name}: none"
            continue
        faults = Faults(_EVERY)
        split = read_split(task, data, name, any_size=True, faults=faults)
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
    used = {field: task.columns.get(field, field) for field in (*task.texts, *task.choices)}
    used |= dict.fromkeys(task.label_columns, "label") or {"label": task.columns.get("label", "")}
    names = {*used.values(), *task.columns.values(), *task.label_columns}
    yield f"  read: {', '.join(name for name in row if name in names)}"
    if ignored := [name for name in row if name not in names and "." not in name]:
        yield f"  not read: {shorten(', '.join(ignored), _WIDTH)}"


def _counts(split: Split) -> Iterator[str]:
    task, examples = split.task, split.examples
    texts = Counter(text for example in examples for texts in example.sequences for text in texts)
    longest = max(map(len, texts), default=0)
    yield f"  texts: {len(texts):,} different, the longest has {longest:,} characters"
    labels: Counter[str] = Counter()
    for example in examples:
        if isinstance(example.label, tuple) and task.head == "multilabel":
            labels.update(name for name, one in zip(task.labels, example.label, strict=True) if one)
        elif task.head == "tags" and example.label is not None:
            labels.update(name for name, *_ in _spans(task, example))
        elif isinstance(example.label, int) and task.head != "choice":
            labels[task.labels[example.label]] += 1
        else:
            labels["with a label" if example.label is not None or example.gold else
                   "without a label"] += 1
    yield "  " + shorten(", ".join(f"{name}: {n:,}" for name, n in labels.most_common()), 400)


def _spans(task: Task, example: Example) -> list[tuple[str, int, int]]:
    return spans_of([task.labels[number] for number in classes_of(example.label)])


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
    label = example.label
    if isinstance(label, int) and task.head != "choice":
        yield f"      = {task.labels[label]}"
    elif task.head == "multilabel" and label is not None:
        yield "      = " + ", ".join(name for name, one in zip(
            task.labels, classes_of(label), strict=True) if one)
    elif task.head == "regress" and label is not None:
        yield f"      = {label:g}"
    elif task.head == "answer":
        yield f"      = {' / '.join(dict.fromkeys(example.gold)) or 'no answer'}"
