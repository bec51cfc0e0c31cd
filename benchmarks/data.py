"""Measure the data pipeline: memory, speed, order, opening a huge corpus. One JSON a topic.

    python benchmarks/data.py memory --text DIR_OF_TXT --scratch DIR     # writes about 4 GB
    python benchmarks/data.py speed --text DIR_OF_TXT --scratch DIR      # and: scaling, order
    python benchmarks/data.py open --scratch DIR
    python benchmarks/data.py languages --text DIR_OF_LANGUAGE_DIRS --scratch DIR

Times are wall and CPU seconds; on a machine with other load only the CPU seconds mean much, so the
load average stands beside them.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import psutil

ROOT = Path(__file__).parent.parent
PREP = ROOT / "data_prep"
RESULTS = Path(__file__).parent / "results"
CHAPTERS = ["--documents", "match:(CHAPTER|Chapter) "]
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    topics = ("memory", "speed", "scaling", "order", "open", "languages")
    parser.add_argument("topic", choices=topics)
    parser.add_argument("--text", type=Path, help="directory of .txt files")
    parser.add_argument("--scratch", type=Path, required=True, help="empty directory to work in")
    args = parser.parse_args()
    args.scratch.mkdir(parents=True, exist_ok=True)
    figures = globals()[f"measure_{args.topic}"](args)
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


def run(*command, mpi: int = 0) -> dict:
    """Run one command; return wall and CPU seconds and the largest peak RSS of its processes."""
    line = [sys.executable, *map(str, command)]
    if mpi:
        line = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(mpi), sys.executable,
                "-m", "mpi4py.futures", *map(str, command)]
    before, start = os.times(), time.perf_counter()
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peaks: dict[int, int] = {}
    while process.poll() is None:
        for pid in _tree(process.pid):
            peaks[pid] = max(peaks.get(pid, 0), _peak_rss(pid))
        time.sleep(0.2)  # VmHWM is a maximum: only the last 0.2 s of a process can be missed
    seconds, after = time.perf_counter() - start, os.times()
    output, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(line)}\n{errors}")
    cpu = after.children_user + after.children_system - before.children_user
    figures = {"seconds": round(seconds, 2), "cpu_seconds": round(cpu - before.children_system, 2),
               "peak_mib": round(max(peaks.values()) / MIB)}
    print(Path(command[0]).name, figures, output.strip().splitlines()[-1], file=sys.stderr)
    return figures


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
        run(PREP / "train_tokenizer.py", text, *CHAPTERS, "--pieces", 16000, "--sample_bytes",
            16 << 20, "--out", model)
    return text, model


def measure_memory(args) -> dict:
    """Peak RSS of each command on the text and on the text repeated to 2 GB."""
    text, model = novels(args)
    big = args.scratch / "big.txt"
    copies = -(-2_000_000_000 // text.stat().st_size)
    if not big.exists():
        with open(big, "wb") as out:
            for _ in range(copies):
                with open(text, "rb") as source:
                    shutil.copyfileobj(source, out)
    figures: dict = {"bytes": {"small": text.stat().st_size, "big": big.stat().st_size}}
    for name, source in (("small", text), ("big", big)):
        corpus = args.scratch / f"corpus_{name}"
        found = args.scratch / f"dedup_{name}"
        for directory in (corpus, found):
            shutil.rmtree(directory, ignore_errors=True)
        figures[name] = {
            "train_tokenizer": run(PREP / "train_tokenizer.py", source, *CHAPTERS, "--pieces", 8000,
                                   "--sample_bytes", 8 << 20, "--out", args.scratch / "m.model"),
            "dedup": run(PREP / "dedup.py", source, *CHAPTERS, "--out", found, "--workers", 2),
            "tokenize_corpus": run(PREP / "tokenize_corpus.py", source, *CHAPTERS, "--tokenizer",
                                   model, "--out", corpus, "--workers", 2),
            "pack": run(PREP / "pack.py", corpus, "--tokenizer", model, "--seq_len", 512,
                        "--workers", 2),
            "verify": run(PREP / "verify.py", corpus),
            "stats": run(PREP / "stats.py", corpus, "--tokenizer", model),
        }
    corpus = args.scratch / "corpus_cap"
    shutil.rmtree(corpus, ignore_errors=True)
    figures["one_shard_of_125_M_tokens"] = {
        "tokenize_corpus": run(PREP / "tokenize_corpus.py", *[text] * 8, *CHAPTERS, "--tokenizer",
                               model, "--out", corpus, "--workers", 2, "--unit_bytes", 1 << 29),
        "pack": run(PREP / "pack.py", corpus, "--tokenizer", model, "--seq_len", 512,
                    "--workers", 2),
    }
    for name in ("small", "big", "cap"):
        shutil.rmtree(args.scratch / f"corpus_{name}")
    return figures


def measure_speed(args) -> dict:
    """Tokens a core second beside raw SentencePiece; 1 and 2 workers; MPI; the loader."""
    import sentencepiece

    from deberta_ds.data.prep.documents import ReadOptions, plan_units
    from deberta_ds.data.prep.readers import read_unit
    from deberta_ds.data.prep.text import normalise
    from deberta_ds.data.prep.tokenize import CleanOptions, tokenize_unit

    text, model = novels(args)
    read = ReadOptions(documents=CHAPTERS[1])
    units = plan_units([str(text)], read)
    documents = [normalise(d.text) for unit in units for d in read_unit(unit, read)]
    documents = [document for document in documents if document]
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ours, raw, raw_numpy, tokens = [], [], [], 0
    target = args.scratch / "speed"
    for _ in range(7):
        start = time.process_time()
        tokens = sum(len(processor.encode(document)) for document in documents)
        raw.append(time.process_time() - start)
        start = time.process_time()
        for document in documents:
            processor.encode(document, return_type="numpy")
        raw_numpy.append(time.process_time() - start)
        start = time.process_time()
        for number, unit in enumerate(units):
            tokenize_unit(number, unit, [str(target)], str(model), read, CleanOptions(), 0.0, "")
        ours.append(time.process_time() - start)
    figures: dict = {
        "tokens": tokens, "documents": len(documents),
        "raw_sentencepiece_tokens_a_core_second": round(tokens / min(raw)),
        "raw_sentencepiece_to_numpy_tokens_a_core_second": round(tokens / min(raw_numpy)),
        "tokenize_stage_tokens_a_core_second": round(tokens / min(ours)),
        "stage_over_raw": round(min(raw) / min(ours), 3),
        "stage_over_raw_to_numpy": round(min(raw_numpy) / min(ours), 3),
    }
    shutil.rmtree(target)
    return figures | _loader_speed(args, text, model)


def measure_scaling(args) -> dict:
    """Wall seconds of tokenizing four copies of the text, the best of three, interleaved."""
    text, model = novels(args)
    kinds = {"1 worker": {"workers": 1}, "2 workers": {"workers": 2}, "mpirun -n 2": {"mpi": 2}}
    runs: dict = {name: [] for name in kinds}
    for _ in range(3):
        for name, kind in kinds.items():
            out = args.scratch / "scaling"
            shutil.rmtree(out, ignore_errors=True)
            command = [PREP / "tokenize_corpus.py", *[text] * 4, *CHAPTERS, "--tokenizer", model,
                       "--out", out, "--workers", kind.get("workers", 1), "--unit_bytes", 4 << 20]
            runs[name].append(run(*command, mpi=kind.get("mpi", 0)))
    best = {name: min(r["seconds"] for r in found) for name, found in runs.items()}
    return {
        "scaling_seconds": best,
        "scaling_cpu_seconds": {n: min(r["cpu_seconds"] for r in f) for n, f in runs.items()},
        "two_workers_over_one": round(best["1 worker"] / best["2 workers"], 2),
        "mpi_over_one": round(best["1 worker"] / best["mpirun -n 2"], 2),
    }


def _loader_speed(args, text: Path, model: Path) -> dict:
    """Tokens a second that one loader worker delivers at 512."""
    from deberta_ds.config import MaskConfig
    from deberta_ds.data.loader import build_loader
    from deberta_ds.data.rows import RowDataset, Source
    from deberta_ds.tokenizer import Tokenizer

    corpus = args.scratch / "loader"
    shutil.rmtree(corpus, ignore_errors=True)
    run(PREP / "tokenize_corpus.py", text, *CHAPTERS, "--tokenizer", model, "--out", corpus)
    run(PREP / "pack.py", corpus, "--tokenizer", model, "--seq_len", 512)
    figures = {}
    for ngram in (1, 3):
        dataset = RowDataset([Source(str(corpus))], Tokenizer(model), seq_len=512, seed=0,
                             mask=MaskConfig(max_ngram=ngram))
        for workers in (0, 1):
            best = 0.0
            for _ in range(3):
                batches = iter(build_loader(
                    dataset, start_row=0, global_batch_rows=64, micro_batch_rows=64, rank=0,
                    world_size=1, num_workers=workers, num_steps=260,
                ))
                for _ in range(10):
                    next(batches)
                clock = time.process_time if workers == 0 else time.perf_counter
                start = clock()
                tokens = sum(batch.input_ids.numel() for batch in batches)
                best = max(best, tokens / (clock() - start))
            kind = "in the training process, a core second" if not workers else "one worker, wall"
            figures[f"max_ngram {ngram}, {kind}"] = round(best)
    return {"loader_tokens_a_second_at_512": figures}


def measure_order(args) -> dict:
    """Shards from 1, 2, 3 workers and MPI, byte by byte; rows at worlds 1..4 and workers 0..2."""
    import torch

    from deberta_ds.config import MaskConfig
    from deberta_ds.data.loader import build_loader
    from deberta_ds.data.rows import RowDataset, Source
    from deberta_ds.files import xxh3
    from deberta_ds.tokenizer import Tokenizer

    text, model = novels(args)
    sums = {}
    for name, workers, mpi in (("1", 1, 0), ("2", 2, 0), ("3", 3, 0), ("mpi 2", 1, 2),
                               ("mpi 3", 1, 3)):
        out = args.scratch / f"order_{name.replace(' ', '')}"
        shutil.rmtree(out, ignore_errors=True)
        run(PREP / "tokenize_corpus.py", text, *CHAPTERS, "--tokenizer", model, "--out", out,
            "--workers", workers, mpi=mpi)
        run(PREP / "pack.py", out, "--tokenizer", model, "--seq_len", 512, "--workers", workers,
            mpi=mpi)
        sums[name] = {str(p.relative_to(out)): xxh3(p) for p in sorted(out.rglob("*.[nj]*"))}
    dataset = RowDataset([Source(str(args.scratch / "order_1"))], Tokenizer(model), seq_len=512,
                         seed=3, mask=MaskConfig())
    digests = {}
    for world in (1, 2, 3, 4):
        for workers in (0, 1, 2):
            steps: list = [[], [], []]
            for rank in range(world):
                loader = build_loader(dataset, start_row=24, global_batch_rows=24, rank=rank,
                                      micro_batch_rows=24 // world, world_size=world,
                                      num_workers=workers, num_steps=3)
                for step, batch in zip(steps, loader, strict=True):
                    step.append(torch.stack([batch.input_ids, batch.labels]))
            rows = torch.cat([part for step in steps for part in step], dim=1)
            digests[f"world {world}, workers {workers}"] = rows.numpy().tobytes()
    return {
        "files": len(sums["1"]),
        "identical_shards": {name: found == sums["1"] for name, found in sums.items()},
        "identical_rows": {name: data == digests["world 1, workers 0"]
                           for name, data in digests.items()},
    }


def measure_open(args) -> dict:
    """Seconds and MiB to open a simulated corpus of 1 T tokens: 7,451 shards, sparse files."""
    from deberta_ds.data.shards import (
        Manifest,
        RowShardInfo,
        RowsManifest,
        ShardInfo,
        npy_header,
        write_manifest,
    )

    corpus = args.scratch / "huge"
    tokens, rows, documents = 1 << 27, 264_000, 200_000
    shards, plans = [], []
    for directory in ("tokens", "ends", "rows-512"):
        (corpus / directory).mkdir(parents=True, exist_ok=True)
    for number in range(-(-10**12 // tokens)):
        name = f"{number:05d}-000"
        sizes = {f"tokens/{name}.npy": 2 * tokens, f"ends/{name}.npy": 8 * documents,
                 f"rows-512/{name}.npy": 16 * rows, f"rows-512/{name}.starts.npy": 4 * rows + 4}
        for path, size in sizes.items():
            with open(corpus / path, "wb") as file:
                file.write(npy_header(np.dtype("<u2"), size // 2))
                file.truncate(128 + size)
        shards.append(ShardInfo(name, tokens, documents, 128 + 2 * tokens, f"{number:032x}",
                                128 + 8 * documents, f"{number:032x}"))
        plans.append(RowShardInfo(name, rows, 2 * rows, tokens, 128 + 16 * rows, f"{number:032x}",
                                  132 + 4 * rows, f"{number:032x}"))
    special = {"pad": 0, "cls": 1, "sep": 2, "unk": 3, "mask": 32000}
    manifest = Manifest("<u2", 32001, "0" * 64, special, {}, {}, tuple(shards))
    fingerprint = write_manifest(corpus, manifest)
    write_manifest(corpus / "rows-512", RowsManifest(512, 1, fingerprint, 0, tuple(plans)))
    code = (
        "import time, resource, json, sys\n"
        "from deberta_ds.data.corpus import Corpus\n"
        "from deberta_ds.data.permutation import Permutation\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "base, start, cpu = peak(), time.perf_counter(), time.process_time()\n"
        "corpus = Corpus(sys.argv[1], seq_len=512)\n"
        "opened = time.perf_counter() - start\n"
        "files = corpus.verify('sizes')\n"
        "verified = time.perf_counter() - start\n"
        "order = Permutation(corpus.num_rows, (0, 0, 0))\n"
        "rows = [order[i] for i in range(1000)]\n"
        "print(json.dumps({'shards': len(corpus.manifest.shards), 'rows': corpus.num_rows,\n"
        " 'files_verified': files, 'open_seconds': round(opened, 2),\n"
        " 'open_and_verify_sizes_seconds': round(verified, 2),\n"
        " 'cpu_seconds': round(time.process_time() - cpu, 2), 'peak_mib': round(peak()),\n"
        " 'of_which_imports_mib': round(base)}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(corpus)], check=True,
                          capture_output=True, text=True)
    shutil.rmtree(corpus)
    return {"tokens": len(shards) * tokens, **json.loads(done.stdout)}


def measure_languages(args) -> dict:
    """Decode every stored document of every language and compare with the normalised text."""
    from deberta_ds.data.corpus import map_array
    from deberta_ds.data.prep.documents import ReadOptions, plan_units
    from deberta_ds.data.prep.readers import read_unit
    from deberta_ds.data.prep.text import normalise
    from deberta_ds.data.shards import read_manifest, read_rows_manifest
    from deberta_ds.tokenizer import Tokenizer

    corpus, model = args.scratch / "languages", args.scratch / "languages.model"
    shutil.rmtree(corpus, ignore_errors=True)
    source = [args.text, "--label_from_directory"]
    run(PREP / "train_tokenizer.py", *source, "--pieces", 32000, "--out", model)
    run(PREP / "tokenize_corpus.py", *source, "--tokenizer", model, "--out", corpus)
    run(PREP / "pack.py", corpus, "--tokenizer", model, "--seq_len", 128, 512)
    tokenizer, read = Tokenizer(model), ReadOptions(label_from_directory=True)
    units = plan_units([str(args.text)], read)
    documents = iter(d for unit in units for d in read_unit(unit, read))
    same: dict[str, list[int]] = {}
    for shard in read_manifest(corpus)[0].shards:
        tokens = map_array(corpus / "tokens" / f"{shard.name}.npy")
        begin = 0
        for end in map_array(corpus / "ends" / f"{shard.name}.npy").tolist():
            document = next(documents)
            row = same.setdefault(document.label, [0, 0])
            row[0] += tokenizer.decode(tokens[begin:end]) == normalise(document.text)
            row[1] += 1
            begin = end
    starts, inside = tokenizer.word_starts(), {}
    for seq_len in (128, 512):
        plan = read_rows_manifest(corpus / f"rows-{seq_len}")[0]
        found = 0
        for shard in plan.shards:
            tokens = map_array(corpus / "tokens" / f"{shard.name}.npy")
            pieces = map_array(corpus / f"rows-{seq_len}" / f"{shard.name}.npy")
            begins = np.append(0, map_array(corpus / "ends" / f"{shard.name}.npy"))
            first = pieces[:, 0][~np.isin(pieces[:, 0], begins)]
            found += int((~starts[tokens[first]]).sum())
        inside[seq_len] = {"pieces": sum(s.pieces for s in plan.shards),
                           "start_inside_a_word": found, "hard_cuts": plan.hard_cuts}
    return {"equal_of_documents": {label: f"{a} of {b}" for label, (a, b) in sorted(same.items())},
            "all_equal": all(a == b for a, b in same.values()), "rows": inside}


if __name__ == "__main__":
    main()
