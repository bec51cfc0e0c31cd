"""What lost a wait or a byte of a save without a test noticing (docs/evidence/reliability.md)."""

import os
from pathlib import Path

import pytest
import thread_ranks
import torch
from data_helpers import RUN_RECORD
from safetensors.torch import load_file
from test_saving import engine_state  # noqa: F401

from deberta_ds.base import files
from deberta_ds.checkpoint import find, save
from deberta_ds.checkpoint.find import CheckpointError
from deberta_ds.checkpoint.run_record import RunRecord
from deberta_ds.checkpoint.saved_state import rank_file

RECORD = RunRecord(**RUN_RECORD | {"step": 5, "config": {}})


def test_the_manifest_is_written_when_all_else_is_on_the_disk(
        tmp_path, monkeypatch, engine_state):  # noqa: F811
    """fsync of every file, then of the directory, the manifest, and the directory above."""
    path, done, fsync = find.path_of(tmp_path, 5), [], os.fsync

    def noted(descriptor):
        fsync(descriptor)
        there = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        done.append(there.relative_to(tmp_path).as_posix().split("/step-00000005")[-1])

    monkeypatch.setattr(files.os, "fsync", noted)
    source = tmp_path / "spm.txt"
    source.write_text("a tokenizer")
    save.finish_save(save.begin_save(None, tmp_path, RECORD, 3, {"spm.model": source}))
    assert (path / "spm.model").read_text() == "a tokenizer" and not find.problems_of(path)
    manifest = max(n for n, name in enumerate(done) if find.MANIFEST in name)
    assert f"/{rank_file(0)}" in done[:manifest] and done[-1] == "checkpoints"
    done.clear()
    one = save.Save(path, 5, 3)
    save._write_manifest(one, [{rank_file(0): {}}])
    before, temporary, *after = done
    assert before == "" and find.MANIFEST in temporary and after == ["", "checkpoints"]


def test_one_rank_that_cannot_write_is_an_error_on_all(
        tmp_path, monkeypatch, engine_state):  # noqa: F811
    write = save.write_stream

    def fail(path, *arguments):
        if path.name == rank_file(1):
            raise OSError(5, "Input/output error")
        return write(path, *arguments)

    monkeypatch.setattr(save, "write_stream", fail)

    def attempt(rank):
        with pytest.raises(CheckpointError, match="rank 1: "):
            save.save(None, tmp_path, RECORD, 3)
        return True

    assert thread_ranks.run(3, attempt) == [True] * 3
    assert not find.list_steps(tmp_path)


def test_an_optimizer_on_nvme_is_written_in_the_foreground(
        tmp_path, monkeypatch, engine_state):  # noqa: F811
    monkeypatch.setattr(save, "is_on_disk", lambda engine: True)
    one = save.begin_save(None, tmp_path, RECORD, 3, in_background=True)
    assert one.thread is None and one.entries


def test_a_stream_of_several_types_is_a_safetensors_file(tmp_path):
    tensors = {"a": torch.randn(3).bfloat16(), "bcd": torch.randn(5), "e": torch.arange(2)}
    described = [(name, tensor.dtype, tensor.numel()) for name, tensor in tensors.items()]
    save.write_stream(tmp_path / "one", described, tensors.items())
    found = load_file(tmp_path / "one")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert int.from_bytes((tmp_path / "one").read_bytes()[:8], "little") % 8 == 0


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
