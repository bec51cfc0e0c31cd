"""Break the data pipeline on purpose and check what is left. Not collected by pytest.

    python tools/faults/data_faults.py --text FILE.txt --scratch DIR [--kills 20] [--stages pack]

Each prep stage is killed (kill -9, the whole process group, or one process of it) at random
moments, started again until it is done, and compared byte by byte with an unbroken run. Then a full
disk (a small tmpfs; needs root), damaged shards, and bad input. Prints a table and writes
benchmarks/results/data_faults.json.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil

ROOT = Path(__file__).parent.parent.parent
PREP = ROOT / "data_prep"
TINY = ROOT / "tests" / "fixtures" / "tiny_run"  # a small corpus and its generator
STAGES = ["train_tokenizer", "dedup", "tokenize_corpus", "pack", "near", "filter", "decontaminate",
          "filtered", "take_down", "replace", "stage_local", "upload", "output_at_a_url", "build"]
RECIPE = """out = "shards"
seq_len = [64, 128]
heldout_share = 0.05
unit_bytes = 150_000
against = ["{work}/evaluation.txt"]
[tokenizer]
path = "{work}/spm.model"
[[corpora]]
name = "text"
inputs = ["{text}"]
documents = "blank_line"
filters = "{work}/filters.toml"
"""
FILTERS = 'use = ["language", "lines", "gopher", "personal"]\n[lines]\nend_mark = false\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="one .txt file of 5 MB or more")
    parser.add_argument("--scratch", type=Path, required=True, help="directory to work in")
    parser.add_argument("--kills", type=int, default=20, help="per stage")
    parts = {"kills": kill_stages, "full_disk": fill_disk, "damage": damage,
             "bad_input": feed_bad_input}
    parser.add_argument("--only", nargs="+", choices=list(parts), default=list(parts),
                        help="parts to run; all but kills need what kills leaves in --scratch")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES,
                        help="stages to kill; a run of some keeps what --scratch holds")
    args = parser.parse_args()
    out = ROOT / "benchmarks" / "results" / "data_faults.json"
    if "kills" in args.only and args.stages == STAGES:
        shutil.rmtree(args.scratch, ignore_errors=True)
    args.scratch.mkdir(parents=True, exist_ok=True)
    report = json.loads(out.read_text()) if out.exists() else {}
    for name in args.only:
        found = parts[name](args)
        report[name] = report.get(name, {}) | found if name == "kills" else found
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


def stage(name: str, args, out: Path) -> list[str]:
    """Return the command of one stage that writes to `out`."""
    text = [str(args.text), "--documents", "blank_line", "--unit_bytes", "150000"]
    model, filters = str(args.scratch / "spm.model"), str(args.scratch / "filters.toml")
    workers = ["--workers", "2"]
    url, cache = f"file://{out}", ["--cache", f"{out}_cache"]
    tokenized = [f"{PREP}/tokenize_corpus.py", *text, "--tokenizer", model, *workers]
    if name == "stage_local":
        return [str(ROOT / "launch/cluster/stage_local.sh"), str(out), str(args.scratch / "packed")]
    return [sys.executable, *{
        "train_tokenizer": [f"{PREP}/train_tokenizer.py", *text, "--vocab_size", "4000",
                            "--sample_bytes", "2000000", "--out", f"{out}/spm.model"],
        "dedup": [f"{PREP}/dedup.py", *text, "--out", str(out), *workers],
        "tokenize_corpus": [f"{PREP}/tokenize_corpus.py", *text, "--tokenizer", model, "--out",
                            f"{out}/train", "--heldout_share", "0.05", "--heldout_out",
                            f"{out}/heldout",
                            *workers],
        "pack": [f"{PREP}/pack.py", f"{out}/train", "--tokenizer", model, "--seq_len", "128",
                 *workers],
        "near": [f"{PREP}/dedup.py", *text, "--near", "0.8", "--out", str(out), *workers],
        "filter": [f"{PREP}/filter.py", *text, "--filters", filters, "--out", str(out), *workers],
        "decontaminate": [f"{PREP}/decontaminate.py", *text, "--against",
                          str(args.scratch / "evaluation.txt"), "--out", str(out), *workers],
        "filtered": [*tokenized, "--filters", filters, "--out", str(out)],
        "take_down": [f"{PREP}/take_down.py", str(args.scratch / "packed"), "--tokenizer", model,
                      "--documents_from", str(args.scratch / "names.txt"), "--out", str(out),
                      *workers],
        "replace": [f"{PREP}/replace.py", str(TINY / "train"), "--generator",
                    str(TINY / "rtd" / "export"), "--seq_len", "32", "--temperatures", "2", "1.5",
                    "1", "--out", str(out), *workers],
        "upload": [f"{PREP}/upload.py", str(args.scratch / "packed"), "--to", url],
        "output_at_a_url": [*tokenized, "--out", url, *cache],
        "build": [f"{PREP}/build.py", "--recipe", str(args.scratch / "corpus.toml"), f"--out={out}",
                  *workers],
    }[name]]


def kill_stages(args) -> dict:
    run(stage("train_tokenizer", args, args.scratch))
    tokenized = args.scratch / "tokenized"
    run(stage("tokenize_corpus", args, tokenized))
    prepare(args, tokenized)
    report = {}
    for name in args.stages:
        report[name] = kill_stage(name, args, tokenized)
        print(name, report[name], flush=True)
    return report


def prepare(args, tokenized: Path) -> None:
    """Write what the later stages work on: a packed corpus, names of its documents, filters."""
    from deberta_ds.corpus.origins import Origins

    packed = args.scratch / "packed"
    if not packed.exists():
        shutil.copytree(tokenized / "train", packed)
    run([sys.executable, f"{PREP}/pack.py", packed, "--tokenizer", args.scratch / "spm.model",
         "--seq_len", "64"])
    origins = Origins(packed)
    names = [origins.of(shard, number).name for shard in list(origins.files)[::3]
             for number in range(0, 30, 7) if number < origins.table(shard).num_rows]
    (args.scratch / "names.txt").write_text("\n".join(names))
    (args.scratch / "filters.toml").write_text(FILTERS)
    (args.scratch / "corpus.toml").write_text(RECIPE.format(text=args.text, work=args.scratch))
    lines = args.text.read_text("utf-8").splitlines()
    (args.scratch / "evaluation.txt").write_text("\n".join(lines[1000:1400]))


def kill_stage(name: str, args, tokenized: Path) -> dict:
    generator = random.Random(name)
    whole, broken = args.scratch / f"{name}_whole", args.scratch / f"{name}_broken"
    for directory in (whole, broken):
        clear(directory)
        if name == "pack":
            shutil.copytree(tokenized, directory)
    start = time.perf_counter()
    run(stage(name, args, whole))
    seconds = time.perf_counter() - start
    kills, rounds, opened, same = 0, 0, 0, 0
    while kills < args.kills:
        rounds += 1
        clear(broken / "train" / "rows-128" if name == "pack" else broken)
        for _ in range(4):  # several kills of the same job, then let it finish
            kills += kill_once(stage(name, args, broken), generator.random() * seconds,
                               whole_group=generator.random() < 0.7, generator=generator)
            opened += opens_half_written(broken, name)
        run(stage(name, args, broken))
        same += tree(broken) == tree(whole)
    return {"kills": kills, "jobs": rounds, "identical_to_the_unbroken_run": same,
            "half_written_output_that_opens": opened, "unbroken_seconds": round(seconds, 2)}


def clear(directory: Path) -> None:
    """Remove an output, and the directory in which that for a URL is made."""
    for path in (directory, Path(f"{directory}_cache")):
        shutil.rmtree(path, ignore_errors=True)


def kill_once(command: list[str], delay: float, *, whole_group: bool, generator) -> int:
    """Start, kill after `delay` seconds; return 1 if it was still running then."""
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    time.sleep(delay)
    alive = process.poll() is None
    if alive and whole_group:
        os.killpg(process.pid, signal.SIGKILL)
    elif alive:
        family = [process.pid] + [c.pid for c in psutil.Process(process.pid).children()]
        victim = generator.choice(family)
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            alive = False
    process.wait(timeout=120)
    return int(alive)


def opens_half_written(out: Path, name: str) -> int:
    """Return 1 if the output has a manifest although a part of it is missing."""
    from deberta_ds.base.errors import UserError
    from deberta_ds.data.corpus import Corpus

    if name == "train_tokenizer":
        model = out / "spm.model"
        return int(model.exists() and model.read_bytes() != (out.parent / f"{name}_whole" /
                                                             "spm.model").read_bytes())
    if name == "build":
        return 0  # each of its stages is killed alone, too
    written = {"pack": out / "train" / "rows-128", "tokenize_corpus": out / "train"}
    directory = written.get(name, out)
    last = {"filter": "filters.json", "upload": "blocks/manifest.json"}.get(name, "manifest.json")
    if name == "stage_local" or not (directory / last).exists():
        return 0
    if name not in (*written, "dedup"):
        missing = set(tree(out.parent / f"{name}_whole")) - set(tree(out))
        return int(any(not path.endswith(".html") for path in missing))  # pages are drawn last
    if name == "dedup":
        return int(not (out / "found").exists())
    try:
        if name == "pack":
            Corpus(out / "train", seq_len=128).verify("full")
        return 0
    except UserError:
        return 1


def tree(directory: Path) -> dict[str, bytes]:
    """Return all files; a page has the directory's name as its title."""
    name = directory.name.encode()
    return {str(p.relative_to(directory)): p.read_bytes().replace(b">" + name, b">DIR")
            for p in sorted(directory.rglob("*")) if p.is_file()}


