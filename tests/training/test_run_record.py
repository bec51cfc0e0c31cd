"""run.json of a checkpoint: what is written is read, and what is damaged is said."""

import json
from dataclasses import asdict

import pytest
from data_helpers import RUN_RECORD

from deberta_ds.checkpoint.run_record import RunRecord, read_run_record
from deberta_ds.engine.layout import CheckpointError

WHOLE = RunRecord(**RUN_RECORD | {
    "config": {"name": "x"}, "best": {"score": "roc_auc", "value": None}, "recent_losses": [1.5],
    "versions": {"torch": "2"}, "time_use": {"saves": 0.25}, "begun_from": "/x"})


def test_what_is_written_is_read(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(asdict(WHOLE)))
    assert read_run_record(tmp_path) == WHOLE


@pytest.mark.parametrize("key, value", [
    ("step", -1), ("step", "3"), ("world_size", 0), ("sequences_seen", None), ("seconds", []),
    ("content_hashes", {"a": 1}), ("recent_losses", ["x"]), ("deepspeed", {"bf16": 3}),
    ("config", "x")])
def test_a_wrong_value_is_named(tmp_path, key, value):
    (tmp_path / "run.json").write_text(json.dumps(asdict(WHOLE) | {key: value}))
    with pytest.raises(CheckpointError, match="run.json: damaged: .*use an older checkpoint"):
        read_run_record(tmp_path)


@pytest.mark.parametrize("key", RUN_RECORD)
def test_a_missing_value_is_named(tmp_path, key):
    values = asdict(WHOLE)
    del values[key]
    (tmp_path / "run.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=f"damaged: {key}"):
        read_run_record(tmp_path)


def test_a_directory_without_one_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="run.json: missing; .* is not a checkpoint"):
        read_run_record(tmp_path)
