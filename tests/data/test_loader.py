"""The same rows in the same order for every world size, worker count and micro-batch size."""

import errno
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
import torch
from data_helpers import (
    dataset_of,
    make_corpus,
    random_documents,
    run_with_batches,
    tiny_tokenizer,
)

from deberta_ds.base.errors import UserError
from deberta_ds.config.batch_schedule import Phase
from deberta_ds.data import corpus as corpus_files
from deberta_ds.data import loader
from deberta_ds.data.loader import build_loader
from deberta_ds.data.rows import Batch

FIELDS = ("rows", "input_ids", "labels", "segments", "positions")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("loader") / "corpus"
    documents = [tiny_tokenizer().encode(text) for text in random_documents(40)]
    make_corpus(path, documents, tiny_tokenizer(), (64,))
    return dataset_of(path)


def one_rank(dataset, phase, micro_batch_size=4, workers=1):
    return build_loader(dataset, phases=[phase], micro_batch_size=micro_batch_size, rank=0,
                        world_size=1, num_workers=workers)


def global_rows(dataset, world_size, workers, micro, start_row=36, steps=2, batch=24):
    """Return the tensors of all global batches, put together from every rank."""
    per_step = [[] for _ in range(steps)]
    for rank in range(world_size):
        loader = build_loader(
            dataset, phases=[Phase(start_row, batch, steps)], micro_batch_size=micro,
            rank=rank, world_size=world_size, num_workers=workers)
        batches = list(loader)
        per_rank = batch // world_size // micro
        assert len(batches) == steps * per_rank
        for index, item in enumerate(batches):
            per_step[index // per_rank].append(item)
    return {name: torch.cat([getattr(item, name) for step in per_step for item in step])
            for name in FIELDS}


def test_batches_for_a_gpu_are_pinned_by_the_rank(dataset, monkeypatch):
    """torch's own thread for it may wait for ever for what a killed worker had begun to send."""
    pinned = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(Batch, "pin_memory", lambda batch: pinned.append(batch) or batch)
    batches = one_rank(dataset, Phase(0, 8, 3))
    first = next(batches)
    assert pinned == [first] and isinstance(first.input_ids, torch.Tensor)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # a run on the CPU beside somebody else's GPUs
    next(batches)
    assert len(pinned) == 1
    batches.close()


def test_rows_do_not_depend_on_world_size_workers_or_micro_batch(dataset):
    expected = global_rows(dataset, 1, 0, 24)
    assert expected["rows"].tolist() == list(range(36, 36 + 48))
    for world_size, workers, micro in ((2, 0, 6), (3, 0, 8), (4, 0, 3), (1, 1, 4), (2, 2, 4)):
        found = global_rows(dataset, world_size, workers, micro)
        for name in FIELDS:
            assert torch.equal(expected[name], found[name]), (name, world_size, workers)


def test_refuses_a_batch_that_the_ranks_cannot_share(dataset):
    with pytest.raises(UserError, match="multiple"):
        build_loader(
            dataset, phases=[Phase(0, 10, 1)], micro_batch_size=4, rank=0, world_size=4,
            num_workers=0)


def test_a_damaged_shard_stops_a_worker_with_one_message(tmp_path):
    path = make_corpus(tmp_path / "corpus", [[10] * 40] * 30, tiny_tokenizer(), (64,))
    dataset = dataset_of(path)
    (path / "tokens" / "00001-000.npy").unlink()
    with pytest.raises(UserError) as caught:
        list(one_rank(dataset, Phase(0, 8, 20), micro_batch_size=8))
    assert "00001-000.npy" in str(caught.value) and "Traceback" not in str(caught.value)


def test_workers_ignore_what_asks_a_run_to_stop_and_say_what_ended_them(dataset):
    before = set(multiprocessing.active_children())
    loader = one_rank(dataset, Phase(0, 4, 400))
    next(loader)
    worker, = set(multiprocessing.active_children()) - before
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        os.kill(worker.pid, number)
    for _ in range(50):
        next(loader)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(UserError, match=r"data.workers = 1\): it was ended by SIGKILL"):
        list(loader)


def test_workers_are_children_of_the_rank_where_pythons_default_is_a_fork_server(dataset):
    """As of Python 3.14: then they would die with the server, not with the rank."""
    usual, before = multiprocessing.get_start_method(), set(multiprocessing.active_children())
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        loader = one_rank(dataset, Phase(0, 4, 4))
        next(loader)
        worker, = set(multiprocessing.active_children()) - before
        assert psutil.Process(worker.pid).ppid() == os.getpid()
        assert len(list(loader)) == 3
    finally:
        multiprocessing.set_start_method(usual, force=True)


def test_a_slow_file_system_is_read_ahead_of(dataset, monkeypatch):
    """5 ms for each file operation: one after another, 240 rows of 3 operations need 3.6 s."""
    operations, waiting, most = [], set(), 0

    def slow(function):
        def wait(*arguments):
            nonlocal most
            operations.append(function)
            waiting.add(threading.get_ident())
            most = max(most, len(waiting))
            time.sleep(0.005)
            waiting.remove(threading.get_ident())
            return function(*arguments)
        return wait

    expected = global_rows(dataset, 1, 0, 1, steps=10)
    monkeypatch.setattr(corpus_files.os, "pread", slow(os.pread))
    monkeypatch.setattr(corpus_files.SmallFiles, "room_bytes", 0)  # as of a large corpus
    dataset = dataset_of(dataset.sources[0].path)
    found = global_rows(dataset, 1, 0, 1, steps=10)  # 240 rows, micro-batches of one
    for name in FIELDS:
        assert torch.equal(expected[name], found[name])
    assert len(operations) >= 3 * 240
    assert most > 8  # at once; not timed, as the machine may be busy


def test_a_run_that_ends_early_does_not_wait_for_its_workers(dataset):
    """They ignore SIGTERM, which is what Python sends them at exit before it waits for them."""
    code = "batches = batches_of(Phase(0, 4, 10**6), 2)\nnext(batches)\nraise SystemExit(3)"
    assert run_with_batches(code, *dataset.num_rows).returncode == 3


def test_a_full_shared_memory_is_named(dataset, monkeypatch):
    """The system names no path: "No space left on device"."""
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("multiprocessing.synchronize._multiprocessing.SemLock", full)
    with pytest.raises(UserError, match="^/dev/shm is full: .*shm-size.*or set data.workers = 0"):
        next(one_rank(dataset, Phase(0, 1, 4)))


def test_a_worker_reads_ahead_of_its_own_rows_alone_and_not_without_end(monkeypatch):
    monkeypatch.setattr(loader, "get_worker_info", lambda: SimpleNamespace(num_workers=3))
    rows = loader.RankRows([Phase(0, 4, 100)], 4, 0, 1)
    reader = loader.Reader(SimpleNamespace(read=lambda g: [g]), rows)
    with ThreadPoolExecutor(2) as threads:
        assert reader._read_ahead(threads, 0) == [[0], [1], [2], [3]]
        assert list(reader._ahead) == list(range(3, 51, 3))  # 68 rows with its own
        assert reader._read_ahead(threads, 3) == [[12], [13], [14], [15]]
        assert list(reader._ahead) == list(range(6, 54, 3))
