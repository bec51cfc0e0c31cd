"""`--check`: verify a run and its cluster; run one micro-batch forward and backward."""

import math
import os
import shutil
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from deberta_ds.base.errors import UserError
from deberta_ds.base.numbers import counted
from deberta_ds.checkpoint.upload import check_owner
from deberta_ds.cluster import dist
from deberta_ds.config.run_config import RunConfig
from deberta_ds.engine import engine
from deberta_ds.engine.ds_config import DeepSpeedConfig
from deberta_ds.files import remote
from deberta_ds.training.inputs import batches_of
from deberta_ds.training.meters import STATE_BYTES
from deberta_ds.training.start import build, describe, join_group, open_run
from deberta_ds.training.step import BadStepError, count_over_ranks, find_bad_gradients, seed_of

# Checks of the nodes of a job: clocks, links within and between nodes, disk.
#
# Between nodes, each exchanges a message with the next one and with the one before, in rounds of
# pairs; the faster exchange counts: a slow node is slow in both, its neighbors in one only.
_GPU_BYTES, _CPU_BYTES = 1 << 26, 1 << 22  # of a message
_ROUNDS = 3  # the fastest counts
_CLOCK_SECONDS = 2.0  # of difference that are worth a warning
_SLOW_SHARE = 0.7  # of the median


