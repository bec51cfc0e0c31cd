"""Which checkpoints are found, kept, deleted and put back, and what their run.json must hold."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from data_helpers import RUN_RECORD, STATE, fake_checkpoint

from deberta_ds.checkpoint import find, save, saved_state
from deberta_ds.checkpoint.find import Best, RunRecord, rank_file, read_run_record
from deberta_ds.checkpoint.saved_state import SavedState
from deberta_ds.engine.state import Buffer, CheckpointError, Piece, replicated


def test_retention_keeps_the_newest_the_spared_and_what_is_not_finished_yet():
    steps = [Path(f"step-0000000{number}") for number in range(1, 6)]
    first = steps[0]
    assert save.outdated(steps, steps[:4], 2, lambda path: path == first) == [steps[1]]
    assert save.outdated(steps, [], 1, lambda path: False) == []
    assert [save.is_permanent(3, step) for step in (2, 3, 4, 6)] == [False, True, False, True]
    assert save.is_permanent((4,), 4) and not save.is_permanent((4,), 8)
    assert not save.is_permanent(0, 3)


def test_the_best_checkpoint_outlives_newer_ones_and_is_a_whole_one(tmp_path):
    paths = [find.path_of(tmp_path, step) for step in (1, 2, 3)]
    for path in paths:
        path.mkdir(parents=True)
        (path / find.MANIFEST).write_text("{}")
    (tmp_path / ".best.tmp").symlink_to("nowhere")  # of a save that was killed
    save.point_best(paths[0])
    (unfinished := find.path_of(tmp_path, 4)).mkdir()
    save.point_best(unfinished)
    save.prune(tmp_path, 1)
    assert find.list_steps(tmp_path) == [paths[0], paths[2], unfinished]
    assert (tmp_path / "best").resolve() == paths[0].resolve()
    assert len(save.set_aside(tmp_path, 1)) == 1  # what a run that goes on from step 1 gives up
    assert find.list_steps(tmp_path) == [paths[0], unfinished]
    (unfinished / find.MANIFEST).write_text("{}")
    save.point_best(unfinished)
    assert len(save.set_aside(tmp_path, 1)) == 1
    assert not (tmp_path / "best").is_symlink()  # it would point to nothing


def test_a_manifest_names_every_rank_and_is_of_its_own_step(tmp_path):
    assert not find.problems_of(fake_checkpoint(find.path_of(tmp_path, 1)))
    path = fake_checkpoint(find.path_of(tmp_path, 2), world_size=3)
    assert find.problems_of(path) == [
        f"manifest.json does not name {rank_file(rank)}" for rank in (1, 2)]
    for number, step in enumerate((3, 5), 10):
        path = fake_checkpoint(tmp_path / str(number) / "step-00000004", step=step)
        assert find.problems_of(path) == ["manifest.json is damaged"]


def test_a_command_with_a_path_goes_on_from_what_it_has_saved_since(tmp_path):
    place = str(fake_checkpoint(tmp_path / "other" / "step-00000007"))
    assert find.find(tmp_path / "out", place).path == Path(place)
    for step, source in ((5, place), (8, place), (9, "")):
        fake_checkpoint(find.path_of(tmp_path / "out", step), begun_from=source)
    found = find.find(tmp_path / "out", place)
    assert (find.step_of(found.path), found.begun_from) == (8, place)
    (find.path_of(tmp_path / "out", 9) / find.MANIFEST).unlink()
    assert find.find(tmp_path / "out", "auto").begun_from == place  # its command may come again


class _State:
    """Of parameters "a", which never had a gradient, and "b"."""

    loss_scale, buffers, step = {"cur_scale": 8.0}, {}, torch.tensor(3.0)

    def __init__(self, directory=""):
        self.counters = {"global_steps": 3}

    def state_keys(self, name):
        return ["exp_avg"] if name == "b" else []

    def scalars(self, name):
        return {"step": self.step} if name == "b" else {}

    def read(self, name, key, start, count):
        return torch.full((count,), 1.0 if name == "a" else 2.0)


def test_a_restore_writes_moments_counters_and_the_loss_scale_of_all(monkeypatch):
    done, state = [], {}
    flats = [Buffer(torch.zeros(4), (("a", Piece(0, 0, 0, 0, 2)), ("b", Piece(0, 0, 2, 0, 2)))),
             Buffer(torch.zeros(2), (("b", Piece(0, 1, 0, 2, 2)),))]
    monkeypatch.setattr(saved_state, "SavedState", _State)
    monkeypatch.setattr(saved_state, "layout_of", lambda engine: None)
    monkeypatch.setattr(saved_state, "open_files", lambda *_: None)
    monkeypatch.setattr(saved_state, "base_optimizer", lambda engine: SimpleNamespace(
        state=state, param_groups=[{}]))
    monkeypatch.setattr(saved_state, "buffers", lambda *_, writing: flats)
    monkeypatch.setattr(saved_state, "write_loss_scale", lambda engine, saved: done.append(saved))
    monkeypatch.setattr(saved_state.dist, "barrier", lambda: done.append("barrier"))
    engine = SimpleNamespace(module=torch.nn.Module())
    saved_state.load_state(engine, "x")
    assert done == [{"cur_scale": 8.0}, "barrier"]  # nobody goes on while a file is read
    assert engine.global_steps == 3 and flats[0].weights.tolist() == [1, 1, 2, 2]
    entries = [state[flat.weights] for flat in flats]
    assert [entry["exp_avg"].tolist() for entry in entries] == [[1, 1, 2, 2], [2, 2]]
    entries[0]["step"] += 1  # in place, as AdamW counts
    assert [float(entry["step"]) for entry in entries] == [4.0, 3.0]
    del engine.global_steps
    saved_state.load_state(engine, "x", is_other_run=True)
    assert not hasattr(engine, "global_steps")


def test_a_frozen_parameter_of_16_bits_is_read_as_fp32(tmp_path):
    layout = replicated({"a": (2, 3)}, 1)
    values = torch.arange(6.0).bfloat16()
    save.write_stream(tmp_path / rank_file(0), [("0.fp32", values.dtype, 6)], [("0.fp32", values)])
    (tmp_path / find.LAYOUT_FILE).write_text(json.dumps(asdict(layout) | STATE))
    found = SavedState(tmp_path).read_whole("a")
    assert found.dtype == torch.float32 and found.tolist() == [[0, 1, 2], [3, 4, 5]]


WHOLE = RunRecord(**RUN_RECORD | {
    "config": {"name": "x"}, "best": Best("roc_auc"), "recent_losses": [1.5],
    "versions": {"torch": "2"}, "time_use": {"saves": 0.25}, "begun_from": "/x"})


def test_what_is_written_is_read(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(asdict(WHOLE)))
    assert read_run_record(tmp_path) == WHOLE
    (tmp_path / "run.json").unlink()
    with pytest.raises(CheckpointError, match="run.json: missing; .* is not a checkpoint"):
        read_run_record(tmp_path)


@pytest.mark.parametrize("key, value", [
    ("step", -1), ("step", "3"), ("world_size", 0), ("sequences_seen", None), ("seconds", []),
    ("content_hashes", {"a": 1}), ("recent_losses", ["x"]), ("deepspeed", {"bf16": 3}),
    ("config", "x"), *((key, ...) for key in RUN_RECORD)])
def test_a_wrong_or_missing_value_is_named(tmp_path, key, value):
    values = asdict(WHOLE) | {key: value}
    if value is ...:
        del values[key]
    (tmp_path / "run.json").write_text(json.dumps(values))
    named = key if value is ... else ".*use an older checkpoint"
    with pytest.raises(CheckpointError, match=f"run.json: damaged: {named}"):
        read_run_record(tmp_path)
