"""Runs with one step made bad on purpose, and what a rollback must be equal to; rank 0 writes.

    pass_over.py RUN.toml OUT.json BAD_STEP POLICY=DS.json ...

A "rollback" is followed by a "fresh" run: a new engine that starts from the same checkpoint, at the
rows after the bad step. Per run: a digest of every parameter before each step.
"""

import dataclasses
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from deepspeed.accelerator import get_accelerator

from deberta_ds.base.files import write_atomic, xxh3
from deberta_ds.checkpoint import find
from deberta_ds.checkpoint.find import read_run_record
from deberta_ds.cluster import dist
from deberta_ds.config import run_config
from deberta_ds.engine import ds_config, engine
from deberta_ds.training import loop

real_step = loop.train_step


def pretrain(run, ds: ds_config.DeepSpeedConfig, bad_step: int | None) -> dict[int, list[float]]:
    digests = {}

    def step_with_one_spike(model_engine, batches, *, step, ceiling, **options):
        parameters = list(model_engine.module.parameters())
        with engine.gathered(parameters):
            digests[step] = [float(p.double().sum()) for p in parameters]
        return real_step(model_engine, batches, step=step,
                         ceiling=-1.0 if step == bad_step else ceiling, **options)

    loop.train_step = step_with_one_spike
    loop.pretrain(run, ds, resume="auto", place="test", origins={})
    return digests


def copy_as_step(source: Path, out: Path, step: int) -> None:
    """Copy a checkpoint as if it had been saved at another step."""
    path = find.path_of(out, step)
    shutil.copytree(source, path)
    record = dataclasses.replace(read_run_record(path), step=step)
    write_atomic(path / "run.json", json.dumps(dataclasses.asdict(record)))
    manifest = json.loads((path / "manifest.json").read_text()) | {"step": step}
    manifest["files"]["run.json"] = {"bytes": (path / "run.json").stat().st_size,
                                     "xxh3": xxh3(path / "run.json")}
    write_atomic(path / "manifest.json", json.dumps(manifest))


def main() -> None:
    run, _ = run_config.load(sys.argv[1])
    # Old CPUs have no fast fp16, which DeepSpeed takes for none; its arithmetic is there.
    get_accelerator().is_fp16_supported = lambda: True
    out, bad_step, results = Path(sys.argv[2]), int(sys.argv[3]), {}
    for argument in sys.argv[4:]:
        policy, ds_file = argument.split("=")
        name = f"{policy}-{Path(ds_file).stem}"
        ds = ds_config.load(ds_file)
        one = replace(run, out_dir=str(out.parent / name),
                      train=replace(run.train, on_spike=policy))
        results[name] = pretrain(one, ds, bad_step)
        if policy == "rollback":
            name = f"fresh-{Path(ds_file).stem}"
            fresh = replace(one, out_dir=str(out.parent / name))
            before = bad_step // run.train.save_every * run.train.save_every
            if dist.is_main():
                copy_as_step(find.path_of(one.out_dir, before), Path(fresh.out_dir),
                             bad_step + 1)
            dist.barrier()
            results[name] = pretrain(fresh, ds, None)
    if dist.is_main():
        out.write_text(json.dumps(results))
    dist.destroy()


if __name__ == "__main__":
    main()
