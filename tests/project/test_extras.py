"""Training, export and fine-tuning need no extra of setup.py, and the core loads no wing."""

import re
import subprocess
import sys
from importlib.metadata import packages_distributions

import pytest
from launching import ENVIRONMENT, ROOT, make_run
from test_import_order import WINGS

SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")
EXTRAS = {name: re.findall(r'"([^"]+)"', packages) for name, packages in re.findall(
    r'"(\w+)": \[(.*)\]', SETUP.partition("EXTRAS = {")[2].partition("\n}")[0])}
USE = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        is_missing = name.partition(".")[0] in {blocked}
        return None if is_missing else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
import deberta_ds.training.start
print(*{{name.split(".")[1] for name in sys.modules if name.startswith("deberta_ds.")}})
import deberta_ds
from deberta_ds.api import jobs
run = deberta_ds.train("{root}/run.toml", {{"train.steps": 2, "train.eval_every": 2}})
assert "roc_auc" in run.metrics
jobs.export(run.checkpoint, "{root}/hf")
made = deberta_ds.finetune("{root}/mood.toml", "{root}/hf", "{root}/tuned",
                           settings={{"epochs": 1, "max_length": 32}})
assert made.models
"""


@pytest.mark.slow
def test_a_run_and_a_fine_tuning_need_no_extra(tmp_path):
    make_run(tmp_path, two_layers=True, warmup_steps="1")
    (tmp_path / "mood.csv").write_text("text,label\n" + "".join(
        f"A {label} day {n}.,{label}\n" for n in range(8) for label in ("good", "bad")))
    (tmp_path / "mood.toml").write_text(
        'name = "mood"\nkind = "classification"\ntexts = ["text"]\ntrain = "mood.csv"\n')
    wanted = {package for packages in EXTRAS.values() for package in packages}
    blocked = {top for top, names in packages_distributions().items() if wanted & {*names}}
    assert {"onnx", "py3langid", "mpi4py", "matplotlib"} <= blocked
    code = USE.format(blocked=blocked | {"sklearn", "mlflow", "wandb"}, root=tmp_path)
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, cwd=ROOT, text=True,
                          capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    rooms = next(line for line in done.stdout.splitlines() if "training" in line.split())
    assert not {*rooms.split()} & WINGS.keys()


def test_the_table_says_what_an_extra_brings():
    page = (ROOT / "docs/how-to/pretrain.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `(\w+)` \| ([\w, -]+) \|", page, re.M)
    assert {name: packages.split(", ") for name, packages in table} == EXTRAS
    asked = {name for path in (ROOT / "deberta_ds").rglob("*.py") for name in re.findall(
        r'of_extra\("(\w+)"|deberta_ds\[(\w+)\]', path.read_text(encoding="utf-8"))}
    assert {one or other for one, other in asked} == EXTRAS.keys()
