"""Labels and tables in the forms that pandas, NumPy, datasets, scikit-learn and Excel write."""

import csv
import gzip
import io
import json

import pytest
from test_finetune_loop import plan
from test_finetune_own import rows_of, write_task

from deberta_ds.base.errors import UserError
from deberta_ds.finetuning import inputs, sweep
from deberta_ds.tasks.labels import has_decimal_commas, read_list
from deberta_ds.tasks.readers import count_shared, read_split
from deberta_ds.tasks.settings import resolve
from deberta_ds.tasks.task_file import load_own_task

TEXTS = {"texts": ["text"]}


def lines(*labels, **more) -> str:
    return "".join(json.dumps({"text": f"text {n}", "label": label} | more) + "\n"
                   for n, label in enumerate(labels))


def table(*labels, mark: str = ",", quoting=csv.QUOTE_MINIMAL, header=("text", "label")) -> str:
    """Return a table as the csv module writes it, and pandas with it."""
    file = io.StringIO()
    writer = csv.writer(file, delimiter=mark, quoting=quoting)
    writer.writerow(header)
    writer.writerows([f"text {n}", *(label if isinstance(label, tuple) else (label,))]
                     for n, label in enumerate(labels))
    return file.getvalue()


def read(directory, kind: str, text: str | bytes, name: str = "train.csv", split="train", **task):
    """Return (labels' names, examples) of a table written to a file."""
    directory.mkdir(exist_ok=True)
    (directory / name).write_bytes(text.encode() if isinstance(text, str) else text)
    path = write_task(directory, kind, [], **({"train": name, "val": name} | TEXTS | task))
    found = load_own_task(path)[0]
    return found, read_split(found, ".", split).examples


@pytest.mark.parametrize(("cell", "value"), [
    ("['sports', 'news']", ["sports", "news"]), ('["sports"]', ["sports"]), ("[]", []),
    ("['it\\'s, a', \"b\"]", ["it's, a", "b"]), ("['a, b' 'c']", ["a, b", "c"]), ("[1 0]", [1, 0]),
    ("[1. 0.\n 1.]", [1.0, 0.0, 1.0]), ("{'b', 'a'}", ["a", "b"]), ("('a',)", ["a"]),
    ("{'text': array(['x y'], dtype=object), 'answer_start': array([3], dtype=int32)}",
     {"text": ["x y"], "answer_start": [3]}), ("[sic] he", "[sic] he"), ("[sic]", "[sic]"), (3, 3),
])
def test_a_list_in_a_cell(cell, value):
    assert read_list(cell) == value


MULTIPLE = [(1, 0), (1, 1), (0, 0)]


@pytest.mark.parametrize(("name", "text", "task"), [
    ("a.jsonl", lines(["x"], ["x", "y"], []), {}),
    ("a.jsonl", lines([1, 0], [1, 1], [0, 0]), {"labels": ["x", "y"]}),
    ("a.jsonl", lines([1.0, 0.0], [1.0, 1.0], [0.0, 0.0]), {"labels": ["x", "y"]}),
    ("a.csv", table("['x']", "['x', 'y']", "[]"), {}),
    ("a.csv", table('["x"]', '["x", "y"]', "[]"), {}),
    ("a.csv", table("['x']", "['x' 'y']", "[]"), {}),
    ("a.csv", table("[1, 0]", "[1, 1]", "[0, 0]"), {"labels": ["x", "y"]}),
    ("a.csv", table("[1 0]", "[1 1]", "[0 0]"), {"labels": ["x", "y"]}),
    ("a.csv", table("x", "x, y", ""), {}),
    ("a.csv", table("x", "x;y", ""), {"separator": ";"}),
    ("a.csv", table("x", "x|y|", "", mark=";"), {"separator": "|"}),
    ("a.csv", table(*MULTIPLE, header=("text", "x", "y")), {"label": ["x", "y"]}),
    ("a.csv", table(("True", "False"), ("True", "True"), ("False", "False"),
                    header=("text", "x", "y")), {"label": ["x", "y"]}),
    ("a.csv", table(("1.0", "0.0"), ("1.0", "1.0"), ("0.0", "0.0"), ("-1", "-1"),
                    header=("text", "x", "y")), {"label": ["x", "y"], "ignore_labels": ["-1"]}),
], ids=str)
def test_several_labels_in_every_form(tmp_path, name, text, task):
    found, examples = read(tmp_path, "multilabel", text, name, **task)
    assert found.labels == ("x", "y") and [example.label for example in examples] == MULTIPLE


