"""Jobs and their units: one process at a time in a directory, ranks share the work, full disks."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from data_helpers import READ, random_documents, tiny_tokenizer, tokenize, tree, write_json_lines
from launching import ROOT

from deberta_ds.base.errors import UserError, still_at_work
from deberta_ds.base.files import atomic_path
from deberta_ds.corpus import units
from deberta_ds.corpus.dedup import find_duplicates
from deberta_ds.corpus.documents import plan_units
from deberta_ds.corpus.pack import pack_corpus
from deberta_ds.corpus.tokenize import CleanOptions
from deberta_ds.corpus.units import drive, job, run_units
from deberta_ds.data import shards


def test_rank_0_works_too_and_takes_waiting_units_back(tmp_path):
    done = []

    def note(number):
        time.sleep(0.01)
        done.append((number, threading.get_ident()))
        return {}

    missing = deque((tmp_path, str(number), note, (number,)) for number in range(24))
    with ThreadPoolExecutor(1) as pool:
        drive(pool, missing, 12, work_here=True)
    assert sorted(number for number, _ in done) == list(range(24))
    here = sum(thread == threading.get_ident() for _, thread in done)
    assert here >= 8  # about 12; without taking back the pool alone does the last 12, here 6


def test_two_jobs_in_one_directory_are_one_error(text_file, tmp_path):
    """The second deleted the files of the first."""
    out, units = tmp_path / "out", plan_units([str(text_file)], READ)
    with job(out, {"version": 1}, finished="manifest.json"):
        for work in (tokenize, partial(find_duplicates, read=READ)):
            with pytest.raises(UserError, match=r"another command is at work here \(pid \d+ on"):
                work(units, out)
    shutil.rmtree(out)
    if not (child := os.fork()):  # a lock does not outlive its process
        with job(out, {"version": 1}, finished="x"):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert (out / ".lock").exists()
    tokenize(units, out)
    assert not (out / ".lock").exists()


def test_two_at_once_over_an_earlier_plan_do_not_take_each_others_files(tmp_path, monkeypatch):
    """The second removed the directory in which the first was at work, as a plan of before."""
    inputs, out = [tmp_path / "0.jsonl", tmp_path / "1.jsonl"], tmp_path / "out"
    rows, locked, done = out / "rows-64", units._locked, {}

    def pack_after(*, files: int):
        planned = plan_units(list(map(str, inputs[:files])), READ, inputs[0].stat().st_size)
        tokenize(planned, out)
        return lambda part=None: pack_corpus(out, tiny_tokenizer(), 64, part=part)

    for path in inputs:
        write_json_lines(path, [*random_documents(50), path.name])
    pack_after(files=2)()
    before, pack = tree(rows), pack_after(files=1)
    with ExitStack() as first:
        first.enter_context(locked(rows, ".lock", shared=False))
        with pytest.raises(UserError, match=r"another command is at work here \(pid \d+ on"):
            pack()
        assert tree(rows) == before and len(before) == 5
        monkeypatch.setattr(units.time, "sleep", lambda seconds: first.close())
        assert pack((1, 2)) is None  # a part waits for the one that makes it ready
    pack()
    assert len(tree(rows)) == 3  # nothing of the shard that is no more
    pack = pack_after(files=2)

    def late(*arguments, **options):  # the first does all of it after the second has looked
        monkeypatch.setattr(units, "_locked", locked)
        pack()
        done.update((path, path.stat().st_mtime_ns) for path in rows.iterdir())
        return locked(*arguments, **options)

    monkeypatch.setattr(units, "_locked", late)
    pack()
    assert tree(rows) == before
    assert done == {path: path.stat().st_mtime_ns for path in rows.iterdir()}


def test_a_first_try_that_ended_on_an_error_does_not_block_a_second(tmp_path):
    """With another option, or a corrected input, it was refused as the output of others."""
    text, out, held = tmp_path / "text.jsonl", tmp_path / "out", tmp_path / "held"
    good = "".join(json.dumps({"text": line}) + "\n" for line in random_documents(800))

    def made(**options):
        return tokenize(text, out, unit_bytes=0, heldout_out=held, heldout_share=0.1, **options)

    text.write_text(good + "not json\n")
    with pytest.raises(UserError, match="not JSON"):
        made(clean=CleanOptions())
    text.write_text(good)
    assert sum(manifest.documents for manifest in made(clean=CleanOptions()).values()) > 250
    with pytest.raises(UserError, match="holds the output of other inputs or options"):
        made(clean=CleanOptions(min_characters=9))


def test_a_refused_command_leaves_the_plan_of_an_array_alone(tmp_path):
    """Its held-out directory, in which nothing was yet, was given the wrong command's plan."""
    text = tmp_path / "text.jsonl"
    write_json_lines(text, random_documents(300))

    def made(part, least):
        return tokenize(text, tmp_path / "out", clean=CleanOptions(min_characters=least), part=part,
                        heldout_out=tmp_path / "held", heldout_share=1e-6)

    assert made((1, 2), 1) == {}
    for part in (None, (2, 2)):
        with pytest.raises(UserError, match="holds the output of other inputs or options"):
            made(part, 9)
    assert made((2, 2), 1) == {} and made(None, 1)


