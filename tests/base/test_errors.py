"""What ends a script by the user's doing is one message that names the file; a bug is a traceback.
"""

import ast
import errno
import fcntl
import json
import lzma
import os
import pickle
import signal
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from pathlib import Path

import pyarrow
import pytest
import safetensors
import zstandard

from deberta_ds.base import files
from deberta_ds.base.errors import UserError, listed, naming, user_message
from deberta_ds.base.files import atomic_path, write_atomic

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*(ROOT / "launch").glob("*.py"), *(ROOT / "data_prep").glob("*.py")])


def test_a_problem_of_every_rank_is_not_said_4096_times():
    assert listed(["a", "b"]) == "a; b" and listed([]) == ""
    text = listed([f"rank {rank}: nan" for rank in range(4096)])
    assert text.startswith("rank 0: nan; rank 1: nan; ") and text.endswith("and 4,088 more")
    assert len(text) < 200


def heed_ctrl_c() -> None:
    """For a child: the background jobs of a shell ignore Ctrl-C, and so would it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(body: str, *options: str, **more) -> subprocess.CompletedProcess:
    """Run a script whose `main` has this body."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    code = f"from deberta_ds.base.errors import *\ndef main():\n{lines}\nexit_cleanly(main)"
    more.setdefault("stdout", subprocess.PIPE)
    return subprocess.run([sys.executable, *options, "-c", code], stderr=subprocess.PIPE, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=60,
                          preexec_fn=heed_ctrl_c, **more)


@pytest.mark.parametrize(("body", "message"), [
    ("raise UserError('run.toml: no')", "run.toml: no"),
    ("open('/no/such/file')", "/no/such/file: No such file or directory; check the path"),
    ("open('/')", "/: Is a directory"),
    ("open('/dev/full', 'w').write('x' * 100000)", "No space left on device"),
    ("with naming('a.zip'):\n    import zipfile; zipfile.ZipFile('/dev/null')", "a.zip: damaged"),
    ("[0] * 10**17", "out of memory")])
def test_what_a_user_did_is_one_line_with_exit_code_2(body, message):
    done = run(body)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("end", "code", "said"), [
    ("dist.destroy(); return 75", 75, ""),
    ("dist.destroy(); sys.exit('no such thing')", 1, "no such thing\n"),
    ("late = lambda: (time.sleep(.5), atexit.register(os.write, 1, b'late\\n'))\n"
     "threading.Thread(target=late).start()", 0, ""),
    ("raise UserError('run.toml: no')", 2, "error: run.toml: no\n"),
    ("{}['a bug of ours']", 1, "KeyError: 'a bug of ours'\n"),
])
def test_a_rank_of_gloo_ends_without_taking_objects_apart(end, code, said, tmp_path):
    """gloo's threads aborted 3 of 24 ranks that did: a thread that asks for the interpreter's lock
    while it is taken down is ended, and in C++ that is the end of the process, with code 134."""
    done = run(f"""import atexit, os, sys, threading, time
import torch, torch.distributed as group
from deberta_ds.cluster import dist
rank = int(os.fork() == 0)
if rank:  # or their lines mix
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
class Kept:
    def __del__(self):
        print('taken apart')
global kept
kept = Kept()
group.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=rank, world_size=2)
group.all_reduce(torch.ones(3))
atexit.register(os.write, 1, b'at exit\\n')
{end}""")
    expected = ["at exit"] * 2 + ["late"] * 2 * ("late" in end)  # threads are waited for
    assert (done.returncode, sorted(done.stdout.splitlines())) == (code, expected), done.stderr
    assert done.stderr.endswith(said) and ("Traceback" in done.stderr) == ("bug" in end)


def test_a_rank_alone_may_be_part_of_another_program():
    done = run("""import torch.distributed as group
from deberta_ds.cluster import dist
group.init_process_group('gloo', init_method='tcp://127.0.0.1:0', rank=0, world_size=1)
dist.destroy()
try:
    exit_cleanly(lambda: 3)
except SystemExit as end:
    print('ended with', end.code)""")
    assert done.stdout == "ended with 3\n", done.stderr


