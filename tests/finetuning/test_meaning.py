"""Tables that read well and mean something else: units, fields, same texts, rules of languages."""

import csv
import json
import runpy

import numpy as np
import pytest
from launching import ROOT
from superglue_helpers import write_lines
from test_finetune_own import write_task

from deberta_ds.base.errors import UserError
from deberta_ds.tasks import metrics
from deberta_ds.tasks.answer_texts import language_of, normalize, token_f1
from deberta_ds.tasks.layouts import Example
from deberta_ds.tasks.look import look
from deberta_ds.tasks.readers import carve, count_shared, read_split
from deberta_ds.tasks.task_file import load_own_task

TEXT = "😀😀😀 Annabelle met Bartholomew near Rome, Carla with Linz, Dora and Fürther."
NAMES = ("Annabelle", "Bartholomew", "Rome", "Carla", "Linz", "Dora", "Fürther")
UNITS = {"bytes of UTF-8": lambda at: len(TEXT[:at].encode()),
         "units of UTF-16": lambda at: len(TEXT[:at].encode("utf-16-le")) // 2,
         "from 1": lambda at: at + 1}


rows_of = runpy.run_path(str(ROOT / "examples/convert_annotations.py"))["rows_of"]


def jsonl(rows: list) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def load(directory, kind: str, table: str, rows: str, **options):
    """Return (the training split, what is said) of a task over a table with these lines."""
    (directory / table).write_text(rows)
    lines = {"name": "mine", "kind": kind, "train": table} | options
    path = directory / "task.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in lines.items()))
    task, said = load_own_task(path)
    return read_split(task, ".", "train"), said


def entities(place=lambda at: at, text: str = TEXT, names=NAMES) -> list:
    return [[place(text.index(name)), place(text.index(name)) + len(name), "X"] for name in names]


@pytest.mark.parametrize("unit", UNITS)
def test_offsets_in_another_unit_are_an_error_that_names_it(tmp_path, unit):
    rows = [{"text": TEXT + " They sing there.", "label": entities(UNITS[unit])}] * 2
    with pytest.raises(UserError, match=f"not begin where a word does.*if they count {unit};"):
        load_own_task(write_task(tmp_path, "tags", rows, texts=["text"]))


def test_entities_inside_words_are_counted_and_read(tmp_path):
    """As Korean's are before particles, and German ones in compounds."""
    text = "서울에서 부산까지 대구에서 인천까지 광주에서"
    names = ("서울", "부산", "대구", "인천", "광주")
    row = {"text": text, "label": entities(text=text, names=names)}
    _, said = load_own_task(write_task(tmp_path, "tags", [row], texts=["text"]))
    assert "5 of 5 entities begin or end inside a word" in said
    _, said = load_own_task(write_task(tmp_path, "tags", [
        {"text": TEXT, "label": entities()}], texts=["text"]))
    assert "inside a word" not in said


def test_plausible_answers_of_an_impossible_question_are_none(tmp_path):
    """is_impossible decides, as in the official scripts; what contradicts it is counted."""
    answer = [{"text": "in Rome", "answer_start": 0}]
    asked = [("a", True, answer), ("b", False, answer), ("c", False, []), ("d", True, [])]
    paragraph = {"context": "in Rome they sing", "qas": [
        {"id": id, "question": "where?", "is_impossible": flag, "answers": answers}
        for id, flag, answers in asked]}
    document = json.dumps({"data": [{"paragraphs": [paragraph]}]})
    split, _ = load(tmp_path, "spans", "a.json", document, texts=["question", "context"],
                    label="answers")
    assert [example.gold for example in split.examples] == [(), ("in Rome",), (), ()]
    assert "2 of 4 questions have answers that contradict is_impossible" in split.left_out


@pytest.mark.parametrize(("flag", "gold"), [
    ("TRUE", ()), ("1.0", ()), ("false", ("Rome",)), ("", ("Rome",)), ("maybe", None)])
def test_is_impossible_is_read_as_tables_write_it(tmp_path, flag, gold):
    """Excel's TRUE was taken for false, and a plausible answer for a right one."""
    table = f"q,text,answer,is_impossible\na?,in Rome,Rome,{flag}\nb?,in Rome,Rome,0\n"
    options = {"texts": ["q", "text"], "label": "answer"}
    if gold is None:
        with pytest.raises(UserError, match="a.csv:2: is_impossible must be true or false, found"):
            load(tmp_path, "spans", "a.csv", table, **options)
    else:
        split, _ = load(tmp_path, "spans", "a.csv", table, **options)
        assert [example.gold for example in split.examples] == [gold, ("Rome",)]


def test_labels_of_two_cases_and_texts_for_empty_cells_are_said(tmp_path):
    """Both were learned without a word: a class twice, and what pandas writes for nothing."""
    split, said = load(tmp_path, "classification", "a.csv",
                       "text,label\nfine,Good\nnice,good\nnan,bad\nNone,bad\n",
                       texts=["text"], label="label")
    assert "'Good' and 'good' differ by case alone" in said
    assert "2 texts are 'None' or 'nan', which tables write for an empty" in split.left_out


