"""metrics.jsonl: what is read, what is refused by name, and what a failed write leaves."""

import json
import math
import subprocess
import sys

import pytest

from deberta_ds.base.errors import UserError
from deberta_ds.tracking import records
from deberta_ds.tracking.records import read_metrics

GOOD = '{"kind": "train", "step": 1, "loss": 2.5}'


@pytest.mark.parametrize(
    "line, rule",
    [('{"kind": "train", "step": 3', "not a whole JSON object"), ('["train", 3]', '"kind"'),
     ('{"kind": "training", "step": 3}', '"kind"'), ('{"kind": ["train"], "step": 3}', '"kind"'),
     ('{"kind": "train", "step": 3.5}', '"step"'), ('{"kind": "train", "step": -1}', '"step"'),
     ('{"kind": "train", "step": true}', '"step"'),
     ('{"kind": "train", "step": 3, "loss": "low"}', '"loss"'),
     ('{"kind": "train", "step": 3, "loss": [1]}', '"loss"'),
     ('{"kind": "train", "step": 3, "loss": Infinity}', '"loss"'),
     ('{"kind": "train", "step": 3, "loss": 1e308}', '"loss"'),
     ('{"kind": "event", "step": 3, "event": 5}', '"event"'),
     ('{"kind": "event", "step": 3}', '"event"'),
     ('{"kind": "train", "step": 3, "detail": null}', '"detail"'), ("", "not a whole JSON object"),
     ("[" * 200_000, "not a record"),
     ('{"kind": "train", "step": ' + "1" * 9_000 + "}", "not a record")])
def test_a_bad_line_is_named(tmp_path, line, rule):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(UserError, match="metrics.jsonl, line 2") as error:
        read_metrics(path)
    assert rule in str(error.value) and len(str(error.value)) < 400 + len(str(path))


def test_the_perplexity_of_a_diverged_run_does_not_end_it(tmp_path):
    """A loss of 700 has a perplexity of 1e304, which the file refused: the run stopped with it."""
    path = tmp_path / "metrics.jsonl"
    record = {"kind": "eval", "step": 3, "loss": 700.0, "perplexity": math.exp(700.0),
              "grad_norm": math.nan, "gain": -math.inf, "count": 10**12}
    records.append(path, record)
    assert read_metrics(path) == [record | dict.fromkeys(("perplexity", "grad_norm", "gain"))]


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from deberta_ds.tracking import records
from deberta_ds.base.errors import UserError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for step in range(1000):
    try:
        records.append(path, {"kind": "train", "step": step, "loss": 1 / (step + 1)})
    except UserError as error:
        assert "metrics.jsonl: " in str(error) and "ulimit -f" in str(error), error
        break
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
records.append(path, {"kind": "train", "step": step, "loss": 1.0})
print(step)
"""


def test_a_write_that_fails_half_way_leaves_whole_lines(tmp_path):
    """A file size limit fails as a full disk does: in the middle of a line."""
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    steps = [record["step"] for record in read_metrics(path)]
    assert steps == list(range(int(done.stdout) + 1)) and len(steps) > 5


def test_a_torn_last_line_is_left_out_and_cut_by_the_next_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{GOOD}\n{GOOD}")  # nothing is lost but the end of the line
    assert len(read_metrics(path)) == 2
    records.truncate(path, json.loads(GOOD)["step"])
    assert len(read_metrics(path)) == 2
    path.write_text(f"{GOOD}\n" + "\0" * 100)  # what a file system may leave after a power cut
    assert len(read_metrics(path)) == 1
    path.write_text(f'{GOOD}\n{{"kind": "event", "step": 9, "event": "save"}}\n{GOOD[:-5]}')
    assert [record["kind"] for record in read_metrics(path)] == ["train", "event"]
    records.truncate(path, 0)
    assert [record["kind"] for record in read_metrics(path)] == ["event"]
    records.append(path, json.loads(GOOD))
    assert len(read_metrics(path)) == 2
