"""Measure the speed of the data pipeline. One JSON a topic.

    python benchmarks/data.py speed --text DIR_OF_TXT --scratch DIR   # and: loader, scaling, shards

Times are wall and CPU seconds; on a machine with other load only the CPU seconds mean much, so the
load average stands next to them.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
PREP = ROOT / "data_prep"
RESULTS = Path(__file__).parent / "results"
CHAPTERS = ["--documents", "match:(CHAPTER|Chapter) "]
MIB = 1 << 20


def main(description: str, topics: dict) -> None:
    """Run one of `topics` {name: function of the arguments -> figures} and write its JSON."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("topic", choices=topics)
    parser.add_argument("--text", type=Path, help="directory of .txt files")
    parser.add_argument("--scratch", type=Path, required=True, help="empty directory to work in")
    args = parser.parse_args()
    args.scratch.mkdir(parents=True, exist_ok=True)
    figures = topics[args.topic](args)
    report = {"machine": machine(), "load_average": os.getloadavg(), **figures}
    RESULTS.mkdir(exist_ok=True)
    out = RESULTS / f"data_{args.topic}.json"
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


def machine() -> dict:
    model = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo")
                  if line.startswith("model name")), platform.machine())
    packages = ("numpy", "sentencepiece", "torch", "xxhash", "pyarrow", "mpi4py")
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version(),
            **{name: version(name) for name in packages}}


def run(*command, mpi: int = 0, most_seconds: float = float("inf")) -> dict:
    """Run one command; return wall and CPU seconds, the CPU seconds that other programs took from
    the machine meanwhile, the largest peak RSS of its processes, and whether it has ended: beyond
    `most_seconds` it is killed.
    """
    line = [sys.executable, *map(str, command)]
    if mpi:
        line = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(mpi), sys.executable,
                "-m", "mpi4py.futures", *map(str, command)]
    before, start, busy = os.times(), time.perf_counter(), _busy_seconds()
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peaks: dict[int, int] = {}
    while process.poll() is None:
        for pid in _tree(process.pid):
            peaks[pid] = max(peaks.get(pid, 0), _peak_rss(pid))
        time.sleep(0.05)  # VmHWM is a maximum: only the last 0.05 s of a process can be missed
        if time.perf_counter() - start > most_seconds:
            process.kill()  # its workers die with it
            process.wait()
            return {"ended": False, "seconds": most_seconds,
                    "peak_mib": round(max(peaks.values()) / MIB)}
    seconds, after, busy = time.perf_counter() - start, os.times(), _busy_seconds() - busy
    output, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(line)}\n{errors}")
    own = sum(after[:4]) - sum(before[:4])
    cpu = sum(after[2:4]) - sum(before[2:4])
    figures = {"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2),
               "cpu_seconds_of_others": round(max(0.0, busy - own), 2),
               "peak_mib": round(max(peaks.values()) / MIB), "ended": True}
    print(Path(command[0]).name, figures, output.strip().splitlines()[-1], file=sys.stderr)
    return figures


