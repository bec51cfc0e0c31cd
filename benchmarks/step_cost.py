"""The cost of a training step on a GPU that is not there: operators, bytes, FLOPs by part, priced.

The step runs on tensors without data, in bf16, and every operator is counted. An operator costs its
bytes at the card's memory speed, its products at a usual share of the peak, or the least time of a
kernel, whichever is most. Attention kernels are priced by the instructions of their compiled loops
(LOOPS), because issuing those is what they wait for, or by the biases that they move, whichever is
more; the optimizer by its bytes a parameter. It is a model, good to say where time goes and what a
change is worth; a profile on the card replaces it.

  python -m benchmarks.step_cost                                  # RTD v3-base, 64 x 512, H100
  python -m benchmarks.step_cost --set train.micro_batch_size=16  # any run file, any override
"""

import argparse
import json
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from benchmarks.measure import RESULTS
from deberta_ds.base.errors import UserError, exit_cleanly
from deberta_ds.base.files import write_atomic
from deberta_ds.config import run_config
from deberta_ds.config.run_config import RunConfig
from deberta_ds.engine.gpus import GPUS
from deberta_ds.model import choose, encoder
from deberta_ds.model import linear_cross_entropy as chunked
from deberta_ds.model.attention.geometry import make_band, padded
from deberta_ds.model.kernels import attention
from deberta_ds.objectives.build import build_model, objective_of, parameter_sizes
from deberta_ds.planner import activations
from deberta_ds.planner.speed import LAYER_SECONDS

LEAST_SECONDS = 2e-6  # of a kernel, however small
PRODUCT_SHARE, MEMORY_SHARE, ISSUE_SHARE = 0.65, 0.85, 0.65
KERNEL_PRODUCT_SHARE = 0.45  # of products inside Triton kernels of the project
OPTIMIZER_BYTES = 74  # a parameter, of a ZeRO-1 step in bf16 on one GPU
ATTENTION_DROPOUT = 0.1
FREE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach",
        "_unsafe_view", "lift_fresh", "resize_"}
# (instructions of the loop, warps, pairs of a tile) of sm_90's tiles at head size 64, compiled by
# Triton 3.7.1 (tests/workers/fused_compile.py 90 --sizes 64). "key" is of rows within the band;
# "far" are pairs beyond it. Bias, rows and table take rows by residue, which meet more distances.
LOOPS = {
    "forward": (428, 4, 64 * 32),
    "far forward": (417, 4, 64 * 32),
    "sums": (91, 4, 64 * 32),
    "key": (683, 8, 64 * 128),
    "key of long rows": (453, 4, 32 * 64),
    "far query": (420, 4, 64 * 32),
    "far key": (508, 4, 32 * 64),
    "gathered forward": (509, 4, 64 * 32),
    "columns": (304, 8, 64 * 64),
    "skew": (70, 4, 16 * 64),
    "spread": (409, 4, 64 * 64),
    "bias": (159, 4, 64 * 64),
    "content": (142, 4, 64 * 64),
    "rows": (121, 4, 64 * 64),
    "table": (142, 4, 32 * 64),
    "dropped pairs": (1344, 4, 64 * 512),
}
# Instructions an element of kernels between products, by Triton 3.6 (tests/workers/
# kernel_compile.py): the loop's, or the whole kernel's where there is none, by a thread's elements.
ELEMENTWISE = {"biased_gelu": 28, "biased_gelu_gradients": 35, "residual_norm": 59,
               "residual_norm_gradients": 54}


@dataclass(frozen=True)
class Card:
    """What decides a kernel's time."""

    bandwidth: float  # bytes/s
    processors: int
    clock: float  # Hz
    peak: float  # bf16 FLOP/s

    def issuing(self, instructions: float) -> float:
        """Return the seconds to issue instructions of warps: four a turn and processor."""
        return instructions / (4 * self.processors * self.clock * ISSUE_SHARE)


