"""Entities as characters of a text: what annotation tools write, and what is predicted of one."""

import json

import pytest
import torch
from test_finetune_own import BY_HEART, train, write_task

from deberta_ds.base.errors import UserError
from deberta_ds.finetune.annotations import tagged_words, words_in
from deberta_ds.finetune.directory import load_finetuned
from deberta_ds.finetune.own import load_own_task
from deberta_ds.finetune.predict_file import predict_file
from deberta_ds.finetune.readers import read_split

TEXT = "😀 Ana Li lives in Rome."
OURS = [(2, 8, "PER"), (18, 22, "LOC")]
STUDIO = [{"from_name": "label", "to_name": "text", "type": "labels", "value": {
    "start": start + 1, "end": end + 1, "text": TEXT[start:end], "labels": [name]}}
    for start, end, name in OURS]  # a browser counts an emoji as two
OBJECTS = [{"start": start, "end": end, "label": name} for start, end, name in OURS]
FORMS = {
    "doccano": ({"text": TEXT, "label": [list(part) for part in OURS]}, "label"),
    "doccano, relations": ({"text": TEXT, "entities": [
        {"id": n, "label": name, "start_offset": start, "end_offset": end}
        for n, (start, end, name) in enumerate(OURS)], "relations": []}, "entities"),
    "spaCy": ({"text": TEXT, "entities": [list(part) for part in reversed(OURS)]}, "entities"),
    "Prodigy": ({"text": TEXT, "spans": OBJECTS, "answer": "accept", "tokens": []}, "spans"),
    "Label Studio": ({"id": 1, "data": {"text": TEXT}, "annotations": [
        {"was_cancelled": True, "result": []},
        {"result": [*STUDIO, {"type": "choices", "value": {"choices": ["x"]}}]}]}, "label"),
    "Label Studio, JSON_MIN": ({"text": TEXT, "id": 1, "label": [
        part["value"] for part in STUDIO]}, "label"),
}


def load(directory, rows: list, label: str = "label", **more):
    path = write_task(directory, "tags", rows, texts=["text"], label=label, **more)
    task, _, said = load_own_task(path)
    return task, read_split(task, ".", "train").examples, said


@pytest.mark.parametrize("name", FORMS)
def test_entities_of_annotation_tools(tmp_path, name):
    row, label = FORMS[name]
    task, (example, empty), said = load(tmp_path, [row, {"text": "None here.", label: []}], label)
    tags = [task.labels[tag] for tag in example.label]
    assert tags == ["O", "B-PER", "I-PER", "O", "O", "B-LOC", "O"]
    assert example.sequences == ((TEXT,),) and set(empty.label) == {0}
    assert [TEXT[span.start : span.end] for span in example.spans] == [
        "😀", "Ana", "Li", "lives", "in", "Rome", "."]
    assert said == "mine: 2 kinds of entities: LOC (1), PER (1)" and task.metrics == ("span_f1",)
    assert task.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")


@pytest.mark.parametrize(("entities", "said"), [
    ([[0, 3, "A"], [2, 5, "B"]], "A and B overlap at character 2"),
    ([[0, 99, "A"]], r"A \[0, 99\) is no piece of a text of 10 characters"),
    ([[3, 3, "A"]], "is no piece of"), ([["0", 3, "A"]], "is no entity; it is"),
    ([{"start": 0, "end": 3, "label": "A", "text": "xyz"}], "'xyz' is not at character 0"),
    ([[0, 3, "C"]], "must be one of 'O', 'B-A'"),
])
def test_entities_that_are_none_are_named_with_their_row(tmp_path, entities, said):
    rows = [{"text": "abc def gh", "label": [[0, 3, "A"]]}, {"text": "abc def gh",
                                                             "label": entities}]
    with pytest.raises(UserError, match=f'train.jsonl:2: .*"label".*{said}'):
        load(tmp_path, rows, **({"labels": ["A", "B"]} if said.startswith("must") else {}))


def test_rejected_and_unlabelled_texts_are_left_out_by_name(tmp_path):
    good = {"text": "abc", "spans": [{"start": 0, "end": 3, "label": "A"}], "answer": "accept"}
    rows = [good, good | {"answer": "reject"}, {"text": "x"}]
    with pytest.raises(UserError, match=r'2 of 3 rows(?s:.*)ignore_labels = \[""\]'):
        load(tmp_path, rows, "spans")
    assert len(load(tmp_path, rows, "spans", ignore_labels=[""])[1]) == 1


@pytest.mark.parametrize(("text", "words"), [
    ("Frau Müller-Lüdenscheidt aß 3,5 kg.", "Frau Müller - Lüdenscheidt aß 3 , 5 kg ."),
    ("हिन्दी में", "हिन्दी में"), ("كتابٌ جديد", "كتابٌ جديد"),
    ("東京へABC行く。", "東 京 へ ABC 行 く 。"), ("ที่นี่", "ที่ นี่"),
    ("안녕하세요 세계", "안녕하세요 세계"), ("don't", "don ' t"),
])
def test_words_of_a_text_in_every_script(text, words):
    found = [text[start:end] for start, end in words_in(text)]
    assert found == words.split()


def test_an_entity_inside_a_word_parts_it():
    places, tags = tagged_words("Berliner Dom", [(0, 6, "LOC")])
    assert places == [(0, 6), (6, 8), (9, 12)] and tags == ["B-LOC", "O", "O"]


LANGUAGES = {"de": ("Heute kam {} an.", ["Anna", "Jürgen"]),
             "ja": ("昨日{}が来た。", ["田中", "鈴木"]),
             "th": ("วันนี้{}มา", ["สมชาย", "มานะ"]), "ar": ("وصل {} أمس", ["أحمد", "سعيد"]),
             "hi": ("आज {} आया", ["मोहन", "राम"]), "zh": ("昨天{}来了。", ["王明", "李华"])}


def test_raw_text_gives_entities_with_their_characters(process_group, tmp_path):
    rows = []
    for pattern, names in LANGUAGES.values():
        for name in names:
            start = pattern.index("{")
            rows.append({"text": pattern.replace("{}", name),
                         "label": [[start, start + len(name), "PER"]]})
    path = write_task(tmp_path, "tags", rows, BY_HEART, texts=["text"])
    result = train(path, tmp_path / "out")
    assert result["score"] == 1, result["history"][-1]
    model = tmp_path / "out" / "mine" / "seed-1" / "model"
    table, out = tmp_path / "new.jsonl", tmp_path / "predictions.jsonl"
    table.write_text("".join(json.dumps({"text": row["text"]}) + "\n" for row in rows))
    predict_file(load_finetuned(model), table, out, torch.device("cpu"), global_batch_size=4,
                 max_length=64)
    lines = [json.loads(line)["prediction"] for line in out.read_text().splitlines()]
    for line, row in zip(lines, rows, strict=True):
        (found,), ((start, end, name),) = line, row["label"]
        assert found.pop("probability") > 0.5
        assert found == {"start": start, "end": end, "label": name, "text": row["text"][start:end]}
