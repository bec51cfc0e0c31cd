"""Fused fp16 attention in Triton's interpreter at scores of standard deviation 1 to 3000.

Prints one JSON line a deviation: relative errors of the context and of every gradient, ours, ours
with position terms kept, and those of Hugging Face's module in fp16, against float64.
"""

import json
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import interpret_bf16  # noqa: F401
import torch
from attention_cases import relative_errors

from benchmarks.peers import GEOMETRY, hugging_face, make_problem, ours
from deberta_ds.model.attention import attend

DEVIATIONS = (1, 4, 16, 64, 3000)


def main() -> None:
    for deviation in DEVIATIONS:
        problem = make_problem(1, 100, 1, 64, torch.float64, "cpu", 0.0)
        v = problem.v_BHLD
        with torch.no_grad():  # each of the three terms of a score is a product of two of these
            for leaf in problem.leaves:
                leaf.mul_(1.0 if leaf is v else deviation**0.5)
                leaf.copy_(leaf.half())
        truth = run(ours("reference"), problem, torch.float64)
        line = {"deviation": deviation}
        for name, peer in (("ours", fused), ("kept", partial(fused, keep_terms=True)),
                           ("theirs", hugging_face)):
            line[name] = relative_errors(run(peer, problem, torch.float16), truth)
        print(json.dumps(line), flush=True)


def fused(problem, keep_terms=False):
    segments = torch.ones(1, problem.q_BHLD.shape[2], dtype=torch.int32)
    return lambda: attend(*problem.leaves, geometry=GEOMETRY, segments=segments, mode="fused",
                          keep_terms=keep_terms)


def run(peer, problem, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the context and all gradients."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in problem.leaves]
    grad = problem.grad_BLHD.to(dtype)
    context = peer(type(problem)(*leaves, grad, problem.dropout))()
    return [context, *torch.autograd.grad(context, leaves, grad)]


if __name__ == "__main__":
    main()