@pytest.mark.parametrize(("kind", "name", "text", "task", "said"), [
    ("multilabel", "a.jsonl", lines([1, 0, 1], [0, 1, 0]), {"labels": ["x", "y"]},
     "vectors of 3 numbers.*name all 3 in their order.*names 2 now"),
    ("multilabel", "a.csv", table("[a, b]", "['a'"), {}, r"'\[a, b\]' is no list that can be read"),
    ("multilabel", "a.csv", table("x|y", "v|w", "z"), {}, r'say separator = "\|" in the task'),
    ("multilabel", "a.csv", table((0.37, 1), header=("text", "x", "y")), {"label": ["x", "y"]},
     'column "x" must be 0 or 1, found \'0.37\''),
    ("multilabel", "a.csv", table((1, 1), header=("text", "x", "y")), {"label": ["x", "z"]},
     "no column 'z'"),
    ("classification", "a.csv", table("x", "y"), {"label": ["x", "z"]}, 'kind = "multilabel" only'),
    ("classification", "a.csv", table("a", "b", "NaN"), {}, r'.NaN.*ignore_labels = \["NaN"\]'),
    ("classification", "a.csv", table("a", "N/A", "-", "null"), {"ignore_labels": ["-"]},
     r'1 rows have the label .null.*ignore_labels = \["-", "null", "N/A"\]'),
    ("classification", "a.jsonl", lines(0, 1, 2, -1, -1), {},
     r'2 rows have the label \'-1\'.*ignore_labels = \["-1"\]'),
    ("classification", "a.jsonl", lines("a", "b", None, None), {},
     r'2 of 4 rows cannot(?s:.*)"label" is missing; rows .* left out by ignore_labels = \[""\]'),
    ("classification", "a.jsonl", lines("a", "b", "-"), {"labels": ["a", "b"]},
     r"must be one of 'a', 'b', found '-'.*ignore_labels = \[...\]"),
    ("regression", "a.csv", table("1,5", "2.5"), {}, 'say decimal = "," in the task file'),
    ("regression", "a.csv", table("1,2,3", "2"), {}, 'say decimal = "," in the task file'),
    ("regression", "a.csv", table("1,500", "2,250"), {}, 'say decimal = "," in the task file'),
    ("regression", "a.csv", table("1.50,5", "2"), {"decimal": ","}, "must be a number"),
    ("regression", "a.csv", table("1.500,5", "2"), {}, 'say decimal = "," in the task file'),
    ("classification", "a.csv", table("1", "0", "1.0"), {}, "look alike: '1' and '1.0'"),
    ("classification", "a.csv", table("True", "False", "true"), {}, "look alike: 'True' and 't"),
    ("classification", "a.csv", table("1.0", "0.0", "-1.0"), {},
     r'1 rows have the label \'-1.0\'.*ignore_labels = \["-1.0"\]'),
    ("classification", "a.csv", table("a", "b", "#N/A", "<NA>"), {}, r'= \["<NA>", "#N/A"\]'),
    ("classification", "a.csv", table("x", "y", header=("text", " Label")), {},
     "' Label' only looks like 'label'"),
    ("multilabel", "a.csv", table("x\ny", "y\nx"), {}, r'say separator = "\\n" in the task'),
    ("multilabel", "a.csv", table(("ja", "nein"), header=("text", "x", "y")),
     {"label": ["x", "y"]}, "must be 0 or 1, found 'ja'$"),
    ("classification", "a.csv", table("a", "b"), {"decimal": ","}, "for kind = \"regression\""),
    ("classification", "a.csv", table("a"), {"encoding": "cp12521"}, "unknown encoding: cp12521"),
    ("classification", "a.csv", table("ä", "b").encode("cp1252"), {"encoding": "utf-16"},
     "not a single row in it"),
    ("classification", "a.csv", table("a", "b").encode("utf-16") + b"x", {},
     "a.csv: is not of the encoding utf-16"),
    ("classification", "a.csv", table("a", "b"), {"train": "b-*.csv"}, "b-.*no file is called so"),
], ids=str)
def test_what_might_mean_something_else_is_refused(tmp_path, kind, name, text, task, said):
    """Also in tests/project/test_remedies.py, where what the messages say is done."""
    with pytest.raises(UserError, match=said):
        read(tmp_path, kind, text, name, **task)


