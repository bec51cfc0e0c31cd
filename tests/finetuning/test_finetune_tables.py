"""Tables of every kind are read into examples, and tags into spans as seqeval reads them."""

import csv
import gzip
import runpy
from pathlib import Path

import pytest
from launching import ROOT
from test_finetune_own import write_task

from deberta_ds.base.errors import UserError
from deberta_ds.tasks.labels import to_line
from deberta_ds.tasks.layouts import chosen
from deberta_ds.tasks.metrics import spans_of
from deberta_ds.tasks.readers import read_split
from deberta_ds.tasks.tables import read_table
from deberta_ds.tasks.task import task_named
from deberta_ds.tasks.task_file import load_own_task


def test_every_kind_of_table_gives_the_same_examples(tmp_path):
    import pyarrow
    import pyarrow.feather
    import pyarrow.parquet

    rows = [{"words": f'He said "{n}", twice\nor so', "extra": "x", "label": n % 3 == 0}
            for n in range(9)]
    path = write_task(tmp_path, "classification", rows)
    wanted = read_split(load_own_task(path)[0], ".", "train").examples
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
        path = write_task(tmp_path, "classification", rows, train=name, val=name)
        task, said = load_own_task(path)
        assert read_split(task, ".", "train").examples == wanted, name
        assert said == "mine: 2 labels: false (6), true (3)"
    (tmp_path / "train.tsv").write_text("words\tlabel\na \"b\tyes\nc\tno\n")
    path = write_task(tmp_path, "classification", rows, train="train.tsv", texts=["words"])
    found = read_split(load_own_task(path)[0], ".", "train").examples
    assert [example.sequences[0][0] for example in found] == ['a "b', "c"]


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
    """Left out, the rows behind it would have other numbers than in the file."""
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
    """predict.py with a model of RTE or MNLI refused the JSON lines that it was trained on."""
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


def test_wikiann_and_the_hubs_numbers_become_the_names_of_tags(tmp_path):
    """A WikiANN file has no ending and a language before each token; the Hub has numbers."""
    datasets = pytest.importorskip("datasets")
    rows_of = runpy.run_path(str(ROOT / "examples/convert_annotations.py"))["rows_of"]
    (tmp_path / "train").write_text("en:Rome\tB-LOC\nen::\tO\nen:a:b\tO\n\nen:He\tO\n")
    path = write_task(tmp_path, "tags", list(rows_of(str(tmp_path / "train"), {})),
                      texts=["tokens"], label="tags")
    task, said = load_own_task(path)
    assert said == "mine: 2 labels: O (3), B-LOC (1)"
    wanted = read_split(task, ".", "train").examples
    assert wanted[0].sequences == (("Rome : a:b",),) and wanted[0].label == (1, 0, 0)
    names = ["O", "B-PER", "B-LOC"]
    features = datasets.Features({
        "tokens": datasets.List(datasets.Value("string")),
        "ner_tags": datasets.List(datasets.ClassLabel(names=names))})
    table = datasets.Dataset.from_dict({"tokens": [["Rome", ":", "a:b"], ["He"]],
                                        "ner_tags": [[2, 0, 0], [0]]}, features=features)
    table.to_parquet(str(tmp_path / "train.parquet"))
    path = write_task(tmp_path, "tags", [], train="train.parquet", val="train.parquet",
                      texts=["tokens"], label="ner_tags", labels=names)
    found = read_split(load_own_task(path)[0], ".", "train").examples
    assert [e.label for e in found] == [(2, 0, 0), (0,)]
    wikiann = "en:Rome\tB-LOC\nen:.\tO\n"
    for name in ("train.tsv", "train.txt"):  # known by its lines, whatever it is called
        (tmp_path / name).write_text(wikiann)
        (row,) = rows_of(str(tmp_path / name), {})
        assert row == {"tokens": ["Rome", "."], "tags": ["B-LOC", "O"]}
    (tmp_path / "train").write_text(wikiann * 15 + "Oslo\tB-LOC\n")
    with pytest.raises(UserError, match="train:31: the lines before are WikiANN's"):
        list(rows_of(str(tmp_path / "train"), {}))


@pytest.mark.parametrize(("tags", "spans"), [
    (["B-PER", "I-PER", "O", "B-LOC"], [("PER", 0, 2), ("LOC", 3, 4)]),
    (["B-PER", "B-PER"], [("PER", 0, 1), ("PER", 1, 2)]),
    (["I-PER", "I-LOC"], [("PER", 0, 1), ("LOC", 1, 2)]),  # IOB1, or a slip of IOB2
    (["B-PER", "I-LOC", "I-LOC"], [("PER", 0, 1), ("LOC", 1, 3)]),
    (["B-PER", "E-PER", "S-LOC", "S-LOC"], [("PER", 0, 2), ("LOC", 2, 3), ("LOC", 3, 4)]),
    (["O", "E-PER", "I-PER"], [("PER", 1, 2), ("PER", 2, 3)]),
    (["NOUN", "NOUN", "O"], [("NOUN", 0, 2)]),
    (["B-PER", "L-PER", "U-LOC", "U-LOC"], [("PER", 0, 2), ("LOC", 2, 3), ("LOC", 3, 4)]),
    (["B-PER", "M-PER", "E-PER", "S-LOC"], [("PER", 0, 3), ("LOC", 3, 4)]),  # BMES
    (["B", "I", "I", "B", "O", "I"], [("", 0, 3), ("", 3, 4), ("", 5, 6)]),  # without kinds
    (["B", "M", "E", "S", "S", "O"], [("", 0, 3), ("", 3, 4), ("", 4, 5)]),
    (["O", "O"], []), ([], []),
])
def test_spans_are_those_of_conlleval(tags, spans):
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
