"""What the checks of every step cost: bad steps, the request to stop, spikes, and the watchdog.

    python -m benchmarks.studies.check_cost --out benchmarks/results/check_cost.json
    torchrun --nproc_per_node=2 -m benchmarks.studies.check_cost \
        --out benchmarks/results/check_cost.json

Two ways: steps with and without the checks on one engine, in turn (first one, then the other way
round); and each check's own calls, timed alone, against the median step. The second is the figure;
the first shows that nothing was left out, as far as its spread allows.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from launching import make_run  # noqa: E402

from benchmarks.measure import environment  # noqa: E402
from deberta_ds.base.files import write_atomic  # noqa: E402
from deberta_ds.cluster import dist  # noqa: E402
from deberta_ds.cluster.watchdog import TICKS, Watchdog  # noqa: E402
from deberta_ds.config import run_config
from deberta_ds.engine import engine  # noqa: E402
from deberta_ds.training.bad_steps import WINDOW, SpikeRule  # noqa: E402
from deberta_ds.training.inputs import batches_of  # noqa: E402
from deberta_ds.training.join import join_group  # noqa: E402
from deberta_ds.training.start import open_run  # noqa: E402
from deberta_ds.training.step import count_over_ranks, seed_step, train_step  # noqa: E402

MODEL = {"hidden_size": 256, "num_layers": 6, "num_heads": 4, "intermediate_size": 1024}
ROWS = 4  # of a rank, and 64 tokens a row
WATCHDOG_SECONDS = 60.0  # the default


def bare_step(model_engine, batches: list, *, step: int, seed: int) -> None:
    """Take a step as train_step does, without asking whether it is bad or the last."""
    share = dist.world_size() * len(batches)
    counts = count_over_ranks(batches, model_engine.device)
    normalizers = {name: (count / share).float() for name, count in counts.items()}
    for micro_step, batch in enumerate(batches):
        with seed_step(model_engine.device, seed, step, micro_step, dist.rank()):
            loss, *_ = model_engine(batch.to(model_engine.device), normalizers)
        model_engine.backward(loss)
        model_engine.step()


def in_turn(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each kind of step, round by round; every other round is reversed."""
    seconds = {name: [] for name in steps}
    for number in range(rounds):
        names = list(steps) if number % 2 else list(steps)[::-1]
        for name in names:
            dist.barrier()
            started = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def seconds_a_call(call: Callable[[], object]) -> float:
    """Return the median seconds of a call."""
    found = []
    for _ in range(300):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def agree(loss: torch.Tensor, ceiling: float) -> list[float]:
    """The operations that train_step adds to a step to agree whether it is bad."""
    agreed = torch.stack([loss.double(), loss.new_tensor(0.0, dtype=torch.float64)])
    agreed = dist.sum_over_ranks(agreed)
    loss * torch.where(agreed[0] <= ceiling, 1.0, torch.nan).to(loss.dtype)
    return agreed.tolist()


def measure(work: Path, stage: int, rounds: int) -> dict:
    overrides = [f"--model.{key}={value}" for key, value in MODEL.items()]
    overrides += [f"--train.global_batch_size={ROWS * int(dist.world_size())}",
                  f"--train.micro_batch_size={ROWS}"]
    run_file = work / "run.toml"
    if dist.is_main():
        make_run(work)
    dist.barrier()
    run, _ = run_config.load(run_file, overrides)
    ds_values = {"zero_optimization": {"stage": stage}}
    join_group(run, ds_values, "benchmark")
    *_, inputs = open_run(run, ds_values, "benchmark", "never")
    model_engine = engine.build_pretraining_engine(run, inputs.ds, inputs.tokenizer.size)
    micro = next(batches_of(run, inputs, start=0, end=1))
    spikes = SpikeRule(8.0, [40.0 + number % 7 for number in range(WINDOW)])
    watchdog = Watchdog(work, WATCHDOG_SECONDS)

    def checked() -> None:
        result = train_step(model_engine, micro, step=0, seed=0, ceiling=spikes.ceiling())
        spikes.accept(result.loss)
        watchdog.beat(1)

    steps = {"bare": lambda: bare_step(model_engine, micro, step=0, seed=0), "checked": checked}
    with watchdog.watch():
        watchdog.join()
        in_turn(steps, 2)
        seconds = in_turn(steps, rounds)
        loss = torch.tensor(40.0)
        calls = {"agree": seconds_a_call(lambda: agree(loss, 100.0)),
                 "spike rule": seconds_a_call(lambda: spikes.accept(spikes.ceiling() * 0 + 40.0)),
                 "beat": seconds_a_call(lambda: watchdog.beat(1))}
        heartbeat = 0.0  # a rank alone talks to nobody
        if dist.world_size() > 1:
            heartbeat = seconds_a_call(lambda: watchdog._exchange(watchdog._store, 0.0))
    step = statistics.median(seconds["bare"])
    ratios = sorted(c / b for b, c in zip(seconds["bare"], seconds["checked"], strict=True))
    parameters = inputs.num_parameters
    return {"ranks": dist.world_size(), "zero_stage": stage, "parameters": parameters,
            "rounds": rounds, "step_seconds": step, "call_seconds": calls,
            "heartbeat_seconds": heartbeat, "heartbeats_a_second": TICKS / WATCHDOG_SECONDS,
            "share_of_a_step": sum(calls.values()) / step + heartbeat * TICKS / WATCHDOG_SECONDS,
            "checked_over_bare": statistics.median(ratios),
            "quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, help="JSON file to write, or to add to")
    options = parser.parse_args()
    engine.init_distributed()
    work = Path(dist.broadcast_object(tempfile.mkdtemp(prefix="check_cost")))
    result = measure(work, options.stage, options.rounds) | {"environment": environment()}
    if dist.is_main():
        print(json.dumps(result, indent=1))
        if options.out:
            others = json.loads(options.out.read_text()) if options.out.exists() else []
            kept = [r for r in others if (r["ranks"], r["zero_stage"])
                    != (result["ranks"], result["zero_stage"])]
            write_atomic(options.out, json.dumps([*kept, result], indent=1) + "\n")
    dist.destroy()


if __name__ == "__main__":
    main()
