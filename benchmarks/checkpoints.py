"""Seconds and bytes of saving, verifying and loading a checkpoint, against model size.

    python benchmarks/checkpoints.py --out benchmarks/results/checkpoints.json

One rank, ZeRO-1, bf16 weights with fp32 masters (14 bytes a parameter). Saving stops training: it
is DeepSpeed's writing, then fsync and checksums, shown apart. With N ranks each writes and reads
1/N of the masters and moments, so on local disks the times fall accordingly.
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from launching import make_run  # noqa: E402

from deberta_ds import config  # noqa: E402
from deberta_ds.files import write_atomic  # noqa: E402
from deberta_ds.train import checkpoint, engine  # noqa: E402
from deberta_ds.train.loop import batches_of  # noqa: E402
from deberta_ds.train.setup import prepare  # noqa: E402
from deberta_ds.train.step import train_step  # noqa: E402

SIZES = {
    "12M": {"hidden_size": 256, "num_layers": 6, "num_heads": 4, "intermediate_size": 1024,
            "vocab_size": 16_000},
    "70M": {"hidden_size": 384, "num_layers": 12, "num_heads": 6, "intermediate_size": 1536,
            "vocab_size": 128_100},
    "184M": {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "intermediate_size": 3072,
             "vocab_size": 128_100},
}
DEEPSPEED = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}


def measure(work: Path, shape: dict, rounds: int) -> dict:
    overrides = [f"--model.{key}={value}" for key, value in shape.items()]
    overrides += ["--objective.kind=mlm", "--train.global_batch_rows=2"]
    run, _ = config.load(make_run(work), overrides)
    inputs = prepare(run, DEEPSPEED, "benchmark")
    model_engine = engine.build_pretraining_engine(run, inputs.ds, inputs.tokenizer.size)
    micro = [next(batches_of(run, inputs, start=0, end=1))]
    train_step(model_engine, micro, step=0, seed=0)  # so that the optimizer has its moments
    record = {"world_size": 1, "config": config.to_dict(run), "deepspeed": inputs.ds}
    parameters = sum(parameter.numel() for parameter in model_engine.module.parameters())
    rows = []
    for number in range(rounds):
        path = checkpoint.path_of(work / "out", number + 1)
        started = time.perf_counter()
        path.mkdir(parents=True)
        checkpoint._write_shards(model_engine, path)
        written = time.perf_counter()
        shutil.rmtree(path)
        again = time.perf_counter()
        checkpoint.save(model_engine, work / "out", number + 1, record, keep=1)
        saved = time.perf_counter()
        assert not checkpoint.problems_of(path)
        verified = time.perf_counter()
        checkpoint.load(model_engine, path)
        loaded = time.perf_counter()
        rows.append({"deepspeed_write": written - started, "save": saved - again,
                     "verify": verified - saved, "load": loaded - verified})
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    best = {key: round(min(row[key] for row in rows), 3) for key in rows[0]}
    return {"parameters": parameters, "bytes": size, "bytes_per_parameter": size / parameters,
            "seconds": best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("runs/checkpoints"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    for name in options.sizes:
        work = options.work.resolve() / name
        shutil.rmtree(work, ignore_errors=True)
        results.append(measure(work, SIZES[name], options.rounds))
        print(json.dumps(results[-1]), flush=True)
        shutil.rmtree(work)
    if options.out:
        write_atomic(options.out, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
