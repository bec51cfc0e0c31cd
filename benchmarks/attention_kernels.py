"""The kernels of one layer's attention on a GPU, next to what `step_cost` expects of the card.

Forward and backward in bf16 with dropout, 12 heads of 64, position terms kept, as v3-base trains:
the Triton kernels ("fused"), and torch's operators for GPUs without them ("dense").

  python -m benchmarks.attention_kernels               # on a GPU: expected and measured
  python -m benchmarks.attention_kernels --expected    # without one: what is expected of --card
"""

import argparse
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from benchmarks.peers import GEOMETRY, Problem, make_problem
from benchmarks.step_cost import ATTENTION_DROPOUT, CARDS, Card, Count, attention_kernels
from deberta_ds.base.errors import UserError, exit_cleanly
from deberta_ds.cluster.launcher import count_gpus
from deberta_ds.engine.gpus import known_as
from deberta_ds.model.attention.dense import dense_attention
from deberta_ds.model.kernels.attention import fused_path

SHAPES = ((64, 512), (16, 2048))
VARIANTS = {"fused": partial(fused_path, keep_terms=True), "dense": dense_attention}
HEADS, SIZE, CALLS, LINES = 12, 64, 10, 16


def layer(attention: Callable[..., Tensor], problem: Problem) -> list[Tensor]:
    """Run attention forward and backward; return the context and all gradients."""
    batch, _, length, _ = problem.q_BHLD.shape
    segments = torch.ones(batch, length, dtype=torch.int32, device=problem.device)
    context = attention(*problem.leaves, geometry=GEOMETRY, segments_BL=segments,
                        query_positions_BQ=None, dropout=problem.dropout, seed=1)
    return [context, *torch.autograd.grad(context, problem.leaves, problem.grad_BLHD)]


def expected(attention: Callable[..., Tensor], shape: tuple[int, int], card: Card
             ) -> Counter[str]:
    """Return the seconds of each kernel of the project, and of each of torch's operators."""
    seconds: Counter[str] = Counter()
    with FakeTensorMode():
        problem = make_problem(*shape, HEADS, SIZE, torch.bfloat16, "cpu", ATTENTION_DROPOUT)
        with Count() as count:
            layer(attention, problem)
    for name, args in count.attention:
        seconds.update(attention_kernels(name, args, card))
    for cost in count.costs:
        seconds[f"torch: {cost.name}"] += cost.seconds(card)
    return seconds


def measured(attention: Callable[..., Tensor], shape: tuple[int, int]) -> Counter[str]:
    """Return the seconds of each kernel on this machine's GPU, by the kernels' own names."""
    problem = make_problem(*shape, HEADS, SIZE, torch.bfloat16, "cuda", ATTENTION_DROPOUT)
    for _ in range(3):
        layer(attention, problem)
    return kernel_seconds(attention, problem)


def kernel_seconds(attention: Callable[..., Tensor], problem: Problem) -> Counter[str]:
    """Return the seconds of each kernel of one layer that has run before."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(CALLS):
            layer(attention, problem)
        torch.cuda.synchronize()
    return Counter({event.key: event.self_device_time_total / CALLS / 1e6
                    for event in profiler.key_averages()})


def show(title: str, wanted: Counter[str], found: Counter[str]) -> None:
    """Print the slowest kernels; `found` is empty where nothing was measured."""
    print(f"\n{title:<60}{'expected, ms':>14}{'measured, ms':>14}")
    shown = [name for name, _ in (wanted | found).most_common(LINES)]
    rows = [(name, wanted[name], found[name]) for name in shown]
    others = [each.total() - sum(each[name] for name in shown) for each in (wanted, found)]
    for name, *times in (*rows, ("others", *others), ("all", wanted.total(), found.total())):
        texts = [f"{1e3 * seconds:.3f}" if seconds else "-" for seconds in times]
        print(f"{name[:58]:<60}{texts[0]:>14}{texts[1]:>14}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--card", choices=CARDS, help="default: this machine's, or h100")
    parser.add_argument("--expected", action="store_true", help="measure nothing")
    options = parser.parse_args()
    on_gpu = not options.expected and count_gpus() > 0
    here = known_as(torch.cuda.get_device_name()) if on_gpu else "h100"
    if (card := options.card or here) not in CARDS:
        raise UserError(f"this machine's {here} has no figures; give the most similar --card of "
                        f"{', '.join(CARDS)}")
    print(f"one layer, forward and backward, bf16, {HEADS} heads of {SIZE}; expected of {card}"
          + (f", measured on {torch.cuda.get_device_name()}" if on_gpu else
             "; nothing is measured" + ("" if options.expected else ": this machine has no GPU")))
    for shape in SHAPES:
        for name, attention in VARIANTS.items():
            wanted = expected(attention, shape, CARDS[card])
            found = measured(attention, shape) if on_gpu else Counter()
            show(f"{name}, {shape[0]} x {shape[1]}", wanted, found)


if __name__ == "__main__":
    exit_cleanly(main)
