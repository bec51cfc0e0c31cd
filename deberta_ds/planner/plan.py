"""What a run needs on a cluster: bytes per GPU, speed, communication, days.

Bytes of weights, gradients and optimizer follow what DeepSpeed 0.19.8 allocates (checked against
the allocator in tests/planner/test_plan.py):

    stage 0    w P weights, g P gradients, 8 P Adam (fp32 only: no separate masters)
    stage 1-2  w P weights, (4 + 8) P / N masters and Adam, gradients w P / N after reduction
               (stage 1 holds w P while it accumulates), one or two buckets
    stage 3    all of it / N, a bucket, and the weights gathered for the layers at work

with P parameters, N GPUs, w bytes a weight (Muon's matrices, 4 bytes less, are counted as Adam's).
The update itself needs gradients in fp32 on top. The peak is what is held + the larger of (forward
and backward) and (update).
"""

from dataclasses import dataclass, replace

from deberta_ds.base.errors import UserError, raise_problems, tell
from deberta_ds.config.batch_schedule import micro_batches, phases, problems_with_ranks
from deberta_ds.config.run_config import RunConfig
from deberta_ds.engine import ds_config
from deberta_ds.engine.ds_config import DeepSpeedConfig
from deberta_ds.engine.gpus import Gpu
from deberta_ds.engine.passes import are_summed, graph_obstacle
from deberta_ds.model.precision import DTYPES
from deberta_ds.objectives.build import objective_of, parameter_sizes
from deberta_ds.planner.activations import Activations, trace
from deberta_ds.training import meters

