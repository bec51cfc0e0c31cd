"""Run everything on this machine: corpus, pretraining, resume, export, fine-tuning, report.

`make demo` calls this. It runs the commands that a user would run and prints each one. Everything
it writes is in runs/demo. The output of an earlier demo is moved to runs/demo-before. At the end,
each score has its 95 % interval and the baseline, which is what a model without learning reaches.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from deberta_ds.base.command_line import parser_for
from deberta_ds.base.errors import UserError, exit_cleanly
from deberta_ds.base.files import write_atomic
from deberta_ds.base.numbers import fill, format_count, format_duration

OUT, BEFORE = Path("runs/demo"), Path("runs/demo-before")
CONFIG = "launch/runs/demo.toml"
NOVELS = Path("examples/models/novels_7m")
PAIRS = Path("launch/runs/minimal_pairs.jsonl")
SHORT_STEPS = 10
MOST_RANKS = 2  # the run file's 16 sequences per step are two micro-batches of 8
STOP_SHARE = 0.5  # the first pretraining job stops here, the second one resumes
_Z = 1.96  # of a 95 % interval


@dataclass(frozen=True)
class Size:
    """How much of everything: a demo that learns, or one that only shows that all commands run."""

    text_bytes: int
    vocab_size: int
    options: tuple[str, ...] = ()  # of pretraining
    pairs: tuple[str, ...] = ()  # of minimal_pairs.py
    tuning: tuple[str, ...] = ()  # of superglue.py


FULL = Size(6_000_000, 8000)
SHORT = Size(400_000, 1000, tuning=("--all.epochs=1",), pairs=("--sample", "2"), options=(
    f"--train.steps={SHORT_STEPS}", "--optim.warmup_steps=2", "--train.eval_sequences=16"))


@dataclass
class Row:
    """One line of the summary table."""

    stage: str
    what: str
    result: str
    seconds: float


@dataclass
class Demo:
    """The commands run so far, what they gave, and the most memory they held at once."""

    rows: list[Row] = field(default_factory=list)
    peak_bytes: int = 0

    def run(self, *command: str | Path) -> float:
        """Print and run one command; return its seconds. Raises UserError if it fails."""
        words = [str(word) for word in command]
        print(f"\n$ {' '.join(words)}", flush=True)
        module = {"python": [], "deepspeed": ["-m", "deepspeed.launcher.runner"]}[words[0]]
        started = time.monotonic()
        process = subprocess.Popen([sys.executable, *module, *words[1:]], env=_environment())
        watcher = threading.Thread(target=self._watch_memory, args=(process,), daemon=True)
        watcher.start()
        if code := process.wait():
            raise UserError(f"the command above ended with exit code {code}")
        watcher.join()
        return time.monotonic() - started

    def note(self, stage: str, what: str, result: str, seconds: float) -> None:
        self.rows.append(Row(stage, what, result, seconds))

    def _watch_memory(self, process: subprocess.Popen) -> None:
        """Record the peak of the proportional set size of a command and all its children."""
        import psutil

        while process.poll() is None:
            try:
                family = [psutil.Process(process.pid)]
                family += family[0].children(recursive=True)
                held = sum(member.memory_full_info().pss for member in family)
                self.peak_bytes = max(self.peak_bytes, held)
            except psutil.Error:
                pass  # a process ended while it was looked at
            time.sleep(2.0)


def _environment() -> dict[str, str]:
    """The environment of every command: quiet on machines without a GPU, no model hub."""
    from deberta_ds.cluster.launcher import count_gpus

    extra = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
             "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    if not count_gpus():
        extra |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return os.environ | extra


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--short", action="store_true",
                        help=f"run every command on little text and for {SHORT_STEPS} steps, "
                             "which learn nothing")
    parser.add_argument("--seed", type=int, default=0,
                        help="seed of the weights, the sequence order and the masks (default: 0)")
    options = parser.parse_args()

    from deberta_ds.cluster.launcher import count_gpus

    started = time.monotonic()
    gpus = gpus_taken(count_gpus())
    size = SHORT if options.short else FULL
    ranks = gpus or (1 if options.short else MOST_RANKS)
    launcher = ("deepspeed", f"--num_gpus={ranks}", "--quiet")
    ds_config = deepspeed_config(gpus)
    demo = Demo()
    if OUT.exists():
        if BEFORE.exists():
            print(f"$ rm -r {BEFORE}")
            shutil.rmtree(BEFORE)
        print(f"$ mv {OUT} {BEFORE}")
        OUT.rename(BEFORE)
    prepare_data(demo, size)
    seeds = [f"--{section}.seed={options.seed}" for section in ("train", "data") if options.seed]
    pretrain(demo, launcher, ds_config, [*size.options, *seeds])
    score_grammar(demo, size)
    export(demo)
    fine_tune(demo, size)
    total = time.monotonic() - started
    used = sum(os.times()[:4])
    demo.note("whole demo", f"GPUs: {gpus}" if gpus else f"CPU processes: {ranks}",
              f"{format_duration(total)}, {format_duration(used)} of processor time, peak memory "
              f"{demo.peak_bytes / 2**30:.1f} GiB", 0.0)
    write_atomic(OUT / "summary.json", json.dumps([asdict(row) for row in demo.rows], indent=1))
    demo.run("python", "launch/report.py", "--run", OUT, "--fill_mask",
             "Return the [MASK] of the list.",
             "If it is not a [MASK], raise an error.")
    print_summary(demo.rows)
    print(f"\nThe report with the curves: {OUT / 'report.html'}")


def gpus_taken(found: int) -> int:
    """Return how many of the GPUs of this machine the demo takes."""
    return min(found, MOST_RANKS)


def deepspeed_config(gpus: int) -> str:
    """Return the JSON that suits this machine; so small a model is not worth sharding."""
    from deberta_ds.model import cpu

    return f"ds_configs/{'zero1_bf16' if gpus else cpu.deepspeed_json()}.json"


def prepare_data(demo: Demo, size: Size) -> None:
    text, corpus, model = OUT / "text", OUT / "corpus", OUT / "spm.model"
    seconds = demo.run("python", "data_prep/docstrings.py", "--out", text, "--pinned",
                       "constraints.txt", "--max_bytes", str(size.text_bytes))
    megabytes = (text / "train.jsonl").stat().st_size / 1e6
    demo.note("corpus", "docstrings of pinned packages", f"{megabytes:.1f} MB", seconds)
    seconds = demo.run("python", "data_prep/train_tokenizer.py", text / "train.jsonl",
                       "--out", model, "--vocab_size", str(size.vocab_size))
    demo.note("tokenizer", "SentencePiece unigram", f"{size.vocab_size:,} tokens", seconds)
    seconds = 0.0
    for part in ("train", "heldout"):
        seconds += demo.run("python", "data_prep/tokenize_corpus.py", text / f"{part}.jsonl",
                            "--out", corpus / part, "--tokenizer", model)
    seconds += demo.run("python", "data_prep/pack.py", corpus / "train", corpus / "heldout",
                        "--tokenizer", model, "--seq_len", "128")
    manifest = json.loads((corpus / "train/manifest.json").read_text())
    tokens = sum(shard["tokens"] for shard in manifest["shards"])
    demo.note("token shards", "packed into sequences of 128", f"{format_count(tokens)} tokens",
              seconds)
    demo.run("python", "data_prep/show.py", corpus / "train", "--tokenizer", model, "--seq_len",
             "128", "--sequences", "2")


def pretrain(demo: Demo, launcher: tuple[str, ...], ds_config: str, overrides: list[str]) -> None:
    command = (*launcher, "launch/pretrain.py", "--config", CONFIG, "--deepspeed_config", ds_config,
               *overrides)
    from deberta_ds.config import run_config
    from deberta_ds.tracking.log import read_metrics

    steps = run_config.load(CONFIG, overrides)[0].train.steps
    stop = int(steps * STOP_SHARE)
    seconds = demo.run(*command, f"--train.stop_after={stop}")
    demo.note("pretraining", f"{Path(ds_config).stem}, stopped on purpose", f"step {stop}", seconds)
    seconds = demo.run(*command)
    records = read_metrics(OUT / "metrics.jsonl")
    resumed = [r for r in records if r.get("event") == "resume"]
    demo.note("resume", resumed[-1]["detail"], f"step {resumed[-1]['step']} to {steps}", seconds)
    scores = [r for r in records if r["kind"] == "eval"][-1]
    share, error = scores["generator_accuracy"], _Z * scores["accuracy_error"]
    demo.note("generator", "masked accuracy on the held-out set",
              f"{share:.1%} ({share - error:.1%} to {share + error:.1%}; most frequent token: "
              f"{scores['unigram_accuracy']:.1%})", 0.0)
    area, error = scores["roc_auc"], _Z * scores["roc_auc_error"]
    demo.note("discriminator", "ROC-AUC on the held-out set",
              f"{area:.3f} ({area - error:.3f} to {area + error:.3f}; chance: 0.500)", 0.0)


def score_grammar(demo: Demo, size: Size) -> None:
    """Score the committed model: the demo's own learns no grammar of so few tokens."""
    seconds = demo.run("python", "launch/minimal_pairs.py", "--model", NOVELS, "--data", PAIRS,
                       "--out", OUT / "minimal_pairs", *size.pairs)
    found = json.loads((OUT / "minimal_pairs/minimal_pairs.json").read_text())
    score = next(iter(found["scorers"].values()))
    low, high = score["interval"]
    demo.note("minimal pairs", f"{found['pairs']} of this project, by {NOVELS.name}, which has "
              "read 144M tokens",
              f"{score['accuracy']:.1%} ({low:.1%} to {high:.1%}; chance: 50.0%)", seconds)


