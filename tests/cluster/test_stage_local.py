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
    (source / "9.npy").unlink()
    times = (copy / "1.npy").stat()
    (copy / "1.npy").write_bytes(b"x" + (source / "1.npy").read_bytes()[1:])  # a flipped bit
    os.utime(copy / "1.npy", (times.st_atime, times.st_mtime))
    (copy / "2.npy").unlink()
    (copy / "2.npy.stage_local").write_bytes(b"half")  # of a copy that was interrupted
    done = stage(target, source)
    assert done.returncode == 0 and f"{copy}/9.npy is not in the source" in done.stderr
    assert (copy / "7.npy").stat().st_ino == seen  # not copied again
    for number in (1, 2, 8):
        assert (copy / f"{number}.npy").read_bytes() == (source / f"{number}.npy").read_bytes()
    assert not list(copy.rglob("*.stage_local"))


def test_what_cannot_be_copied_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/0.npy").write_text("x")
    done = stage(tmp_path / "file", tmp_path / "shards")
    assert done.returncode == 1 and "file: not a directory" in done.stderr
    in_the_way = tmp_path / "blocked" / str(tmp_path).lstrip("/") / "shards/0.npy"
    in_the_way.mkdir(parents=True)
    done = stage(tmp_path / "blocked", tmp_path / "shards")
    assert done.returncode == 1 and "0.npy: not copied" in done.stderr
    assert stage(tmp_path / "local", tmp_path / "none").returncode == 2
    assert stage(tmp_path / "local").returncode == 2


def test_a_link_to_a_folder_is_followed_and_two_at_once_do_no_harm(tmp_path):
    (tmp_path / "network").mkdir()
    for number in range(30):
        (tmp_path / f"network/{number}.npy").write_bytes(os.urandom(100_000))
    source, target = tmp_path / "data", tmp_path / "local"
    source.symlink_to("network")
    both = [subprocess.Popen([str(SCRIPT), str(target), str(source)]) for _ in range(2)]
    assert [one.wait() for one in both] == [0, 0]
    copy = target / str(source).lstrip("/")
    assert not copy.is_symlink() and len(list(copy.iterdir())) == 30
    assert (copy / "7.npy").read_bytes() == (source / "7.npy").read_bytes()
