"""Helpers that start scripts on several ranks, and a tiny run that trains in seconds."""

import contextlib
import functools
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import rank_helpers
from data_helpers import make_corpus, random_documents, tiny_tokenizer, tokenizer_path

# With libaio-dev installed; the compiler runs for minutes once per environment.
NVME_REASON = "compiles DeepSpeed's async_io operator: set NVME_TESTS=1"
ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
                            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}

RUN = """
name = "tiny"
out_dir = "{out}"
[model]
preset = "tiny"
{layers}vocab_size = 640
hidden_dropout = {dropout}
attention_dropout = {dropout}
[objective]
kind = "rtd"
{generator}[data]
sources = [{{path = "{root}/train"}}]
heldout = "{root}/heldout"
tokenizer = "{root}/spm.model"
seq_len = 64
workers = 0
[optim]
learning_rate = 1e-3
warmup_steps = 5
[train]
steps = 20
global_batch_size = 8
micro_batch_size = 2
initial_batch_size = 0
batch_warmup_steps = 0
activation_checkpointing = "full"
log_every = 1
eval_sequences = 16
eval_every = 20
save_every = 5
keep = 10
"""


@functools.cache
def _inputs() -> Path:
    """Return a directory with a tokenizer and two corpora."""
    root = Path(tokenizer_path()).with_name("run")
    root.mkdir()
    shutil.copy(tokenizer_path(), root)
    tokenizer = tiny_tokenizer()
    for name, count, seed in (("train", 200, 0), ("heldout", 40, 9)):
        documents = [tokenizer.encode(text) for text in random_documents(count, seed)]
        make_corpus(root / name, documents, tokenizer)
    return root


def make_run(root: Path, dropout: float = 0.0, two_layers: bool = False, **extra: str | None
             ) -> Path:
    """Write tokenizer, corpora and run.toml under `root`; return the run file.

    `two_layers`: in both networks, as few as the enhanced mask decoder takes.
    `extra` maps a line of the template's key to another value, such as steps="10"; None: no line.
    """
    shutil.copytree(_inputs(), root, dirs_exist_ok=True)
    text = RUN.format(root=root, out=root / "out", dropout=dropout,
                      layers="num_layers = 2\n" * two_layers,
                      generator="generator_layers = 2\n" * two_layers)
    for key, value in extra.items():
        lines = [f"{key} = {value}" if line.startswith(f"{key} =") else line
                 for line in text.splitlines() if value or not line.startswith(f"{key} =")]
        text = "\n".join(lines)
    (root / "run.toml").write_text(text)
    return root / "run.toml"


def losses(out: Path) -> dict[int, float]:
    """Return {step: loss} of a run's metrics.jsonl; also while it is being written."""
    metrics = out / "metrics.jsonl"
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    records = [json.loads(line) for line in lines]
    return {r["step"]: r["loss"] for r in records if r["kind"] == "train"}


def deepspeed_json(path: Path, stage: int, **more) -> Path:
    """Write a DeepSpeed config in which every parameter is really partitioned."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0} if stage == 3 \
        else {"stage": stage}
    path.write_text(json.dumps({"zero_optimization": zero} | more))
    return path


def options_of(run_file: str | Path, ds_file: str | Path) -> list[str]:
    """Return the arguments of pretrain.py that name the two."""
    return ["--config", str(run_file), "--deepspeed_config", str(ds_file)]


def torchrun(ranks: int, script: str | Path, *arguments, timeout: float = 240,
             check: bool = True) -> subprocess.CompletedProcess:
    """Run `script` on `ranks` ranks of this machine; on failure show what it printed."""
    with tempfile.TemporaryDirectory() as name, rank_helpers.quick_python(Path(name)) as program:
        command = [program, "-m", "torch.distributed.run", "--standalone",
                   f"--nproc_per_node={ranks}", str(script), *map(str, arguments)]
        return checked(subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True,
                                      text=True, timeout=timeout), check)


def python(*words, timeout: float = 240, check: bool = True) -> subprocess.CompletedProcess:
    """Run `python *words` without a launcher, as a fork that has everything imported."""
    words = [*map(str, words)]
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(ROOT):
        out, errors = Path(name) / "out", Path(name) / "errors"
        codes = rank_helpers.wait([rank_helpers.start_alone(words, out, errors)], timeout)
        done = subprocess.CompletedProcess(words, codes[0], *(
            path.read_text(encoding="utf-8", errors="replace") for path in (out, errors)))
    return checked(done, check)


def checked(done: subprocess.CompletedProcess, check: bool) -> subprocess.CompletedProcess:
    if check and done.returncode:
        raise AssertionError(f"{done.args} exited with {done.returncode}\n{done.stdout[-3000:]}\n"
                             f"{done.stderr[-6000:]}")
    return done


def wait_for_server(port: int) -> None:
    """Return when a server of this machine listens on `port`."""
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the server did not start")