@pytest.mark.parametrize(("body", "options", "code", "said"), [
    ("{}['key']", (), 1, "KeyError: 'key'\n"),  # a bug keeps its traceback
    ("open('/no/such/file')", ("-X", "dev"), 2, "check the path\n"),  # for developers, the user's
    ("return 75", (), 75, ""), ("return None", (), 0, ""), ("sys.exit(3)", (), 3, "")])
def test_exit_codes_and_tracebacks(body, options, code, said):
    done = run(f"import sys\n{body}", *options)
    assert done.returncode == code and done.stderr.endswith(said), done.stderr
    assert ("Traceback" in done.stderr) == bool(said)


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_left_ends_the_script_quietly(lines):
    """As in `show.py ... | head -1`: the output of one line is written only at the end."""
    reading, writing = os.pipe()
    os.close(reading)
    done = run(f"for line in range({lines}): print(line)", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_full_disk_under_the_output_is_named(lines):
    with open("/dev/full", "w") as full:
        done = run(f"for line in range({lines}): print(line)", stdout=full)
    assert done.returncode == 2
    assert done.stderr.startswith("error: standard output: No space left on device")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("body", [
    "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)",
    "import os, signal\ntry: os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException: 1 / 0"])
def test_ctrl_c_is_one_word(body):
    """Also where a library in C drops it while it is imported, and breaks down by that."""
    done = run(body)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_ctrl_c_while_a_script_imports(path):
    """Seconds go by in imports: they happen inside `main`, where Ctrl-C is one word."""
    light = {"argparse", "collections.abc", "contextlib", "dataclasses", "functools", "itertools",
             "json", "options", "os", "pathlib", "re", "runpy", "shutil", "subprocess",
             "sys", "threading", "time", "typing", "deberta_ds.base.command_line",
             "deberta_ds.base.errors", "deberta_ds.base.files", "deberta_ds.base.numbers",
             "deberta_ds.finetuning.options", "deberta_ds.tracking.log"}
    for node in ast.parse(path.read_text()).body:
        names = [node.module] if isinstance(node, ast.ImportFrom) else \
            [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        assert set(names) <= light, f"{path.name} imports {names} before main() runs"


@pytest.mark.slow
def test_ctrl_c_while_torch_is_imported():
    script = ROOT / "launch/evaluate.py"
    process = subprocess.Popen([sys.executable, script, "--run", "nowhere"], text=True,
                               stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
                               env=os.environ | {"PYTHONPATH": str(ROOT)},
                               preexec_fn=heed_ctrl_c)
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    assert (process.communicate(timeout=60)[1], process.returncode) == ("interrupted\n", 130)


def _refusals(path: Path):
    """Each way in which a reader refuses bytes that it does not understand."""
    damaged = b"\xff\xfe not what you think"
    path.write_bytes(damaged)
    yield lambda: path.read_text(encoding="utf-8")
    yield lambda: json.loads("{")
    yield lambda: zipfile.ZipFile(path)
    yield lambda: zlib.decompress(damaged)
    yield lambda: lzma.decompress(damaged)
    yield lambda: zstandard.ZstdDecompressor().decompress(damaged)
    yield lambda: pyarrow.ipc.open_file(pyarrow.py_buffer(damaged))
    yield lambda: safetensors.deserialize(damaged)
    yield lambda: pickle.loads(damaged)
    yield lambda: struct.unpack("<q", damaged)
    yield lambda: open(path / "inside")
    yield lambda: open(path.with_name("missing"))


@pytest.mark.parametrize("number", range(12))
def test_every_reader_that_refuses_a_file_names_it(tmp_path, number):
    refuse = list(_refusals(tmp_path / "damaged"))[number]
    with pytest.raises(UserError, match="the/file"), naming("the/file"):
        refuse()


def test_a_bug_while_a_file_is_read_stays_a_bug():
    with pytest.raises(ZeroDivisionError), naming("the/file"):
        1 / 0  # noqa: B018
    assert user_message(ZeroDivisionError()) is None and user_message(KeyError("a")) is None


def test_the_file_is_named_where_python_names_none(tmp_path):
    """`write` on an open file raises an OSError without a file name."""
    with pytest.raises(OSError) as caught, atomic_path(tmp_path / "out.bin"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert user_message(caught.value).startswith(f"{tmp_path}/out.bin: No space left on device; ")
    with pytest.raises(OSError) as caught, atomic_path(tmp_path / "out.bin"):
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")
    assert caught.value.errno == errno.ENOSPC
    (tmp_path / "directory").mkdir()
    with pytest.raises(OSError) as caught:
        write_atomic(tmp_path / "directory", "text")
    assert user_message(caught.value) == f"{tmp_path}/directory: Is a directory"
    with pytest.raises(IsADirectoryError, match="Is a directory: '/'"):
        write_atomic("/", "text")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError) as caught:  # Python names the file that is in the way
        write_atomic(tmp_path / "file/page.html", "text")
    assert user_message(caught.value).startswith(f"{tmp_path}/file/page.html: Not a directory; ")
    assert not list(tmp_path.glob(".*"))


def test_a_console_that_nobody_reads_any_more_ends_nothing():
    """As when mpirun, tee or a terminal is killed: the run goes on to its save and exit code."""
    text = ("import sys, time\nfrom deberta_ds.base.errors import exit_cleanly, tell\ndef main():\n"
            "    tell('ready', sys.stdout)\n    time.sleep(0.5)\n"
            "    for stream in (sys.stdout, sys.stderr):\n"
            "        tell('lost', stream)\n        print('lost, too', file=stream, flush=True)\n"
            "    return 75\nexit_cleanly(main)\n")
    child = subprocess.Popen([sys.executable, "-c", text], text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert child.stdout.readline() == "ready\n"
    child.stdout.close()
    child.stderr.close()
    assert child.wait(timeout=60) == 75


def test_what_a_killed_process_left_is_removed_and_what_another_one_writes_stays(tmp_path):
    """At once if this host wrote it: locks are not seen between hosts on all file systems."""
    other = f"{(int(files._HOST, 16) + 1) % 0x1000:03x}"
    names = [f".{name}.{host}1abcd.tmp" for name, host in (
        ("dead", files._HOST), ("alive", files._HOST), ("there", other), ("old_there", other))]
    for name in names:
        (tmp_path / name).write_bytes(b"half")
    os.utime(tmp_path / names[3], 2 * (time.time() - 99,))
    with open(tmp_path / names[1], "rb") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        write_atomic(tmp_path / "page.html", "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names[1:3], "page.html"]


def test_a_new_file_is_locked_until_it_has_its_name(tmp_path, monkeypatch):
    def replace(source, target):
        with open(source) as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        rename(source, target)

    rename = os.replace
    monkeypatch.setattr(os, "replace", replace)
    write_atomic(tmp_path / "page.html", "whole")
    assert (tmp_path / "page.html").exists()


def test_a_file_taken_for_a_leftover_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    locked = []

    def flock(file, operation):
        if not locked:
            os.unlink(file.name)
        locked.append(file)

    monkeypatch.setattr(fcntl, "flock", flock)
    write_atomic(tmp_path / "page.html", "whole")
    assert (tmp_path / "page.html").read_text() == "whole" and len(locked) == 2
    assert len(list(tmp_path.iterdir())) == 1


def test_text_and_paths_that_no_file_can_hold_are_said():
    """fill_mask with a lone byte, and a NUL in a path, were tracebacks."""
    for bad, words in ((lambda: "a\udcff".encode(), "not UTF-8"), (lambda: open("a\0"), "NUL")):
        with pytest.raises(ValueError) as caught:
            bad()
        assert words in user_message(caught.value)
