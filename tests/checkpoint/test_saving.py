"""Saving while training goes on: nothing torn, nothing lost, and no cost that grows with W^2."""

import errno
import json
import math
import os
import shutil
import sys
import threading
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import rank_helpers
import thread_ranks
import torch
from data_helpers import RUN_RECORD, STATE
from launching import deepspeed_json, make_run, options_of
from safetensors.torch import load_file

from deberta_ds.base import files
from deberta_ds.checkpoint import find, save, saved_state
from deberta_ds.checkpoint.find import CheckpointError, RunRecord, rank_file
from deberta_ds.checkpoint.saved_state import SavedState
from deberta_ds.cluster import dist
from deberta_ds.engine.state import Buffer, Group, Layout, layout_from, replicated
from deberta_ds.release.model_files import read_checkpoint
from deberta_ds.tracking.log import read_metrics

RECORD = RunRecord(**RUN_RECORD | {"step": 5, "config": {}})
SHAPES = {"a": (7, 3), "b": (5,), "c": (64, 16), "d": (1,)}
TOTAL = sum(math.prod(shape) for shape in SHAPES.values())


def layouts(world_size: int) -> list[Layout]:
    """Return the three cuts of four parameters over a cluster of any size."""
    shares = [math.ceil(math.prod(shape) / world_size) for shape in SHAPES.values()]
    offsets = tuple(sum(shares[:number]) for number in range(len(shares)))
    line = replicated(SHAPES, world_size).groups[0]
    split = (Group(("b", "c"), (0, 5), math.ceil((5 + 1024) / world_size)),
             Group(("a", "d"), (0, 21), math.ceil(22 / world_size)))
    return [Layout(world_size, "line", SHAPES, (line,)), Layout(world_size, "line", SHAPES, split),
            Layout(world_size, "parameter", SHAPES, (Group(tuple(SHAPES), offsets, sum(shares)),))]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 64])