def preflight(device: torch.device, host: str) -> list[str]:
    """Return log lines about the nodes; call on every rank. `host` is this rank's."""
    if dist.world_size() == 1:
        return []
    names = dist.gather_objects(host)
    hosts: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        hosts.setdefault(name, []).append(rank)
    dist.barrier()
    clocks = dist.gather_number(time.time(), device)
    message = torch.ones((_CPU_BYTES if device.type == "cpu" else _GPU_BYTES) // 4, device=device)
    lines = [f"{counted(len(hosts), 'node')}, {dist.world_size():,} ranks, the same versions "
             "everywhere", *clock_lines(clocks, names)]
    lines += _inside(hosts, host, message, device)
    lines += _between(list(hosts.values()), list(hosts), message, device)
    whole = fastest(lambda: dist.all_reduce(message), device)
    lines.append(f"all-reduce of {message.nbytes >> 20} MiB over all ranks: {1000 * whole:,.1f} ms")
    return lines


def disk_space(out_dir: str | Path, parameters: int, keep: int, has_best: bool) -> str:
    """Return what is free where checkpoints go, and what they need.

    One is written before an old one goes; the best one (`has_best`) stays next to the newest.
    """
    directory = Path(out_dir).absolute()
    while not directory.exists():
        directory = directory.parent
    if not directory.is_dir():
        raise UserError(f"out_dir = {out_dir}: {directory} is a file; choose another directory")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UserError(f"out_dir = {out_dir}: {directory} cannot be written; choose another "
                        "directory")
    more = 2 if has_best else 1
    free, needed = shutil.disk_usage(directory).free, (keep + more) * STATE_BYTES * parameters
    warning = "WARNING: not enough disk space: " if free < needed else ""
    return (f"{warning}{out_dir}: {free / 1e9:,.1f} GB free, train.keep + {more} checkpoints need "
            f"{needed / 1e9:,.1f} GB")


def clock_lines(clocks: list[float], hosts: list[str]) -> list[str]:
    """Return a line on the host whose clock is off the most, if that is much."""
    usual = statistics.median_low(clocks)  # one of them: of two, all of the difference is said
    off = {host: clock - usual for clock, host in zip(clocks, hosts, strict=True)}
    worst = max(off, key=lambda host: abs(off[host]))
    if abs(off[worst]) < _CLOCK_SECONDS:
        return []
    return [f"WARNING: the clock of {worst} is {off[worst]:+.1f} s off; the times of its log "
            "and files are wrong (nothing else depends on clocks)"]


def _inside(hosts: dict[str, list[int]], host: str, message: torch.Tensor, device: torch.device
            ) -> list[str]:
    """Compare the all-reduce of each host, all hosts at once."""
    if all(len(ranks) == 1 for ranks in hosts.values()):
        return []
    group = dist.group_of(list(hosts.values()))
    seconds = fastest(lambda: dist.all_reduce(message, group=group), device)
    own = len(hosts[host])
    by_rank = dist.gather_number(2 * (own - 1) / own * message.nbytes / seconds, device)
    rates = {name: by_rank[ranks[0]] for name, ranks in hosts.items() if len(ranks) > 1}
    return [compared("all-reduce inside a node", rates)]


def _between(hosts: list[list[int]], names: list[str], message: torch.Tensor,
             device: torch.device) -> list[str]:
    """Compare the links of the hosts, by their first ranks."""
    count = len(hosts)
    if count == 1:
        return []
    rate = 0.0
    for pairs in _rounds(count):
        for pair in pairs:
            leaders = [hosts[number][0] for number in pair]
            if dist.rank() in leaders:
                partner = leaders[1 - leaders.index(dist.rank())]
                seconds = fastest(partial(dist.swap, message, partner), device)
                rate = max(rate, message.nbytes / seconds)
        dist.barrier()
    by_rank = dist.gather_number(rate, device)
    return [compared("between nodes, each way",
                      {name: by_rank[ranks[0]] for name, ranks in zip(names, hosts, strict=True)})]


def _rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs in which each of `count` hosts meets both its neighbors in a ring."""
    rounds = [[(a, a + 1) for a in range(first, count - 1, 2)] for first in (0, 1)]
    if count > 2:  # the ring closes: next to others where the count is even
        closing = (count - 1, 0)
        rounds = [rounds[0], [*rounds[1], closing]] if count % 2 == 0 else [*rounds, [closing]]
    return [pairs for pairs in rounds if pairs]


def fastest(action: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of some rounds, after one that connects, or compiles."""
    found = []
    for _ in range(1 + _ROUNDS):
        _wait(device)
        before = time.perf_counter()
        action()
        _wait(device)
        found.append(time.perf_counter() - before)
    return max(min(found[1:]), 1e-9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compared(what: str, rates: dict[str, float]) -> str:
    """Return a line with the range of rates and who is slowest; bytes a second."""
    slowest = min(rates, key=rates.__getitem__)
    usual = statistics.median(rates.values())
    warning = "WARNING: " if rates[slowest] < _SLOW_SHARE * usual else ""
    return (f"{warning}{what}: {rates[slowest] / 1e9:,.2f} to {max(rates.values()) / 1e9:,.2f} "
            f"GB/s, slowest {slowest}")


def rehearse(run: RunConfig, ds: DeepSpeedConfig, *, resume: str, place: str,
             origins: dict[str, str]) -> None:
    """Check a run and take its first micro-batch forward and backward; nothing is kept on disk.

    Where it would go on from a checkpoint, that is verified; the micro-batch sees random weights.
    Raises UserError, on every rank, also if the loss or a gradient is not finite.
    """
    warnings, kernels, complete = join_group(
        run, ds, place, {"--resume": resume, "--check": True})
    found, record, inputs = open_run(run, complete, place, resume)
    if dist.is_main():
        print("\n".join(describe(run, inputs, origins, kernels)))
    lines = preflight(engine.local_device(), socket.gethostname())
    lines += [*warnings, *found.warnings]
    if record:
        lines.append(f"would go on from {found.path}, step {record.step:,}")
    lines.append(dist.together(lambda: disk_space(
        run.out_dir, sum(inputs.sizes.values()), run.train.keep, bool(run.train.best_metric))))
    if run.train.upload:
        dist.on_main(partial(remote.check_writable, run.train.upload))
        dist.on_main(partial(check_owner, run.out_dir, run.train.upload, resume, claims=False))
        lines.append(f"train.upload = {run.train.upload}: can be written, listed and read")
    if dist.is_main():
        print("\n".join(lines))
    with TemporaryDirectory() as out:  # for the report of another vocabulary
        model_engine = build(replace(run, out_dir=out), inputs, record, print)
    full = replace(run.train, initial_batch_size=0, batch_warmup_steps=0)
    batch = next(batches_of(replace(run, train=full), inputs, start=0, end=1))[0]
    counts = count_over_ranks([batch], model_engine.device)
    loss = torch.zeros((), dtype=torch.float64, device=model_engine.device)

    def forward(batch) -> tuple[torch.Tensor, dict]:
        trained, sums, _ = model_engine(batch, counts)
        loss.add_(trained.detach())
        return trained, sums

    bad = find_bad_gradients(model_engine, [batch], forward,
                             [seed_of(run.train.seed, 0, 0, dist.rank())])
    mean = dist.sum_over_ranks(loss).item()
    what = f"micro-batch of {run.train.micro_batch_size} x {run.data.seq_len}"
    if not counts["targets"]:
        bad = "none of its tokens is masked; raise objective.mask.rate, or look at the data with " \
              "data_prep/show.py"
    if bad or not math.isfinite(mean):
        raise BadStepError(f"check failed: {what}, loss {mean:.4f}: "
                           + (bad or "not finite; look at the weights of [init] and the precision"))
    if dist.is_main():
        print(f"check passed: {what}, loss {mean:.4f}")
