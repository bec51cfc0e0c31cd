"""What each rank of a job of any size does to the file system, from the start to a resume.

    python -m benchmarks.studies.scale --out benchmarks/results/scale.json

launch/pretrain.py's own `pretrain` runs as rank 0 and as the last rank, one after the other, in a
process group whose other ranks are imaginary (torch's "fake" one), with the tensors of the 1.5B
RTD model at 16 channels. A library that is loaded first (scale_operations.c) counts each operation
below the run's directories. For every number of ranks W:

    at 3/4 W    rank 0 trains a step from nothing and saves
    at W        both resume that checkpoint, train a step, evaluate, save and delete the old one
    at W        both resume that one, and train and save again

What other ranks would write is put there as links to rank 0's files; what rank 0 tells them is
replayed. Under ZeRO-3 DeepSpeed cuts every weight and gradient into W pieces in Python, seconds a
step at 1,024 ranks, without a file being touched: here weights are gathered one by one
(allgather_sequential), and of a gradient a rank takes its own piece. Fails if an operation costs a
rank more in a large job than in a small one. What the watchdog does in a large job is in
tests/cluster/test_watchdog.py.
"""

import argparse
import contextlib
import ctypes
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("open", "stat", "remove", "rename", "make", "list", "sync")
PLACES = ("run", "environment")
LATENCY_SECONDS, SERVER_RATE = 0.005, 20_000  # of an operation; operations a second of the server
MORE_ALLOWED = 12  # operations beyond the smallest job's: a resume may open two files more, and
# TensorBoard's writer looks by the clock
VARIABLES = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}
OVERRIDES = [
    "--model.hidden_size=16",
    "--model.num_heads=2",
    "--model.intermediate_size=32",
    "--model.vocab_size=640",
    "--data.seq_len=64",
    "--data.workers=0",
    "--train.micro_batch_size=1",
    "--train.log_every=1",
    "--train.activation_checkpointing=none",
    "--train.save_every=1",
    "--train.keep=1",
    "--train.steps=100",
    "--train.eval_every=2",
    "--train.eval_sequences=8",
    "--train.watchdog_seconds=0",
    "--train.save_in_background=false",
    "--optim.warmup_steps=0",
]


class Operations:
    """File operations and collectives of this process, by phase and by (place, kind)."""

    def __init__(self):
        self._library = ctypes.CDLL(None)
        self.phase, self.collectives = "rest", Counter()
        self.found: Counter = Counter()
        self._before = self._read()

    def _read(self) -> list[int]:
        return [self._library.operations(place, kind)
                for place in range(len(PLACES)) for kind in range(len(KINDS))]

    def _take(self) -> None:
        now = self._read()
        names = [(place, kind) for place in PLACES for kind in KINDS]
        for (place, kind), count in zip(names, (b - a for a, b in zip(self._before, now,
                                                                     strict=True)), strict=True):
            self.found[self.phase, place, kind] += count
        self._before = now

    @contextlib.contextmanager
    def during(self, phase: str):
        self._take()
        outer, self.phase = self.phase, phase
        try:
            yield
        finally:
            self._take()
            self.phase = outer

    @contextlib.contextmanager
    def uncounted(self):
        self._library.operations_pause(1)
        try:
            yield
        finally:
            self._library.operations_pause(0)

    def __call__(self, phase: str, function):
        def counted(*arguments, **named):
            with self.during(phase):
                return function(*arguments, **named)
        return counted


class Peers:
    """Stands in for cluster.dist: what the other ranks would answer, and do to the disk."""

    def __init__(self, rank: int, ranks: int, out: Path, told: list, operations: Operations):
        self.rank, self.ranks, self.out, self.told = rank, ranks, out, told
        self._operations, self._heard = operations, 0

    def _count(self, name: str) -> None:
        self._operations.collectives[self._operations.phase, name] += 1

    def barrier(self) -> None:
        """The others have deleted their share of old checkpoints."""
        self._count("barrier")
        with self._operations.uncounted():
            for path in (self.out / "checkpoints").glob("step-*"):
                if not (path / "manifest.json").exists() and self.rank == 0:
                    for file in path.glob("rank-*"):
                        file.unlink()

    def gather_objects(self, value) -> list:
        self._count("gather")
        return [value] * self.ranks

    def gather_to_main(self, value) -> list | None:
        """Of a save: the others have written files like rank 0's."""
        self._count("gather")
        if self.rank:
            return None
        name = "rank-00000.safetensors"
        if not isinstance(value, tuple) or name not in value[0]:
            return [value] * self.ranks
        entries = value[0]
        path = max((self.out / "checkpoints").glob("step-*"))
        answers = [value]
        with self._operations.uncounted():
            for other in range(1, self.ranks):
                theirs = f"rank-{other:05d}.safetensors"
                os.link(path / name, path / theirs)
                answers.append(({theirs: entries[name]}, ""))
        return answers

    def broadcast_object(self, value):
        self._count("broadcast")
        if self.rank == 0:
            self.told.append(pickle.dumps(value))
        self._heard += 1
        return pickle.loads(self.told[self._heard - 1])