def _busy_seconds() -> float:
    """Return the seconds that all cores together have been busy since boot."""
    user, nice, system = map(int, open("/proc/stat").readline().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def _tree(pid: int) -> list[int]:
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def _peak_rss(pid: int) -> int:
    try:
        for line in open(f"/proc/{pid}/status"):
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    except (OSError, ProcessLookupError):
        pass
    return 0


def novels(args) -> tuple[Path, Path]:
    """Return (one file of all the text, the tokenizer trained on it), made once."""
    text, model = args.scratch / "text.txt", args.scratch / "spm.model"
    if not text.exists():
        with open(text, "wb") as out:
            for path in sorted(args.text.rglob("*.txt")):
                out.write(path.read_bytes().strip() + b"\n")
    if not model.exists():
        run(PREP / "train_tokenizer.py", text, *CHAPTERS, "--vocab_size", 16000, "--sample_bytes",
            16 << 20, "--out", model)
    return text, model


def measure_speed(args) -> dict:
    """Tokens a core second of the tokenize stage and raw SentencePiece, on long and short
    documents: novels by chapter, and the same text in JSON lines of about 1,300 characters.
    """
    text, model = novels(args)
    short = args.scratch / "short.jsonl"
    if not short.exists():
        lines = text.read_text(encoding="utf-8").splitlines()
        with open(short, "w", encoding="utf-8") as out:
            while lines:
                part = []
                while lines and sum(map(len, part)) < 1000:
                    part.append(lines.pop())
                out.write(json.dumps({"text": "\n".join(part)}) + "\n")
    return {"chapters": _stage_speed(args, text, model, CHAPTERS[1]),
            "short documents in JSON lines": _stage_speed(args, short, model, "file")}


def _stage_speed(args, text: Path, model: Path, documents_are: str) -> dict:
    import sentencepiece

    from deberta_ds.corpus.documents import ReadOptions, plan_units
    from deberta_ds.corpus.readers import read_unit
    from deberta_ds.corpus.tokenize import CleanOptions, tokenize_unit
    from deberta_ds.tokenizer import Tokenizer
    from deberta_ds.tokenizer.text import normalize

    tokenizer = Tokenizer(model)
    read, target = ReadOptions(documents=documents_are), args.scratch / "speed"
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    totals = dict.fromkeys(("list", "numpy", "stage"), 0.0)
    tokens = count = 0
    for number, unit in enumerate(plan_units([str(text)], read)):
        documents = [text for text in (normalize(d.text) for d in read_unit(unit, read)) if text]
        ways = {"list": lambda docs=documents: [processor.encode(text) for text in docs],
                "numpy": lambda docs=documents: [processor.encode(text, return_type="numpy")
                                                 for text in docs],
                "stage": lambda args=(number, unit): tokenize_unit(
                    *args, [str(target)], tokenizer, read, CleanOptions(), 0.0, [])}
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(5):  # the ways take turns within each unit
            for way, work in ways.items():
                start = time.process_time()
                work()
                best[way] = min(best[way], time.process_time() - start)
        totals = {way: totals[way] + best[way] for way in ways}
        tokens += sum(map(len, ways["numpy"]()))
        count += len(documents)
    shutil.rmtree(target)
    return {"tokens": tokens, "documents": count,
            **{f"{way}_tokens_a_core_second": round(tokens / totals[way]) for way in totals},
            "stage_over_raw": round(totals["list"] / totals["stage"], 3),
            "stage_over_raw_to_numpy": round(totals["numpy"] / totals["stage"], 3)}


def measure_scaling(args) -> dict:
    """Wall seconds of tokenizing eight copies of the text, the better of two, interleaved.

    "two jobs" are two commands of one worker, half the text each, at the same time: what the two
    cores give to processes that have nothing in common.
    """
    text, model = novels(args)
    out = args.scratch / "scaling"

    def command(copies: int, *options) -> list:
        return [PREP / "tokenize_corpus.py", *[text] * copies, *CHAPTERS, "--tokenizer", model,
                "--unit_bytes", 4 << 20, *options]

    def two_jobs() -> dict:
        lines = [[sys.executable, *map(str, command(4, "--out", out / str(job), "--workers", 1))]
                 for job in range(2)]
        start = time.perf_counter()
        jobs = [subprocess.Popen(line, stdout=subprocess.DEVNULL) for line in lines]
        assert not any(job.wait() for job in jobs)
        return {"seconds": round(time.perf_counter() - start, 2)}

    kinds = {"1 worker": lambda: run(*command(8, "--out", out, "--workers", 1)),
             "2 workers": lambda: run(*command(8, "--out", out, "--workers", 2)),
             "mpirun -n 2": lambda: run(*command(8, "--out", out), mpi=2), "two jobs": two_jobs}
    runs: dict = {name: [] for name in kinds}
    for _ in range(2):
        for name, work in kinds.items():
            shutil.rmtree(out, ignore_errors=True)
            runs[name].append(work())
    best = {name: min(found["seconds"] for found in runs[name]) for name in kinds}
    return {"runs": runs, "over one worker": {
        name: round(best["1 worker"] / found, 2) for name, found in best.items()}}


def measure_loader(args) -> dict:
    """Tokens a second that one loader worker delivers at 512."""
    from deberta_ds.config.batch_schedule import Phase
    from deberta_ds.config.objective import MaskConfig
    from deberta_ds.config.run_config import SourceConfig
    from deberta_ds.data.loader import build_loader
    from deberta_ds.data.rows import RowDataset
    from deberta_ds.tokenizer import Tokenizer

    text, model = novels(args)
    corpus = args.scratch / "loader"
    shutil.rmtree(corpus, ignore_errors=True)
    run(PREP / "tokenize_corpus.py", text, *CHAPTERS, "--tokenizer", model, "--out", corpus)
    run(PREP / "pack.py", corpus, "--tokenizer", model, "--seq_len", 512)
    datasets = {ngram: RowDataset([SourceConfig(path=str(corpus))], Tokenizer(model),
                                  seq_len=512, seed=0,
                                  mask=MaskConfig(max_ngram=ngram)) for ngram in (1, 3)}
    best: dict = {}
    for _ in range(4):
        for ngram, dataset in datasets.items():
            for workers in (0, 1):
                batches = iter(build_loader(
                    dataset, phases=[Phase(0, 64, 160)], micro_batch_size=64, rank=0,
                    world_size=1, num_workers=workers))
                for _ in range(10):
                    next(batches)
                clock = time.perf_counter if workers else time.process_time
                start = clock()
                tokens = sum(batch.input_ids.numel() for batch in batches)
                kind = "one worker, wall" if workers else "in the training process, a core second"
                name = f"max_ngram {ngram}, {kind}"
                best[name] = max(best.get(name, 0), round(tokens / (clock() - start)))
    return {"loader_tokens_a_second_at_512": best}


def measure_shards(args) -> dict:
    """Rows a core second from 10 to 7,451 shards that hold the same documents, and rows a second
    where each read and each opening of a file takes 5 ms.
    """
    import numpy as np

    from deberta_ds.config.objective import MaskConfig
    from deberta_ds.config.run_config import SourceConfig
    from deberta_ds.data import corpus as corpus_files
    from deberta_ds.data.rows import RowDataset
    from deberta_ds.tokenizer import Tokenizer

    with suppress(ValueError, OSError):  # as where the hard limit is that of systemd
        resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 16, 1 << 16))
    _, model = novels(args)
    tokenizer, rng = Tokenizer(model), np.random.default_rng(0)

    def open_rows(path: Path) -> RowDataset:
        return RowDataset([SourceConfig(path=str(path))], tokenizer, seq_len=512, seed=0,
                          mask=MaskConfig())

    lengths = rng.integers(50, 1500, 60_000)
    datasets = {}
    for shards in (10, 100, 2000, 7451):
        path = args.scratch / f"shards_{shards}"
        if not (path / "rows-512" / "manifest.json").exists():
            _write_corpus(path, np.array_split(lengths, shards), tokenizer, rng)
        datasets[shards] = open_rows(path)
    for dataset in datasets.values():  # every file is open as far as the limit allows
        for g in range(30_000):
            dataset.read(g)
    best: dict = {}
    for turn in range(30):  # many short turns: on a busy machine the best of them say most
        for shards, dataset in datasets.items():
            start = time.process_time()
            for g in range(turn * 2000, (turn + 1) * 2000):
                dataset[g]
            rate = round(512 * 2000 / (time.process_time() - start))
            best[shards] = max(best.get(shards, 0), rate)
    # each time again from the last, of 7,451 shards: no plan of them is kept yet
    slow_rates = _rates_where_files_are_slow(lambda: open_rows(path))
    return {"tokens_a_core_second_by_shards": best,
            "over_10_shards": {shards: round(rate / best[10], 3) for shards, rate in best.items()},
            "open_files": corpus_files.most_open_files(),
            "rows_a_second_at_5_ms_an_operation": slow_rates}