CARDS = {
    "h100": Card(3.35e12, 132, 1.755e9, GPUS["h100"].peak("bf16")),
    "h200": Card(4.8e12, 132, 1.755e9, GPUS["h200"].peak("bf16")),
    "a100": Card(2.04e12, 108, 1.41e9, GPUS["a100"].peak("bf16")),
}


@dataclass(frozen=True)
class Cost:
    """One operator's bytes and FLOPs."""

    part: str
    name: str
    bytes: int
    flops: int
    product_share: float = PRODUCT_SHARE
    issued: float = 0.0  # instructions of warps

    def seconds(self, card: Card) -> float:
        moving = self.bytes / (card.bandwidth * MEMORY_SHARE)
        computing = self.flops / (card.peak * self.product_share)
        return max(moving, computing, card.issuing(self.issued), LEAST_SECONDS)


class Count(TorchDispatchMode):
    """Every operator that launches a kernel, under the part that ran it."""

    def __init__(self):
        super().__init__()
        self.part, self.costs, self.attention = "top", [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        inputs, outputs = _tensors((args, kwargs or {})), _tensors(out)
        if name.startswith(("fused_attention", "gathered_bias")):
            self.attention.append((name, args))
        elif function.namespace == "deberta_ds":
            moved, flops = sum(map(_held_bytes, inputs + outputs)), _kernel_flops(name, args, out)
            issued = ELEMENTWISE.get(name, 0) / 32 * inputs[0].numel()
            self.costs.append(Cost(self.part, name, moved, flops, KERNEL_PRODUCT_SHARE, issued))
        elif function.namespace == "aten" and name not in FREE:
            if not _is_view(function, inputs, outputs):
                touched = inputs[1:] if name == "scatter_add_" else [*inputs, *outputs]
                moved = sum(map(_held_bytes, touched))
                self.costs.append(Cost(self.part, name, moved, _flops(name, inputs, outputs)))
        return out


def _tensors(tree) -> list[Tensor]:
    return [x for x in tree_iter(tree) if isinstance(x, Tensor)]


def _is_view(function, inputs, outputs) -> bool:
    if function.is_view or function._schema.is_mutable or not outputs:
        return function.is_view
    storages = {x.untyped_storage()._cdata for x in inputs}
    return all(x.untyped_storage()._cdata in storages for x in outputs)


def _held_bytes(tensor: Tensor) -> int:
    """Return the bytes behind a tensor: an expanded dimension counts once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or size == 1 else 1
    return count * tensor.element_size()


def _flops(name: str, inputs, outputs) -> int:
    name = name.rstrip("_")
    if name not in ("mm", "addmm", "bmm", "baddbmm"):
        return 0
    left = inputs[1] if name in ("addmm", "baddbmm") else inputs[0]
    return 2 * outputs[0].numel() * left.shape[-1]


def _kernel_flops(name: str, args, outputs) -> int:
    """Return the products inside of a kernel of the project."""
    if name not in ("loss_tiles", "loss_gradient"):
        return 0
    rows, size = args[0].shape
    ids = args[5] if name == "loss_tiles" else outputs[0].shape[1]
    return 2 * rows * size * ids


def count_step(run: RunConfig) -> Count:
    """Return the operators of one micro-batch, forward and backward, in bf16."""
    count = Count()

    def attend(*tensors, segments, query_positions_BQ=None, **options):
        part, count.part = count.part, "around attention"
        context = attention.fused_path(*tensors, geometry=options["geometry"], segments_BL=segments,
                             query_positions_BQ=query_positions_BQ, dropout=ATTENTION_DROPOUT,
                             seed=options["seed"], keep_terms=options["keep_terms"])
        count.part = part
        return context

    def gathered_term(*tensors, segments, **options):
        return attention.gathered_term(*tensors, geometry=options["geometry"], segments_BL=segments,
                                       query_positions_BQ=options["query_positions_BQ"])

    def pick(idea, _request, mode="auto"):  # as on a card where every check passes
        kernel = next(one for one in choose.KERNELS if one.idea == idea
                      and mode in ("auto", one.name))
        return kernel, ""

    chunk_for = chunked.chunk_for
    stand_ins = ((encoder, "attend", attend), (encoder, "gathered_term", gathered_term),
                 (choose, "pick", pick),
                 (chunked, "_sample", activations.first_ids),
                 (chunked, "chunk_for", lambda rows, _: chunk_for(rows, "cuda")))
    with ExitStack() as stack:
        for stand_in in stand_ins:
            stack.enter_context(patch.object(*stand_in))
        stack.enter_context(FakeTensorMode())
        _run(run, count)
    return count


def _run(run: RunConfig, count: Count) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = build_model(run)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, module in model.named_modules():
        if part := _part_of(name):
            _mark(module, part, count)
    norm = {"targets": torch.ones(()), "tokens": torch.ones(())}
    with count:
        loss, *_ = model(activations.full_batch(run), norm)
        count.part = "backward"
        loss.backward()


def _part_of(name: str) -> str:
    if name.endswith(".head"):
        return "vocabulary head" if name.startswith("generator") else "detection head"
    return "layers" if name.rpartition(".")[0].endswith("layers") else ""


def _mark(module, part: str, count: Count) -> None:
    before = []

    def enter(*_):
        before.append(count.part)
        count.part = part

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(lambda *_: setattr(count, "part", before.pop()))


def attention_kernels(name: str, args, card: Card) -> dict[str, float]:
    """Return the time of each kernel of one fused operator, by instructions issued."""
    if name.startswith("gathered_bias"):
        return _columns_kernels(name, args, card)
    forward = name == "fused_attention"
    q, k, *numbers = args if forward else args[2:]
    gathered, (reach, *_, keep) = numbers[3] is not None, numbers[7:11]
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    band = make_band(reach, keys)
    width, far = keys if gathered else min(band.width(keys), keys), band.far and not gathered
    pairs, near = (batch * heads * queries * columns for columns in (keys, width))
    seconds = partial(_loop_seconds, card=card, near=near)
    found: Counter[str] = Counter()
    if not gathered and (forward or not keep):
        found["bias_kernel"] = 2 * seconds("bias", _by_residue(q, width), 1)
    if forward or not (keep or gathered):
        found["dropped_kernel"] = seconds("dropped pairs", pairs)
    if forward:
        kernel = "gathered forward" if gathered else "forward"
        found["forward_kernel"] = seconds(kernel, near, 3 if keep or gathered else 2)
        found["forward_kernel"] += seconds("far forward", pairs - near) if far else 0
        return found
    if not (keep or gathered):
        found["forward_kernel"] = seconds("sums", near, 3)
    found["content_kernel"] = seconds("content", near, 1)
    found["key_kernel"] = seconds("key of long rows" if far else "key", near, 2 if gathered else 3)
    found["row_dot_kernel"] = 4 * q.numel() / (card.bandwidth * MEMORY_SHARE)
    if gathered:
        found["skew_kernel"] = seconds("skew", pairs * 2 * band.radius(keys) / keys, 3)
        return found
    found["row_gradient_kernel"] = 2 * seconds("rows", _by_residue(q, width), 1)
    found["table_gradient_kernel"] = 2 * seconds("table", _by_residue(q, width), 1)
    if far:
        found["key_kernel"] += seconds("far key", pairs - near)
        found["query_kernel"] = seconds("far query", pairs - near)
    return found


def _columns_kernels(name: str, args, card: Card) -> dict[str, float]:
    """Return the times of the operators of a decoder's position-to-content term."""
    k, *_ = args[name == "gathered_bias_backward":]
    facts = args[2 + (name == "gathered_bias_backward")]
    batch, heads, keys, _ = k.shape
    width = min(make_band(args[-1 - (name == "gathered_bias")], keys).width(keys), keys)
    seconds = partial(_loop_seconds, card=card, near=batch * heads * keys * width)
    pairs = batch * heads * keys * padded(facts.shape[2])
    if name == "gathered_bias":
        return {"bias_kernel": seconds("bias", _by_residue(k, width), 1),
                "columns_kernel": seconds("columns", pairs, 1)}
    return {"spread_kernel": seconds("spread", pairs * width / 64, 1),
            "row_gradient_kernel": seconds("rows", _by_residue(k, width), 1),
            "table_gradient_kernel": seconds("table", _by_residue(k, width), 1)}


def _by_residue(x: Tensor, width: int) -> int:
    """Return the pairs that products by residue compute: 64 rows span up to 512."""
    batch, heads, rows, _ = x.shape
    return batch * heads * padded(rows) * (width + min(padded(rows), 512))


def _loop_seconds(kernel: str, pairs: float, biases: int = 0, *, card: Card, near: float) -> float:
    """Return a kernel's time; biases: how many matrices of `near` elements it moves."""
    instructions, warps, tile = LOOPS[kernel]
    moving = biases * 2 * near / (card.bandwidth * MEMORY_SHARE)
    return max(card.issuing(pairs / tile * instructions * warps), moving, LEAST_SECONDS)


def summarize(run: RunConfig, count: Count, card: Card) -> dict:
    """Return the table: by part forward, by operator backward, and what they add up to."""
    parts = defaultdict(lambda: [0, 0, 0, 0.0])
    for cost in count.costs:
        label = cost.part if cost.part != "backward" else f"backward: {cost.name}"
        for place, value in enumerate((1, cost.bytes, cost.flops, cost.seconds(card))):
            parts[label][place] += value
    for name, args in count.attention:
        kernels = attention_kernels(name, args, card)
        row = parts["attention kernels" + (" backward" if name.endswith("backward") else "")]
        row[0] += len(kernels)
        row[3] += sum(kernels.values())
    moved = OPTIMIZER_BYTES * sum(parameter_sizes(run).values())
    parts["optimizer"] = [0, moved, 0, moved / (card.bandwidth * MEMORY_SHARE)]
    names = ("kernels", "bytes", "flops", "seconds")
    table = {label: dict(zip(names, row, strict=True)) for label, row in parts.items()}
    total = {name: sum(row[name] for row in table.values()) for name in names}
    tokens = run.train.micro_batch_size * run.data.seq_len
    ideal = objective_of(run).flops_per_token(run) * tokens / card.peak
    layers = sum(one.num_layers for one in objective_of(run).encoders(run).values())
    total |= {"tokens_per_second": tokens / total["seconds"], "mfu": ideal / total["seconds"],
              "host_seconds": layers * LAYER_SECONDS}
    return {"parts": table, "total": total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="launch/runs/v3_base.toml")
    parser.add_argument("--card", choices=CARDS, default="h100")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides")
    options = parser.parse_args()
    overrides = ["--train.micro_batch_size=64", *(f"--{text}" for text in options.set)]
    run, _ = run_config.load(options.config, overrides)
    if run.model.head_size > choose.LARGEST_HEAD:
        raise UserError(f"{options.config}: heads of {run.model.head_size} take no fused kernel")
    result = summarize(run, count_step(run), CARDS[options.card])
    rows = sorted(result["parts"].items(), key=lambda item: -item[1]["seconds"])
    print(f"{'':36}{'kernels':>8}{'GB':>9}{'TFLOP':>9}{'ms':>9}")
    for name, row in [*rows[:24], ("everything", result["total"])]:
        print(f"{name:36}{row['kernels']:8}{row['bytes'] / 1e9:9.2f}{row['flops'] / 1e12:9.3f}"
              f"{row['seconds'] * 1e3:9.2f}")
    total = result["total"]
    print(f"{run.train.micro_batch_size} x {run.data.seq_len} on {options.card}: "
          f"{total['tokens_per_second']:,.0f} tok/s, {total['mfu']:.1%} of the peak; the host "
          f"needs {total['host_seconds'] * 1e3:.0f} ms without a CUDA graph")
    shape = f"{run.train.micro_batch_size}x{run.data.seq_len}"
    path = RESULTS / f"step_cost-{run.name}-{shape}-{options.card}.json"
    write_atomic(path, json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    exit_cleanly(main)