def rehearse(rank: int, ranks: int, run_file: Path, out: Path, stage: int, stop_after: int,
             told: list, layers: int) -> dict:
    """Be one rank of a job until it has saved step `stop_after`; return what it did."""
    import torch
    from deepspeed.runtime.zero import partition_parameters, stage3
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from deberta_ds.checkpoint import find, saved_state
    from deberta_ds.cluster import dist
    from deberta_ds.config import run_config
    from deberta_ds.engine import engine
    from deberta_ds.engine.ds_config import DeepSpeedConfig
    from deberta_ds.training import loop, start

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.distributed.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    engine.deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for a minute
    engine.deepspeed.init_distributed(verbose=False)
    count = Operations()
    peers = Peers(rank, ranks, out, told, count)
    job = 3 * ranks if stop_after > 1 else 4 * ranks  # rows: the same at W and 3/4 W
    run, origins = run_config.load(run_file, [
        *OVERRIDES, f"--model.num_layers={layers}",
        f"--objective.generator_layers={max(2, layers // 2)}",
        f"--out_dir={out}", f"--train.global_batch_size={job}", f"--train.stop_after={stop_after}"])
    zero = {"stage": stage}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_allgather_sequential": True}
    phases = [(start, "open_inputs", "start-up"), (find, "find", "find and verify"),
              (engine, "build_pretraining_engine", "build"), (saved_state, "load_state", "resume"),
              (loop, "train_step", "step"), (loop, "evaluate", "evaluation"),
              (loop, "begin_save", "save"), (loop, "finish_save", "save, delete the old one")]
    started = time.process_time()
    with contextlib.ExitStack() as stack:
        for name in ("barrier", "gather_objects", "gather_to_main", "broadcast_object"):
            stack.enter_context(mock.patch.object(dist, name, getattr(peers, name)))
        for module, name, phase in phases:
            counted = count(phase, getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, counted))
        stack.enter_context(mock.patch.object(
            stage3, "reduce_scatter_coalesced", lambda tensors, group=None: [
                own_piece(tensor, rank, ranks) for tensor in tensors]))
        stack.enter_context(mock.patch.object(
            partition_parameters, "_dist_allgather_fn", GatherOfZeros))
        stack.enter_context(mock.patch.object(  # asks rank 0, which is imaginary to the last rank
            coordinator, "assert_ints_same_as_other_ranks", lambda ints: None))
        stack.enter_context(contextlib.redirect_stdout(open(os.devnull, "w")))
        with count.during("rest"):
            loop.pretrain(run, DeepSpeedConfig(zero_optimization=zero), resume="auto",
                          place="rehearsal", origins=origins)
    return {"told": peers.told, "cpu_seconds": time.process_time() - started,
            "operations": {" / ".join(key): number for key, number in count.found.items()
                           if number},
            "collectives": {" / ".join(key): number for key, number in
                            count.collectives.items()}}


