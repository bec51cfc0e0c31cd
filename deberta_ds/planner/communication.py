"""What a rank sends in a step, and how much of the time for it is not hidden behind computing.

Counted from what DeepSpeed 0.19.8 calls (tests/planner/test_traffic.py holds it against the bytes
of real runs): stages 1 and 2 all-reduce gradients, once a step or once a micro-batch, a bucket at
a time, and gather the new weights once. Stage 3 reduce-scatters the gradients of every micro-batch
and gathers weights, for which there is an upper bound (`most_gathered`).
A ring of N sends (N - 1) / N of what is gathered or scattered, and twice that of an all-reduce.
"""

import math
from dataclasses import dataclass

from deberta_ds.engine import ds_config
from deberta_ds.engine.gpus import Gpu
from deberta_ds.model.precision import DTYPES

BUCKET = 500_000_000  # DeepSpeed's default of every bucket size, elements
_REUSE_DISTANCE, _SMALL = 1_000_000_000, 100_000  # DeepSpeed's defaults, in elements

_BACKWARD = 2 / 3  # of forward + backward: the time in which gradients come
_RING_SHARE = 0.95  # of a link that a ring of large messages gets
_HOP_SECONDS = 1e-5  # a message costs this for each doubling of the ranks: 0.1 ms at 1,024


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in a step, and the messages that they come in."""

    gradients: float
    weights: float
    messages: int = 0
    last: float = 0.0  # of `gradients`: the bucket that is full when the backward pass has ended

    @property
    def total(self) -> float:
        return self.gradients + self.weights


@dataclass(frozen=True)
class Gathered:
    """Elements that all-gathers yield, over all ranks, and how many all-gathers there are."""

    per_micro_batch: float
    per_step: int = 0  # once, after the update: small parameters, which stay
    messages: int = 0  # of a micro-batch


def most_gathered(sizes: list[int], zero: dict, ranks: int, layers: int) -> Gathered:
    """Return an upper bound of what ZeRO-3 gathers of parameters of `sizes` elements.

    Every large parameter is gathered once. It is gathered again for another use if at least
    `stage3_max_reuse_distance` elements lie between: for the backward pass where the distance
    spans two layers, else up to three times (recomputation, matrices used twice in a layer).
    At most four elements go by for each one of the model. The token embedding has more uses.
    """
    distance = int(zero.get("stage3_max_reuse_distance", _REUSE_DISTANCE))
    limit = int(zero.get("stage3_param_persistence_threshold", _SMALL))
    padded = [(size <= limit, -(-size // ranks) * ranks) for size in sizes]
    small = sum(size for stays, size in padded if stays)
    large = [size for stays, size in padded if not stays]
    total, embedding = sum(large), max(large, default=0)
    uses = 1 if distance >= 2 * total / layers else 3
    again = max(0.0, 1 - distance / max(4 * total, 1))  # share of the parameters
    return Gathered(total + again * (uses * total + 2 * embedding), small,
                    math.ceil(len(large) * (1 + uses * again)))


def traffic(parameters: int, ds: dict, ranks: int, micro_batches: int,
            gathered: Gathered | None = None) -> Traffic:
    """Return what a rank sends in a step of `micro_batches` under a DeepSpeed dict.

    `gathered` is what stage 3 gathers at most; the other stages have no use for it.
    """
    stage, zero = ds_config.zero_stage(ds), ds.get("zero_optimization", {})
    if ranks == 1:
        return Traffic(0.0, 0.0)
    width = weight_width(ds)
    share = (ranks - 1) / ranks  # of what is gathered or scattered
    sent = ds.get("communication_data_type")
    gradients = parameters * share * (DTYPES[sent].itemsize if sent else width)
    bucket = min(int(zero.get("reduce_bucket_size", BUCKET)), parameters)
    buckets = math.ceil(parameters / bucket)
    if stage == 3:
        assert gathered is not None
        weights = micro_batches * gathered.per_micro_batch + gathered.per_step
        return Traffic(micro_batches * gradients, width * share * weights,
                       micro_batches * (gathered.messages + buckets))
    reductions = micro_batches if stage == 2 else 1
    gradients *= 2 * reductions
    gathers = math.ceil(parameters / int(zero.get("allgather_bucket_size", BUCKET)))
    return Traffic(gradients, width * share * parameters if stage else 0.0,
                   reductions * buckets + (gathers if stage else 0),
                   gradients * bucket / parameters)


def weight_width(ds: dict) -> int:
    """Return the bytes of an element of the weights that run forward."""
    return DTYPES[ds_config.precision(ds)].itemsize


def bandwidth(gpu: Gpu, gpus: int, nodes: int) -> float:
    """Return bytes/s of a rank: inside a node its link; between nodes a ring uses every NIC."""
    if nodes == 1:
        return gpu.link * _RING_SHARE
    return min(gpu.link, gpu.network * gpus) * _RING_SHARE


def latency_seconds(ranks: int) -> float:
    """Return what a message costs whatever its size."""
    return _HOP_SECONDS * math.log2(ranks)


def host_seconds(tensors: int, ranks: int) -> float:
    """Return the processor time that ZeRO-3 spends on a step in Python, on every rank.

    Fitted to DeepSpeed 0.19.8 with 1,184 tensors: 1.2, 2.1, 6.3 and 15.5 s at 8, 64, 256 and 1,024
    ranks. Stages 0 to 2 need little, whatever the ranks.
    """
    return tensors * (0.9e-3 + 1.2e-5 * ranks)


def sending_seconds(sent: Traffic, rate: float, latency: float) -> float:
    """Return the seconds for all that is sent in a step, hidden or not."""
    return sent.total / rate + sent.messages * latency


def step_seconds(sent: Traffic, compute: float, rate: float, ds: dict, micro_batches: int, *,
                 host: float = 0.0, latency: float = 0.0) -> float:
    """Return the seconds of a step: computing, and sending that computing does not hide.

    Stage 3 prefetches weights and reduces during the passes, and `host` is its `host_seconds`.
    Stages 1 and 2 hide the reduction behind the backward pass that brings the gradients if
    `overlap_comm` is true, all but its last bucket; else nothing.
    """
    stage = ds_config.zero_stage(ds)
    if stage == 3:
        return max(compute, sending_seconds(sent, rate, latency), host)
    hidden = 0.0
    if stage and ds.get("zero_optimization", {}).get("overlap_comm"):
        hidden = compute * _BACKWARD / (micro_batches if stage == 1 else 1)
    gradients = max(sent.gradients / rate + sent.messages * latency - hidden, sent.last / rate)
    return compute + gradients + sent.weights / rate