def _write_corpus(path: Path, shards: list, tokenizer, rng) -> None:
    """Write a packed corpus of random tokens; `shards` are the lengths of each one's documents."""
    import numpy as np

    from deberta_ds.corpus.pack import pack_corpus
    from deberta_ds.data.shards import Manifest, ShardWriter, write_manifest

    infos = []
    for number, lengths in enumerate(shards):
        writer = ShardWriter(path, f"{number:05d}-000", np.dtype("<u2"))
        for length in lengths:
            writer.append(rng.integers(4, tokenizer.mask_id, length).astype("<u2"))
        infos.append(writer.finish())
    special = {"pad": 0, "cls": 1, "sep": 2, "unk": 3, "mask": tokenizer.mask_id}
    write_manifest(path, Manifest("<u2", tokenizer.size, tokenizer.sha256, special, {}, {},
                                  tuple(infos)))
    pack_corpus(path, tokenizer, 512)


def _rates_where_files_are_slow(open_rows: Callable) -> dict:
    """Return rows a second by micro-batch where each read and each opening takes 5 ms."""
    from deberta_ds.config.batch_schedule import Phase
    from deberta_ds.data import corpus as corpus_files
    from deberta_ds.data.loader import build_loader

    waits = {"read": os.pread, "open": corpus_files.OpenFile}

    def slow(function):
        def wait(*arguments):
            time.sleep(0.005)
            return function(*arguments)
        return wait

    corpus_files.os.pread, corpus_files.OpenFile = slow(waits["read"]), slow(waits["open"])
    rates = {}
    for micro in (1, 16):
        corpus_files.kept_open.cache_clear()
        batches = build_loader(open_rows(), phases=[Phase(0, 16, 40)], rank=0,
                               micro_batch_size=micro, world_size=1, num_workers=0)
        start = time.perf_counter()
        rows = sum(len(batch.rows) for batch in batches)
        rates[f"micro-batches of {micro}"] = round(rows / (time.perf_counter() - start))
    return rates


if __name__ == "__main__":
    main(__doc__, {"speed": measure_speed, "loader": measure_loader,
                   "scaling": measure_scaling, "shards": measure_shards})
