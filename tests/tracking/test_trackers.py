"""Trackers: the services' own libraries, offline; a failing service does not end a run."""

import json
import logging
import sys
import time
import types

import pytest

from deberta_ds.base.errors import UserError
from deberta_ds.config.run_config import LogConfig
from deberta_ds.tracking import trackers

RECORD = {"kind": "train", "step": 3, "loss": 2.5, "grad_norm": None}


def test_a_service_without_its_library_is_named(monkeypatch):
    assert trackers.chosen(LogConfig()) == [trackers.tensorboard]
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="log.wandb = 'mine': needs the package wandb; pip install"):
        trackers.chosen(LogConfig(wandb="mine"))


@pytest.mark.parametrize("where", ["init", "log"])
def test_a_service_that_fails_is_said_once(monkeypatch, tmp_path, caplog, where):
    def fail(*_, **__):
        raise RuntimeError("no network\nand a long story")

    log = types.SimpleNamespace(log=fail, finish=fail)
    library = types.SimpleNamespace(init=fail if where == "init" else lambda **_: log)
    monkeypatch.setitem(sys.modules, "wandb", library)
    with caplog.at_level(logging.WARNING, "deberta_ds"):
        tracker = trackers.wandb("project")(tmp_path, None)
        for _ in range(3):
            tracker.write(RECORD)
        tracker.close()
    assert caplog.messages == [
        "WARNING: Weights & Biases gets nothing more of this run: no network"]


def test_the_id_of_a_wandb_run_is_kept_with_it(monkeypatch, tmp_path):
    """It was a hash of the path: two runs shared one, and a run that was moved had another."""
    ids = []
    log = types.SimpleNamespace(log=print, finish=print)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(
        init=lambda id, **_: ids.append(id) or log))
    for name, purge_step in (("a", 1), ("a", 3), ("b", 3), ("b", 1)):  # 1: from step 0
        (tmp_path / name).mkdir(exist_ok=True)
        trackers.wandb("project")(tmp_path / name, purge_step)
        if purge_step == 3 and name == "a":
            (tmp_path / "a").rename(tmp_path / "b")
    assert ids[0] == ids[1] == ids[2] != ids[3]


def test_wandb_offline(monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "config.json").write_text(json.dumps({"run": {"name": "x"}}))
    for purge_step in (None, 3):
        tracker = trackers.wandb("project")(tmp_path, purge_step)
        tracker.write(RECORD)
        tracker.close()
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    deadline = time.monotonic() + 30  # its service process writes behind our back
    while not all(b"train/loss" in file.read_bytes() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert len({file.name for file in files}) == 1  # both parts are one run there


def test_mlflow_in_a_directory(monkeypatch, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{tmp_path / 'mlruns'}")
    for purge_step in (None, 3):
        tracker = trackers.mlflow("experiment")(tmp_path, purge_step)
        tracker.write(RECORD | {"step": 2 + (purge_step or 0)})
        tracker.close()
    run_id = (tmp_path / "mlflow-run.txt").read_text().strip()
    history = mlflow.MlflowClient().get_metric_history(run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(2, 2.5), (5, 2.5)]