@pytest.mark.parametrize(("text", "task", "labels"), [
    (lines("a", "-", "b", "-1"), {"ignore_labels": ["-", "-1"]}, [0, 1]),
    (lines("a", None, "b", ""), {"ignore_labels": [""]}, [0, 1]),
    (lines(0, -1, 1, 0), {"ignore_labels": ["-1"]}, [0, 1, 0]),
    (lines("a", "NaN", "b", "N/A"), {"ignore_labels": ["NaN", "N/A"]}, [0, 1]),
    (lines(1, -1, 1), {}, [0, 1, 0]), (lines(0, -1, 1), {"labels": ["-1", "0", "1"]}, [1, 0, 2]),
    (lines("1.0", "0", "-1.0"), {"labels": ["0", "1"], "ignore_labels": ["-1"]}, [1, 0]),
    (lines(1.0, 0.0, 1.0), {}, [1, 0, 1]), (lines(["a"], ["b"], ["a"]), {}, [0, 1, 0])], ids=str)
def test_rows_without_a_label_are_left_out_by_name(tmp_path, text, task, labels):
    found, examples = read(tmp_path, "classification", text, "a.jsonl", **task)
    assert [example.label for example in examples] == labels
    split = read_split(found, ".", "val")
    assert ("ignore_labels" in split.left_out) == ("ignore_labels" in task)


def test_test_rows_without_a_label_are_predicted_unless_others_have_one(tmp_path):
    task = {"ignore_labels": ["-"], "test": "a.jsonl"}
    found, examples = read(tmp_path, "classification", lines("a", "-", "b"), "a.jsonl", "test",
                           **task)
    assert [example.label for example in examples] == [0, 1]
    (tmp_path / "a.jsonl").write_text(lines("-", "-"))
    assert [example.label for example in read_split(found, ".", "test").examples] == [None, None]


@pytest.mark.parametrize(("labels", "first", "right"), [
    ([1, 2, 4, 3], 1, [0, 1, 3, 2]), ([1, 2, 3, 1], 1, [0, 1, 2, 0]), ([1, 2, 3], 0, [1, 2, 3]),
    ([0, 1, 3], None, [0, 1, 3]), (["A", "D"], None, [0, 3])])
def test_answers_are_counted_from_one_or_zero(tmp_path, labels, first, right):
    rows = [{"text": "q", "label": label, "options": list("wxyz")} for label in labels]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    task = {"choices": ["options"], "first_answer": first}
    found, examples = read(tmp_path, "choice", text, "a.jsonl", **task)
    assert [example.label for example in examples] == right
    if first is not None:
        with pytest.raises(UserError, match=r"numbers 1, 2, 3(, 4)?, never 0; .*first_answer = 1"):
            read(tmp_path, "choice", text, "a.jsonl", choices=["options"])
    else:
        with pytest.raises(UserError, match="a number from 1 to 4") if 0 in labels else (
                pytest.raises(UserError, match='"regression" only')):
            read(tmp_path, "choice", text, "a.jsonl", **(
                task | {"first_answer": 1} if 0 in labels else task | {"decimal": ","}))


GERMAN = "text;wert\r\nSchön, gut;1,5\r\nNaja;-0,25\r\nSchlecht;3\r\n"