def test_two_writers_of_one_process_id_do_not_share_a_temporary_file(tmp_path, monkeypatch):
    """Parts of an array in containers have the same ids: one renamed the other's file away."""
    monkeypatch.setattr("os.getpid", lambda: 7)
    with atomic_path(tmp_path / "file") as first, atomic_path(tmp_path / "file") as second:
        first.write_text("first")
        second.write_text("second")
        assert all(path.match(units._TEMPORARY) for path in (first, second))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_part_that_begins_between_two_looks_is_no_other_command(tmp_path, monkeypatch):
    """The directory was found without a plan, then not empty: by the plan of another part."""
    plan, looks = {"version": 1}, []

    def exists(path):
        if not looks:
            looks.append(path)
            units.write_plan(tmp_path, plan)
            return False
        return os.path.exists(path)

    monkeypatch.setattr(Path, "exists", exists)
    units.check_description(tmp_path, plan, tmp_path)
    (tmp_path / "made").touch()
    with pytest.raises(UserError, match="other inputs or options"):
        units.check_description(tmp_path, plan | {"words": 9}, tmp_path)


def test_workers_where_pythons_default_is_a_fork_server(text_file, tmp_path):
    """As of Python 3.14: each worker took the server for its parent, found another, and ended."""
    planned = plan_units([str(text_file)], READ, 20_000)
    find_duplicates(planned, tmp_path / "one", read=READ)
    usual = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        find_duplicates(planned, tmp_path / "two", read=READ, workers=2)
    finally:
        multiprocessing.set_start_method(usual, force=True)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_texts_that_units_return_are_not_all_in_memory_at_once(tmp_path):
    """The examples of filters, 40 kB for each reason and unit, were: gigabytes of many units."""
    (tmp_path / ".units").mkdir()
    jobs = {f"{number}": ("x",) for number in range(60)}
    tracemalloc.start()
    try:
        sizes = run_units(tmp_path, hundred_thousand, jobs, workers=1, label="texts",
                          keep=lambda result: len(result["text"]))
        assert tracemalloc.get_traced_memory()[1] < 2_000_000  # of 6 MB
    finally:
        tracemalloc.stop()
    assert sizes == [100_000] * 60


def hundred_thousand(letter: str) -> dict:
    return {"text": letter * 100_000}


def test_a_line_says_that_work_goes_on(monkeypatch, capsys):
    """Training a tokenizer said nothing for 3.5 minutes."""
    monkeypatch.setattr("deberta_ds.base.errors._SAY_SECONDS", 0.01)
    said = threading.Semaphore(0)
    with still_at_work(lambda: said.release() or "training"):
        assert said.acquire(timeout=60) and said.acquire(timeout=60)
    assert capsys.readouterr().err.startswith("training, 0 s\n")


def test_mpirun_without_its_pool_is_an_error(text_file, tmp_path, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.delitem(sys.modules, "mpi4py.futures", raising=False)
    with pytest.raises(UserError, match="mpirun -n N python -m mpi4py.futures"):
        tokenize(text_file, tmp_path / "out")


def test_a_full_disk_is_an_error_with_its_number(monkeypatch, tmp_path):
    @contextmanager
    def full_disk(path):
        yield "/dev/full"

    monkeypatch.setattr(shards, "atomic_path", full_disk)
    with pytest.raises(OSError) as caught:
        shards.save_array(tmp_path / "x.npy", np.arange(100_000))
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("first", [0, 1])
def test_an_array_of_slurm_jobs_may_begin_at_0(first):
    environment = {f"SLURM_{name}": str(value) for name, value in {
        "CPUS_PER_TASK": 2, "ARRAY_TASK_ID": first + 2, "ARRAY_TASK_MIN": first,
        "ARRAY_TASK_MAX": first + 3}.items()}
    command = ["bash", ROOT / "launch/cluster/data_prep.sbatch", "build.py", "--recipe", "c.toml"]
    said = subprocess.run(command, env=os.environ | environment | {"PYTHON": "echo"}, text=True,
                          capture_output=True, check=True).stdout
    assert said == "data_prep/build.py --recipe c.toml --workers 2 --part 3/4\n"
