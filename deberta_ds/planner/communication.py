"""What a rank sends in a step, and how much of the time for it is not hidden behind computing.

Counted from what DeepSpeed 0.19.8 calls (tests/test_traffic.py holds it against the bytes of real
runs): stages 1 and 2 all-reduce gradients, once a step or once a micro-batch, and gather the new
weights once. Stage 3 reduce-scatters the gradients of every micro-batch and gathers the weights for
every call of a module (the word table and the decoder's last layer are called several times); those
that may stay (stage3_max_live_parameters, stage3_max_reuse_distance) once a step.
A ring of N sends (N - 1) / N of what is gathered or scattered, and twice that of an all-reduce.
"""

from dataclasses import dataclass

from deberta_ds import deepspeed_config
from deberta_ds.planner.gpus import Gpu

_BACKWARD = 2 / 3  # of forward + backward: the time in which gradients come
_LIVE = 1_000_000_000  # DeepSpeed's default of both limits of stage 3
_RING_SHARE = 0.95  # of a link that a ring of large messages gets


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in a step."""

    gradients: float
    weights: float

    @property
    def total(self) -> float:
        return self.gradients + self.weights


def traffic(parameters: int, ds: dict, ranks: int, micro_batches: int, gathered: int) -> Traffic:
    """Return what a rank sends in a step of `micro_batches` under a DeepSpeed dict.

    `gathered` are the parameters that the calls of modules in one of them need, each counted as
    often as it is called.
    """
    stage, zero = deepspeed_config.zero_stage(ds), ds.get("zero_optimization", {})
    width = 4 if deepspeed_config.precision(ds) == "fp32" else 2
    weights = float(width * parameters) * (ranks - 1) / ranks
    if stage == 3:
        stays = min(int(zero.get(name, _LIVE)) for name in
                    ("stage3_max_live_parameters", "stage3_max_reuse_distance")) >= parameters
        calls = 1 if stays else micro_batches * gathered / parameters
        return Traffic(micro_batches * weights, weights * calls)
    reductions = micro_batches if stage == 2 else 1
    return Traffic(2 * reductions * weights, weights if stage else 0.0)


def bandwidth(gpu: Gpu, gpus: int, nodes: int) -> float:
    """Return bytes/s of a rank: inside a node its link; between nodes a ring uses every NIC."""
    if nodes == 1:
        return gpu.link * _RING_SHARE
    return min(gpu.link, gpu.network * gpus) * _RING_SHARE


def host_seconds(tensors: int, ranks: int) -> float:
    """Return the processor time that ZeRO-3 spends on a step in Python, on every rank.

    Fitted to DeepSpeed 0.19.8 with 1,184 tensors: 1.2, 2.1, 6.3 and 15.5 s at 8, 64, 256 and 1,024
    ranks. Stages 0 to 2 need little, whatever the ranks.
    """
    return tensors * (0.9e-3 + 1.2e-5 * ranks)


def step_seconds(sent: Traffic, compute: float, rate: float, ds: dict, micro_batches: int,
                 host: float = 0.0) -> float:
    """Return the seconds of a step: computing, and sending that computing does not hide.

    Stage 3 prefetches weights and reduces beside the passes, and `host` is its `host_seconds`.
    Stages 1 and 2 hide the reduction behind the backward pass that brings the gradients if
    `overlap_comm` is true, else nothing.
    """
    stage = deepspeed_config.zero_stage(ds)
    if stage == 3:
        return max(compute, sent.total / rate, host)
    hidden = 0.0
    if stage and ds.get("zero_optimization", {}).get("overlap_comm"):
        hidden = compute * _BACKWARD / (micro_batches if stage == 1 else 1)
    return compute + max(0.0, sent.gradients / rate - hidden) + sent.weights / rate
