"""Rows that cannot be used are named all at once, or left out; texts that are too long are cut."""

import dataclasses
import json
import random
import shutil

import pytest
import torch
from superglue_helpers import SAMPLE, predict, tiny_start, write_lines
from test_finetune_loop import plan
from test_finetune_own import WORDS, opened, random_model, rows_of, train, write_task

from deberta_ds.base.errors import UserError
from deberta_ds.finetuning import inputs, sweep
from deberta_ds.finetuning.features import collate, encode, shortened
from deberta_ds.finetuning.models import build_model
from deberta_ds.tasks.readers import read_split
from deberta_ds.tasks.settings import resolve
from deberta_ds.tasks.tables import Faults
from deberta_ds.tasks.task_file import load_own_task

LONG = " ".join(WORDS * 20)
ODD = [{"words": " ", "extra": ""}, {"words": None, "extra": "b"}, {"words": 5, "extra": "b"},
       {"words": "a", "extra": LONG}, ["no", "object"], {"extra": "b"}, {"words": ["a"]}, "{cut"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_model(tmp_path_factory.mktemp("model"))


def test_a_saved_model_says_nothing_of_the_machines_directories(model):
    assert set(model.task.files.values()) == {"train.jsonl"}


def test_eight_odd_rows_of_many_are_predicted_around(process_group, tmp_path, model, capsys):
    rows: list = [{"words": " ".join(WORDS[: 1 + n % 9]), "extra": "x", "n": n} for n in range(60)]
    places = [0, 7, 8, 20, 31, 32, 58, 59]
    for place, row in zip(places, ODD, strict=True):
        rows[place] = row | {"n": place} if isinstance(row, dict) else row
    table, out = tmp_path / "new.jsonl", tmp_path / "out.jsonl"
    write_lines(table, rows)
    lines = predict(model, table, out, max_bad=8, keep=["n"])
    assert [line["idx"] for line in lines] == list(range(60))
    assert [line["idx"] for line in lines if "error" in line] == places
    assert [line["n"] for line in lines if "n" in line] == [n for n in range(60)
                                                            if n not in (31, 59)]
    assert all(("prediction" in line) != ("error" in line) for line in lines)
    assert "new.jsonl:8: field \"words\" must be a string, found None" in lines[7]["error"]
    assert "tokens must be seen together, but max_length is 64" in lines[20]["error"]
    assert "8 of 60 rows cannot be used" in capsys.readouterr().err
    good = tmp_path / "good.jsonl"
    write_lines(good, [row for n, row in enumerate(rows) if n not in places])
    wanted = predict(model, good, tmp_path / "good_out.jsonl")
    found = [line for line in lines if "error" not in line]
    assert [line["prediction"] for line in found] == [line["prediction"] for line in wanted]
    out.unlink()
    with pytest.raises(UserError, match=r"(?s)8 of 60 rows.*Correct them.*--max_bad N.*"
                       r"Set --truncation=longest_first, .*, or --max_length=\d+"):
        predict(model, table, out, max_bad=7)
    assert not out.exists()
    assert len((tmp_path / "out.jsonl.bad_rows.txt").read_text().splitlines()) == 8
    cut = dataclasses.replace(model, settings=dataclasses.replace(
        model.settings, truncation="longest_first"))
    assert "prediction" in predict(cut, table, out, max_bad=7)[20]


def test_labels_that_cannot_be_read_are_no_fault_of_a_prediction(process_group, tmp_path, model):
    """Jigsaw's test table has -1 where there is no label."""
    task = dataclasses.replace(model.task, head="multilabel", label_columns=("toxic", "insult"))
    rows = [{"words": "a", "extra": "b", "toxic": -1, "insult": "x", "n": 0}]
    write_lines(tmp_path / "new.jsonl", rows)
    (line,) = predict(dataclasses.replace(model, task=task), tmp_path / "new.jsonl",
                      tmp_path / "out.jsonl")
    assert set(line["probabilities"]) == {"animal", "thing"}


def test_all_misplaced_answers_are_named_in_one_run(process_group, tmp_path):
    text = "Anna Smith lives in Rome."
    rows = [{"words": text, "extra": "Who?", "label": {"text": ["Anna"],
                                                       "answer_start": [n % 10 // 9]}}
            for n in range(400)]
    task = load_own_task(write_task(tmp_path, "spans", rows))[0]
    file = tmp_path / "out" / "mine.train.bad_rows.txt"
    with pytest.raises(UserError, match=r"(?s)40 of 400 rows cannot be used:.*:100: .*\(all in .*"
                       r"bad_rows.txt\).*--max_bad N"):
        read_split(task, ".", "train", faults=Faults(0, file))
    assert len(file.read_text().splitlines()) == 40
    split = read_split(task, ".", "train", faults=Faults(40))
    assert len(split.examples) == 360 and split.left_out.startswith("40 of 400 rows")


def test_training_leaves_out_what_it_may(process_group, tmp_path, monkeypatch):
    encoded: list[str] = []
    monkeypatch.setattr(inputs, "encode", lambda task, examples, *rest, **more: encode(
        task, [encoded.append(e.place) or e for e in examples], *rest, **more))
    rows: list = rows_of("classification", 24)
    rows[3] |= {"label": None}
    rows[5] |= {"extra": LONG}
    path = write_task(tmp_path, "classification", rows, "epochs = 1\nmax_length = 64")
    said: list[str] = []
    with pytest.raises(UserError, match='train.jsonl:4: field "label" is missing'):
        train(path, tmp_path / "out")
    result = train(path, tmp_path / "out", max_bad=2, say=said.append)
    assert result["train"][1] == 22 and len(encoded) == 2 * 23  # once for train, once for val
    assert any("train.jsonl:4" in line for line in said)
    assert any("train.jsonl:6: " in line and "must be seen together" in line for line in said)
    assert any("22 of 22 examples of" in line and "are in" in line for line in said)
    with pytest.raises(UserError, match="train.jsonl:6: .* tokens must be seen together"):
        train(path, tmp_path / "out2", max_bad=1)
    path = write_task(tmp_path, "classification", rows, "epochs = 1\nmax_length = 64", val=None,
                      val_share=0.3)
    encoded.clear()
    result = train(path, tmp_path / "carved", max_bad=2)
    assert (result["train"][1], result["val"][1], len(encoded)) == (16, 6, 23)


def test_bad_rows_of_each_test_table_are_listed_in_a_file_of_their_own(process_group, tmp_path):
    rows = rows_of("classification", 8)
    path = write_task(tmp_path, "classification", rows, test="test.jsonl",
                      tests={"old": "old.jsonl"})
    write_lines(tmp_path / "test.jsonl", [*rows, {"words": 3, "extra": "x"}])
    write_lines(tmp_path / "old.jsonl", rows)
    task = load_own_task(path)[0]
    tests = inputs.read_tables(plan(tmp_path / "out", [task], max_bad=1), task).tests
    assert {name: len(split.examples) for name, split in tests.items()} == {"mine": 8, "old": 8}
    (line,) = (tmp_path / "out" / "mine.test.bad_rows.txt").read_text().splitlines()
    assert "test.jsonl:9: " in line


def test_a_diagnostic_set_is_encoded_as_the_task_whose_model_predicts_it(process_group, tmp_path):
    wanted = plan(tmp_path, ["RTE"], ("--RTE.max_length=30",), max_bad=99)
    found = inputs.read_tables(wanted, wanted.tasks[0])
    rows = [row for feature in found.encoded[id(found.tests["AX-b"])] for row in feature.sequences]
    assert max(map(len, rows)) == 30


def test_no_line_of_a_pair_is_left_out_alone(process_group, tmp_path):
    """Gender parity compares lines 2k and 2k + 1."""
    shutil.copytree(SAMPLE, tmp_path / "data")
    file = tmp_path / "data" / "AX-g" / "AX-g.jsonl"
    first, *others = map(json.loads, file.read_text().splitlines())
    write_lines(file, [first | {"premise": LONG}, *others])
    wanted = plan(tmp_path / "out", ["RTE"], ("--RTE.truncation=second",), max_bad=99,
                  data=str(tmp_path / "data"))
    with pytest.raises(UserError, match="(?s)texts do not fit:.*AX-g.jsonl:1: .*--RTE.max_length="):
        sweep.run_all(wanted)


@pytest.mark.parametrize(("how", "room", "kept"), [
    ("second", 6, ["abcd", "12"]), ("head_tail", 10, ["d", "123456789"]),
    ("head_tail", 12, ["bcd", "123456789"]), ("second", 3, ["abcd", ""])], ids=str)
def test_which_tokens_are_kept(how, room, kept):
    assert ["".join(part) for part in shortened(["abcd", "123456789"], room, how)] == kept


def test_longest_first_is_that_of_tokenizers():
    tokenizers = pytest.importorskip("tokenizers")
    words = {str(n): n for n in range(40)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    dice = random.Random(3)
    for _ in range(300):
        texts = [[str(n) for n in range(dice.randrange(1, 40))] for _ in range(2)]
        room = dice.randrange(2, 80)
        tokenizer.enable_truncation(room, strategy="longest_first")
        wanted = tokenizer.encode(*map(" ".join, texts)).sequence_ids
        found = shortened(texts, room, "longest_first")
        assert [len(part) for part in found] == [wanted.count(0), wanted.count(1)]


def test_head_and_tail_of_a_long_text_are_read():
    ids = list(range(600))
    head_tail = shortened([ids], 510, "head_tail")[0]
    assert head_tail == [*range(127), *range(600 - 383, 600)]  # 128 + 382 but for rounding


@pytest.mark.parametrize("how", ["first", "second", "longest_first", "head_tail"])
def test_a_long_text_is_cut_where_it_is_allowed(tmp_path, how):
    rows = [{"words": LONG, "extra": "b c", "label": "x"}, {"words": "a", "extra": LONG,
                                                            "label": "y"}]
    split, _ = opened(tmp_path, "classification", rows, settings=f'truncation = "{how}"')
    assert resolve(split.task, {}).truncation == how
    faults = Faults()
    features = encode(split.task, split.examples, tiny_start().tokenizer,
                      max_length=24, window_overlap=8, truncation=how, faults=faults)
    assert [len(feature.sequences[0]) for feature in features] == [24] * len(features)
    lost = {"second": ["1"], "longest_first": []}.get(how, ["2"])
    assert [place.rpartition(":")[2] for place in faults.errors] == lost
    assert all(feature.cut_tokens > 0 for feature in features)


@pytest.mark.parametrize("how", ["windows_mean", "windows_max"])
def test_a_long_text_is_read_in_windows_and_nothing_is_cut(tmp_path, how):
    rows = [{"words": LONG, "extra": "b", "label": label} for label in "xy"]
    split, _ = opened(tmp_path, "classification", rows, settings=f'truncation = "{how}"')
    task, examples, start = split.task, split.examples, tiny_start()
    features = encode(task, examples, start.tokenizer, max_length=24, window_overlap=8,
                      truncation=how)
    first = features[0]
    assert first.cut_tokens == 0 and len(first.sequences) > 3
    ids = start.tokenizer.encode(LONG)
    shown = [list(row[1:-3]) for row in first.sequences]  # without [CLS], [SEP] b [SEP]
    assert shown[0] == ids[:len(shown[0])] and shown[-1] == ids[-len(shown[-1]):]
    model = build_model(task, start, resolve(task, {}), 1).eval()
    torch.nn.init.constant_(model.head.classifier.bias, -9.0)
    with torch.no_grad():
        whole = model(collate(features)).scores
        each = torch.cat([model(collate([dataclasses.replace(first, sequences=(row,))])).scores
                          for row in first.sequences])
    expected = each.mean(0) if how == "windows_mean" else each.amax(0)
    torch.testing.assert_close(whole, torch.stack([expected] * 2))
    assert whole.max() < -8  # nothing but windows is compared


def test_only_a_classification_has_weights_of_classes(tmp_path):
    split, _ = opened(tmp_path, "tags", rows_of("tags", 6), settings='class_weights = "balanced"')
    with pytest.raises(UserError, match="only a classification with one label"):
        resolve(split.task, {})