def test_every_element_has_one_place_and_every_slice_is_found(world_size):
    """Oracle: buffers filled from `held_by`, element by element, and read through `pieces`."""
    for layout in layouts(world_size):
        assert layout_from(json.loads(json.dumps(asdict(layout))), "x") == layout
        whole = {name: torch.arange(math.prod(shape)) + 10_000 * number
                 for number, (name, shape) in enumerate(SHAPES.items())}
        buffers, placed = {}, 0
        for rank in range(world_size):
            for number, group in enumerate(layout.groups):
                buffers[rank, number] = torch.full((group.size,), -1)
                for name, piece in layout.held_by(rank, number):
                    place = buffers[rank, number][piece.offset:piece.offset + piece.count]
                    assert (place == -1).all() and len(place) == piece.count
                    place.copy_(whole[name][piece.start:piece.start + piece.count])
                    placed += piece.count
        assert placed == TOTAL
        for name, values in whole.items():
            for start, count in ((0, None), (len(values) // 3, len(values) // 2), (0, 0)):
                read = [buffers[p.rank, p.group][p.offset:p.offset + p.count]
                        for p in layout.pieces(name, start, count)]
                wanted = values[start:None if count is None else start + count]
                assert torch.equal(torch.cat([torch.empty(0, dtype=torch.long), *read]), wanted)


@pytest.mark.parametrize("world_size", range(1, 8))
@pytest.mark.parametrize("count", range(1, 24))
def test_the_shares_of_zero_3_are_those_of_a_padded_tensor(world_size, count):
    """DeepSpeed fills a tensor up until the ranks divide it, and cuts it in equal parts."""
    share = -(-count // world_size)
    padded = torch.full((world_size * share,), -1)
    padded[:count] = torch.arange(count)
    layout = Layout(world_size, "parameter", {"x": (2,), "y": (count,)},
                    (Group(("x", "y"), (0, 2), 2 + share),))
    for rank, wanted in enumerate(padded.view(world_size, share)):
        held = [piece for name, piece in layout.held_by(rank, 0) if name == "y"]
        real = wanted[wanted >= 0].tolist()
        assert [(p.offset, p.start, p.count) for p in held] == ([(2, real[0], len(real))]
                                                                if real else [])
        assert [p for p in layout.pieces("y") if p.rank == rank] == held


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_what_pads_a_parameter_is_saved_as_zeros(world_size):
    """ZeRO-3 leaves there what memory held, so that equal states had files that were not."""
    for layout in layouts(world_size):
        left = world_size * sum(group.size for group in layout.groups)
        for rank in range(world_size):
            for number, group in enumerate(layout.groups):
                flat, held = torch.full((group.size,), 2.0), tuple(layout.held_by(rank, number))
                saved_state.clear_padding(flat, Buffer(flat, held))
                left -= group.size - sum(piece.count for _, piece in held)
                assert all((flat[p.offset:p.offset + p.count] == 2).all() for _, p in held)
                assert (flat == 2).sum() == sum(piece.count for _, piece in held)
        assert left == TOTAL


@pytest.mark.parametrize("damage", [
    {"groups": []}, {"groups": 3}, {"world_size": 0}, {"shapes": {"a": [7, 3]}},
    {"cut": "diagonal"}, {"shapes": SHAPES | {"c": (64, 17)}}, {"world_size": "many"}])
def test_damaged_map_is_one_clear_error(damage):
    values = asdict(layouts(2)[0]) | damage
    with pytest.raises(CheckpointError, match=r"layout\.json: is no map"):
        layout_from(values, "layout.json")


@pytest.mark.parametrize("damage", [
    {"counters": {"global_steps": 3, "global_samples": None, "skipped_steps": 0}},
    {"counters": {"global_steps": 3}}, {"loss_scale": {"dynamic": True, "cur_scale": "x"}},
    {"keys": [1]}, {"scalars": {"step": 3}}])
def test_damaged_state_is_one_clear_error(tmp_path, damage):
    whole = asdict(layouts(2)[0]) | STATE
    (tmp_path / "layout.json").write_text(json.dumps(whole))
    assert SavedState(tmp_path).counters["global_samples"] == 24
    (tmp_path / "layout.json").write_text(json.dumps(whole | damage))
    with pytest.raises(CheckpointError, match=r"layout\.json: is not what a save writes"):
        SavedState(tmp_path)


@pytest.mark.parametrize("world_size", [64, 4096])
def test_a_resume_opens_only_the_files_that_hold_what_a_rank_will_own(world_size):
    """At the same world size one file; at 15/16 of it a handful, at any number of ranks."""
    shapes = {f"p{number}": (1536, 384) for number in range(100)}

    def by_parameter(ranks: int) -> Layout:
        share = math.ceil(1536 * 384 / ranks)
        offsets = tuple(range(0, 100 * share, share))
        return Layout(ranks, "parameter", shapes, (Group(tuple(shapes), offsets, 100 * share),))

    for layout in (partial(replicated, shapes), by_parameter):
        then = layout(world_size)
        for now in (world_size, world_size * 15 // 16):
            for rank in (0, now // 2, now - 1):
                opened = {piece.rank for name, mine in layout(now).held_by(rank, 0)
                          for piece in then.pieces(name, mine.start, mine.count)}
                assert len(opened) == 1 if now == world_size else len(opened) <= 4


WATCHED: list[str] | None = None  # the file operations of a block, while it is not None


def watch(event: str, _arguments: tuple) -> None:
    if WATCHED is not None and event in ("open", "os.listdir", "os.scandir", "os.remove"):
        WATCHED.append(event)


sys.addaudithook(watch)


def operations_of_last_rank(path, world_size: int, monkeypatch) -> list[str]:
    """Return what the last rank of a cluster does to the disk for its part of a save."""
    global WATCHED
    real_stat = os.stat

    def watched_stat(*arguments, **options):
        if WATCHED is not None:  # an empty list, too
            WATCHED.append("stat")
        return real_stat(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(dist, "world_size", lambda: world_size)
        patch.setattr(dist, "rank", lambda: world_size - 1)
        patch.setattr(dist, "is_main", lambda: False)
        patch.setattr(os, "stat", watched_stat)
        size = replicated(SHAPES, world_size).groups[0].size
        one, WATCHED = save.Save(path, keep=1), []
        one.attempt(lambda: save.write_my_files(
            one, [("0.fp32", torch.float32, size)], [("0.fp32", torch.zeros(size))], {}))
        done, WATCHED = WATCHED, None
    assert not one.problem and one.entries.keys() == {rank_file(world_size - 1)}
    return done


@pytest.mark.parametrize("world_size", [8, 4096])
def test_saving_costs_a_rank_one_file_in_any_cluster(tmp_path, monkeypatch, world_size):
    """It neither lists nor looks at what others wrote, nor reads again what it wrote itself."""
    for rank in range(20):
        (tmp_path / rank_file(rank)).write_bytes(b"x")
    assert operations_of_last_rank(tmp_path, world_size, monkeypatch) == ["open"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One run saved in the foreground and one in the background, on two ranks under ZeRO-1."""
    root = tmp_path_factory.mktemp("background")
    run = make_run(root, dropout=0.1, steps="12", save_every="3", eval_every="12", two_layers=True)
    ds = deepspeed_json(root / "zero1.json", 1)
    for name, in_background in (("a", "false"), ("b", "true")):
        rank_helpers.run(2, [*options_of(run, ds), f"--out_dir={root / name}",
                             f"--train.save_in_background={in_background}"], root / f"log_{name}")
    return root


@pytest.mark.multi
def test_what_is_saved_in_the_background_is_the_state_of_its_step(runs):
    """Not of a later one, though training went on: bit for bit what a pause would have saved."""
    steps = find.list_finished(runs / "a")
    assert [path.name for path in steps] == [f"step-{n:08d}" for n in (3, 6, 9, 12)]
    for path in steps:
        first = SavedState(path)
        second = SavedState(find.path_of(runs / "b", find.step_of(path)))
        assert not find.problems_of(second.directory)
        for name in first.shapes:
            for key in ("fp32", "exp_avg", "exp_avg_sq"):
                assert torch.equal(first.read(name, key), second.read(name, key)), (path, name)
    lines = [[(r["step"], r["loss"]) for r in read_metrics(runs / name / "metrics.jsonl")
              if r["kind"] == "train"] for name in "ab"]
    assert lines[0] == lines[1] and len(lines[0]) == 12


@pytest.mark.multi
def test_a_checkpoint_holds_its_tokenizer_and_can_be_exported_where_the_run_was_moved(runs):
    path = find.path_of(runs / "b", 12)
    assert (path / "spm.model").read_bytes() == (runs / "spm.model").read_bytes()
    found, = read_checkpoint(runs / "b", "fp32").tokenizer_files.values()
    assert (found.path, found.data) == (path / "spm.model", (runs / "spm.model").read_bytes())


@pytest.fixture
def engine_state(monkeypatch):
    """A state of 24 numbers, cut over the ranks; no engine is asked."""
    weights = torch.ones(24)
    monkeypatch.setattr(save, "layout_of",
                        lambda engine: replicated({"w": (24,)}, dist.world_size()))
    monkeypatch.setattr(save, "is_on_disk", lambda engine: False)
    monkeypatch.setattr(save, "described_tensors", lambda engine, layout: [
        ("0.fp32", torch.float32, layout.groups[0].size)])
    monkeypatch.setattr(save, "tensors_of_rank", lambda engine, layout: iter(
        [("0.fp32", weights.view(dist.world_size(), -1)[dist.rank()])]))
    monkeypatch.setattr(save, "describe_engine", lambda engine, layout: asdict(layout) | STATE)
    return weights


def test_no_rank_writes_before_the_remains_of_a_killed_save_are_gone(
        tmp_path, monkeypatch, engine_state):
    """Rank 0 deletes them; what others have written by then would go with them."""
    path = find.path_of(tmp_path, 5)
    path.mkdir(parents=True)
    (path / rank_file(7)).write_bytes(b"left behind")
    empty = save.empty
    monkeypatch.setattr(save, "empty", lambda path: (time.sleep(0.3), empty(path)))
    engine_state.copy_(torch.arange(24))
    record = replace(RECORD, world_size=3)
    saved = thread_ranks.run(3, lambda rank: save.finish_save(
        save.begin_save(None, tmp_path, record, 3)))
    assert saved == [path] * 3 and not find.problems_of(path)
    assert SavedState(path).read("w", saved_state.MASTER).tolist() == list(range(24))


def test_an_old_checkpoint_s_directory_goes_when_every_rank_has_deleted_its_files(
        tmp_path, monkeypatch):
    """Or rank 0 deletes thousands of files alone, and a network disk keeps the directory."""
    for step in (1, 2):
        path = find.path_of(tmp_path, step)
        path.mkdir(parents=True)
        for name in (find.MANIFEST, *map(rank_file, range(7))):
            (path / name).write_bytes(b"{}")
    remove, seen = shutil.rmtree, []
    unlink = Path.unlink

    def slow_unlink(path, **options):
        time.sleep(0.1 * dist.rank())
        unlink(path, **options)

    def seen_remove(path, **options):
        seen.append(sorted(os.listdir(path)))
        remove(path, **options)

    monkeypatch.setattr(Path, "unlink", slow_unlink)
    monkeypatch.setattr(shutil, "rmtree", seen_remove)
    thread_ranks.run(3, lambda rank: save.prune(tmp_path, 1))
    assert seen == [[]] and [p.name for p in find.list_steps(tmp_path)] == ["step-00000002"]


def test_a_slow_disk_delays_the_manifest_and_never_training(tmp_path, monkeypatch, engine_state):
    """A real thread that is held back: the copy is of the step, the manifest waits, one at most."""
    release = threading.Event()
    real_write = save.write_stream

    def slow_write(*arguments):
        release.wait(20)
        return real_write(*arguments)

    monkeypatch.setattr(save, "write_stream", slow_write)
    began = time.monotonic()
    one = save.begin_save(None, tmp_path, RECORD, 3, in_background=True)
    assert time.monotonic() - began < 10 and not one.is_written()
    engine_state.zero_()  # the next step
    assert find.find(tmp_path, "auto").path is None
    release.set()
    path = save.finish_save(one)
    assert find.find(tmp_path, "auto").path == path
    assert SavedState(path).read("w", saved_state.MASTER).tolist() == [1.0] * 24


@pytest.mark.parametrize("number, remedy", [
    (errno.ENOSPC, "No space left on device; make room there.*one checkpoint more than train.keep"),
    (errno.EIO, "the disk or the network file system has a fault"),
    (errno.ENOENT, "No such file or directory; check the path")])
def test_a_write_that_fails_in_the_background_is_one_error(tmp_path, monkeypatch, number, remedy):
    def fail(*_arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(save, "write_stream", fail)
    one = save.Save(find.path_of(tmp_path, 5), 3)
    one.path.mkdir(parents=True)
    one.thread = threading.Thread(target=lambda: one.attempt(
        lambda: save.write_my_files(one, [], [], {})))
    one.thread.start()
    with pytest.raises(CheckpointError, match=f"cannot be saved: rank 0: .*{remedy}") as caught:
        save.finish_save(one)
    assert ("train.keep" in str(caught.value)) == (number == errno.ENOSPC)
    assert not one.path.exists()


@pytest.mark.multi
def test_save_minutes_saves_between_save_every(tmp_path):
    run = make_run(tmp_path, steps="4", save_every="1000", eval_every="1000", log_every="2",
                   warmup_steps="0", two_layers=True)
    ds = deepspeed_json(tmp_path / "zero1.json", 1)
    rank_helpers.run(1, [*options_of(run, ds), "--train.save_minutes=1e-9"], tmp_path / "log")
    assert [p.name[-1] for p in find.list_finished(tmp_path / "out")] == ["2", "4"]


def test_the_manifest_is_written_when_all_else_is_on_the_disk(
        tmp_path, monkeypatch, engine_state):
    """fsync of every file, then of the directory, the manifest, and the directory above."""
    path, done, fsync = find.path_of(tmp_path, 5), [], os.fsync

    def noted(descriptor):
        fsync(descriptor)
        there = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        done.append(there.relative_to(tmp_path).as_posix().split("/step-00000005")[-1])

    monkeypatch.setattr(files.os, "fsync", noted)
    read = {"spm.model": files.ReadFile(tmp_path / "gone", b"a tokenizer")}
    save.finish_save(save.begin_save(None, tmp_path, RECORD, 3, read))
    assert (path / "spm.model").read_text() == "a tokenizer" and not find.problems_of(path)
    manifest = max(n for n, name in enumerate(done) if find.MANIFEST in name)
    assert f"/{rank_file(0)}" in done[:manifest] and done[-1] == "checkpoints"
    done.clear()
    one = save.Save(path, 3)
    save.write_manifest(one, [{rank_file(0): {}}])
    before, temporary, *after = done
    assert before == "" and find.MANIFEST in temporary and after == ["", "checkpoints"]


def test_one_rank_that_cannot_write_is_an_error_on_all(
        tmp_path, monkeypatch, engine_state):
    write = save.write_stream

    def fail(path, *arguments):
        if path.name == rank_file(1):
            raise OSError(5, "Input/output error")
        return write(path, *arguments)

    monkeypatch.setattr(save, "write_stream", fail)

    def attempt(rank):
        with pytest.raises(CheckpointError, match="rank 1: "):
            save.finish_save(save.begin_save(None, tmp_path, RECORD, 3))
        return True

    assert thread_ranks.run(3, attempt) == [True] * 3
    assert not find.list_steps(tmp_path)


def test_an_optimizer_on_nvme_is_written_in_the_foreground(
        tmp_path, monkeypatch, engine_state):
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