def fill_disk(args) -> dict:
    """Run each stage on a tmpfs that is too small: one error, no manifest, and it can go on."""
    if os.geteuid() != 0:
        return {"skipped": "mounting a tmpfs needs root"}
    mount = args.scratch / "small_disk"
    mount.mkdir(exist_ok=True)
    report = {}
    for name, size in (("dedup", "64k"), ("tokenize_corpus", "600k"), ("pack", "20k")):
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", mount],
                              capture_output=True, text=True)
        if done.returncode:
            return {"skipped": done.stderr.strip()}
        try:
            out = mount / "out"
            if name == "pack":
                out = args.scratch / "pack_on_small_disk"
                shutil.rmtree(out, ignore_errors=True)
                shutil.copytree(args.scratch / "tokenized", out)
                (out / "train" / "rows-128").symlink_to(mount)
            failed = subprocess.run(stage(name, args, out), capture_output=True, text=True)
            left = any(mount.rglob("manifest.json"))
            subprocess.run(["mount", "-o", "remount,size=200m", mount], check=True)
            again = subprocess.run(stage(name, args, out), capture_output=True, text=True)
            whole = args.scratch / f"{name}_whole"
            pair = (mount, whole / "train" / "rows-128") if name == "pack" else (out, whole)
            report[name] = {
                "exit_code": failed.returncode, "error_lines": failed.stderr.count("error:"),
                "traceback": "Traceback" in failed.stderr, "manifest_left": left,
                "message": failed.stderr.strip().splitlines()[-1].replace(str(args.scratch), "DIR"),
                "exit_code_after_more_space": again.returncode,
                "identical_to_the_unbroken_run": tree(pair[0]) == tree(pair[1])}
        finally:
            subprocess.run(["umount", mount], check=True)
    return report