@pytest.mark.parametrize(("name", "data", "task"), [
    ("a.csv", GERMAN.encode(), {}), ("a.csv", GERMAN.encode("utf-8-sig"), {}),
    ("a.csv", GERMAN.encode("cp1252"), {"encoding": "cp1252"}),
    ("a.csv", GERMAN.encode(), {"encoding": "cp1252"}),  # another table of the task is cp1252
    ("a.csv", ("sep=;\r\n" + GERMAN).encode("cp1252"), {"encoding": "latin-1"}),
    ("a.csv", GERMAN.encode("utf-16"), {}),
    ("a.csv.gz", gzip.compress(GERMAN.encode(), mtime=0), {}),
    ("a.csv", GERMAN.replace(";", "\t").encode("utf-16-le"), {}),
    ("a.tsv", GERMAN.replace(";", "\t").encode("utf-16"), {"decimal": ","}),
    ("a.csv", GERMAN.replace(";", "^").encode(), {"delimiter": "^"}),
    ("a.csv", GERMAN.replace(",", ".").replace("Schön.", "Schön,").encode(), {})], ids=str)
def test_a_german_table_of_numbers(tmp_path, name, data, task):
    found, examples = read(tmp_path, "regression", data, name, label="wert", **task)
    assert [example.label for example in examples] == [1.5, -0.25, 3.0]
    assert examples[0].sequences == (("Schön, gut",),)


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
def test_quotes_of_a_tab_file_are_those_of_pandas(tmp_path, quoting):
    """They reached the model."""
    file = io.StringIO()
    writer = csv.writer(file, delimiter="\t", quoting=quoting)
    rows = [("text", "label"), ('He said "hi"', "a"), ("two\nlines", "b"), ("plain", "a")]
    writer.writerows(rows)
    _, examples = read(tmp_path, "classification", file.getvalue(), "a.tsv")
    assert [example.sequences[0][0] for example in examples] == [text for text, _ in rows[1:]]


@pytest.mark.parametrize("text", ['"Go', 'a "b" c', '"Hello" he said', '"Hello"', '5" disk'])
def test_quotes_of_a_tab_file_that_are_characters_stay(tmp_path, text):
    raw = f'text\tlabel\n{text}\ta\nother "x\tb\n'
    assert read(tmp_path, "classification", raw, "a.tsv")[1][0].sequences == ((text,),)
    more = {"quoted": False} if text == '"Hello"' else {}
    assert read(tmp_path, "classification", raw.replace("other \"x", "y"), "a.tsv",
                **more)[1][0].sequences == ((text,),)


def test_several_tables_and_a_data_set_of_the_hub(tmp_path_factory):
    datasets = pytest.importorskip("datasets")
    tmp_path = tmp_path_factory.mktemp("rows")  # "test" in a path would be a split to `datasets`
    (tmp_path / "data").mkdir()
    features = datasets.Features({"text": datasets.Value("string"),
                                  "label": datasets.ClassLabel(names=["no", "yes"])})
    for n in range(3):
        rows = {"text": [f"{n} a", f"{n} b"], "label": [n % 2, -1 if n == 2 else 1]}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(
            str(tmp_path / "data" / f"train-0000{n}-of-00003.parquet"))
    found, examples = read(tmp_path, "classification", "", train="data/train-*.parquet",
                           val="data/train-*.parquet", ignore_labels=["-1"])
    assert found.labels == ("no", "yes")
    assert [example.label for example in examples] == [0, 1, 1, 1, 0]
    assert examples[2].place.endswith("train-00001-of-00003.parquet:row 1")
    hub = f"hub:{tmp_path / 'data'}"  # a local directory stands for one that must be fetched
    found, examples = read(tmp_path / "x", "classification", "", train=hub, val=f"{hub}#train",
                           ignore_labels=["-1"])
    assert found.labels == ("no", "yes") and found.files["train"] == hub
    assert [example.label for example in examples] == [0, 1, 1, 1, 0]
    assert examples[0].place == f"{hub}:row 1"


@pytest.mark.parametrize(("values", "has"), [
    (["1,5", "2,250"], True), (["1,500", "2,250"], False), (["1,5", "2.5"], False),
    (["15", "20"], False), (["1,5", "7"], True), (["1,5", "a,b"], False)], ids=str)
def test_a_comma_is_a_decimal_mark_unless_all_may_part_thousands(values, has):
    assert has_decimal_commas(values) is has


