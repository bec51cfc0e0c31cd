"""Remote corpora: the rows of the local one, whatever the server does to its answers."""

import dataclasses
import itertools
import json
import os
import pickle
import random
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pytest
from data_helpers import (
    dataset_of,
    flip_a_bit,
    make_corpus,
    random_documents,
    run_main,
    tiny_tokenizer,
)
from fsspec.implementations.local import LocalFileSystem
from s3_server import s3_bucket

from deberta_ds.base.errors import UserError
from deberta_ds.config.batch_schedule import Phase
from deberta_ds.config.objective import MaskConfig
from deberta_ds.data import remote as corpus_remote
from deberta_ds.data.corpus import Corpus
from deberta_ds.data.loader import build_loader
from deberta_ds.data.remote import BLOCK_BYTES, RemoteCorpus, upload
from deberta_ds.data.rows import eval_sequences
from deberta_ds.files import remote
from deberta_ds.files.remote import Cache


class FaultyFileSystem(LocalFileSystem):
    """Local files whose reads fail as those of object stores do, in turns."""

    protocol = "faulty"
    faults = itertools.cycle([""])
    reads = 0

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("faulty://"))

    def cat_file(self, path, start=None, end=None, **options):
        type(self).reads += 1
        data = super().cat_file(path, start=start, end=end, **options)
        fault = next(self.faults)
        if fault == "cut":
            raise ConnectionResetError(104, "Connection reset by peer")
        if fault == "short":
            return data[: len(data) // 2]
        if fault == "corrupt":
            return data[:-1] + bytes([data[-1] ^ 1])
        if fault == "slow":
            time.sleep(0.02)
        return data


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    generator = random.Random(0)
    words = [tiny_tokenizer().encode(text) for text in random_documents(300)]
    documents = [generator.choice(words) for _ in range(2500)]
    path = make_corpus(tmp_path_factory.mktemp("remote") / "corpus", documents, tiny_tokenizer(),
                       shards=4)
    largest = max(file.stat().st_size for file in path.rglob("*.npy"))
    assert largest > 1.5 * BLOCK_BYTES  # else no file has two blocks
    return path


@pytest.fixture
def url(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(FaultyFileSystem, "faults", itertools.cycle([""]))
    monkeypatch.setattr(FaultyFileSystem, "reads", 0)
    monkeypatch.setattr(remote, "FIRST_WAIT_SECONDS", 0.001)
    found = f"faulty://{tmp_path}/store/web"
    total, copied = upload(corpus, found)
    assert total == copied == 4 * 4
    assert upload(corpus, found) == (total, 0)
    return found


def same_rows(local, other, numbers):
    return all(np.array_equal(a, b) for row in numbers
               for a, b in zip(local.row(row), other.row(row), strict=True))


@pytest.mark.parametrize("faults", [[""], ["cut", ""], ["corrupt", "short", ""],
                                    ["slow", "cut", "corrupt", "short", "cut", ""]])
def test_rows_are_those_of_the_local_corpus(corpus, url, tmp_path, monkeypatch, faults):
    monkeypatch.setattr(FaultyFileSystem, "faults", itertools.cycle(faults))
    local = Corpus(corpus, seq_len=64)
    found = Corpus(url, seq_len=64, cache=Cache(str(tmp_path / "cache")))
    assert found.content_hash == local.content_hash and found.num_rows == local.num_rows
    assert same_rows(local, found, range(0, local.num_rows, 7))
    assert Corpus(url + "/", seq_len=64, cache=Cache(str(tmp_path / "cache"))).path == found.path
    assert tmp_path / "cache" in found.path.parents
    reads = FaultyFileSystem.reads
    again = pickle.loads(pickle.dumps(found))
    assert same_rows(local, again, range(0, local.num_rows, 7))
    assert FaultyFileSystem.reads == reads  # everything was in the cache


def test_damage_in_the_cache_is_mended_and_in_the_store_refused(corpus, url, tmp_path):
    local, cache = Corpus(corpus, seq_len=64), Cache(str(tmp_path / "cache"))
    found = Corpus(url, seq_len=64, cache=cache)
    rows = range(0, local.num_rows, 50)
    assert same_rows(local, found, rows)
    for path in (tmp_path / "cache").rglob("*.npy"):
        size = path.stat().st_size
        path.write_bytes(os.urandom(size // 2))  # cut short, and other bytes
    assert same_rows(local, found, rows)
    for path in (tmp_path / "store/web/tokens").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(UserError, match=r"tokens.*8 tries \(damaged"):
        Corpus(url, seq_len=64, cache=cache).row(0)
    with pytest.raises(UserError, match="no such file"):
        Corpus(url + "x", seq_len=64, cache=cache)


def test_what_cannot_be_listed_is_named(tmp_path):
    assert remote.listed_at(f"file://{tmp_path}/none")[2] == {}
    with pytest.raises(UserError, match="^zip://x::file:.*: cannot be listed .FileNotFoundError: "):
        remote.listed_at(f"zip://x::file://{tmp_path}/none.zip")


@pytest.mark.parametrize("name, damage", [
    ("blocks", {"files": []}), ("blocks", {"files": {"tokens/00000.npy": 3}}),
    ("blocks", {"block_bytes": "many"}), ("blocks", {"version": None}),
    ("blocks", {"files": {"tokens/00000.npy": [-1, "x"]}}), (".", {}), ("rows-64", {})])
def test_a_damaged_manifest_at_a_url_is_named_by_its_url(url, tmp_path, name, damage):
    path = tmp_path / "store/web" / name / "manifest.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | (damage or {"shards": values["shards"][:-1]})))
    with pytest.raises(UserError, match=rf"^{url}/blocks/manifest\.json: damaged \(" if damage
                       else f"^{url}: "):
        Corpus(url, seq_len=64, cache=Cache(str(tmp_path / "cache")))


def test_a_corpus_with_a_damaged_shard_is_not_uploaded(corpus, tmp_path):
    """Readers hold each block against what was uploaded, so nobody would notice later."""
    broken = Path(shutil.copytree(corpus, tmp_path / "broken"))
    path = min((broken / "tokens").glob("*.npy"))
    flip_a_bit(path)
    with pytest.raises(UserError, match=f"^{path}: "):
        run_main("data_prep/upload.py", broken, "--to", f"file://{tmp_path}/store")
    assert not (tmp_path / "store").exists()


def test_a_bounded_cache_stays_small_and_gives_the_same_rows(corpus, url, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_remote, "_BLOCKS_BETWEEN_COUNTS", 1)
    limit = 4 * BLOCK_BYTES
    cache = Cache(str(tmp_path / "cache"), limit / 1e9)
    local, found = Corpus(corpus, seq_len=64), Corpus(url, seq_len=64, cache=cache)
    largest = 0
    for row in random.Random(1).sample(range(local.num_rows), 60):
        assert same_rows(local, found, [row])
        used = sum(512 * path.stat().st_blocks for path in (tmp_path / "cache").rglob("*.npy"))
        largest = max(largest, used)
    assert 0 < largest <= limit + BLOCK_BYTES


def test_ranks_of_a_host_share_the_cache_at_the_same_time(corpus, url, tmp_path):
    local = Corpus(corpus, seq_len=64)
    ranks = [Corpus(url, seq_len=64, cache=Cache(str(tmp_path / "cache"))) for _ in range(4)]

    def reads_the_same(number: int) -> bool:
        return same_rows(local, ranks[number], range(number, local.num_rows, 5))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(reads_the_same, range(4)))


def test_a_run_starts_before_all_is_there(corpus, url, tmp_path):
    """Its first rows need a few blocks; workers fetch ahead; evaluation rows may be remote too."""
    sizes = sum(path.stat().st_size for path in corpus.rglob("*.npy"))
    cache = Cache(str(tmp_path / "cache"))
    first = dataset_of(url, cache=cache)[0]
    assert np.array_equal(first.input_ids, dataset_of(corpus)[0].input_ids)
    got = sum(512 * path.stat().st_blocks for path in (tmp_path / "cache").rglob("*.npy"))
    assert 0 < got < sizes / 2
    loader = {"phases": [Phase(0, 8, 4)], "micro_batch_size": 4, "rank": 0,
              "world_size": 1, "num_workers": 1}
    for one, other in zip(build_loader(dataset_of(url, cache=cache), **loader),
                          build_loader(dataset_of(corpus), **loader), strict=True):
        for field in dataclasses.fields(one):
            assert np.array_equal(getattr(one, field.name), getattr(other, field.name))
    held_out = eval_sequences(url, tiny_tokenizer(), eval_seed=1, num_rows=3, cache=cache,
                              seq_len=64, mask=MaskConfig())
    assert len(held_out) == 3


def test_rows_from_an_s3_server_with_faults(corpus, tmp_path, monkeypatch):
    local, cache = Corpus(corpus, seq_len=64), Cache(str(tmp_path / "cache"))
    with s3_bucket(monkeypatch) as port:
        upload(corpus, "s3://shop/web")
        proxy_port, faults = _faulty_proxy(port)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy_port}")
        found = Corpus("s3://shop/web", seq_len=64, cache=cache)
        assert same_rows(local, found, range(0, local.num_rows, 25))
        shutil.rmtree(tmp_path / "cache")  # and in a worker, which the client must survive
        batches = [[batch.input_ids.numpy() for batch in build_loader(
            dataset_of(path, cache=cache), phases=[Phase(0, 4, 3)], micro_batch_size=4, rank=0,
            world_size=1, num_workers=1)] for path in (corpus, "s3://shop/web")]
    assert np.array_equal(*batches)
    assert faults["cut"] and faults["delayed"] and faults["altered"]


def _faulty_proxy(port: int) -> tuple[int, dict[str, int]]:
    """Return the port of a proxy that cuts each third connection, delays others, and flips a bit in
    each seventh answer; and how often it has.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    faults = dict.fromkeys(("connections", "cut", "delayed", "altered"), 0)

    def serve():
        for number in itertools.count():
            client = listener.accept()[0]
            upstream = socket.create_connection(("127.0.0.1", port))
            faults["connections"] += 1
            for ends in ((client, upstream, -1), (upstream, client, number)):
                threading.Thread(target=_copy, args=(*ends, faults), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()[1], faults


def _copy(source, target, number: int, faults: dict[str, int]) -> None:
    """Pass on what connection `number` answers; -1: a request, without faults."""
    room = 40_000 if number >= 0 and number % 3 == 0 else 1 << 60
    try:
        while room > 0 and (data := source.recv(min(room, 1 << 16))):
            if number >= 0 and number % 5 == 1:
                faults["delayed"] += 1
                time.sleep(0.02)
            if number >= 0 and number % 7 == 2 and len(data) > 20_000:
                faults["altered"] += 1
                data = data[:-9] + bytes([data[-9] ^ 4]) + data[-8:]
            target.sendall(data)
            room -= len(data)
        faults["cut"] += room <= 0
    except OSError:
        pass
    for end in (source, target):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


@pytest.mark.parametrize("name", ["blocks/manifest.json", "tokens/*.npy"])
def test_a_pipe_among_remote_files_is_refused(corpus, tmp_path, name):
    """Whoever opens one waits, for ever if nobody is at its other end."""
    url = f"file://{tmp_path}/store"
    upload(corpus, url)
    place = min((tmp_path / "store").glob(name))
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(UserError, match=f"{place}: is a pipe or a device; give a file"):
        found = RemoteCorpus(url, Cache(str(tmp_path / "cache")))
        found.read(str(found.directory / "tokens" / place.name), 0, 10)
    if name.startswith("blocks"):
        with pytest.raises(UserError, match=f"{place}: is a pipe or a device; give a file"):
            upload(corpus, url)


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
    assert waits == [0.05 * 2**number for number in range(7)]


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


def test_a_corpus_in_the_place_of_another_lists_its_own_files(tmp_path):
    for name, shards in (("old", 3), ("new", 1)):
        corpus = make_corpus(tmp_path / name, [[20, 21]] * 3, tiny_tokenizer(), shards=shards)
        upload(corpus, f"file://{tmp_path}/store")
    listed = json.loads((tmp_path / "store/blocks/manifest.json").read_bytes())["files"]
    assert len(listed) == 4  # of one shard