def damage(args) -> dict:
    """Damage one file at a time; each must be refused by name."""
    corpus = args.scratch / "pack_whole" / "train"
    shards = sorted((corpus / "tokens").glob("*.npy"))
    rows = sorted((corpus / "rows-128").glob("*.npy"))
    generator = np.random.default_rng(0)
    report = {}
    for kind, path in (("tokens", shards[0]), ("ends", corpus / "ends" / shards[1].name),
                       ("rows", rows[0]), ("starts", rows[1])):
        data = path.read_bytes()
        for fault in ("flipped byte", "truncated", "removed"):
            changed = bytearray(data)
            changed[int(generator.integers(len(data)))] ^= 0x10
            if fault == "removed":
                path.unlink()
            else:
                path.write_bytes(changed if fault == "flipped byte" else data[: len(data) // 2])
            report[f"{kind}, {fault}"] = complaint([f"{PREP}/verify.py", corpus], path.name)
            path.write_bytes(data)
    manifest = corpus / "manifest.json"
    text = manifest.read_text()
    other = text.replace('"tokenizer_sha256": "', '"tokenizer_sha256": "0')
    for fault, changed in (("manifest cut short", text[: len(text) // 2]),
                           ("manifest of another tokenizer", other)):
        manifest.write_text(changed)
        report[fault] = complaint([f"{PREP}/verify.py", corpus], str(corpus))
        manifest.write_text(text)
    report["undamaged again"] = run([sys.executable, f"{PREP}/verify.py", corpus]).returncode == 0
    return report


def feed_bad_input(args) -> dict:
    """Give the tokenizer bad files; report the message, or the counts where it goes on."""
    directory = args.scratch / "bad"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    words = b"many ordinary words in one line " * (50_000_000 // 32)
    cases = {
        "invalid_utf8.txt": b"good line\nbad \xff byte\n",
        "wrong_json.jsonl": b'{"text": "good"}\n{"text": \n',
        "wrong_key.jsonl": b'{"text": "good"}\n{"body": "x"}\n',
        "not_a_string.jsonl": b'{"text": 17}\n',
        "lone_surrogate.jsonl": b'{"text": "x"}\n{"text": "\\ud800"}\n',
        "empty_documents.jsonl": b'{"text": ""}\n{"text": " "}\n\n{"text": "x y"}\n',
        "nul_bytes.txt": b"one\x00two\x00 three\n", "one_line_of_50_MB.txt": words,
        "one_line_of_50_MB.jsonl": b'{"text": "' + words + b'"}\n{"text": "after"}\n',
        "one_word_of_3_MB.txt": b"x" * 3_000_000,
        "one_line_of_80_MB.jsonl": b'{"text": "' + b"y " * 40_000_000 + b'"}\n{"text": "after"}\n'}
    report = {}
    for name, data in cases.items():
        (directory / name).write_bytes(data)
        done = subprocess.run(
            [sys.executable, f"{PREP}/tokenize_corpus.py", directory / name, "--tokenizer",
             args.scratch / "spm.model", "--out", directory / f"{name}.out"],
            capture_output=True, text=True)
        said = (done.stderr if done.returncode else done.stdout).strip().splitlines()[-1]
        assert "Traceback" not in done.stderr, done.stderr
        report[name] = {"exit_code": done.returncode, "said": said.replace(str(directory), "DIR")}
    return report


def complaint(command: list, expected: str) -> dict:
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True)
    return {"exit_code": done.returncode, "one_line": done.stderr.count("\n") == 1,
            "names_the_file": expected in done.stderr}


def run(command: list) -> subprocess.CompletedProcess:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done


if __name__ == "__main__":
    main()