def test_texts_that_validation_shares_with_train_are_counted(tmp_path):
    (tmp_path / "val.jsonl").write_text(lines("a", "b") + '{"text": "new", "label": "a"}\n')
    found, _ = read(tmp_path, "classification", lines("a", "b", "a"), "a.jsonl", val="val.jsonl")
    train, val = (read_split(found, ".", split) for split in ("train", "val"))
    assert count_shared(train, val) == (2, f"{tmp_path / 'val.jsonl'}:1")


MISTAKES = [  # more in tests/project/test_remedies.py, where what the messages say is done
    ({"texts": []}, "texts = .*must not be empty"),
    ({"train": ""}, "train = .*must not be empty"),
    ({"label": "lable"}, r"no column 'lable' \(label in .*task.toml\); there are words"),
    ({"labels": ["animal", "thin"]}, "must be one of 'animal', 'thin', found 'thing'"),
    ({"kind": "spans", "texts": ["extra", "words"], "label": "labl"}, "no column 'labl'"),
    ({"texts": ["label"], "label": "words"}, "column 'label' cannot be a text .* rename"),
    ({"kind": "tags", "texts": ["words"]}, r"field \"words\"|tags for|must be"),
    ({"kind": "regression"}, "must be a number|finite number"),
    ({"val_share": 1.5}, "val_share = 1.5: must be below 1"),
    ({"kind": "spans", "texts": ["words"]}, "texts must name two columns, the question and the"),
    ({"kind": "tags", "settings": 'class_weights = "balanced"', "texts": ["words"]},
     "only a classification with one label"),
    ({"group": "label"}, "column 'label' cannot be .* the group: a row has its idx, id, label"),
]


@pytest.mark.parametrize(("change", "message"), MISTAKES)
def test_a_mistake_is_one_clear_error(tmp_path, change, message):
    kind = change.get("kind", "classification")
    rows = rows_of("tags" if "settings" in change and kind == "tags" else "classification", 6)
    path = write_task(tmp_path, kind, rows, **{k: v for k, v in change.items() if k != "kind"})
    with pytest.raises(UserError, match=message):
        task, _ = load_own_task(path)
        resolve(task, {})
        read_split(task, ".", "train")


def test_labels_and_columns_that_only_look_alike_are_refused(tmp_path):
    """One label was two, and a column was missing beside its own name."""
    rows = rows_of("classification", 6)
    spelled = [row | {"label": "caf\u00e9" if number % 2 else "cafe\u0301"}
               for number, row in enumerate(rows)]
    with pytest.raises(UserError, match=r"'caf\\xe9'.*write them in one way|'cafe\\u0301' and"):
        load_own_task(write_task(tmp_path, "classification", spelled))
    named = [{"cate\u0301gorie" if key == "label" else key: value for key, value in row.items()}
             for row in rows]
    with pytest.raises(UserError, match=r"'cate\\u0301gorie' only looks like 'cat\\xe9gorie'"):
        load_own_task(write_task(tmp_path, "classification", named, label="cat\u00e9gorie"))


def test_skipped_test_tables_are_not_read(tmp_path):
    rows = rows_of("classification", 8)
    path = write_task(tmp_path, "classification", rows, test="broken.jsonl")
    (tmp_path / "broken.jsonl").write_text("{")
    task, _ = load_own_task(path)
    assert inputs.read_tables(plan(tmp_path, [task], predict_test=False), task).tests == {}
    with pytest.raises(UserError, match="broken.jsonl"):
        inputs.read_tables(plan(tmp_path, [task]), task)
    for option in ({"init_from": {"RTE": "x"}}, {"carved": ("RTE",)}):
        with pytest.raises(UserError, match="RTE: is none of the tasks of this run, mine"):
            sweep.run_all(plan(tmp_path, [task], **option))


@pytest.mark.parametrize("label", ["1_000", "1,5", "nan", "x"])
def test_a_number_that_could_mean_another_is_refused(tmp_path, label):
    rows = [{"words": "a cat", "extra": "b", "stars": text} for text in ("1.5", "2", label, "-3e2")]
    path = write_task(tmp_path, "regression", rows, label="stars")
    with pytest.raises(UserError, match='train.jsonl:3: field "stars" must be .*number'):
        read_split(load_own_task(path)[0], ".", "train")
