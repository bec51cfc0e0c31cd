"""The check of a kernel in a process of its own: how it ends, and where a pass is kept."""

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from deberta_ds.base.errors import UserError
from deberta_ds.base.files import temporary_directory
from deberta_ds.model.choose import Request
from deberta_ds.model.kernels import kernel_check


@pytest.fixture
def check(monkeypatch, tmp_path):
    """Function that checks under a stand-in for Python, a shell script."""
    pytest.importorskip("triton")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(kernel_check, "missing_tools", lambda: "")
    monkeypatch.setattr(kernel_check, "_MOST_SECONDS", 1)
    script = tmp_path / "python"

    def check(commands: str, *sources: Path) -> str:
        script.write_text(f"#!/bin/sh\ncat > /dev/null\necho run >> {tmp_path}/runs\n{commands}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        monkeypatch.setattr(kernel_check, "SOURCES", sources)
        return kernel_check.check(Request(torch.device("cpu"), torch.bfloat16, 16), "its place")

    kernel_check.check.cache_clear()
    yield check
    kernel_check.check.cache_clear()


@pytest.mark.parametrize(("commands", "words"), [
    ("echo misaligned >&2; kill -SEGV $$", "its process ends with SIGSEGV\nmisaligned"),
    ("seq 300 >&2; echo fatal error: Python.h >&2; exit 1", "299\n300\nfatal error: Python.h"),
    ("exec sleep 30", "it does not end in 1 s"),
    ("echo '[0.1, \"keys\"]'", "keys off by 1.0e-01 where 1.5e-02 is allowed"),
    ("echo '[NaN, \"keys\"]'", "keys off by nan where")])
def test_a_check_that_does_not_pass_says_why_in_full(check, tmp_path, commands, words):
    """Of a compiler's error 200 characters were shown, and a fault of the GPU ended the run."""
    with pytest.raises(UserError) as refused:
        check(commands)
    assert words in str(refused.value)
    assert not list(tmp_path.rglob("kernels"))


def test_a_pass_is_kept_on_this_node(check, tmp_path):
    passing = "echo a line of a library; echo '[0.001, \"keys\"]'"
    assert check(passing).endswith("largest error 1.0e-03") and check("exit 1") == check(passing)
    kernel_check.check.cache_clear()  # another process
    assert "kept in " in check("exit 1")
    for text, commands in (("old", passing), ("new", "exit 1")):
        (tmp_path / "kernel.py").write_text(text)  # a change of it asks again
        kernel_check.check.cache_clear()
        with nullcontext() if text == "old" else pytest.raises(UserError, match="exit code 1"):
            check(commands, tmp_path / "kernel.py")


@pytest.mark.parametrize(("tools", "header", "words"), [
    ((), True, "no C compiler (apt install gcc"), (("gcc",), False, "(apt install python3-dev)"),
    (("clang",), True, "")])
def test_what_triton_needs_is_looked_for(monkeypatch, tmp_path, tools, header, words):
    """`apt install python3-venv make gcc` brings no Python.h, and every kernel fell back."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("shutil.which", lambda name: name if name in tools else None)
    monkeypatch.setattr("sysconfig.get_path", lambda *names: str(tmp_path))
    if header:
        (tmp_path / "Python.h").touch()
    assert words in (missing := kernel_check.missing_tools()) and bool(missing) == bool(words)


def test_what_triton_compiles_stays_on_this_node(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    for given, wanted in ((None, str(temporary_directory() / "triton")), ("own", "own")):
        if given:
            monkeypatch.setenv("TRITON_CACHE_DIR", given)
        kernel_check.keep_on_this_node()
        assert kernel_check.os.environ["TRITON_CACHE_DIR"] == wanted
    assert temporary_directory().stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr("os.getuid", lambda: 12345)
    (tmp_path / "deberta_ds-12345").mkdir()
    with pytest.raises(UserError, match="deberta_ds-12345 belongs to another user"):
        kernel_check.keep_on_this_node()
