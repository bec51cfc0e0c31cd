"""Tables of every kind are read into examples, and what they may mean but do not say is said."""

import csv
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from launching import ROOT
from test_finetune_own import opened, write_task

from deberta_ds.base.errors import UserError
from deberta_ds.tasks.labels import to_line
from deberta_ds.tasks.layouts import chosen
from deberta_ds.tasks.look import look
from deberta_ds.tasks.metrics import spans_of
from deberta_ds.tasks.readers import carve, count_shared, read_split
from deberta_ds.tasks.tables import read_table
from deberta_ds.tasks.task import task_named
from deberta_ds.tasks.task_file import load_own_task


def test_every_kind_of_table_gives_the_same_examples(tmp_path):
    import pyarrow
    import pyarrow.feather
    import pyarrow.parquet

    rows = [{"words": f'He said "{n}", twice\nor so', "extra": "x", "label": n % 3 == 0}
            for n in range(9)]
    wanted = opened(tmp_path, "classification", rows)[0].examples
    assert {example.label for example in wanted} == {0, 1}
    with open(tmp_path / "train.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(row | {"label": str(row["label"]).lower()} for row in rows)
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    pyarrow.feather.write_feather(table, tmp_path / "train.feather")
    with pyarrow.ipc.new_stream(str(tmp_path / "train.arrow"), table.schema) as stream:
        stream.write_table(table)
    for name in ("train.csv", "train.parquet", "train.feather", "train.arrow"):
        split, said = opened(tmp_path, "classification", rows, train=name)
        assert split.examples == wanted, name
        assert said == "mine: 2 labels: false (6), true (3)"
    split, _ = opened(tmp_path, "classification", "words\tlabel\na \"b\tyes\nc\tno\n",
                      table="train.tsv", texts=["words"])
    assert [example.sequences[0][0] for example in split.examples] == ['a "b', "c"]


@pytest.mark.parametrize("directory", ["~", "s3:", "file:x", "\udcff"], ids=ascii)
def test_a_directory_whose_name_says_more_to_pyarrow(tmp_path, directory, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    monkeypatch.chdir(tmp_path)
    Path(directory).mkdir()
    table = pyarrow.table({"words": ["a", "b"]})
    with open(Path(directory, "train.parquet"), "wb") as file:
        pyarrow.parquet.write_table(table, file)
    with open(Path(directory, "train.arrow"), "wb") as file, \
            pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    for name in ("train.parquet", "train.arrow"):
        assert [row["words"] for _, row in read_table(Path(directory, name))] == ["a", "b"]


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_an_empty_line_of_one_column_is_named(tmp_path, ending):
    path = tmp_path / f"table.{ending}"
    path.write_text("text\none\n\ntwo\n")
    with pytest.raises(UserError, match=f"table.{ending}:3: an empty line"):
        list(read_table(path))
    path.write_text("text\none\ntwo\n\n\n")
    assert [row for _, row in read_table(path)] == [{"text": "one"}, {"text": "two"}]


def test_a_csv_of_another_encoding_or_with_long_texts(tmp_path):
    file = tmp_path / "a.csv"
    file.write_bytes("words,label\nok,a\nZo\u00eb,b\n".encode("latin-1"))
    with pytest.raises(UserError, match="a.csv:3: invalid UTF-8; convert the file"):
        list(read_table(file))
    file.write_text("words,label\n" + "long " * 50_000 + ",a\n")  # beyond the library's 128 KiB
    ((_, row),) = read_table(file)
    assert len(row["words"]) == 250_000


@pytest.mark.parametrize("text", ["a;b\n1,5;x\n", "sep=;\na;b\n1,5;x\n", "a\tb\n1,5\tx\n",
                                  'a,b\n"1,5",x\n', '"a, c; d",b\n"1,5",x\n', "a|b\n1,5|x"])
def test_the_header_of_a_csv_tells_its_delimiter_and_it_may_be_compressed(tmp_path, text):
    (tmp_path / "a.csv").write_text(text)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("a.csv", "a.csv.gz"):
        ((place, row),) = read_table(tmp_path / name)
        assert list(row.values()) == ["1,5", "x"]
        assert place == f"{tmp_path / name}:{text.strip().count(chr(10)) + 1}"


def test_a_table_has_the_columns_of_superglue_or_of_glue():
    task = task_named("MNLI")
    for first, second in (("premise", "hypothesis"), ("sentence1", "sentence2")):
        line = to_line(task, "x:1", {first: "A.", second: "B."}, 0)
        assert line == {"idx": 0, "premise": "A.", "hypothesis": "B."}


@pytest.mark.parametrize(("value", "found"), [
    (1, (1, "number")), ("B", (1, "letter")), ("moon", (2, "text")), ("AB", None), ("", None),
    (3, None), (-1, None), ("D", None), (None, None), (True, None), (7, (0, "text"))])
def test_which_answer_a_label_of_a_choice_names(value, found):
    assert chosen(value, ["7", "dog", "moon"]) == found
    assert chosen("cow", ["cow", "cow"]) is None  # it was the first


@pytest.mark.parametrize(("tags", "spans"), [
    (["O", "E-PER", "I-PER"], [("PER", 1, 2), ("PER", 2, 3)]),
    (["NOUN", "NOUN", "O"], [("NOUN", 0, 2)]),
    (["B-PER", "M-PER", "E-PER", "S-LOC"], [("PER", 0, 3), ("LOC", 3, 4)]),  # BMES
    (["B", "M", "E", "S", "S", "O"], [("", 0, 3), ("", 3, 4), ("", 4, 5)]),  # without kinds
    (["O", "O"], []), ([], [])])
def test_spans_of_tags_beyond_those_that_seqeval_reads(tags, spans):
    """Others: test_metrics_references.py."""
    assert spans_of(tags) == spans


RECIPES = ROOT / "launch" / "runs" / "tasks"


def recipe(name: str, directory: Path):
    """Return the task of a recipe whose tables lie in `directory`."""
    file = directory / f"{name}.toml"
    file.write_text((RECIPES / file.name).read_text())
    return load_own_task(file)[0]


def test_swag_race_and_conll_are_read_in_their_own_formats(tmp_path):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "train.csv").write_text(
        ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,"
        "label\n0,a,1,He sits. He,He sits.,He,gold,stands.,\"eats, then runs.\",flies.,sinks.,1\n")
    (example,) = read_split(recipe("swag", tmp_path), ".", "train").examples
    assert example.sequences[1] == ("He sits.", "He eats, then runs.") and example.label == 1
    row = {"example_id": "high1.txt", "article": "It rained all day.", "question": "What fell?",
           "options": ["Snow.", "Rain.", "Hail.", "Dust."], "answer": "B"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "train.parquet")
    (example,) = read_split(recipe("race", tmp_path), ".", "train").examples
    assert example.sequences[3] == ("It rained all day.", "What fell? Dust.") and example.label == 1
    (tmp_path / "train.jsonl").write_text('{"tokens": ["EU", "ran"], "tags": ["B-ORG", "O"]}\n')
    task = recipe("conll2003", tmp_path)
    (example,) = read_split(task, ".", "train").examples
    assert task.labels == ("O", "B-ORG") and example.label == (1, 0)


def test_plausible_answers_of_an_impossible_question_are_none(tmp_path):
    """is_impossible decides, as in the official scripts; what contradicts it is counted."""
    answer = [{"text": "in Rome", "answer_start": 0}]
    asked = [("a", True, answer), ("b", False, answer), ("c", False, []), ("d", True, [])]
    paragraph = {"context": "in Rome they sing", "qas": [
        {"id": id, "question": "where?", "is_impossible": flag, "answers": answers}
        for id, flag, answers in asked]}
    document = json.dumps({"data": [{"paragraphs": [paragraph]}]})
    split, _ = opened(tmp_path, "spans", document, table="a.json", texts=["question", "context"],
                      label="answers")
    assert [example.gold for example in split.examples] == [(), ("in Rome",), (), ()]
    assert "2 of 4 questions have answers that contradict is_impossible" in split.left_out


@pytest.mark.parametrize(("flag", "gold"), [
    ("TRUE", ()), ("1.0", ()), ("false", ("Rome",)), ("", ("Rome",))])
def test_is_impossible_is_read_as_tables_write_it(tmp_path, flag, gold):
    table = f"q,text,answer,is_impossible\na?,in Rome,Rome,{flag}\nb?,in Rome,Rome,0\n"
    split, _ = opened(tmp_path, "spans", table, table="a.csv", texts=["q", "text"], label="answer")
    assert [example.gold for example in split.examples] == [gold, ("Rome",)]


def test_labels_of_two_cases_and_texts_for_empty_cells_are_said(tmp_path):
    table = "text,label\nfine,Good\nnice,good\nnan,bad\nNone,bad\n"
    split, said = opened(tmp_path, "classification", table, table="a.csv", texts=["text"])
    assert "'Good' and 'good' differ by case alone" in said
    assert "2 texts are 'None' or 'nan', which tables write for an empty" in split.left_out


def test_texts_that_tokenize_alike_are_the_same_text(tmp_path):
    """A doubled space, an invisible mark, or NFD in place of NFC: a copy of it is no new text."""
    texts = [f"número {n} de la lista" for n in range(20)]
    odd = [text.replace(" de", "  de").replace("ú", "u\u0301").replace("la", "la\u200b")
           for text in texts]
    rows = [{"text": text, "label": n % 2} for text in (texts, odd) for n, text in enumerate(text)]
    whole, _ = opened(tmp_path, "classification", rows, texts=["text"])
    train, val = carve(whole, 0.5, seed=3)
    assert count_shared(train, val) == (0, "")
    assert count_shared(whole, val)[0] == len(val.examples)


def test_one_rule_compares_the_answers_of_a_table(tmp_path):
    thai = "กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย"
    rows = [{"question": "?", "context": context, "answers": context[:4]}
            for context in (thai, thai, "Anna Maria Lopez ไทย lives here")]
    split, _ = opened(tmp_path, "spans", rows, texts=["question", "context"], label="answers")
    assert {example.language for example in split.examples} == {"ja"}
    assert 'compared by the rule of language = "ja"' in split.left_out


@pytest.mark.parametrize(("table", "rows", "keys"), [
    ("a.csv", "fine,good\nawful,bad\n", {"names": ["text", "mood"], "texts": ["text"],
                                         "label": "mood"}),
    ("a.csv", "fine,good\nawful,bad\n", {"header": False, "texts": ["1"], "label": "2"}),
    ("a.jsonl", [{"doc": {"text": "fine"}, "labels": {"mood": "good"}},  # inside objects
                 {"doc": {"text": "awful"}, "labels": {"mood": "bad"}}],
     {"texts": ["doc.text"], "label": "labels.mood"})], ids=str)
def test_columns_have_the_names_that_they_are_given(tmp_path, table, rows, keys):
    split, said = opened(tmp_path, "classification", rows, table=table, **keys)
    assert [example.sequences for example in split.examples] == [(("fine",),), (("awful",),)]
    assert "2 labels: bad (1), good (1)" in said


def test_answers_to_choose_from_may_be_fewer_and_have_marks(tmp_path):
    """ARC as the Hub has it: marks are letters or numbers from 1, and some questions have three."""
    rows = [{"question": "a?", "choices": {"text": ["x", "y", "z"], "label": ["A", "B", "C"]},
             "answerKey": "C"},
            {"question": "b?", "choices": {"text": ["x", "y", "z", "w"],
                                           "label": ["1", "2", "3", "4"]}, "answerKey": "1"}]
    split, said = opened(tmp_path, "choice", rows, texts=["question"], choices=["choices"],
                         label="answerKey")
    assert [len(example.sequences) for example in split.examples] == [3, 4]
    assert [example.label for example in split.examples] == [2, 0] and "4 answers" in said
    columns = "q,a,b,c,right\nfirst,x,y,z,C\nsecond,x,y,,B\n"
    split, _ = opened(tmp_path, "choice", columns, table="b.csv", texts=["q"],
                      choices=["a", "b", "c"], label="right")
    assert [len(example.sequences) for example in split.examples] == [3, 2]


def test_csv_cells_decide_what_columns_called_tokens_and_tags_hold(tmp_path):
    rows = [(["Anna", "can't"], ["B-PER", "O"]), (["In", "Rome"], ["O", "B-LOC"])]
    for form in (str, json.dumps, " ".join, lambda row: str(np.array(row))):
        with open(tmp_path / "a.csv", "w", newline="") as file:
            csv.writer(file).writerows([("tokens", "tags"), *(map(form, row) for row in rows)])
        split, said = opened(tmp_path, "tags", [], train="a.csv", texts=["tokens"], label="tags")
        assert [one.sequences for one in split.examples] == [(("Anna can't",),), (("In Rome",),)]
        assert "B-LOC (1)" in said and "O (2)" in said


def test_look_shows_columns_counts_and_rows_as_they_are_read(tmp_path):
    rows = [{"text": "Anna met Linz.", "label": [[0, 4, "X"], [9, 13, "X"]], "who": "me"},
            {"text": "none", "label": []}]
    lines = list(look(opened(tmp_path, "tags", rows, texts=["text"])[0].task, "."))
    for wanted in (f"\ntrain: {tmp_path / 'train.jsonl'}: 2 examples", "  read: text, label",
                   "  not read: who", "  X: 2", "  2 of 2 are in train, too", "test: none"):
        assert any(line.startswith(wanted) for line in lines), wanted
    assert any("[Anna|X] met [Linz|X]" in line for line in lines)
    rows = [{"q": "what?", "text": "tall trees", "answers": "trees", "is_impossible": False},
            {"q": "who?", "text": "tall trees", "answers": "", "is_impossible": True}]
    lines = list(look(opened(tmp_path, "spans", rows, texts=["q", "text"], label="answers",
                             val=None)[0].task, "."))
    assert "  - what? || tall [trees]" in lines and "      = no answer" in lines
    assert "  read: q, text, answers, is_impossible" in lines
    assert "val: 10% of train (val_share)" in lines
    task, _ = load_own_task(write_task(tmp_path, "regression", [{"text": "a", "label": ""}],
                                       texts=["text"]))
    with pytest.raises(UserError, match="(?s)not a single example in it.*is missing"):
        list(look(task, "."))


@pytest.mark.parametrize("text, said", [
    ("M\ufffdnchen", "were lost"), ("sch\u00c3\u00b6n", "Latin-1"), ("Tom &amp; Jerry", "HTML"),
    ("good<br />but", "HTML"), ("b'It is.'", "Python's bytes"), ("NA", "for an empty cell"),
    ("\u00c3o \u00c2ngela", "")])
def test_look_counts_damaged_texts(tmp_path, text, said):
    rows = [{"text": text, "label": "a"}, {"text": "&", "label": "b"}]
    task = opened(tmp_path, "classification", rows, texts=["text"])[0].task
    found = {line for line in look(task, ".") if line.startswith(("  1 of them", "  1 texts are"))}
    assert len(found) == bool(said) and said in "".join(found)