RESERVED_BYTES = 3 << 30  # CUDA context, NCCL, workspaces, fragmentation
_MANY_RANKS, _MANY_RANKS_BUCKET = 256, 200_000_000  # at least
BUCKET = ds_config.Zero().reduce_bucket_size  # DeepSpeed's default, elements
_RING_SHARE = 0.95  # of a link that a ring of large messages gets
_LARGE = 200_000_000  # parameters of which a trace takes seconds
_ABOUT = 0.03  # of the time: no difference that the planner can tell


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU (and its share of host memory or disk)."""

    weights: int
    optimizer: int
    buffers: int
    work: int  # forward and backward: activations, gradients as they come, buckets, live weights
    update: int
    offloaded: int

    @property
    def held(self) -> int:
        """Bytes held between steps."""
        return self.weights + self.optimizer + self.buffers

    @property
    def peak(self) -> int:
        """Most bytes of a rank at one time."""
        return self.held + max(self.work, self.update)


@dataclass(frozen=True)
class Choice:
    """One row of the plan: a ZeRO stage and a way of recomputing.

    Times are upper bounds: nothing that is sent hides behind computing.
    """

    stage: int
    checkpointing: str  # of activations: none, selective or full
    memory: Memory
    fits: bool
    compute_seconds: float  # of a step
    communication_seconds: float  # of a step, at most
    step_seconds: float
    tokens_per_second: float  # of the whole cluster
    days: float


def memory_of(parameters: int, ds: DeepSpeedConfig, ranks: int, activations: Activations,
              accumulates: bool, summed: bool) -> Memory:
    """Return the memory of one rank under a DeepSpeed JSON.

    summed: gradients of the micro-batches are summed outside of DeepSpeed (`engine.passes`).
    """
    zero, stage, width = ds.zero_optimization, ds.stage, DTYPES[ds.precision].itemsize
    part, bucket = -(-parameters // ranks), width * zero.reduce_bucket_size
    # From the second micro-batch on, stages 0 and 1 hold whole gradients and stage 2 its part.
    if summed:  # all gradients of a pass at once, their sums, and these again as DeepSpeed's
        flat = 4 * min(parameters, BUCKET) if stage == 0 and ranks > 1 else 2 * bucket
        optimizer = 8 * parameters if stage == 0 else 12 * part
        handed = width * parameters * (width < 4)
        return Memory(width * parameters, optimizer, 4 * parameters, activations.peak(1.0),
                      handed + min(flat, 2 * width * parameters) + (2 * width + 4) * part, 0)
    if stage == 0:
        flat = 4 * min(parameters, BUCKET) if ranks > 1 else 0
        work = activations.peak(0.0) + width * parameters if accumulates else activations.peak(1.0)
        return Memory(width * parameters, 8 * parameters, 0, work, width * parameters + flat, 0)
    optimizer, update = 12 * part, (2 * width + 4) * part
    if stage == 3:
        live = width * min(parameters, zero.stage3_max_live_parameters)
        memory = Memory(width * part, optimizer, width * part + bucket,
                        activations.peak(0.0) + live, 4 * min(part, zero.sub_group_size), 0)
    else:
        share = 1.0 if stage == 1 else 1.0 / ranks
        work = activations.peak(0.0) + round(share * width * parameters) if accumulates \
            else activations.peak(1.0 / ranks)
        buckets = min(bucket * (2 if zero.overlap_comm else 1), 2 * width * parameters)
        memory = Memory(width * parameters, optimizer, 0, work + buckets, update, 0)
    if ds.offload().device != "none":
        memory = replace(memory, optimizer=0, update=0, offloaded=16 * part)
    if ds.offload("offload_param").device != "none":
        memory = replace(memory, weights=0, offloaded=memory.offloaded + width * part)
    return memory


def most_sent(sizes: list[int], ds: DeepSpeedConfig, ranks: int, micro_batches: int) -> float:
    """Return an upper bound of the bytes that a rank sends in a step, in rings.

    sizes: of the parameters. Stages 0 to 2 all-reduce gradients, stage 2 those of every
    micro-batch, and gather new weights once: these bytes are exact. Stage 3 scatters gradients, and
    gathers every weight for each use, at most four times in a micro-batch, the embedding six times;
    DeepSpeed's stage3_max_reuse_distance and _max_live_parameters may spare most of it.
    """
    stage, width, total = ds.stage, DTYPES[ds.precision].itemsize, sum(sizes)
    gradients = total * DTYPES[ds.communication_data_type or ds.precision].itemsize
    share = (ranks - 1) / ranks  # of what is gathered or scattered
    if stage == 3:
        padded = [-(-size // ranks) * ranks for size in sizes]
        return share * micro_batches * (gradients + width * (4 * sum(padded) + 2 * max(padded)))
    return share * (2 * gradients * (micro_batches if stage == 2 else 1)
                    + (width * total if stage else 0))


def bandwidth(gpu: Gpu, gpus: int, nodes: int) -> float:
    """Return bytes/s of a rank: inside a node its link; between nodes a ring uses every NIC."""
    return _RING_SHARE * (gpu.link if nodes == 1 else min(gpu.link, gpu.network * gpus))


def host_seconds(tensors: int, ranks: int) -> float:
    """Return the processor time that ZeRO-3 spends on a step in Python, on every rank.

    Fitted to DeepSpeed 0.19.8 with 1,184 tensors: 1.2, 2.1, 6.3 and 15.5 s at 8, 64, 256 and 1,024
    ranks. Stages 0 to 2 need little, whatever the ranks.
    """
    return tensors * (0.9e-3 + 1.2e-5 * ranks)


def make_plan(run: RunConfig, ds: DeepSpeedConfig, *, gpu: Gpu, gpus: int, nodes: int, mfu: float
              ) -> list[Choice]:
    """Return every ZeRO stage x recomputation for `run` on `nodes` x `gpus` of a kind.

    `ds` gives precision, buckets and offload; its stage is replaced, by those that go with the
    rest of it. Times lack what offload and Muon cost. Raises UserError if the batch does not
    divide, the optimizer cannot go with the JSON, or the card has no bf16.
    """
    raise_problems("optimizer", ds_config.problems_with_optimizer(run.optim.name, ds))
    ranks = gpus * nodes
    accumulation = ds_config.accumulation_steps(run, ranks)
    peak_flops = gpu.peak(ds.matmul_precision)
    if peak_flops is None:
        raise UserError("this card has no bf16: give a DeepSpeed JSON of fp16, such as "
                        "--deepspeed_config ds_configs/zero1_fp16.json")
    sizes = list(parameter_sizes(run).values())
    parameters, tensors = sum(sizes), len(sizes)
    raise_problems("batch", problems_with_ranks(run.train, ranks, 0))
    full, seq_len = run.train.global_batch_size, run.data.seq_len
    updates = phases(run.train, 0, run.train.steps)
    compute_row = seq_len * objective_of(run).flops_per_token(run) / (ranks * peak_flops * mfu)
    rate = bandwidth(gpu, gpus, nodes)
    choices = []
    for name in ("none", "selective", "full"):
        if parameters > _LARGE:
            tell(f"planning with activation checkpointing {name} (some seconds) ...")
        train = replace(run.train, activation_checkpointing=name,
                        activation_checkpointing_interval=1)
        activations = trace(replace(run, train=train), DTYPES[ds.precision], fused=True)
        for stage in (0, 1, 2, 3):
            zero = ds.zero_optimization.model_copy(update={"stage": stage})
            staged = ds.model_copy(update={"zero_optimization": zero})
            if ds_config.problems_between(staged):
                continue  # pretrain would reject it
            summed = are_summed(staged, accumulation > 1) or not graph_obstacle(
                run, staged, "cpu" if gpu.is_cpu else "cuda")
            memory = memory_of(parameters, staged, ranks, activations, accumulation > 1, summed)
            # Full recomputation repeats the forward pass: a third of forward + backward.
            row_seconds = compute_row * {"none": 1.0, "selective": 1.05, "full": 4 / 3}[name]
            host = host_seconds(tensors, ranks) if stage == 3 and ranks > 1 else 0.0
            steps = {}  # by the rows of an update: seconds, and those of its communication
            for rows in {full, *(one.rows for one in updates)}:
                count = micro_batches(rows, ranks, run.train.micro_batch_size)
                sending = most_sent(sizes, staged, ranks, count) / rate
                steps[rows] = sending, max(rows * row_seconds + sending, host)
            sending, step = steps[full]
            run_seconds = sum(one.steps * steps[one.rows][1] for one in updates)
            choices.append(Choice(stage, name, memory, memory.peak + RESERVED_BYTES < gpu.memory,
                                  full * row_seconds, sending, step, full * seq_len / step,
                                  run_seconds / 86400))
    return choices


def recommended(choices: list[Choice]) -> Choice | None:
    """Return what fits and is about as fast as the fastest that fits, of the lowest stage, which
    depends least on links; None if nothing fits.
    """
    fitting = [choice for choice in choices if choice.fits]
    fastest = min((choice.days for choice in fitting), default=0.0)
    about = [choice for choice in fitting if choice.days <= fastest * (1 + _ABOUT)]
    return min(about, key=lambda c: (c.stage, c.days), default=None)


def advise(run: RunConfig, ds: DeepSpeedConfig, best: Choice, parameters: int, *, gpu: Gpu,
           ranks: int) -> list[str]:
    """Return what else to set for `best` on this cluster, and what to expect of failures."""
    lines = []
    if larger := _larger_micro_batch(run, best, ranks, gpu):
        each = run.train.global_batch_size // ranks
        lines.append(f"train.micro_batch_size = {larger} would fit too: micro-batches per step "
                     f"{each // larger} instead of {each // run.train.micro_batch_size}")
    if ranks >= _MANY_RANKS:
        lines.append(f"reduce_bucket_size = {_MANY_RANKS_BUCKET:,} to {BUCKET:,}: "
                     f"{ranks:,} ranks make each message of a ring that much smaller")
        if ds.precision == "bf16" and not ds.communication_data_type:
            lines.append('communication_data_type = "fp32": sums of so many ranks in bf16 are '
                         "biased (it doubles what the gradients send)")
    pause = meters.pause_of_copy(parameters, ranks)
    interval = meters.save_interval(ranks, pause)
    share = max(0.0, 1.0 - meters.lost_share(ranks, pause, interval))
    return [*lines, f"failures: one in {meters.seconds_between_failures(ranks) / 3600:,.0f} h at "
            f"Llama 3's rate; train.save_minutes = \"auto\" begins with {interval / 60:.0f} (a "
            f"copy of {pause:.2f} s); {share:.1%} of the time goes into steps"]


def offloaded(choices: list[Choice], gpus: int) -> list[str]:
    """Return what a node needs besides its GPUs, and what the times lack; [] without offload."""
    most = max(choice.memory.offloaded for choice in choices)
    return [f"offload: {gpus * most / 1e9:,.1f} GB of each node's memory (or disk, where the JSON "
            "says nvme); the CPU's Adam and the transfers are not in the times"] if most else []


def _larger_micro_batch(run: RunConfig, best: Choice, ranks: int, gpu: Gpu) -> int:
    """Return the largest micro-batch that divides and fits, 0 without a larger one; activations
    grow with its sequences.
    """
    now, memory = run.train.micro_batch_size, best.memory
    each = run.train.global_batch_size // ranks
    room = gpu.memory - RESERVED_BYTES - memory.held
    return max((micro for micro in range(now + 1, each + 1) if each % micro == 0
                and max(memory.work * micro / now, memory.update) < room), default=0)
