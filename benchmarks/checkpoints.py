"""Seconds and bytes of saving, verifying and loading a checkpoint, against model size.

    python benchmarks/checkpoints.py --sizes 70M --out benchmarks/results/checkpoints.json

One rank, ZeRO-1, fp32 masters and moments (12 bytes a parameter). Training stands still for `save`,
or for `pause_in_background` where a thread writes what was copied. `plain_write` is as many bytes
written to one file and flushed to the disk, at the same moment. With N ranks each writes and reads
1/N of them, so on local disks the times fall accordingly.
"""

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from launching import make_run  # noqa: E402

from deberta_ds.base.files import write_atomic  # noqa: E402
from deberta_ds.checkpoint import find, save, saved_state  # noqa: E402
from deberta_ds.checkpoint.find import Best, RunRecord  # noqa: E402
from deberta_ds.config import run_config  # noqa: E402
from deberta_ds.engine import engine  # noqa: E402
from deberta_ds.engine.ds_config import DeepSpeedConfig  # noqa: E402
from deberta_ds.training.inputs import batches_of  # noqa: E402
from deberta_ds.training.start import join_group, open_run  # noqa: E402
from deberta_ds.training.step import train_step  # noqa: E402

SIZES = {
    "22M": {"hidden_size": 384, "num_layers": 8, "num_heads": 6, "intermediate_size": 1536,
            "vocab_size": 16_000},
    "70M": {"hidden_size": 384, "num_layers": 12, "num_heads": 6, "intermediate_size": 1536,
            "vocab_size": 128_100},
    "184M": {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "intermediate_size": 3072,
             "vocab_size": 128_100},
}
DEEPSPEED = DeepSpeedConfig(zero_optimization={"stage": 1}, bf16={"enabled": True})


def measure(work: Path, shape: dict, rounds: int) -> dict:
    overrides = [f"--model.{key}={value}" for key, value in shape.items()]
    overrides += ["--objective.kind=mlm", "--train.global_batch_size=2"]
    run, _ = run_config.load(make_run(work), overrides)
    *_, ds = join_group(run, DEEPSPEED, "benchmark")
    *_, inputs = open_run(run, ds, "benchmark", "never")
    model_engine = engine.build_pretraining_engine(run, inputs.ds, inputs.tokenizer.size)
    micro = next(batches_of(run, inputs, start=0, end=1))
    train_step(model_engine, micro, step=0, seed=0)  # so that the optimizer has its moments
    record = RunRecord(step=1, sequences_seen=2, tokens_seen=0, seconds=0.0, world_size=1,
                       config=run_config.to_dict(run), deepspeed=inputs.ds.as_dict(),
                       content_hashes={}, tokenizer_sha256=inputs.tokenizer.sha256, versions={},
                       recent_losses=[], since_line={}, time_use={}, best=Best(), begun_from="")
    parameters = sum(parameter.numel() for parameter in model_engine.module.parameters())
    rows = []
    for number in range(rounds):
        record = replace(record, step=number + 1)
        path = find.path_of(work / "out", record.step)
        started = time.perf_counter()
        in_background = save.begin_save(model_engine, work / "out", record, keep=1,
                                          in_background=True)
        begun = time.perf_counter()
        save.finish_save(in_background)
        finished = time.perf_counter()
        shutil.rmtree(path)
        again = time.perf_counter()
        save.finish_save(save.begin_save(model_engine, work / "out", record, keep=1))
        saved = time.perf_counter()
        assert not find.problems_of(path)
        verified = time.perf_counter()
        saved_state.load_state(model_engine, path)
        loaded = time.perf_counter()
        rows.append({"save": saved - again, "pause_in_background": begun - started,
                     "whole_in_background": finished - started,
                     "verify": verified - saved, "load": loaded - verified,
                     "plain_write": plain_write(work / "plain", size_of(path))})
    size = size_of(path)
    best = {key: round(min(row[key] for row in rows), 3) for key in rows[0]}
    return {"parameters": parameters, "bytes": size, "bytes_per_parameter": size / parameters,
            "seconds": best}


def size_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def plain_write(path: Path, size: int) -> float:
    """Return the seconds to write `size` bytes to a file and flush them to the disk."""
    block = os.urandom(1 << 24)
    started = time.perf_counter()
    with open(path, "wb") as file:
        for start in range(0, size, len(block)):
            file.write(block[:size - start])
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    path.unlink()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("runs/checkpoints"))
    parser.add_argument("--out", type=Path, help="JSON file to write, or to add to")
    options = parser.parse_args()
    for name in options.sizes:
        work = options.work.resolve() / name
        shutil.rmtree(work, ignore_errors=True)
        result = {"size": name} | measure(work, SIZES[name], options.rounds)
        print(json.dumps(result), flush=True)
        shutil.rmtree(work)
        if options.out:
            others = json.loads(options.out.read_text()) if options.out.exists() else []
            results = [*(r for r in others if r["size"] != name), result]
            results.sort(key=lambda r: r["parameters"])
            write_atomic(options.out, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
