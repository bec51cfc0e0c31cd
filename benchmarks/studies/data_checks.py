"""Check what the data pipeline writes, on real text: order, languages, near duplicates, opening.

    python -m benchmarks.studies.data_checks order --text DIR_OF_TXT --scratch DIR
    python -m benchmarks.studies.data_checks near --text DIR_OF_TXT --scratch DIR
    python -m benchmarks.studies.data_checks open --scratch DIR
    python -m benchmarks.studies.data_checks languages --text DIR_OF_LANGUAGE_DIRS --scratch DIR

Writes the same JSON files as benchmarks/data.py, one a topic.
"""

import json
import random
import shutil
import subprocess
import sys

import numpy as np

from benchmarks.data import CHAPTERS, PREP, main, novels, run


def measure_order(args) -> dict:
    """Shards from 1, 2, 3 workers and MPI, byte by byte; rows at worlds 1..4 and workers 0..2."""
    import torch

    from deberta_ds.base.files import xxh3
    from deberta_ds.config.batch_schedule import Stretch
    from deberta_ds.config.objective import MaskConfig
    from deberta_ds.config.run_config import SourceConfig
    from deberta_ds.data.loader import build_loader
    from deberta_ds.data.rows import RowDataset
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
    sources = [SourceConfig(path=str(args.scratch / "order_1"))]
    dataset = RowDataset(sources, Tokenizer(model), seq_len=512,
                         seed=3, mask=MaskConfig())
    digests = {}
    for world in (1, 2, 3, 4):
        for workers in (0, 1, 2):
            steps: list = [[], [], []]
            for rank in range(world):
                loader = build_loader(dataset, stretches=[Stretch(24, 24, 3)], rank=rank,
                                      micro_batch_size=24 // world, world_size=world,
                                      num_workers=workers)
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
    content_hash = write_manifest(corpus, manifest)
    write_manifest(corpus / "rows-512", RowsManifest(512, 1, content_hash, 0, tuple(plans)))
    code = ("import time, resource, json, sys\n" "from deberta_ds.data.corpus import Corpus\n"
            "from deberta_ds.data.mixture import Permutation\n"
            "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
            "base, start, cpu = peak(), time.perf_counter(), time.process_time()\n"
            "corpus = Corpus(sys.argv[1], seq_len=512)\n" "opened = time.perf_counter() - start\n"
            "files = corpus.verify('sizes')\n" "verified = time.perf_counter() - start\n"
            "order = Permutation(corpus.num_rows, (0, 0, 0))\n"
            "rows = [order[i] for i in range(1000)]\n"
            "print(json.dumps({'shards': len(corpus.manifest.shards), 'rows': corpus.num_rows,\n"
            " 'files_verified': files, 'open_seconds': round(opened, 2),\n"
            " 'open_and_verify_sizes_seconds': round(verified, 2),\n"
            " 'cpu_seconds': round(time.process_time() - cpu, 2), 'peak_mib': round(peak()),\n"
            " 'of_which_imports_mib': round(base)}))\n")
    done = subprocess.run([sys.executable, "-c", code, str(corpus)], check=True,
                          capture_output=True, text=True)
    shutil.rmtree(corpus)
    return {"tokens": len(shards) * tokens, **json.loads(done.stdout)}


def measure_languages(args) -> dict:
    """Decode every stored document of every language and compare with the normalised text."""
    from deberta_ds.corpus.documents import ReadOptions, plan_units
    from deberta_ds.corpus.readers import read_unit
    from deberta_ds.data.corpus import map_array
    from deberta_ds.data.shards import read_manifest, read_rows_manifest
    from deberta_ds.tokenizer import Tokenizer
    from deberta_ds.tokenizer.text import normalise

    corpus, model = args.scratch / "languages", args.scratch / "languages.model"
    shutil.rmtree(corpus, ignore_errors=True)
    source = [args.text, "--label_from_directory"]
    run(PREP / "train_tokenizer.py", *source, "--vocab_size", 32000, "--out", model)
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


SCRIPTS = {"Han": (0x4E00, 0x5FFF), "Kana": (0x3041, 0x30FA), "Thai": (0x0E01, 0x0E2E),
           "Tibetan": (0x0F40, 0x0F68), "Myanmar": (0x1000, 0x1020)}


def measure_near(args) -> dict:
    """Which near duplicates dedup.py --near 0.8 finds: documents and a copy of each with some words
    replaced, by script and by the true Jaccard similarity of the two. Latin: real paragraphs; other
    scripts: characters drawn by Zipf's law, without spaces, each a word.
    """
    from deberta_ds.corpus.dedup import SHINGLE_WORDS
    from deberta_ds.corpus.findings import Findings
    from deberta_ds.tokenizer.text import normalise

    text, _ = novels(args)
    generator = random.Random(0)
    paragraphs = (normalise(line).lower().split() for line in open(text, encoding="utf-8"))
    latin = {tuple(words[:300]): None for words in paragraphs if len(words) >= 150}
    documents = {"Latin": list(latin)[:4000]}
    for script, (low, high) in SCRIPTS.items():
        letters = [chr(code) for code in range(low, high)]
        weights = [1 / rank for rank in range(1, len(letters) + 1)]
        documents[script] = [
            tuple(generator.choices(letters, weights, k=generator.randint(150, 300)))
            for _ in range(1000)]
    pairs = [(script, original, _with_changes(original, originals, generator))
             for script, originals in documents.items() for original in originals]
    source, found = args.scratch / "near.jsonl", args.scratch / "near"
    with open(source, "w", encoding="utf-8") as file:
        places = []
        for side in (1, 2):
            for pair in pairs:
                places.append(file.tell())
                words = (" " if pair[0] == "Latin" else "").join(pair[side])
                file.write(json.dumps({"text": words}) + "\n")
    shutil.rmtree(found, ignore_errors=True)
    figures = run(PREP / "dedup.py", source, "--out", found, "--near", 0.8, "--unit_bytes", 1 << 30)
    findings = Findings(found)
    dropped = [findings.has(str(source), place) for place in places]

    def shingles(document) -> set:
        return {tuple(document[i : i + SHINGLE_WORDS])
                for i in range(len(document) - SHINGLE_WORDS + 1)}

    bins: dict[str, dict[str, list[int]]] = {}
    for number, (script, original, copy) in enumerate(pairs):
        one, other = shingles(original), shingles(copy)
        similarity = min(int(len(one & other) / len(one | other) * 20) / 20, 0.9)
        row = bins.setdefault(script, {}).setdefault(f"{max(similarity, 0.65):.2f}", [0, 0])
        row[0] += dropped[len(pairs) + number]
        row[1] += 1
    return {"threshold": 0.8, "documents": 2 * len(pairs), **figures,
            "originals dropped": sum(dropped[: len(pairs)]),
            "copies dropped, of all, by similarity from (0.65: and below; 0.90: and above)":
                {script: dict(sorted(rows.items())) for script, rows in bins.items()}}


def _with_changes(original: tuple, originals: list[tuple], generator: random.Random) -> list[str]:
    copy = list(original)
    for place in generator.sample(range(len(copy)), generator.randint(0, 12)):
        copy[place] = generator.choice(generator.choice(originals))
    return copy


if __name__ == "__main__":
    main(__doc__, {"order": measure_order, "open": measure_open, "languages": measure_languages,
                   "near": measure_near})
