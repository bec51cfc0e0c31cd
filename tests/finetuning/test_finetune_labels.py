"""Labels and tables in the forms that pandas, NumPy, datasets, scikit-learn and Excel write."""

import csv
import gzip
import io

import pytest
from superglue_helpers import jsonl
from test_finetune_loop import plan
from test_finetune_own import opened, rows_of, write_task

from deberta_ds.base.errors import UserError
from deberta_ds.finetuning import inputs, sweep
from deberta_ds.tasks.labels import has_decimal_commas, read_list
from deberta_ds.tasks.readers import Split, count_shared, read_split
from deberta_ds.tasks.task_file import load_own_task


def lines(*labels, **more) -> str:
    return jsonl({"text": f"text {n}", "label": label} | more for n, label in enumerate(labels))


def table(*labels, mark: str = ",", quoting=csv.QUOTE_MINIMAL, header=("text", "label")) -> str:
    """Return a table as the csv module writes it, and pandas with it."""
    file = io.StringIO()
    writer = csv.writer(file, delimiter=mark, quoting=quoting)
    writer.writerow(header)
    writer.writerows([f"text {n}", *(label if isinstance(label, tuple) else (label,))]
                     for n, label in enumerate(labels))
    return file.getvalue()


def read(directory, kind: str, text, name: str = "train.csv", split="train", **task) -> Split:
    """Return a split of a table written to a file."""
    return opened(directory, kind, text, split, table=name, **({"texts": ["text"]} | task))[0]


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
    found = read(tmp_path, "multilabel", text, name, **task)
    assert found.task.labels == ("x", "y")
    assert [example.label for example in found.examples] == MULTIPLE


