"""Readers of tables (.csv, .tsv, Parquet, Arrow): the same documents, and bad rows named."""

import csv
import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
from data_helpers import TEXTS, problems_of, texts_of

from deberta_ds.base.errors import UserError
from deberta_ds.corpus.documents import ReadOptions, plan_units
from deberta_ds.corpus.readers import read_unit
from deberta_ds.files import tables


def test_separated_values_give_the_same_documents(tmp_path):
    rows = [("id", "text"), *((str(n), text) for n, text in enumerate(TEXTS)), ("9", 'a, "b"\nc')]
    for name, delimiter in (("c.csv", ","), ("d.tsv", "\t"), ("e.csv.gz", ",")):
        opener = gzip.open if name.endswith("gz") else open
        with opener(tmp_path / name, "wt", newline="", encoding="utf-8-sig") as file:
            csv.writer(file, delimiter=delimiter).writerows(rows)
        assert texts_of([tmp_path / name]) == [*TEXTS, 'a, "b"\nc'], name
    (tmp_path / "c.csv").write_text('text\n"open quote')
    with pytest.raises(UserError, match="c.csv:2: unexpected end"):
        texts_of([tmp_path / "c.csv"])


def test_a_cell_or_a_line_without_end_is_named_before_it_fills_the_memory(tmp_path, monkeypatch):
    """A quotation mark or line ends that are missing make one cell or line of a whole file."""
    monkeypatch.setattr(tables, "_LONGEST_CELL", 100)
    for name, text, said in (("a.csv", 'text\n"' + "word\n" * 30, "a.csv:.*field larger than field "
                              "limit .100.*no cell is longer than 100 characters"),
                             ("b.csv", "text\n" + "word" * 30, "b.csv:2: a line of more than 100"),
                             ("c.tsv", "text" * 30, "c.tsv:1: a line of more than 100"),
                             ("d.jsonl", '{"text": "a"}\n{"text": "' + "word" * 30,
                              "d.jsonl:2: a line of more than 100 bytes; fix its line ends")):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=said):
            list(tables.read_rows(tmp_path / name, longest=100))
    with pytest.raises(UserError, match="d.jsonl:2: a line of more than 100 bytes"):
        list(tables.text_lines(tmp_path / "d.jsonl"))
    assert not tables.is_quoted(tmp_path / "c.tsv")
    (tmp_path / "e.json").write_text(json.dumps([{"text": "word" * 30}]))  # a document, on one line
    assert len(list(tables.read_rows(tmp_path / "e.json"))) == 1


def test_parquet_problems(tmp_path):
    table = pyarrow.table({"text": ["a", None, "c"]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    problems, _ = problems_of(tmp_path / "t.parquet")
    assert problems[0].startswith(f"{tmp_path}/t.parquet:row 2: no string under 'text'")
    with pytest.raises(UserError, match="no column 'body'; name one of text"):
        texts_of([tmp_path / "t.parquet"], text_key="body")


def test_a_saved_dataset_is_its_arrow_files(tmp_path):
    """Its state.json was read as a corpus, and its rows twice."""
    import datasets

    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "one", num_shards=2)
    assert texts_of([tmp_path / "one"]) == TEXTS
    both = datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": TEXTS})
                                 for name in ("train", "validation")})
    both.save_to_disk(tmp_path / "both")
    assert texts_of([tmp_path / "both"]) == TEXTS * 2


def test_damaged_and_empty_tables_are_named(tmp_path):
    table = pyarrow.table({"text": TEXTS * 50})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    with pyarrow.ipc.new_file(str(tmp_path / "t.arrow"), table.schema) as writer:
        writer.write_table(table)
    for name, at in (("t.parquet", 20), ("t.arrow", -60)):
        data = (tmp_path / name).read_bytes()
        for bad in (data[: len(data) // 2], data[:at] + b"x" * 40 + data[at + 40:], b"", b"x" * 99):
            (tmp_path / name).write_bytes(bad)
            with pytest.raises(UserError, match=name):
                texts_of([tmp_path / name])
    (tmp_path / name).write_bytes(data[:20] + b"x" * 40 + data[60:])  # the footer has it again
    pyarrow.parquet.write_table(table.slice(0, 0), tmp_path / "none.parquet")
    assert texts_of([tmp_path / name, tmp_path / "none.parquet"]) == TEXTS * 50


def test_a_parquet_file_is_opened_once_in_a_unit(tmp_path, monkeypatch):
    """Once for each row group, whose number its footer grows with: quadratic in small groups."""
    path, table = tmp_path / "t.parquet", pyarrow.table({"text": list(map(str, range(50)))})
    pyarrow.parquet.write_table(table, path, row_group_size=1)
    usual, opened = pyarrow.parquet.ParquetFile, []
    monkeypatch.setattr(pyarrow.parquet, "ParquetFile",
                        lambda file: opened.append(file) or usual(file))
    unit, = plan_units([str(path)], ReadOptions())  # opens it, too
    found = [(d.text, d.where) for d in read_unit(unit[7:], ReadOptions())]
    assert found == [(str(row), row) for row in range(7, 50)] and len(opened) == 2
    assert [d.where for d in read_unit([*unit[4:6], unit[1]], ReadOptions())] == [4, 5, 1]


def test_rows_of_a_table_with_other_cells_than_its_header_are_bad(tmp_path):
    """Of a text with a comma and no quotation marks the first half was taken."""
    path = tmp_path / "a.csv"
    path.write_text('id,text\n1,"one, two"\n\n2,three, four\n3\n4,five\n')
    problems, documents = problems_of(path)
    assert [d.text for d in documents if not d.problem] == ["one, two", "five"]
    assert problems == [f"{path}:row 2: 3 columns, the header has 2",
                        f"{path}:row 3: 1 columns, the header has 2"]
    path.with_suffix(".tsv").write_text('id\ttext\n1\tone\n2\t"two" or three\n')
    with pytest.raises(UserError, match=r"a.tsv:3: .* quotation mark"):
        texts_of([path.with_suffix(".tsv")])
    path.write_text("text,text\na,b\n")
    with pytest.raises(UserError, match="more than one column 'text'"):
        texts_of([path])


def test_rows_of_a_tsv_that_quotation_marks_may_join_are_refused(tmp_path):
    """Two documents were read as one, whose marks were lost, with the other's id in its text."""
    path = tmp_path / "a.tsv"
    for between in ("", "\n", "one\ttoo\tmany\n"):
        path.write_text(f'text\tid\n"Hello, she said.\tone\n{between}Then she went."\ttwo\n')
        lines = 2 + bool(between)
        with pytest.raises(UserError, match=rf"a.tsv:2: .* one row of {lines} lines.*jsonl"):
            texts_of([path])
    path.write_text('text\tid\n"two\nlines"\tone\n"a\tb\tc\n\nd"\ttwo\nthree\tthree\n')
    assert texts_of([path]) == ["two\nlines", "a\tb\tc\n\nd", "three"]
