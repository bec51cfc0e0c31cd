"""Entities as characters of a text: what annotation tools write, and what is predicted of one."""

import dataclasses
import json
import random
import runpy

import data_helpers
import pytest
from launching import ROOT
from superglue_helpers import jsonl, predict, save_random, tiny_start, write_lines
from test_finetune_own import BY_HEART, opened, train, write_task

from deberta_ds.base.errors import UserError
from deberta_ds.finetuning.features import encode, token_range
from deberta_ds.finetuning.models import load_finetuned
from deberta_ds.tasks.line import words_in
from deberta_ds.tasks.metrics import spans_of
from deberta_ds.tasks.readers import read_split
from deberta_ds.tasks.task_file import load_own_task
from deberta_ds.tokenizer import Tokenizer

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
    "spaCy, pairs": ([TEXT, {"entities": [list(part) for part in OURS]}], "entities"),
    "LightTag": ({"text": TEXT, "entities": [
        {"start": start, "end": end, "tag": name} for start, end, name in OURS]}, "entities"),
    "Stockmark": ({"text": TEXT, "entities": [
        {"name": TEXT[start:end], "span": [start, end], "type": name}
        for start, end, name in OURS]}, "entities"),
    "Prodigy": ({"text": TEXT, "spans": OBJECTS, "answer": "accept", "tokens": []}, "spans"),
    "Label Studio": ({"id": 1, "data": {"text": TEXT}, "annotations": [
        {"was_cancelled": True, "result": []},
        {"result": [*STUDIO, {"type": "choices", "value": {"choices": ["x"]}}]}]}, "label"),
    "Label Studio, JSON_MIN": ({"text": TEXT, "id": 1, "label": [
        part["value"] for part in STUDIO]}, "label"),
}


CONVERT = runpy.run_path(str(ROOT / "examples/convert_annotations.py"))


def load(directory, rows, label: str = "label", name: str = "export.jsonl", **more):
    """Return (split, what is said of its labels) of an annotation tool's export."""
    (directory / name).write_text(rows if isinstance(rows, str) else jsonl(rows))
    found = list(CONVERT["rows_of"](str(directory / name), {}))
    return opened(directory, "tags", found, texts=["text"], label=label, **more)


# Where these have found no entity, they write no field.
EMPTY = {"Prodigy": {"answer": "accept"}, "Label Studio, JSON_MIN": {"annotation_id": 7}}


@pytest.mark.parametrize("name", FORMS)
def test_entities_of_annotation_tools(tmp_path, name):
    row, label = FORMS[name]
    none = {"text": "None here."} | EMPTY.get(name, {label: []})
    none = [none.pop("text"), none] if isinstance(row, list) else none
    split, said = load(tmp_path, [row, none], label)
    task, (example, empty) = split.task, split.examples
    if isinstance(row, list):  # the same over many lines, and as one line
        for indent in (None, 1):
            text = json.dumps([row, none], indent=indent)
            assert load(tmp_path, text, label, "export.json")[0].examples == split.examples
    tags = dict(zip(((span.start, span.end) for span in example.spans), example.label, strict=True))
    named = {place: task.labels[tag] for (place, _), tag in tags.items() if tag}
    assert named == {2: "B-PER", 18: "B-LOC", **dict.fromkeys(range(3, 8), "I-PER"),
                     **dict.fromkeys(range(19, 22), "I-LOC")}
    assert example.sequences == ((TEXT,),) and set(empty.label) == {0}
    assert len(tags) == len(TEXT)
    assert said == "mine: 2 kinds of entities: LOC (1), PER (1)" and task.metrics == ("span_f1",)
    assert task.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")


@pytest.mark.parametrize(("entities", "said"), [
    ([[0, 3, "A"], [2, 5, "B"]], "A and B overlap at character 2"),
    ([[0, 99, "A"]], r"A \[0, 99\) is no part of a text of 10 characters"),
    ([[3, 3, "A"]], "is no part of"), ([["0", 3, "A"]], "is no entity; it is"),
    ([{"start": 0, "end": 3, "label": "A", "text": "xyz"}], "'xyz' is not at character 0"),
    ([[0, 3, "C"]], "must be one of 'O', 'B-A'")])
def test_entities_that_are_none_are_named_with_their_row(tmp_path, entities, said):
    rows = [{"text": "abc def gh", "label": [[0, 3, "A"]]}, {"text": "abc def gh",
                                                             "label": entities}]
    with pytest.raises(UserError, match=f'train.jsonl:2: .*"label".*{said}'):
        load(tmp_path, rows, name="train.jsonl",
             **({"labels": ["A", "B"]} if said.startswith("must") else {}))


LONG = "😀😀😀 Annabelle met Bartholomew near Rome, Carla with Linz, Dora and Fürther."
NAMES = ("Annabelle", "Bartholomew", "Rome", "Carla", "Linz", "Dora", "Fürther")
UNITS = {"bytes of UTF-8": lambda at: len(LONG[:at].encode()),
         "units of UTF-16": lambda at: len(LONG[:at].encode("utf-16-le")) // 2,
         "from 1": lambda at: at + 1}