@pytest.mark.parametrize(("kind", "name", "text", "task", "said"), [
    ("multilabel", "a.jsonl", lines([1, 0, 1], [0, 1, 0]), {"labels": ["x", "y"]},
     "vectors of 3 numbers.*name all 3 in their order.*names 2 now"),
    ("multilabel", "a.csv", table("x|y", "v|w", "z"), {}, r'say separator = "\|" in the task'),
    ("classification", "a.csv", table("a", "b", "NaN"), {}, r'.NaN.*ignore_labels = \["NaN"\]'),
    ("classification", "a.csv", table("a", "N/A", "-", "null"), {"ignore_labels": ["-"]},
     r'1 rows have the label .null.*ignore_labels = \["-", "null", "N/A"\]'),
    ("classification", "a.jsonl", lines(0, 1, 2, -1, -1), {},
     r'2 rows have the label \'-1\'.*ignore_labels = \["-1"\]'),
    ("classification", "a.jsonl", lines("a", "b", None, None), {},
     r'2 of 4 rows cannot(?s:.*)"label" is missing; rows .* left out by ignore_labels = \[""\]'),
    ("regression", "a.csv", table("1,2,3", "2"), {}, 'say decimal = "," in the task file'),
    ("regression", "a.csv", table("1.50,5", "2"), {"decimal": ","}, "must be a number"),
    ("regression", "a.csv", table("1.500,5", "2"), {}, 'say decimal = "," in the task file'),
    ("classification", "a.csv", table("1", "0", "1.0"), {}, "look alike: '1' and '1.0'"),
    ("classification", "a.csv", table("True", "False", "true"), {}, "look alike: 'True' and 't"),
    ("classification", "a.csv", table("1.0", "0.0", "-1.0"), {},
     r'1 rows have the label \'-1.0\'.*ignore_labels = \["-1.0"\]'),
    ("classification", "a.csv", table("a", "b", "#N/A", "<NA>"), {}, r'= \["<NA>", "#N/A"\]'),
    ("classification", "a.csv", table("x", "y", header=("text", "cate\u0301gorie")),
     {"label": "cat\u00e9gorie"}, r"'cate\\u0301gorie' only looks like 'cat\\xe9gorie'"),
    ("classification", "a.csv", table("x", "y"), {"label": "lable"},
     r"no column 'lable' \(label in .*task.toml\); there are text"),
    ("classification", "a.csv", table("x", "y"), {"group": "label"},
     "column 'label' cannot be .* the group: a row has its idx, id, label"),
    *[("classification", "a.csv", table("x", "y"), {"tests": {name: "x.csv"}},
       "a test table needs a name of letters, digits, - and _") for name in ("mine", "a/b")],
    ("classification", "a.csv", table("x", "y"), {"texts": []}, "texts = .*must not be empty"),
    ("classification", "a.csv", table("x", "y"), {"train": ""}, "train = .*must not be empty"),
    ("classification", "a.csv", table("x", "y"), {"val_share": 1.5}, "= 1.5: must be below 1"),
    ("tags", "a.jsonl", lines("O B-X O", "O B-X"), {}, "a.jsonl:1: .*3 tags for"),
    ("tags", "a.jsonl", lines([[0, 3, "A"]], n=5), {"texts": ["txt"]},
     "a.jsonl:1: no column 'txt'; there are text, label, n"),
    ("tags", "a.jsonl", lines([[0, 3, "A"]], n=5), {"texts": ["n"]},
     'a.jsonl:1: field "n" must be a string, found 5'),
    *[("regression", "a.csv", table("1.5", "2", odd, "-3e2"), {},
       'a.csv:4: field "label" must be .*number') for odd in ("1_000", "1,5", "nan", "x")],
    ("choice", "a.jsonl", lines(0, 1, 3, options=list("wxyz")),
     {"choices": ["options"], "first_answer": 1}, "a number from 1 to 4"),
    ("multilabel", "a.csv", table("x\ny", "y\nx"), {}, r'say separator = "\\n" in the task'),
    ("multilabel", "a.csv", table(("ja", "nein"), header=("text", "x", "y")),
     {"label": ["x", "y"]}, "column \"x\" must be 0 or 1, found 'ja'$"),
    ("classification", "a.csv", table("a", "b"), {"decimal": ","}, "for kind = \"regression\""),
    ("classification", "a.csv", table("a"), {"encoding": "cp12521"}, "unknown encoding: cp12521"),
    ("classification", "a.csv", table("ä", "b").encode("cp1252"), {"encoding": "utf-16"},
     "not a single row in it"),
    ("classification", "a.csv", table("a", "b").encode("utf-16") + b"x", {},
     "a.csv: is not of the encoding utf-16"),
    ("classification", "a.csv", table("a", "b"), {"train": "b-*.csv"}, "b-.*no file is called so"),
], ids=str)
def test_what_might_mean_something_else_is_refused(tmp_path, kind, name, text, task, said):
    """More in tests/project/test_remedies.py, where what the messages say is done."""
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
    found = read(tmp_path, "classification", text, "a.jsonl", "val", **task)
    assert [example.label for example in found.examples] == labels
    assert ("ignore_labels" in found.left_out) == ("ignore_labels" in task)


def test_test_rows_without_a_label_are_predicted_unless_others_have_one(tmp_path):
    task = {"ignore_labels": ["-"], "test": "a.jsonl"}
    found = read(tmp_path, "classification", lines("a", "-", "b"), "a.jsonl", "test", **task)
    assert [example.label for example in found.examples] == [0, 1]
    (tmp_path / "a.jsonl").write_text(lines("-", "-"))
    found = read_split(found.task, ".", "test")
    assert [example.label for example in found.examples] == [None, None]


@pytest.mark.parametrize(("labels", "first", "right"), [
    ([1, 2, 4, 3], 1, [0, 1, 3, 2]), ([1, 2, 3, 1], 1, [0, 1, 2, 0]), ([1, 2, 3], 0, [1, 2, 3]),
    ([0, 1, 3], None, [0, 1, 3]), (["A", "D"], None, [0, 3])])
