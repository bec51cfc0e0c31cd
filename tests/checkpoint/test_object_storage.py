"""Checkpoints at a URL: uploaded whole or not at all, kept as locally, read from there."""

import argparse
import fcntl
import json
import multiprocessing
import os
import re
import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
import torch
import xxhash
from data_helpers import fake_checkpoint
from fsspec.implementations.local import LocalFileSystem
from launching import make_run
from s3_server import s3_bucket

import deberta_ds
from deberta_ds.base.command_line import local_path
from deberta_ds.base.errors import UserError
from deberta_ds.base.files import cache_directory, temporary_directory
from deberta_ds.checkpoint import find, saved_state
from deberta_ds.checkpoint.find import local_copy
from deberta_ds.checkpoint.save import prune
from deberta_ds.checkpoint.upload import Uploads
from deberta_ds.config import run_config
from deberta_ds.config.run_config import TrainConfig
from deberta_ds.files import remote
from deberta_ds.training.loop import Saver


class Shop(LocalFileSystem):
    """Local files that may refuse to be written, alter what is written, or never be finished."""

    protocol = "shop"
    fault = ""

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("shop://"))

    def pipe_file(self, path, value, mode="overwrite", **_):
        if self.fault == "refused":
            raise PermissionError(13, "Access Denied")
        if self.fault == "altered" and path.endswith("layout.json"):
            value = value[:-1] + b"?"
        Path(path).write_bytes(value)
        if self.fault == "never ends" and path.endswith("layout.json"):
            time.sleep(600)