def entities(place=lambda at: at, text: str = LONG, names=NAMES) -> list:
    return [[place(text.index(name)), place(text.index(name)) + len(name), "X"] for name in names]


@pytest.mark.parametrize("unit", UNITS)
def test_offsets_in_another_unit_are_an_error_that_names_it(tmp_path, unit):
    rows = [{"text": LONG + " They sing there.", "label": entities(UNITS[unit])}] * 2
    with pytest.raises(UserError, match=f"not begin where a word does.*if they count {unit};"):
        load(tmp_path, rows)


def test_places_that_may_be_wrong_are_pointed_out(tmp_path):
    """Inside words, as Korean's before particles; or where an end counts its last letter in."""
    said = load(tmp_path, [{"text": LONG, "label": entities()}])[1]
    assert "inside a word" not in said and "add 1" not in said
    korean = "서울에서 부산까지 대구에서 인천까지 광주에서"
    names = "서울 부산 대구 인천 광주".split()
    said = load(tmp_path, [{"text": korean, "label": entities(text=korean, names=names)}])[1]
    assert "5 of 5 entities begin or end inside a word" in said
    ends = [[start, end - 1, name] for start, end, name in entities()]
    said = load(tmp_path, [{"text": LONG, "label": ends}])[1]
    assert "7 of 7 entities end one letter before their word does" in said


def test_rejected_and_unlabeled_texts_are_left_out_by_name(tmp_path):
    good = {"text": "abc", "spans": [{"start": 0, "end": 3, "label": "A"}], "answer": "accept"}
    rows = [good, good | {"answer": "reject"}, {"text": "x"}]
    with pytest.raises(UserError, match=r'2 of 3 rows(?s:.*)ignore_labels = \[""\]'):
        load(tmp_path, rows, "spans")
    assert len(load(tmp_path, rows, "spans", ignore_labels=[""])[0].examples) == 1
    chosen = {"type": "choices", "from_name": "mood", "value": {"choices": ["good"]}}
    row = {"data": {"text": "abc"}, "annotations": [{"result": [chosen]}]}
    assert CONVERT["flat"](row) == {"id": None, "text": "abc", "label": [], "mood": ["good"]}
    row = {"text": "abc", "label": "sport", "_task_hash": 1}
    assert CONVERT["flat"](row | {"answer": "reject"})["label"] is None
    assert CONVERT["flat"](row) == row
    answers = [row | {"answer": answer} for answer in ("reject", "accept")]  # of yes/no questions
    write_lines(tmp_path / "textcat.jsonl", answers)
    assert [row["answer"] for row in CONVERT["rows_of"](str(tmp_path / "textcat.jsonl"), {})] == [
        "reject", "accept"]


@pytest.mark.parametrize(("text", "words"), [
    ("Frau Müller-Lüdenscheidt aß 3,5 kg.", "Frau Müller - Lüdenscheidt aß 3 , 5 kg ."),
    ("हिन्दी में", "हिन्दी में"), ("كتابٌ جديد", "كتابٌ جديد"),
    ("東京へABC行く。", "東 京 へ ABC 行 く 。"), ("ที่นี่", "ที่ นี่"),
    ("안녕하세요 세계", "안녕하세요 세계"), ("don't", "don ' t")])
def test_words_of_a_text_in_every_script(text, words):
    found = [text[start:end] for start, end in words_in(text)]
    assert found == words.split()


LANGUAGES = {"de": ("Heute kam {} an.", ["Anna", "Jürgen"]),
             "ja": ("昨日{}が来た。", ["田中", "鈴木"]),
             "th": ("วันนี้{}มา", ["สมชาย", "มานะ"]), "ar": ("وصل {} أمس", ["أحمد", "سعيد"]),
             "hi": ("आज {} आया", ["मोहन", "राम"]), "zh": ("昨天{}来了。", ["王明", "李华"])}


def start_of(texts, monkeypatch):
    """Return a start whose tokenizer knows the texts."""
    monkeypatch.setattr(data_helpers, "SENTENCES", texts)
    tokenizer = Tokenizer(data_helpers.tokenizer_path.__wrapped__())
    config = dataclasses.replace(tiny_start().config, vocab_size=tokenizer.size)
    return dataclasses.replace(tiny_start(), tokenizer=tokenizer, config=config)


def predicted(directory, rows) -> list:
    write_lines(directory / "new.jsonl", rows)
    model = load_finetuned(directory / "out" / "mine" / "seed-1" / "model")
    lines = predict(model, directory / "new.jsonl", directory / "predictions.jsonl")
    return [line["prediction"] for line in lines]


