"""The zips of both leaderboards: a right one passes, and no kind of wrong one does."""

import dataclasses
import json
import random
import zipfile
from pathlib import Path

import pytest
from data_helpers import run_main
from superglue_helpers import SAMPLE, sample
from test_metrics_references import labeled, task_of

from deberta_ds.base.errors import UserError
from deberta_ds.tasks.layouts import Example, TextSpan
from deberta_ds.tasks.submission import check_zip, is_label, render, write_zip
from deberta_ds.tasks.task import GLUE, TASKS, task_named

TESTS = {task.name: sample(task.name, "test").examples for task in TASKS}
SUBMITTED_FILES = [f"{task.name}.jsonl" for task in TASKS]


def random_predictions(task, examples, seed=0):
    dice = random.Random(seed)
    if task.layout == "record":
        return [dice.choice(example.names) for example in examples]
    return [dice.randrange(len(task.labels)) for _ in examples]


def texts(tests=TESTS, seed=0) -> dict[str, str]:
    return {
        task.name: render(task, tests[task.name], random_predictions(task, tests[task.name], seed))
        for task in TASKS if task.name in tests}


def zip_of(contents: dict[str, str | bytes], path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in contents.items():
            archive.writestr(name, text)
    return path


def test_the_zip_passes_and_is_the_same_every_time(tmp_path):
    write_zip(tmp_path / "a.zip", texts(), TESTS)
    write_zip(tmp_path / "b.zip", texts(), TESTS)
    check_zip(tmp_path / "a.zip", TESTS)
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    assert zipfile.ZipFile(tmp_path / "a.zip").namelist() == SUBMITTED_FILES


def test_a_broken_prediction_is_named_by_its_file(tmp_path):
    broken = texts() | {"AX-b": texts()["AX-b"].rstrip("\n")}
    with pytest.raises(UserError, match="runs/RTE/AX-b.jsonl:.*no line end"):
        write_zip(tmp_path / "a.zip", broken, TESTS, places={"AX-b": "runs/RTE/AX-b.jsonl"})


def first_line(name: str, prediction) -> str:
    return render(task_named(name), TESTS[name][:1], [prediction]).strip()


def test_label_strings_are_the_servers():
    assert first_line("BoolQ", 1) == '{"idx": 0, "label": "true"}'
    assert first_line("WiC", 0) == '{"idx": 0, "label": "false"}'
    assert first_line("WSC", 1) == '{"idx": 0, "label": "True"}'
    assert first_line("CB", 2) == '{"idx": 0, "label": "entailment"}'
    assert first_line("RTE", 0) == '{"idx": 0, "label": "not_entailment"}'
    assert first_line("COPA", 1) == '{"idx": 0, "label": 1}'
    assert first_line("AX-b", 1) == '{"idx": 0, "label": "entailment"}'  # an int, not "0"
    assert first_line("ReCoRD", "Lindport") == '{"idx": 0, "label": "Lindport"}'
    line = json.loads(first_line("MultiRC", 1))
    answers = [{"idx": 0, "label": 1}]
    assert line == {"idx": 0, "passage": {"questions": [{"idx": 0, "answers": answers}]}}


def edit_line(name: str, change, number: int = 0):
    """Return a damage that changes one JSON line of TASK.jsonl in place (or returns a new text)."""

    def damage(contents):
        lines = contents[f"{name}.jsonl"].splitlines()
        value = json.loads(lines[number])
        changed = change(value)
        lines[number] = changed if isinstance(changed, str) else json.dumps(value)
        contents[f"{name}.jsonl"] = "\n".join(lines) + "\n"

    return damage


def edit_text(name: str, change):
    def damage(contents):
        contents[f"{name}.jsonl"] = change(contents[f"{name}.jsonl"])

    return damage


def questions(value):
    return value["passage"]["questions"]


BROKEN = {
    "a file is missing": lambda c: c.pop("COPA.jsonl"),
    "a file too many": lambda c: c.update({"README.txt": "hello"}),
    "files in a folder": lambda c: c.update({"out/RTE.jsonl": c.pop("RTE.jsonl")}),
    "lower-case file name": lambda c: c.update({"wsc.jsonl": c.pop("WSC.jsonl")}),
    "another file ending": lambda c: c.update({"COPA.tsv": c.pop("COPA.jsonl")}),
    "shuffled idx": edit_text("RTE", lambda t: "\n".join(t.splitlines()[::-1]) + "\n"),
    "a missing line": edit_text("CB", lambda t: "\n".join(t.splitlines()[:-1]) + "\n"),
    "a missing first line": edit_text("BoolQ", lambda t: "\n".join(t.splitlines()[1:]) + "\n"),
    "a line too many": edit_text("WiC", lambda t: t + '{"idx": 3, "label": "true"}\n'),
    "an empty line": edit_text("WiC", lambda t: t + "\n"),
    "a repeated idx": edit_line("RTE", lambda v: v.update(idx=0), 1),
    "idx as a string": edit_line("AX-b", lambda v: v.update(idx="0")),
    "a bool idx": edit_line("RTE", lambda v: v.update(idx=False)),
    "a wrong label string": edit_line("CB", lambda v: v.update(label="Entailment")),
    "a JSON bool label": edit_line("BoolQ", lambda v: v.update(label=True)),
    "WSC in lower case": edit_line("WSC", lambda v: v.update(label="true")),
    "WiC in upper case": edit_line("WiC", lambda v: v.update(label="True")),
    "COPA as a string": edit_line("COPA", lambda v: v.update(label="1")),
    "COPA as a bool": edit_line("COPA", lambda v: v.update(label=True)),
    "neutral in RTE": edit_line("RTE", lambda v: v.update(label="neutral")),
    "no label": edit_line("RTE", lambda v: v.pop("label")),
    "an extra key": edit_line("RTE", lambda v: v.update(score=0.5)),
    "not JSON": edit_line("AX-g", lambda v: "{idx: 0}"),
    "a list": edit_line("AX-g", lambda v: "[0, 1]"),
    "cut in the last line": edit_text("ReCoRD", lambda t: t[:-6]),
    "no line end": edit_text("RTE", lambda t: t.rstrip("\n")),
    "an answer that is no entity": edit_line("ReCoRD", lambda v: v.update(label="Atlantis")),
    "ReCoRD idx as a string": edit_line("ReCoRD", lambda v: v.update(idx="0")),
    "flat MultiRC": edit_line("MultiRC", lambda v: '{"idx": 0, "label": 1}'),
    "a MultiRC question missing": edit_line("MultiRC", lambda v: questions(v).pop()),
    "a MultiRC answer missing": edit_line("MultiRC", lambda v: questions(v)[0]["answers"].pop()),
    "MultiRC answers swapped": edit_line("MultiRC", lambda v: questions(v)[0]["answers"].reverse()),
    "a MultiRC bool label": edit_line(
        "MultiRC", lambda v: questions(v)[0]["answers"][0].update(label=True)),
    "answers not a list": edit_line("MultiRC", lambda v: questions(v)[0].update(answers=1)),
    "not UTF-8": lambda c: c.update({"RTE.jsonl": b"\xff\xfe"}),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_zip_is_refused(kind, tmp_path):
    contents = {f"{name}.jsonl": text for name, text in texts().items()}
    check_zip(zip_of(contents, tmp_path / "whole.zip"), TESTS)
    BROKEN[kind](contents)
    with pytest.raises(UserError):
        check_zip(zip_of(contents, tmp_path / "broken.zip"), TESTS)


def test_damaged_archives_are_refused(tmp_path):
    whole = zip_of({f"{n}.jsonl": t for n, t in texts().items()}, tmp_path / "whole.zip")
    data = whole.read_bytes()
    for cut in (0, 10, len(data) // 2, len(data) - 1):
        (tmp_path / "cut.zip").write_bytes(data[:cut])
        with pytest.raises(UserError):
            check_zip(tmp_path / "cut.zip", TESTS)
    place = data.index(b"not_entailment")
    (tmp_path / "bit.zip").write_bytes(data[:place] + b"N" + data[place + 1 :])
    with pytest.raises(UserError):
        check_zip(tmp_path / "bit.zip", TESTS)
    with pytest.raises(UserError, match="no such file"):
        check_zip(tmp_path / "nothing.zip", TESTS)
    with zipfile.ZipFile(whole, "a") as archive, pytest.warns(UserWarning):
        archive.writestr("RTE.jsonl", texts()["RTE"])
    with pytest.raises(UserError, match="2 times"):
        check_zip(whole, TESTS)


def test_a_partial_zip_must_be_asked_for_by_name(tmp_path):
    some = texts()
    del some["ReCoRD"], some["AX-g"]
    with pytest.raises(UserError, match="no predictions for ReCoRD, AX-g.*--leave_out ReCoRD AX-g"):
        write_zip(tmp_path / "p.zip", some, TESTS)
    with pytest.raises(UserError, match="no predictions for AX-g"):
        write_zip(tmp_path / "p.zip", some, TESTS, ["ReCoRD"])
    assert not (tmp_path / "p.zip").exists()
    write_zip(tmp_path / "p.zip", some, TESTS, ["AX-g", "ReCoRD"])
    check_zip(tmp_path / "p.zip", TESTS, ["AX-g", "ReCoRD"])
    with pytest.raises(UserError, match="no predictions"):
        check_zip(tmp_path / "p.zip", TESTS)
    with pytest.raises(UserError, match="names CB, which is there"):
        write_zip(tmp_path / "q.zip", some, TESTS, ["AX-g", "ReCoRD", "CB"])


def test_the_command_makes_checks_and_refuses(tmp_path):
    for name, text in (texts() | {"CoLA": '{"idx": 0, "label": 1}\n'}).items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    words = ["launch/submit.py", "--run", tmp_path, "--any_size", "--zip", tmp_path / "out.zip"]
    assert "10 files, checked" in run_main(*words, "--data", SAMPLE)
    with pytest.raises(UserError, match="official BoolQ test has 3245"):
        run_main("launch/submit.py", "--check", tmp_path / "out.zip", "--data", SAMPLE)
    (tmp_path / "CoLA").mkdir()
    (tmp_path / "CoLA/test.tsv").write_text("index\tsentence\n0\tBirds sing.\n")
    others = [task.name for task in GLUE if task.name != "CoLA"]
    assert "1 files, checked" in run_main(*words, "--suite", "GLUE", "--data", tmp_path,
                                          "--leave_out", *others)


GLUE_TESTS = {task.name: labeled([None] * 3) for task in GLUE}


def glue_texts() -> dict[str, str]:
    return {task.name: render(task, GLUE_TESTS[task.name],
                              [1.25, 3.0, 0.1] if task.head == "regress" else [0, 1, 1])
            for task in GLUE}


def test_the_zip_of_glue_has_the_leaderboards_files_and_labels(tmp_path):
    file = tmp_path / "glue.zip"
    write_zip(file, glue_texts(), GLUE_TESTS, suite="GLUE")
    check_zip(file, GLUE_TESTS, suite="GLUE")
    with zipfile.ZipFile(file) as archive:
        found = {name: archive.read(name).decode() for name in archive.namelist()}
    assert set(found) == {"AX.tsv", "CoLA.tsv", "MNLI-m.tsv", "MNLI-mm.tsv", "MRPC.tsv", "QNLI.tsv",
                          "QQP.tsv", "RTE.tsv", "SST-2.tsv", "STS-B.tsv", "WNLI.tsv"}
    assert found["CoLA.tsv"] == "index\tprediction\n0\t0\n1\t1\n2\t1\n"
    assert found["STS-B.tsv"] == "index\tprediction\n0\t1.25\n1\t3.0\n2\t0.1\n"
    assert found["MNLI-mm.tsv"].splitlines()[1] == "0\tcontradiction"
    assert found["RTE.tsv"].splitlines()[2] == "1\tentailment"


def test_wrong_predictions_of_glue_are_refused(tmp_path):
    good = glue_texts()
    for text, message in ((good["RTE"], "prediction must be 0 or 1"),
                          (good["CoLA"].splitlines()[0] + "\n", "1 predictions, the test set asks"),
                          ("[]\n", "CoLA.jsonl:1: not a prediction")):
        with pytest.raises(UserError, match=message):
            write_zip(tmp_path / "glue.zip", good | {"CoLA": text}, GLUE_TESTS, suite="GLUE")
    assert not is_label(task_named("STS-B"), "nan")


def test_entities_of_characters_are_submitted_as_the_training_table_has_them():
    example = Example((7,), (("a bc d",),), None, tuple(TextSpan(0, n, n + 1) for n in range(6)))
    task = task_of("span_f1", head="tags", labels=("O", "B-X", "I-X"))
    task = dataclasses.replace(task, words="raw")
    line = json.loads(render(task, [example], [(1, 0, 1, 2, 0, 0)]))
    assert line == {"idx": 7, "label": [[0, 1, "X"], [2, 4, "X"]]}
