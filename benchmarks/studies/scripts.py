"""Whether a model of English helps with another script: tokens that its start needs. CPU.

    python -m benchmarks.studies.scripts --texts DIR --work DIR --out FILE.json

DIR/NAME.txt has one text a line. Each gets a tokenizer of 4,000 subwords. Three starts of the shape
of novels_7m then train on it, at a constant learning rate: transplanted ([init] from), rows (its
layers with a random token embedding), random (--init.from=random:...). `share`: the tokens after
which the transplanted start is as low as the better other one at the end, by that one's tokens.
"""

import argparse
import json
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from deberta_ds.base.files import write_atomic

MODEL = Path("examples/models/novels_7m")
ORDER = [(1, "mlm", "transplanted"), (1, "mlm", "random"), (1, "mlm", "rows"),
         (1, "rtd", "transplanted"), (1, "rtd", "random"), (2, "mlm", "transplanted"),
         (2, "mlm", "random"), (2, "mlm", "rows"), (2, "rtd", "transplanted"), (2, "rtd", "random"),
         (1, "rtd", "rows"), (2, "rtd", "rows")]
SCORES = {"mlm": ("masked_loss",), "rtd": ("generator_loss", "discriminator_loss")}
RUN = """
[data]
sources = [{{ path = "{work}/train" }}]
heldout = "{work}/heldout"
tokenizer = "{work}/spm.model"
seq_len = 128
[objective]
kind = "{kind}"
[optim]
learning_rate = 1e-3
schedule = "constant"
warmup_steps = 20
[train]
steps = {steps}
global_batch_size = 8
micro_batch_size = 8
log_every = 50
eval_every = {every}
eval_sequences = 64
[model]
hidden_dropout = 0.0
attention_dropout = 0.0
[init]
"""


def command(*words: object) -> str:
    """Return what a command of the project prints."""
    return subprocess.run([sys.executable, *map(str, words)], check=True, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout


def prepare(text: Path, work: Path) -> None:
    """Make the tokenizer and the packed corpora of one text."""
    if not (work / "spm.model").exists():
        command("data_prep/train_tokenizer.py", text, "--documents", "line", "--vocab_size", 4000,
                "--out", work / "spm.model")
        command("data_prep/tokenize_corpus.py", text, "--documents", "line", "--tokenizer",
                work / "spm.model", "--out", work / "train", "--heldout_out", work / "heldout",
                "--heldout_share", 0.1, "--workers", 1)
        command("data_prep/pack.py", work / "train", work / "heldout", "--tokenizer",
                work / "spm.model", "--seq_len", 128)


def source_of(start: str, work: Path) -> str:
    """Return the value of init.from for a start."""
    if start == "rows" and not (work / "rows").exists():
        shutil.copytree(MODEL, work / "rows")
        tensors = load_file(MODEL / "model.safetensors")
        for name, tensor in tensors.items():
            if name.endswith("word_embeddings.weight"):
                tensors[name] = (0.04 * torch.randn(tensor.shape)).to(tensor.dtype)
            elif name == "cls.predictions.bias":
                tensors[name] = torch.zeros_like(tensor)
        save_file(tensors, work / "rows/model.safetensors", {"format": "pt"})
    return {"transplanted": str(MODEL), "rows": str(work / "rows"),
            "random": f"random:{MODEL}"}[start]


def curve(work: Path, kind: str, start: str, seed: int, steps: int, every: int
          ) -> tuple[dict[str, list[float]], str]:
    """Return ({score: before, each `every` steps}, what the log says of token embeddings)."""
    out, source = work / f"{kind}-{start}-{seed}", source_of(start, work)
    init = f'from = "{source}"\n' + (
        f'generator = "{source}"\ngenerator_layers = [0, 3, 6]\n'
        if kind == "rtd" and start != "random" else "")
    out.with_suffix(".toml").write_text(f'name = "scripts"\nout_dir = "{out}"\n' + RUN.format(
        work=work, kind=kind, steps=steps, every=every).replace(
        f'kind = "{kind}"', f'kind = "{kind}"' + "\ngenerator_layers = 3" * (kind == "rtd")) + init)
    log = command("launch/pretrain.py", "--config", out.with_suffix(".toml"), "--deepspeed_config",
                  "ds_configs/zero0_fp32.json", f"--train.seed={seed}", f"--data.seed={seed}")
    said = [line for line in log.splitlines() if "token embeddings:" in line]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {name: [round(row[name], 4) for row in rows if row["kind"] == "eval"]
            for name in SCORES[kind]}, said[0] if said else ""


def share(first: list[float], other: list[float]) -> float | None:
    """Return after which share of the run `first` is as low as `other` at its end; None: never."""
    for point, (before, after) in enumerate(pairwise(first)):
        if after <= other[-1]:
            part = (before - other[-1]) / (before - after) if before > other[-1] else 0.0
            return round((point + part) / (len(first) - 1), 3)
    return None


def compare(starts: dict[str, dict[str, list[float]]]) -> dict[str, float | None]:
    """Return {score: share of tokens that the transplanted start needs} of the better other."""
    others = [curves for start, curves in starts.items() if start != "transplanted"]
    return {name: share(points, min((one[name] for one in others), key=lambda one: one[-1]))
            for name, points in starts["transplanted"].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=12)
    options = parser.parse_args()
    found: dict = json.loads(options.out.read_text()) if options.out.exists() else {
        "steps": options.steps, "every": options.every, "tokens_a_step": 1024}
    for seed, kind, start in ORDER:
        for text in sorted(options.texts.glob("*.txt")):
            work = options.work / text.stem
            prepare(text, work)
            starts = found.setdefault(text.stem, {}).setdefault(kind, {}).setdefault(str(seed), {})
            if start in starts:  # measured before
                continue
            curves, said = curve(work, kind, start, seed, options.steps, options.every)
            starts[start] = curves
            if said:
                found[text.stem]["log"] = said.split("token embeddings: ")[1]
            if "transplanted" in starts and len(starts) > 1:
                found[text.stem].setdefault("share", {})[f"{kind} {seed}"] = compare(starts)
            write_atomic(options.out, json.dumps(found, indent=1) + "\n")
            print(text.stem, seed, kind, start, curves, flush=True)


if __name__ == "__main__":
    main()