fsspec.register_implementation("shop", Shop, clobber=True)


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """Return a function that sets the fault of shop://."""
    monkeypatch.setattr(remote, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(Shop, "fault", "")
    return lambda fault: monkeypatch.setattr(Shop, "fault", fault)


def make_checkpoint(out: Path, step: int, best: int | None = None, text: str = "") -> Path:
    return fake_checkpoint(find.path_of(out, step), text=f"{step}{text}",
                           best={"value": best and 0.5, "step": best})


def config(url: str, **train) -> TrainConfig:
    return TrainConfig(steps=1, global_batch_size=1, micro_batch_size=1, upload=url, **train)


def one_round(out: Path, url: str, **train) -> list[str]:
    """Return what a round of uploads says."""
    said: list[str] = []
    uploads = Uploads(out, config(url, **train), said.append)
    uploads.begin_round()
    while uploads.is_running():
        time.sleep(0.001)
    return said


def steps_at(store: Path) -> list[int]:
    return [find.step_of(path) for path in find.list_finished(store)]


def test_the_url_has_what_retention_keeps_here(tmp_path, shop):
    """Also the best, the permanent, and later ones, which are of another continuation."""
    out, url = tmp_path / "out", f"shop://{tmp_path}/store"
    make_checkpoint(tmp_path / "store", 900)
    for step in range(10, 70, 10):
        make_checkpoint(out, step, best=30)
        (out / "metrics.jsonl").write_text(f"{step}")
        said = one_round(out, url, keep=1, keep_every=(20,))
        assert [line[:-3] for line in said] == [f"uploaded {url}/checkpoints/step-{step:08d} in 0."]
    assert steps_at(tmp_path / "store") == [20, 30, 60, 900]
    assert len(os.listdir(tmp_path / "store/checkpoints")) == 4
    assert (tmp_path / "store/metrics.jsonl").read_text() == "60"
    assert one_round(out, url, keep=1, keep_every=(20,)) == []
    assert find.find(tmp_path / "new", f"{url}/best").path.name == "step-00000030"
    shutil.rmtree(tmp_path / "store/checkpoints/step-00000900")
    first = local_copy(url)
    assert first.name == "step-00000060" and not find.problems_of(first)
    assert local_copy(f"{url}/checkpoints/step-00000060") == first
    # The same step of another continuation: its files have the same sizes.
    shutil.rmtree(find.path_of(out, 60))
    make_checkpoint(out, 60, text="b")
    assert len(one_round(out, url, keep=1)) == 1 and local_copy(url) != first
    assert (local_copy(url) / "layout.json").read_text() == "60b"


def test_the_newest_is_copied_first_and_manifests_are_deleted_first(tmp_path, shop, monkeypatch):
    """At each moment what has a manifest at the URL is whole, and nothing holds a copy back."""
    done, out, store = [], tmp_path / "out", tmp_path / "store"

    def noted(act):
        return lambda self, path, *a, **k: (
            done.append((act.__name__, path.rpartition("/step-000000")[2])),
            act(self, path, *a, **k))

    for name in ("pipe_file", "rm_file", "rm"):
        monkeypatch.setattr(Shop, name, noted(getattr(Shop, name)))
    make_checkpoint(out, 10)
    make_checkpoint(out, 20)
    said = one_round(out, f"shop://{store}", keep=2)
    assert [line.partition("step-000000")[2][:2] for line in said] == ["20", "10"]
    done.clear()
    shutil.rmtree(find.path_of(out, 20))
    make_checkpoint(out, 20, text="b")  # another continuation
    make_checkpoint(out, 30)
    one_round(out, f"shop://{store}", keep=2)
    assert done.index(("rm_file", "20/manifest.json")) < done.index(
        ("pipe_file", "20/layout.json"))
    assert done[-2:] == [("rm_file", "10/manifest.json"), ("rm", "10")]
    uploads = Uploads(out, config(f"shop://{store}", keep=2), print)
    with open(store / "checkpoints/step-00000030/run.json", "a") as longer:
        longer.write(" ")
    (store / "checkpoints/step-00000030/manifest.json").unlink()
    uploads._attempt()
    assert uploads.current is None and not find.problems_of(find.path_of(store, 30))


@pytest.mark.parametrize("fault, said", [
    ("refused", "UserError: .*store.*: cannot be written in 8 tries .PermissionError: .*Acc"),
    ("altered", "OSError: .*/layout.json has another checksum than what was uploaded")])
def test_an_upload_that_fails_is_said_and_tried_again(tmp_path, shop, fault, said):
    make_checkpoint(tmp_path / "out", 10)
    shop(fault)
    lines = one_round(tmp_path / "out", f"shop://{tmp_path}/store")
    assert len(lines) == 1 and re.search(
        f"WARNING: upload failed; it is tried again .*{said}", lines[0])
    assert steps_at(tmp_path / "store") == []
    with pytest.raises(UserError, match="store: no(thing is there| whole checkpoint)"):
        local_copy(f"shop://{tmp_path}/store")
    shop("")
    assert len(one_round(tmp_path / "out", f"shop://{tmp_path}/store")) == 1
    assert steps_at(tmp_path / "store") == [10]


def test_a_check_writes_at_the_url_and_lists_one_level(tmp_path, shop, monkeypatch):
    monkeypatch.setattr(Shop, "find", None)
    url = f"shop://{tmp_path}/store"
    make_checkpoint(tmp_path / "store", 10)
    remote.check_writable(url)
    assert os.listdir(tmp_path / "store") == ["checkpoints"]
    shop("refused")
    for bad, reason in ((url, "Access Denied"), ("file:///proc/1/nothing", "No such file")):
        with pytest.raises(UserError, match=f"^{bad}: must allow to write, list, read and delete "
                                            f"files .*{reason}.*; check the address"):
            remote.check_writable(bad)


def test_kill_9_in_an_upload_leaves_nothing_that_is_taken_for_whole(tmp_path, shop):
    out, store = tmp_path / "out", tmp_path / "store"
    make_checkpoint(out, 10)
    shop("never ends")
    process = multiprocessing.get_context("fork").Process(
        target=one_round, args=(out, f"shop://{store}"))
    process.start()
    begun = find.path_of(store, 10)
    while not (begun / "layout.json").exists():
        assert process.is_alive()
    process.kill()
    process.join()
    assert steps_at(store) == []
    before = (begun / "run.json").stat().st_mtime_ns
    shop("")
    assert len(one_round(out, f"shop://{store}")) == 1 and steps_at(store) == [10]
    assert (begun / "run.json").stat().st_mtime_ns == before  # it was whole: not sent again


def test_what_is_uploaded_is_not_deleted_meanwhile(tmp_path, shop):
    """With keep = 1 and a slow upload none would ever be there."""
    train = config(f"shop://{tmp_path}/store", keep=1, keep_every=10)
    saver = Saver(SimpleNamespace(module=torch.nn.Linear(1, 1)), tmp_path, train, {}, print)
    while saver.uploads.is_running():  # the round of the start says what is current until it ends
        time.sleep(0.01)
    for step in (10, 15, 16, 17):
        make_checkpoint(tmp_path, step)
    saver.uploads.current = find.path_of(tmp_path, 15)
    prune(tmp_path, 1, saver._is_spared)
    assert steps_at(tmp_path) == [10, 15, 17]
    assert [step for step in range(1, 30) if saver.is_due(step)] == [10, 20]


def test_a_checkpoint_is_the_current_one_while_it_is_copied(tmp_path, shop, monkeypatch):
    out, seen = tmp_path / "out", []
    uploads = Uploads(out, config(f"shop://{tmp_path}/store", keep=2), print)
    monkeypatch.setattr(uploads, "_copy", lambda path: seen.append((path, uploads.current)))
    paths = [make_checkpoint(out, step) for step in (10, 20)]
    uploads._attempt()
    assert seen == [(path, path) for path in paths[::-1]] and uploads.current is None


def test_one_process_of_a_node_fetches_a_model(tmp_path, monkeypatch):
    def fetch(url, cache):
        with open(Path(cache) / ".lock") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return cache

    monkeypatch.setattr(remote, "fetch", fetch)
    monkeypatch.setattr(remote, "listed_at", lambda url: (None, "m", {"m/config.json": "1"}))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_copy("https://host/m").parent == tmp_path / ".cache/deberta_ds/models"


def test_a_run_goes_on_from_an_s3_server(tmp_path, monkeypatch, process_group):
    """The same losses as of the run itself; every reader takes the address of the run."""
    with s3_bucket(monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        remote.check_writable("s3://shop/run")
        run = make_run(tmp_path, two_layers=True, steps="4", save_every="2", eval_every="4",
                       warmup_steps="0")
        whole = deberta_ds.train(run, {"train.upload": "s3://shop/run", "train.keep": 1,
                                       "train.keep_every": [2]}).metrics
        again = deberta_ds.train(run, {"out_dir": str(tmp_path / "again")},
                                 resume="s3://shop/run/checkpoints/step-00000002").metrics
        both = [metrics.query("kind == 'train' and step > 2").loss.tolist()
                for metrics in (whole, again)]
        assert both[0] == both[1] and len(both[0]) == 2
        local, there = (saved_state.load_whole_state(place)[0] for place in (
            tmp_path / "out", "s3://shop/run"))
        assert all(torch.equal(local[name], there[name]) for name in local)
        deberta_ds.export("s3://shop/run", tmp_path / "hf")
        assert deberta_ds.load(tmp_path / "hf").tokenizer


@pytest.mark.parametrize("refused", ["out_dir", "export", "predict"])
def test_a_url_where_only_a_directory_can_be_is_refused_by_name(tmp_path, refused):
    """Not taken for a local directory that is called "s3:"."""
    with pytest.raises((UserError, argparse.ArgumentTypeError), match="s3://shop/x.* is a URL"):
        if refused == "out_dir":
            run_config.load(make_run(tmp_path), ["--out_dir=s3://shop/x"])
        elif refused == "export":
            deberta_ds.export(tmp_path, "s3://shop/x")
        else:
            local_path("s3://shop/x.jsonl")
    assert not Path("s3:").exists()


def test_a_model_of_the_hub_is_fetched_by_name(tmp_path, monkeypatch):
    """By huggingface_hub, from a stand-in that answers as the Hub does; typing errors are named."""
    files = {"config.json": b"{}", "model.safetensors": b"weights", "tf_model.h5": b"never read"}
    commit = "a" * 40

    class StandIn(BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.partition("?")[0].rpartition("/")[2]
            listed = [{"rfilename": name, "path": name, "type": "file", "oid": "b",
                       "size": len(data)} for name, data in files.items()]
            body = files[name] if "/resolve/" in self.path else json.dumps(
                listed if "/tree/" in self.path else
                {"id": "me/mine", "sha": commit, "siblings": listed}).encode()
            self.send_response(200 if "me/mine" in self.path else 404)
            tag = xxhash.xxh3_64_hexdigest(body)
            for key, value in {"ETag": f'"{tag}"', "X-Repo-Commit": commit,
                               "Content-Length": len(body)}.items():
                self.send_header(key, str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    from huggingface_hub import constants, hf_api

    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    for module in (constants, hf_api.constants):
        monkeypatch.setattr(module, "ENDPOINT", url)
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(module, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE",
                            url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setenv("HF_ENDPOINT", url)
    try:
        for name in ("me/mine", "hf://me/mine", "hf://me/mine@main"):
            found = local_copy(name)
            assert sorted(path.name for path in found.iterdir()) == [
                "config.json", "model.safetensors"]
            assert (found / "model.safetensors").read_bytes() == b"weights"
        with pytest.raises(UserError, match="^me/other: no such file .*, and no model"):
            local_copy("me/other")
    finally:
        server.shutdown()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert local_copy("runs/mine") == Path("runs/mine")  # a directory of this machine is meant


def test_a_reader_takes_the_newest_where_a_run_deletes_what_it_reads(tmp_path):
    make_checkpoint(tmp_path, 10)

    def read(path: Path) -> str:
        if find.step_of(path) == 10:
            make_checkpoint(tmp_path, 20)
            prune(tmp_path, 1)
        return (path / "layout.json").read_text()

    assert find.read_newest(tmp_path, read) == "20"
    (find.path_of(tmp_path, 20) / "layout.json").unlink()
    with pytest.raises(FileNotFoundError):
        find.read_newest(tmp_path, read)


@pytest.mark.parametrize("home", [None, "file"])
def test_without_a_home_directory_the_cache_is_among_the_temporary_files(
        tmp_path, monkeypatch, home):
    """The user of a container may have neither a name nor HOME."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    if home:
        (tmp_path / home).touch()
        monkeypatch.setenv("HOME", str(tmp_path / home))
    assert cache_directory("~/.cache/deberta_ds") == temporary_directory() / "deberta_ds"
    assert cache_directory(str(tmp_path / "own")) == tmp_path / "own"
