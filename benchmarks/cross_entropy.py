"""The masked LM head, forward + backward with sampling: chunked, fused and full logits.

15 percent of 32 rows of 512 tokens, hidden size 768, vocabulary 128,100. Prints milliseconds, peak
memory and the loss, and writes benchmarks/results/cross_entropy-<device>.json.

  python -m benchmarks.cross_entropy --device cuda
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.measure import interleaved_minimum, save
from deberta_ds.base.errors import exit_cleanly, first_line
from deberta_ds.model.linear_cross_entropy import linear_cross_entropy

HIDDEN, VOCAB = 768, 128_100


def full_logits(hidden, weight, bias, labels, uniforms):
    """Return the loss and a draw the plain way."""
    logits = (hidden @ weight.t()).float() + bias
    drawn = torch.multinomial(logits.detach().softmax(-1), 1)[:, 0]
    return F.cross_entropy(logits, labels, reduction="sum"), None, drawn


def functions(device: str) -> dict[str, Callable]:
    """Return what can run here."""
    found = {"full logits": full_logits, "ours, chunked": linear_cross_entropy}
    if device == "cuda":
        from deberta_ds.model.kernels.fused_cross_entropy import fused_linear_cross_entropy

        found["ours, fused"] = fused_linear_cross_entropy
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=int, default=2458, help="masked tokens")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(options.rows, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.02
    labels = torch.randint(0, VOCAB, (options.rows,), generator=generator).to(options.device)
    uniforms = torch.rand(options.rows, generator=generator).to(options.device)
    leaves = [hidden.to(dtype), weight.to(dtype), torch.zeros(VOCAB)]
    leaves = [x.to(options.device).requires_grad_() for x in leaves]
    calls, results = {}, {}
    for name, function in functions(options.device).items():

        def run(function=function):
            loss = function(*leaves, labels, uniforms)[0]
            torch.autograd.grad(loss, leaves)
            return loss

        try:
            results[name] = {"loss": run().item()}
        except Exception as reason:  # a kernel that finds no room keeps no other from being timed
            results[name] = {"absent": f"{type(reason).__name__}: {first_line(reason)}"[:160]}
            print(f"{name:16}{results[name]['absent']}")
            continue
        if options.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            results[name]["peak_bytes"] = torch.cuda.max_memory_allocated() - before
        calls[name] = run
    for name, seconds in interleaved_minimum(calls, options.rounds, options.device).items():
        results[name]["seconds"] = seconds
        peak = f"{results[name].get('peak_bytes', 0) / 2**20:9.0f} MiB"
        print(f"{name:16}{seconds * 1e3:10.2f} ms{peak}  loss {results[name]['loss']:.4f}")
    print(f"wrote {save('cross_entropy', options.device, {'rows': options.rows, **results})}")


if __name__ == "__main__":
    exit_cleanly(main)
