"""What changed rows, or what reads them, without a test noticing (docs/evidence/reliability.md)."""

import json
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from data_helpers import make_corpus, tiny_tokenizer

from deberta_ds.base.errors import UserError
from deberta_ds.config.batch_schedule import Stretch
from deberta_ds.data import loader, masking, reading
from deberta_ds.data.remote import RemoteCorpus, upload
from deberta_ds.files import remote


def test_a_worker_reads_ahead_of_its_own_rows_alone_and_not_without_end(monkeypatch):
    monkeypatch.setattr(loader, "get_worker_info", lambda: SimpleNamespace(num_workers=3))
    rows = loader.RankRows([Stretch(0, 4, 100)], 4, 0, 1)
    reader = loader._Reader(SimpleNamespace(read=lambda g: [g]), rows)
    with ThreadPoolExecutor(2) as threads:
        assert reader._read_ahead(threads, 0) == [[0], [1], [2], [3]]
        assert list(reader._ahead) == list(range(3, 51, 3))  # 68 rows with its own
        assert reader._read_ahead(threads, 3) == [[12], [13], [14], [15]]
        assert list(reader._ahead) == list(range(6, 54, 3))


def test_where_no_word_fits_the_shortest_is_chosen():
    """Characters of several bytes are words of their own in a long word, of unlike lengths."""
    starts, lengths, dice = np.array([1, 4, 6]), np.array([3, 2, 4]), np.random.default_rng(0)
    assert masking._choose_words(lengths, 1, dice).tolist() == [1]
    assert masking._choose_ngrams(starts, lengths, 1, 3, dice).tolist() == [1]


def test_each_try_waits_twice_as_long_as_the_last(monkeypatch):
    waits = []
    monkeypatch.setattr(remote.time, "sleep", waits.append)
    monkeypatch.setattr(remote.random, "uniform", lambda low, high: high - low)
    with pytest.raises(UserError, match="s3://a: cannot be read in 8 tries"):
        remote.tried(lambda: b"", "s3://a", bool)
    assert waits == [0.05 * 2**number for number in range(7)]
    waits.clear()
    with pytest.raises(UserError, match="a/b: cannot be written"):
        remote.put(None, "a/b", b"")
    assert waits == [0.1 * 2**number for number in range(7)]


def test_the_blocks_written_first_make_room_until_a_fifth_is_free(tmp_path):
    corpus = RemoteCorpus.__new__(RemoteCorpus)
    corpus.directory, corpus._cache = tmp_path / "one", remote.Cache(gigabytes=75e-6)
    corpus.directory.mkdir()
    for number in range(10):
        with open(tmp_path / f"one/{number}.npy", "wb") as file:
            file.write(b"x" * 8192)
            os.fsync(file.fileno())
        os.utime(file.name, (number, number))
    (tmp_path / "prepared").mkdir()  # where a job of preparation works
    (tmp_path / "prepared/0.npy").write_bytes(b"x" * 8192)
    os.utime(tmp_path / "prepared/0.npy", (0, 0))
    corpus._make_room()
    assert os.stat(tmp_path / "prepared/0.npy").st_size == 8192
    assert [os.stat(tmp_path / f"one/{number}.npy").st_size for number in range(10)] == (
        [0] * 3 + [8192] * 7)


@pytest.mark.parametrize("soft, hard, kept", [
    (256, 256, 128), (1024, 4096, 4096 - 512), (1024, 1024, 1024 - 256),
    (4096, resource.RLIM_INFINITY, 65536 - 8192)])
def test_files_that_are_kept_open_leave_descriptors_to_the_process(monkeypatch, soft, hard, kept):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    assert reading.most_open_files.__wrapped__() == kept


def test_a_corpus_in_the_place_of_another_lists_its_own_files(tmp_path):
    for name, shards in (("old", 3), ("new", 1)):
        corpus = make_corpus(tmp_path / name, [[20, 21]] * 3, tiny_tokenizer(), shards=shards)
        upload(corpus, f"file://{tmp_path}/store")
    listed = json.loads((tmp_path / "store/blocks/manifest.json").read_bytes())["files"]
    assert len(listed) == 4  # of one shard