def test_texts_that_tokenize_alike_are_the_same_text(tmp_path):
    """A doubled space, an invisible mark, or NFD in place of NFC: a copy of it is no new text."""
    texts = [f"número {n} de la lista" for n in range(20)]
    odd = [text.replace(" de", "  de").replace("ú", "u\u0301").replace("la", "la\u200b")
           for text in texts]
    rows = [{"text": text, "label": n % 2} for text in (texts, odd) for n, text in enumerate(text)]
    task, _ = load_own_task(write_task(tmp_path, "classification", rows, texts=["text"]))
    whole = read_split(task, ".", "train")
    train, val = carve(whole, 0.5, seed=3)
    assert count_shared(train, val) == (0, "")
    assert count_shared(whole, val)[0] == len(val.examples)


def test_one_rule_compares_the_answers_of_a_table(tmp_path):
    thai = "กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย"
    rows = [{"question": "?", "context": context, "answers": context[:4]}
            for context in (thai, thai, "Anna Maria Lopez ไทย lives here")]
    split, _ = load(tmp_path, "spans", "a.jsonl", jsonl(rows), texts=["question", "context"],
                    label="answers")
    assert {example.language for example in split.examples} == {"ja"}
    assert 'compared by the rule of language = "ja"' in split.left_out


def test_korean_answers_are_compared_by_characters_as_korquads_script_does():
    """F1 of evaluate-v1.0.py, by hand: 5 of 7 and 5 of 5 characters are shared."""
    found, gold = normalize("《서울특별시》에 (서)", "ko"), normalize("'서울특별시'", "ko")
    assert token_f1(found, gold) == pytest.approx(2 * 5 / 7 * 1 / (5 / 7 + 1))
    assert normalize("서울 시", "ko") != normalize("서울시", "ko")  # exact match knows spaces
    assert language_of("대한민국의 수도는 서울이다 (Seoul)") == "ko"
    task = type("Task", (), {"layout": "answers"})
    example = Example((0,), (("q", "c"),), (), gold=("서울 시",), language="ko")
    rows, mean = metrics._METRICS["f1"]
    assert mean(task, rows(task, [example], ["서울시"])) == 1.0


@pytest.mark.parametrize("options, texts, label", [
    ({"names": ["text", "mood"]}, ["text"], "mood"), ({"header": False}, ["1"], "2")])
def test_a_table_without_a_header_has_the_names_that_it_is_given(tmp_path, options, texts, label):
    split, said = load(tmp_path, "classification", "a.csv", "fine,good\nawful,bad\n",
                       texts=texts, label=label, **options)
    assert [example.sequences for example in split.examples] == [(("fine",),), (("awful",),)]
    assert "2 labels: bad (1), good (1)" in said


def test_a_column_may_lie_inside_objects(tmp_path):
    rows = [{"doc": {"text": "fine"}, "labels": {"mood": "good"}},
            {"doc": {"text": "awful"}, "labels": {"mood": "bad"}}]
    split, _ = load(tmp_path, "classification", "a.jsonl", jsonl(rows),
                    texts=["doc.text"], label="labels.mood")
    assert [example.sequences[0][0] for example in split.examples] == ["fine", "awful"]


def test_answers_to_choose_from_may_be_fewer_and_have_marks(tmp_path):
    """ARC as the Hub has it: marks are letters or numbers from 1, and some questions have three."""
    rows = [{"question": "a?", "choices": {"text": ["x", "y", "z"], "label": ["A", "B", "C"]},
             "answerKey": "C"},
            {"question": "b?", "choices": {"text": ["x", "y", "z", "w"],
                                           "label": ["1", "2", "3", "4"]}, "answerKey": "1"}]
    split, said = load(tmp_path, "choice", "a.jsonl", jsonl(rows), texts=["question"],
                       choices=["choices"], label="answerKey")
    assert [len(example.sequences) for example in split.examples] == [3, 4]
    assert [example.label for example in split.examples] == [2, 0] and "4 answers" in said
    columns = "q,a,b,c,right\nfirst,x,y,z,C\nsecond,x,y,,B\n"
    split, _ = load(tmp_path, "choice", "b.csv", columns, texts=["q"], choices=["a", "b", "c"],
                    label="right")
    assert [len(example.sequences) for example in split.examples] == [3, 2]


def test_look_shows_columns_counts_and_rows_as_they_are_read(tmp_path):
    rows = [{"text": TEXT, "label": entities(), "who": "me"}, {"text": "none", "label": []}]
    path = write_task(tmp_path, "tags", rows, texts=["text"], val="train.jsonl")
    lines = list(look(load_own_task(path)[0], "."))
    for wanted in (f"\ntrain: {tmp_path / 'train.jsonl'}: 2 examples", "  read: text, label",
                   "  not read: who", "  X: 7", "  2 of 2 are in train, too", "test: none"):
        assert any(line.startswith(wanted) for line in lines), wanted
    assert any("[Annabelle|X] met" in line for line in lines)
    examples = [{"q": "what?", "text": "tall trees", "answers": "trees", "is_impossible": False},
                {"q": "who?", "text": "tall trees", "answers": "", "is_impossible": True}]
    load(tmp_path, "spans", "qa.jsonl", jsonl(examples), texts=["q", "text"],
         label="answers")
    lines = list(look(load_own_task(tmp_path / "task.toml")[0], "."))
    assert "  - what? || tall [trees]" in lines and "      = no answer" in lines
    assert "  read: q, text, answers, is_impossible" in lines
    assert "val: 10% of train (val_share)" in lines


