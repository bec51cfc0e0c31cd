"""SuperGLUE and GLUE as the Hugging Face Hub keeps them -> the objects of the official JSON lines.

The Hub's tables are flat: MultiRC has one row per answer, ReCoRD one per query, labels are class
numbers and a label of -1 means none. Source: huggingface/datasets datasets/super_glue.
"""

from collections.abc import Iterator

from deberta_ds.errors import UserError
from deberta_ds.finetune.tables import to_line
from deberta_ds.finetune.tasks import NoSplitError, Task

HUB = "hub"
_SPLITS = {"train": "train", "val": "validation", "test": "test"}


def hub_split(task: Task, split: str) -> str:
    """Return what the Hub calls a split."""
    return task.hub_splits.get(split, _SPLITS[split])


def read_hub(task: Task, split: str) -> list[tuple[str, dict]]:
    """Return (place, row) of a split downloaded from the Hub; needs network once."""
    from datasets import load_dataset

    repository = task.hub_repository
    name = hub_split(task, split)
    try:
        table = load_dataset(repository, task.hub, split=name)
    except (OSError, ValueError, ConnectionError) as error:
        is_unknown = isinstance(error, ValueError) and "Unknown split" in str(error)
        raise (NoSplitError if is_unknown else UserError)(
            f"{repository} {task.hub} {name}: cannot be read from the Hub ({error}); "
            "download the official zip and pass its directory"
        ) from error
    return [(f"hub:{repository}/{task.hub}/{name}:row {number}", row)
            for number, row in enumerate(table, start=1)]


def official_lines(task: Task, rows: list[tuple[str, dict]]) -> Iterator[tuple[str, dict]]:
    """Yield (place, object in the format of the official JSON lines) for the Hub's rows."""
    convert = {"MultiRC": _multirc, "ReCoRD": _record}.get(task.name)
    try:
        if convert:
            yield from convert(rows)
            return
        for number, (place, row) in enumerate(rows):
            answers = task.layout == "answers"
            yield place, to_line(task, place, row, number) if answers else _flat(task, row)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        place, row = rows[0]
        raise UserError(
            f"{place}: not the Hub's {task.hub} table ({type(error).__name__}: {error}); its "
            f"columns are {', '.join(row)}"
        ) from error


def _flat(task: Task, row: dict) -> dict:
    line = {name: value for name, value in row.items() if name != "label"}
    for field, column in task.columns.items():  # GLUE's RTE has other names than SuperGLUE's
        if field not in row and column in row:
            line[field] = row[column]
    if task.name == "AX-b":
        line["idx"] = str(line["idx"])
    if task.name == "WiC":
        line["version"] = 1.1
    if task.name == "WSC":
        names = ("span1_index", "span1_text", "span2_index", "span2_text")
        line["target"] = {name: line.pop(name) for name in names}
    if row["label"] == -1:
        return line
    if task.head == "regress":
        return line | {"label": float(row["label"])}
    number = row["label"]
    if type(number) is not int or not 0 <= number < len(task.labels):
        raise ValueError(f"label {number!r} is no class number")
    if task.hub_labels:
        number = task.labels.index(task.hub_labels[number])
    line["label"] = (task.values or task.labels)[number]
    return line


def _multirc(rows: list[tuple[str, dict]]) -> Iterator[tuple[str, dict]]:
    passages: dict[int, tuple[str, dict]] = {}
    questions: dict[tuple[int, int], dict] = {}
    for place, row in rows:
        idx = row["idx"]
        passage = {"text": row["paragraph"], "questions": []}
        line = {"idx": idx["paragraph"], "version": 1.1, "passage": passage}
        _, line = passages.setdefault(idx["paragraph"], (place, line))
        key = (idx["paragraph"], idx["question"])
        if key not in questions:
            questions[key] = {"question": row["question"], "idx": idx["question"], "answers": []}
            line["passage"]["questions"].append(questions[key])
        answer = {"text": row["answer"], "idx": idx["answer"]}
        if row["label"] != -1:
            answer["label"] = row["label"]
        questions[key]["answers"].append(answer)
    yield from passages.values()


def _record(rows: list[tuple[str, dict]]) -> Iterator[tuple[str, dict]]:
    passages: dict[int, tuple[str, dict]] = {}
    for place, row in rows:
        spans = row["entity_spans"]
        # The Hub's spans are end-exclusive, the official files count the last character in.
        entities = [
            {"start": start, "end": end - 1}
            for start, end in zip(spans["start"], spans["end"], strict=True)
        ]
        # The Hub removes the newlines around @highlight; offsets are kept.
        line = {"source": "hub", "passage": {"text": row["passage"], "entities": entities},
                "qas": [], "idx": row["idx"]["passage"]}
        _, line = passages.setdefault(row["idx"]["passage"], (place, line))
        qa = {"query": row["query"], "idx": row["idx"]["query"]}
        if row["answers"]:
            qa["answers"] = [{"start": 0, "end": 0, "text": text} for text in row["answers"]]
        line["qas"].append(qa)
    yield from passages.values()
