"""What a user gets wrong in a task of one's own, and what is said."""

import pytest
from test_finetune_loop import plan
from test_finetune_own import rows_of, write_task

from deberta_ds.base.errors import UserError
from deberta_ds.finetuning import inputs, sweep
from deberta_ds.tasks.readers import read_split
from deberta_ds.tasks.settings import resolve
from deberta_ds.tasks.task_file import load_own_task

# What a user gets wrong, and what is said.
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


def test_a_task_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="no such task file"):
        load_own_task(tmp_path / "none.toml")


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
