"""What was written stays: at a URL, in a save that is due, in what a killed command has left."""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import rank_helpers
from launching import ROOT, deepspeed_json, make_run, options_of
from report_cases import make_result

from deberta_ds.base.errors import UserError
from deberta_ds.checkpoint import save, upload
from deberta_ds.checkpoint.find import path_of
from deberta_ds.finetuning import sweep
from deberta_ds.publish import convert
from deberta_ds.tasks.task import task_named
from deberta_ds.tracking.log import read_metrics


def claim(out: Path, url: str, resume: str = "auto", claims: bool = True) -> None:
    upload.check_owner(out, url, resume, claims=claims)


def test_a_url_belongs_to_one_run(tmp_path):
    """C1: the second run deleted the first one's checkpoints; --check called the URL good."""
    url = f"file://{tmp_path}/there"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    claim(tmp_path / "one", url, claims=False)
    assert not (tmp_path / "there").exists()
    claim(tmp_path / "one", url)
    claim(tmp_path / "one", url)
    for claims in (True, False):
        with pytest.raises(UserError, match=f"train.upload = {url}: is another run's"):
            claim(tmp_path / "two", url, claims=claims)
    claim(tmp_path / "two", url, resume=f"{url}/checkpoints/step-00000005")  # its disk was lost
    claim(tmp_path / "two", url)


def test_a_url_with_checkpoints_of_version_0_2_0_is_known_by_one_of_them(tmp_path):
    for place in ("there", "mine", "other"):
        directory = path_of(tmp_path / place, 5)
        directory.mkdir(parents=True)
        (directory / "manifest.json").write_text("other" if place == "other" else "same")
    with pytest.raises(UserError, match="no checkpoint in common"):
        claim(tmp_path / "other", f"file://{tmp_path}/there")
    claim(tmp_path / "mine", f"file://{tmp_path}/there")


SLOW = """
import time
def score(total, per_token):
    open("{0}", "w").close()
    time.sleep(60)
"""


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize("part, steps, last", [
    ("evaluation", 10, 5), ("own score", 10, 5), ("start", 5, 0), ("upload", 5, 5)])
def test_a_signal_in_a_slow_part_saves_and_the_next_start_goes_on(tmp_path, part, steps, last):
    """C2: nothing was saved, and it was said that it was; a start and an upload did not look."""
    run = make_run(tmp_path, steps=str(steps), eval_every="5", save_every="5", two_layers=True)
    common = options_of(run, deepspeed_json(tmp_path / "ds.json", 1))
    slow, seen = list(common), path_of(tmp_path / "out", last) / "manifest.json"
    if part == "own score":
        seen = tmp_path / "out/began"
        (tmp_path / "slow.py").write_text(SLOW.format(seen))
        slow.append(f'--evaluate.metrics=["{tmp_path}/slow.py:score"]')
    elif part == "start":
        seen = tmp_path / "out/run.lock"
    elif part == "upload":
        slow.append(f"--train.upload=file://{tmp_path}/there")
    processes = rank_helpers.start(2, [part, *slow], tmp_path / "log",
                                   ROOT / "tests/workers/slow_parts.py")
    until = time.monotonic() + 60
    while not seen.exists() and time.monotonic() < until:  # a save waits for no evaluation
        time.sleep(0.1)
    time.sleep(1.0)
    assert seen.exists(), (tmp_path / "log").read_text()
    began = time.monotonic()
    os.kill(processes[1].pid, signal.SIGTERM)  # one rank alone was told
    assert rank_helpers.wait(processes, 30) == [75, 75], (tmp_path / "log").read_text()
    assert time.monotonic() - began < 10
    assert path_of(tmp_path / "out", last).exists() == (last > 0)
    rank_helpers.run(2, common, tmp_path / "log2")
    records = [one for one in read_metrics(tmp_path / "out/metrics.jsonl") if one["kind"] == "eval"]
    assert [one["step"] for one in records] == list(range(5, steps + 1, 5))


def test_remains_that_cannot_be_deleted_are_set_aside(tmp_path, monkeypatch):
    """C3: every start ended at that step: a file that is open over NFS, or of another user."""
    path = tmp_path / "step-00000005"
    path.mkdir()
    (path / ".nfs0001").write_text("open")
    monkeypatch.setattr(save.shutil, "rmtree", lambda *_, **__: None)
    save.empty(path)
    assert path.is_dir() and not any(path.iterdir())
    assert len(list(tmp_path.glob("remains-*"))) == 1


def result(task: str, seed: int, **more) -> dict:
    return make_result(task, seed, start_weights="a", tokenizer="t", shape={}) | more


def test_results_of_other_tasks_and_seeds_stay(tmp_path):
    """C4: results.json and the report held the last command alone."""
    said: list[str] = []
    for task, seed in (("CB", 1), ("CB", 2), ("RTE", 1)):
        place = tmp_path / task / f"seed-{seed}" / "result.json"
        place.parent.mkdir(parents=True)
        place.write_text("{}")

    def write(*results: dict) -> dict:
        tasks = tuple(map(task_named, dict.fromkeys(one["task"] for one in results)))
        plan = SimpleNamespace(out=tmp_path, tasks=tasks, say=said.append)
        runs, summary = sweep.merged(plan, results)
        (tmp_path / "results.json").write_text(json.dumps(summary | {"runs": runs}))
        return summary | {"runs": [(run["task"], run["seed"]) for run in runs]}

    write(result("CB", 1))
    write(result("RTE", 1))
    found = write(result("CB", 2, score=1.0))
    assert found["runs"] == [("CB", 1), ("RTE", 1), ("CB", 2)] and not said
    assert found["tasks"]["CB"]["seeds"] == 2 and found["tasks"]["RTE"]["seeds"] == 1
    assert found["tasks"]["CB"]["score"]["median"] == 0.75
    found = write(result("RTE", 1, tokenizer="another"))
    assert found["runs"] == [("RTE", 1)] and "without 2 runs of another model (CB)" in said[0]


def test_a_card_is_written_before_an_export_is_there(tmp_path):
    """C5: killed while it wrote its card, the same command was refused."""
    seen = []

    def finish(fresh: Path, _summary) -> None:
        seen.append((fresh != tmp_path / "out", (tmp_path / "out").exists()))
        (fresh / "README.md").write_text("card")

    source = ROOT / "tests/fixtures/tiny_run/rtd/export"
    convert.convert(source, tmp_path / "out", "hf", finish=finish)
    assert seen == [(True, False)] and (tmp_path / "out/README.md").exists()