def own_piece(tensor, rank: int, ranks: int):
    """Return a rank's piece of a tensor that is cut into equal ones, the last ones short or empty.
    """
    flat, size = tensor.view(-1), -(-tensor.numel() // ranks)
    return flat[rank * size:(rank + 1) * size]


class GatherOfZeros:
    """Stands in for an all-gather: of a small tensor the last rank's piece is empty padding."""

    def __init__(self, _piece, whole, group=None):
        whole.zero_()

    def wait(self) -> None:
        """Nothing is under way."""


def in_a_process(function, *arguments):
    """Return `function(*arguments)`, run in a fork: DeepSpeed holds on to its first group."""
    with tempfile.TemporaryFile() as answer:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                pickle.dump(function(*arguments), answer)
                answer.flush()
                code = 0
            except BaseException:
                import traceback
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        if status:
            sys.exit(f"a rank failed: {arguments[:2]}")
        answer.seek(0)
        return pickle.load(answer)


def job(ranks: int, stage: int, work: Path, run_file: Path, layers: int) -> dict[str, dict]:
    """Return what rank 0 and the last rank did, in a resume of another W and in one of this W."""
    out, kept = work / "out", work / "kept"
    for path in (out, kept):
        shutil.rmtree(path, ignore_errors=True)
    found: dict[str, dict] = {}
    in_a_process(rehearse, 0, ranks * 3 // 4, run_file, out, stage, 1, [], layers)
    for number, name in ((2, "another W"), (3, "this W")):
        shutil.copytree(out, kept, copy_function=os.link)
        main = in_a_process(rehearse, 0, ranks, run_file, out, stage, number, [], layers)
        after = work / "after"
        os.rename(out, after)
        shutil.copytree(kept, out, copy_function=_copied_if_written)
        (out / f"checkpoints/step-{number:08d}").mkdir()
        last = in_a_process(rehearse, ranks - 1, ranks, run_file, out, stage, number,
                            main.pop("told"), layers)
        last.pop("told")
        found[name] = {"rank 0": main, "last rank": last}
        shutil.rmtree(out)
        shutil.rmtree(kept)
        os.rename(after, out)
    return found


def _copied_if_written(source, target) -> None:
    """Link the files of checkpoints, which nobody writes again; copy what a run appends to."""
    (os.link if "checkpoints" in str(source) else shutil.copy2)(source, target)


def per_phase(rank: dict, place: str) -> Counter:
    counts: Counter = Counter()
    for key, number in rank["operations"].items():
        phase, where, _ = key.split(" / ")
        if where == place:
            counts[phase] += number
    return counts


def table(jobs: dict[int, dict], place: str) -> tuple[list[str], list[str]]:
    """Return (lines of the table, what grows with W) of one ZeRO stage."""
    lines = ["| operation | W | rank 0 | each other rank | all ranks | s at 5 ms an operation "
             "| s at 20,000 operations/s |", "|---|---|---|---|---|---|---|"]
    grown, smallest = [], min(jobs)
    rows = [(which, phase) for which in ("another W", "this W")
            for phase in ("start-up", "find and verify", "build", "resume", "step", "evaluation",
                          "save", "save, delete the old one", "rest")]
    for which, phase in rows:
        for ranks, found in jobs.items():
            main, last = (per_phase(found[which][who], place)[phase]
                          for who in ("rank 0", "last rank"))
            everything = main + (ranks - 1) * last
            lines.append(f"| {phase}, resumed from {which} | {ranks:,} | {main} | {last} "
                         f"| {everything:,} | {max(main, last) * LATENCY_SECONDS:.2f} "
                         f"| {everything / SERVER_RATE:.2f} |")
            for who, now in (("rank 0", main), ("last rank", last)):
                before = per_phase(jobs[smallest][which][who], place)[phase]
                if now > before + MORE_ALLOWED:
                    grown.append(f"{phase} ({who}, resumed from {which}): {before} operations at "
                                 f"{smallest:,} ranks, {now} at {ranks:,}")
    return lines, grown


def collectives(jobs: dict[int, dict]) -> list[str]:
    """Return what grows: a job of any size calls the same collectives of ours."""
    grown = []
    smallest = min(jobs)
    for ranks, found in jobs.items():
        for which, by_rank in found.items():
            for who, rank in by_rank.items():
                before = sum(jobs[smallest][which][who]["collectives"].values())
                now = sum(rank["collectives"].values())
                if now > before:
                    grown.append(f"collectives ({who}): {before} at {smallest:,}, {now} at "
                                 f"{ranks:,} ranks")
    return grown


def start_counted(arguments: list[str]) -> int:
    """Run this script again under the library that counts."""
    work = Path(tempfile.mkdtemp(prefix="scale"))
    library = work / "operations.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library),
                    str(ROOT / "benchmarks/studies/scale_operations.c"), "-ldl"], check=True)
    environment = Path(json.__file__).parents[1]  # the standard library and, below, the packages
    packages = next((path for path in sys.path if path.endswith("site-packages")), environment)
    variables = os.environ | VARIABLES | {
        "LD_PRELOAD": str(library), "OPERATIONS_BELOW": f"{work}/run:{packages}",
        "SCALE_WORK": str(work), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    try:
        return subprocess.run([sys.executable, __file__, *arguments], env=variables).returncode
    finally:
        shutil.rmtree(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 1024, 4096])
    parser.add_argument("--stage", type=int, default=1, help="ZeRO stage (default: 1)")
    parser.add_argument("--layers", type=int, default=24, help="of the discriminator")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    if "SCALE_WORK" not in os.environ:
        sys.exit(start_counted(sys.argv[1:]))

    started = Operations()
    import rank_preload  # noqa: F401  what a run imports
    import torch._inductor.compile_fx
    import torch._inductor.lowering
    import torch._inductor.scheduler  # noqa: F401
    with started.during("rest"):
        pass
    imported = sum(n for (_, place, _), n in started.found.items() if place == "environment")
    from launching import make_run

    work = Path(os.environ["SCALE_WORK"]) / "run"
    run_file = make_run(work, dropout=0.1)
    jobs = {ranks: job(ranks, options.stage, work, run_file, options.layers)
            for ranks in options.ranks}
    lines, grown = table(jobs, "run")
    print(f"ZeRO-{options.stage}, {options.layers} layers. Importing: {imported:,} operations on "
          "the environment, on every rank of any job: "
          f"{imported * LATENCY_SECONDS:.0f} s at 5 ms\n")
    print("\n".join(lines))
    cpu = {ranks: round(max(rank["cpu_seconds"] for by_rank in found.values()
                            for rank in by_rank.values()), 2) for ranks, found in jobs.items()}
    print(f"\nmost CPU seconds of a rank, by W: {cpu}")
    grown += collectives(jobs)
    if options.out:
        from deberta_ds.base.files import write_atomic
        write_atomic(options.out, json.dumps(
            {"stage": options.stage, "layers": options.layers, "imports": imported,
             "jobs": jobs}, indent=1) + "\n")
    if grown:
        sys.exit("grows with the number of ranks:\n  " + "\n  ".join(grown))


if __name__ == "__main__":
    main()