def test_a_tag_inside_of_a_field_is_taken_by_its_key(tmp_path):
    path = tmp_path / "a.conllu"
    path.write_text("".join(f"{n}\t{word}{chr(9)}{field}\n" for n, (word, field) in enumerate(
        [("Bob", "SpaceAfter=No"), ("R", "SpaceAfter=No|name=B-PER"), (".", "name=O")], start=1)))
    columns = {"word": 2, "tag": 3}
    with pytest.raises(UserError, match="--key SpaceAfter or name, or --key all"):
        list(rows_of(str(path), columns))
    assert [row["tags"] for row in rows_of(str(path), columns, key="name")] == [["O", "B-PER", "O"]]
    assert "SpaceAfter=No" in next(rows_of(str(path), columns, key="all"))["tags"]
    assert [row["tags"] for row in rows_of(str(path), {}, key="name")] == [["O", "B-PER", "O"]]
    with pytest.raises(UserError, match="no tag has a field nam="):
        list(rows_of(str(path), {}, key="nam"))


def test_csv_cells_decide_what_columns_called_tokens_and_tags_hold(tmp_path):
    rows = [(["Anna", "can't"], ["B-PER", "O"]), (["In", "Rome"], ["O", "B-LOC"])]
    for form in (str, json.dumps, " ".join, lambda row: str(np.array(row))):
        with open(tmp_path / "a.csv", "w", newline="") as file:
            csv.writer(file).writerows([("tokens", "tags"), *(map(form, row) for row in rows)])
        split, said = load(tmp_path, "tags", "a.csv", (tmp_path / "a.csv").read_text(),
                           texts=["tokens"], label="tags")
        assert [one.sequences for one in split.examples] == [(("Anna can't",),), (("In Rome",),)]
        assert "B-LOC (1)" in said and "O (2)" in said


def test_files_of_other_projects_that_were_read_as_something_else(tmp_path):
    """GUM's .tsv was a table with the columns "Bos" and "person", BSNLP's .conllu lost its tags,
    answers to Prodigy's yes/no questions went, a row's fault was hidden.
    """
    (tmp_path / "gum.tsv").write_text("\nBos\tperson\n'\tO\n\nants\tanimal\nsleep\tO\n")
    assert [row["tags"] for row in rows_of(str(tmp_path / "gum.tsv"), {})] == [
        ["person", "O"], ["animal", "O"]]
    (tmp_path / "pl.conllu").write_text("#DOCSTART\n\n1\tUnia\tB-LOC\n2\tjest\tO\n")
    with pytest.raises(UserError, match="has 3 columns, and CoNLL-U 10.*--word 2 --tag 3"):
        list(rows_of(str(tmp_path / "pl.conllu"), {}))
    row = {"text": "a", "label": "DOCS", "_task_hash": 1, "answer": "reject"}
    write_lines(tmp_path / "textcat.jsonl", [row, row | {"answer": "accept"}])
    assert [row["answer"] for row in rows_of(str(tmp_path / "textcat.jsonl"), {})] == [
        "reject", "accept"]
    with pytest.raises(UserError, match="(?s)not a single example in it.*is missing"):
        list(look(load_own_task(write_task(tmp_path, "regression", [
            {"text": "a", "label": ""}], texts=["text"]))[0], "."))


@pytest.mark.parametrize("text, said", [
    ("M\ufffdnchen", "were lost"), ("sch\u00c3\u00b6n", "Latin-1"), ("Tom &amp; Jerry", "HTML"),
    ("good<br />but", "HTML"), ("b'It is.'", "Python's bytes"), ("NA", "for an empty cell"),
    ("\u00c3o \u00c2ngela", "")])
def test_look_counts_damaged_texts(tmp_path, text, said):
    rows = [{"text": text, "label": "a"}, {"text": "&", "label": "b"}]
    path = write_task(tmp_path, "classification", rows, texts=["text"])
    found = {line for line in look(load_own_task(path)[0], ".")
             if line.startswith(("  1 of them", "  1 texts are"))}
    assert len(found) == bool(said) and said in "".join(found)


def test_a_file_that_only_begins_as_conll_2012_names_the_columns(tmp_path):
    path = tmp_path / "a.conll"
    path.write_text("#begin document x\nAnna B-PER\nist O\n#end document\n")
    with pytest.raises(UserError, match="no word in column 4; name .*: --word 1 --tag -1"):
        list(rows_of(str(path), {}))
    assert next(rows_of(str(path), {"word": 1, "tag": -1}))["tags"] == ["B-PER", "O"]