def test_raw_text_gives_the_entities_that_transformers_finds(process_group, tmp_path, monkeypatch):
    from transformers import pipeline

    rows = []
    for pattern, names in LANGUAGES.values():
        for name in names:
            start = pattern.index("{")
            rows.append({"text": pattern.replace("{}", name),
                         "label": [[start, start + len(name), "PER"]]})
    start = start_of([row["text"] for row in rows], monkeypatch)
    path = write_task(tmp_path, "tags", rows, BY_HEART, texts=["text"])
    result = train(path, tmp_path / "out", start=start)
    assert result["score"] == 1, result["history"][-1]
    ask = pipeline("token-classification", str(tmp_path / "out" / "mine" / "seed-1" / "model"),
                   aggregation_strategy="simple")
    for found, row in zip(predicted(tmp_path, [{"text": row["text"]} for row in rows]), rows,
                          strict=True):
        (ours,), ((begin, end, name),), text = found, row["label"], row["text"]
        assert ours.pop("probability") > 0.5
        assert ours == {"start": begin, "end": end, "label": name, "text": text[begin:end]}
        # What stands for the space before the text has no character; a token may begin with one.
        (theirs,) = (part for part in ask(text) if part["start"] < part["end"])
        assert text[theirs["start"] : theirs["end"]].strip() == ours["text"]
        assert theirs["entity_group"] == "PER" and theirs["end"] == end


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
def test_first_of_transformers_gives_the_same_entities_of_words(process_group, tmp_path):
    """Any tags in any order, from a random model. A space mark that is a token by itself is a word
    to transformers, of a tag that nothing has learned: texts without one are compared."""
    from transformers import pipeline

    start, dice = tiny_start(), random.Random(1)
    path = write_task(tmp_path, "tags", [{"words": ["a"] * 5, "label": [
        "O", "B-X", "I-X", "B-Y", "I-Y"]}])
    place = tmp_path / "out" / "mine" / "seed-1" / "model"
    save_random(place, load_own_task(path)[0], std=0.4)
    words = "stone bread river Annabel unbelievable house Rome cat the a of kettles".split()
    texts = [" ".join(dice.choices(words, k=dice.randint(1, 9))) for _ in range(200)]
    texts = [text for text in texts if all(
        text[low:high].strip() for low, high in start.tokenizer.encode_with_offsets(text)[1])]
    ask = pipeline("token-classification", str(place), aggregation_strategy="first")
    split = 0
    for text, ours in zip(texts, predicted(tmp_path, [{"words": text} for text in texts]),
                          strict=True):
        theirs = ask(text)
        assert [(part["start"], part["end"], part["label"]) for part in ours] == [
            (part["end"] - len(text[part["start"] : part["end"]].strip()), part["end"],
             part["entity_group"]) for part in theirs]
        assert [part["probability"] for part in ours] == pytest.approx(
            [part["score"] for part in theirs], abs=2e-5)
        split += len(start.tokenizer.encode(text)) > len(text.split())
    assert split > 20


def test_characters_that_share_a_token_are_one_entity(process_group, tmp_path, monkeypatch):
    """KLUE has a tag for every character, also for spaces."""
    texts = ["경찰청 이 왔다", "나는 서울 시청 갔다", "이순신은 장군"]
    spans = [(0, 3), (3, 8), (0, 3)]
    rows = [{"words": list(text), "label": ["B-X" if n == low else "I-X" if low < n < high else "O"
                                            for n in range(len(text))]}
            for text, (low, high) in zip(texts, spans, strict=True)]
    path = write_task(tmp_path, "tags", rows, BY_HEART)
    start = start_of([*texts, "경찰청", "이순신", "서울 시청"], monkeypatch)
    task = load_own_task(path)[0]
    features = encode(task, read_split(task, ".", "train").examples, start.tokenizer,
                      max_length=64, window_overlap=8)
    assert any(feature.inner for feature in features)
    result = train(path, tmp_path / "out", start=start)
    assert result["score"] == 1, result["history"][-1]
    assert list(map(spans_of, predicted(tmp_path, rows))) == [
        spans_of(row["label"]) for row in rows]
    found = predicted(tmp_path, [{"words": text} for text in texts])
    assert [[(part["start"], part["end"]) for part in line] for line in found] == [
        [span] for span in spans]


def test_the_tokens_of_a_place_are_those_of_a_search_through_all():
    dice = random.Random(5)
    for _ in range(300):
        ends = sorted(dice.randrange(30) for _ in range(dice.randrange(1, 12)))
        offsets = [(max(end - dice.randrange(3), 0), end) for end in ends]
        offsets = [(max(low for low, _ in offsets[: n + 1]), max(offsets[n][1], max(
            low for low, _ in offsets[: n + 1]))) for n in range(len(offsets))]
        start = dice.randrange(30)
        end = start + dice.randrange(1, 5)
        inside = [n for n, (low, high) in enumerate(offsets) if low < end and high > start]
        after = [n for n, (low, _) in enumerate(offsets) if low >= start] or [len(offsets) - 1]
        inside = inside or after[:1]
        assert token_range(offsets, start, end) == (inside[0], inside[-1] + 1)
