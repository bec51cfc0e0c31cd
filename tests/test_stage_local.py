"""launch/cluster/stage_local.sh copies what is missing or changed, and says what it could not."""

import os
import subprocess

from launching import ROOT

SCRIPT = ROOT / "launch/cluster/stage_local.sh"


def stage(*words) -> subprocess.CompletedProcess:
    return subprocess.run([str(SCRIPT), *map(str, words)], capture_output=True, text=True)


def test_environment_and_shards_are_copied_once_and_compared(tmp_path):
    source, target = tmp_path / "a folder", tmp_path / "local"
    (source / "bin").mkdir(parents=True)
    (source / "bin/tool").write_text("#!/bin/sh\n")
    (source / "bin/tool").chmod(0o755)
    (source / "link").symlink_to("bin/tool")
    for number in range(20):
        (source / f"{number}.npy").write_bytes(os.urandom(1000))
    done = stage(target, source)
    copy = target / str(source).lstrip("/")
    assert done.returncode == 0 and os.uname().nodename in done.stdout, done.stderr
    assert (copy / "7.npy").read_bytes() == (source / "7.npy").read_bytes()
    assert os.access(copy / "bin/tool", os.X_OK) and (copy / "link").is_symlink()
    seen = (copy / "7.npy").stat().st_ino
    (source / "8.npy").write_bytes(os.urandom(1001))
    assert stage(target, source).returncode == 0
    assert (copy / "7.npy").stat().st_ino == seen  # not copied again
    assert (copy / "8.npy").read_bytes() == (source / "8.npy").read_bytes()
    assert not list(copy.rglob("*.part"))


def test_what_cannot_be_copied_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/0.npy").write_text("x")
    done = stage(tmp_path / "file", tmp_path / "shards")
    assert done.returncode == 1 and "0.npy: not copied" in done.stderr
    assert stage(tmp_path / "local", tmp_path / "none").returncode == 2
    assert stage(tmp_path / "local").returncode == 2