def export(demo: Demo) -> None:
    seconds = demo.run("python", "launch/export.py", "--run", OUT, "--out", OUT / "hf")
    size = (OUT / "hf/model.safetensors").stat().st_size / 1e6
    demo.note("export", "AutoModel and AutoTokenizer agree with ours", f"{size:.1f} MB", seconds)


def fine_tune(demo: Demo, size: Size) -> None:
    real, out = os.environ.get("SUPERGLUE_DIR"), OUT / "superglue"
    data, about = (real, "") if real else ("tests/fixtures/superglue", " of a small sample")
    seconds = demo.run("python", "launch/superglue.py", "--tasks", "RTE", "CB",
                       "--model", OUT / "hf", "--data", data, "--out", out,
                       "--seeds", "1", "--skip_test", *(() if real else ("--any_size",)),
                       "--config", "launch/runs/superglue/demo.toml", *size.tuning)
    runs = json.loads((out / "results.json").read_text())["runs"]
    for run in runs:
        scores = run["scores"]["val"]
        share, rows = scores["metrics"]["accuracy"]["value"], scores["examples"]
        low, high = wilson(share, rows)
        demo.note(f"SuperGLUE {run['task']}", f"accuracy on {rows} validation examples{about}",
                  f"{share:.1%} ({low:.1%} to {high:.1%}; majority class: "
                  f"{scores['majority']['accuracy']:.1%})", seconds / len(runs))


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of `count` independent answers (Wilson 1927)."""
    from scipy.stats import binomtest

    return tuple(binomtest(round(share * count), count).proportion_ci(method="wilson"))


def print_summary(rows: list[Row]) -> None:
    """Print the table of what was done."""
    print()
    for row in rows:
        seconds = format_duration(row.seconds) if row.seconds else ""
        print(fill(f"{row.stage:<13} {seconds:>7}  {row.what}: {row.result}", 79, hanging=23))


if __name__ == "__main__":
    exit_cleanly(main)