def test_answers_are_counted_from_one_or_zero(tmp_path, labels, first, right):
    found = read(tmp_path, "choice", lines(*labels, options=list("wxyz")), "a.jsonl",
                 choices=["options"], first_answer=first)
    assert [example.label for example in found.examples] == right


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
    examples = read(tmp_path, "regression", data, name, label="wert", **task).examples
    assert [example.label for example in examples] == [1.5, -0.25, 3.0]
    assert examples[0].sequences == (("Schön, gut",),)


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
def test_quotes_of_a_tab_file_are_those_of_pandas(tmp_path, quoting):
    file = io.StringIO()
    writer = csv.writer(file, delimiter="\t", quoting=quoting)
    rows = [("text", "label"), ('He said "hi"', "a"), ("two\nlines", "b"), ("plain", "a")]
    writer.writerows(rows)
    examples = read(tmp_path, "classification", file.getvalue(), "a.tsv").examples
    assert [example.sequences[0][0] for example in examples] == [text for text, _ in rows[1:]]


@pytest.mark.parametrize("text", ['"Go', 'a "b" c', '"Hello" he said', '"Hello"', '5" disk'])
def test_quotes_of_a_tab_file_that_are_characters_stay(tmp_path, text):
    raw = f'text\tlabel\n{text}\ta\nother "x\tb\n'
    more = {"quoted": False} if text == '"Hello"' else {}
    for found in (read(tmp_path, "classification", raw, "a.tsv"),
                  read(tmp_path, "classification", raw.replace('other "x', "y"), "a.tsv", **more)):
        assert found.examples[0].sequences == ((text,),)


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
    hub = f"hub:{tmp_path / 'data'}"  # a local directory stands for one that must be fetched
    for train, number, place in (
            ("data/train-*.parquet", 2, "train-00001-of-00003.parquet:row 1"),
            (hub, 0, f"{hub}:row 1")):
        found = read(tmp_path, "classification", "", train=train, ignore_labels=["-1"])
        assert found.task.labels == ("no", "yes")
        assert [example.label for example in found.examples] == [0, 1, 1, 1, 0]
        assert found.examples[number].place.endswith(place)
    found = read(tmp_path, "classification", "", split="val", train=hub, val=f"{hub}#train",
                 ignore_labels=["-1"])
    assert len(found.examples) == 5 and found.task.files["train"] == hub


@pytest.mark.parametrize(("values", "has"), [
    (["1,5", "2,250"], True), (["1,500", "2,250"], False), (["1,5", "2.5"], False),
    (["15", "20"], False), (["1,5", "7"], True), (["1,5", "a,b"], False)], ids=str)
def test_a_comma_is_a_decimal_mark_unless_all_may_part_thousands(values, has):
    assert has_decimal_commas(values) is has


def test_texts_that_validation_shares_with_train_are_counted(tmp_path):
    (tmp_path / "val.jsonl").write_text(lines("a", "b") + '{"text": "new", "label": "a"}\n')
    train = read(tmp_path, "classification", lines("a", "b", "a"), "a.jsonl", val="val.jsonl")
    val = read_split(train.task, ".", "val")
    assert count_shared(train, val) == (2, f"{tmp_path / 'val.jsonl'}:1")


def test_what_a_run_does_not_read_and_what_it_asks_for(process_group, tmp_path):
    rows = rows_of("classification", 8)
    path = write_task(tmp_path, "classification", rows, test="broken.jsonl")
    (tmp_path / "broken.jsonl").write_text("{")
    task, _ = load_own_task(path)
    assert inputs.read_tables(plan(tmp_path, [task], predict_test=False), task).tests == {}
    with pytest.raises(UserError, match="broken.jsonl"):
        inputs.read_tables(plan(tmp_path, [task]), task)
    grouped, _ = load_own_task(write_task(tmp_path, "classification", rows, group="team"))
    with pytest.raises(UserError, match=r"train.jsonl:1: no column 'team' \(group in the task"):
        sweep.run_all(plan(tmp_path, [grouped]))
    for option in ({"init_from": {"RTE": "x"}}, {"carved": ("RTE",)}):
        with pytest.raises(UserError, match="RTE: is none of the tasks of this run, mine"):
            sweep.run_all(plan(tmp_path, [task], **option))
