"""Run the fused LayerNorm and GELU in Triton's interpreter compared with torch's operators in fp32.

Prints one JSON line a case.
"""

import json

import interpret_bf16  # noqa: F401
import torch

from deberta_ds.model.choose import Request
from deberta_ds.model.dropout import DropoutMask
from deberta_ds.model.kernels import checks, fused_norm

CPU = torch.device("cpu")
KEEP = DropoutMask(torch.tensor([3_000_000_000, 17]), round(0.25 * 2**32))
SINGLE, HALF, OLD = torch.float32, torch.bfloat16, torch.float16
# dtypes of update and state, rows, columns
CASES = ((SINGLE, SINGLE, 37, 40), (SINGLE, SINGLE, 1, 3), (SINGLE, SINGLE, 50, 7),
         (HALF, HALF, 37, 40), (HALF, SINGLE, 33, 300), (HALF, HALF, 3, 520),
         (OLD, OLD, 20, 64), (OLD, SINGLE, 20, 33))


def same_mask(rows: int, size: int) -> bool:
    """Return whether the kernels drop what `DropoutMask` drops, forward and backward."""
    update = torch.ones(rows, size, requires_grad=True)
    state = torch.zeros(rows, size)
    weight, bias = torch.ones(size), torch.zeros(size)
    _, total, *_ = fused_norm._norm(update.detach(), state, weight, bias, 1e-7, KEEP.key,
                                    KEEP.signed_threshold, KEEP.scale)
    kept = KEEP.mask(update) > 0
    out, _ = fused_norm.residual_norm(update, torch.randn(rows, size), weight, bias, 1e-7, KEEP)
    (grad,) = torch.autograd.grad(out, update, torch.randn(rows, size))
    return torch.equal(total > 0, kept) and (size < 3 or torch.equal(grad != 0, kept))


def repeats(dtype, rows: int, size: int) -> bool:
    values = [torch.randn(rows, size).to(dtype) for _ in range(2)]
    weight = torch.randn(size).to(dtype).requires_grad_()
    grads = []
    for _ in range(2):
        _, out = fused_norm.residual_norm(*values, weight, weight, 1e-7, KEEP)
        grads.append(torch.autograd.grad(out, weight, values[0])[0])
    return torch.equal(*grads)


def poisoned(bad: float) -> bool:
    """Return whether what is not finite stays so, and in its row alone."""
    update = torch.randn(4, 40)
    update[1, 3] = bad
    weight = torch.ones(40)
    out, _ = fused_norm.residual_norm(update, torch.randn(4, 40), weight, weight, 1e-7)
    grown = fused_norm.biased_gelu(update, weight)
    rows = out.isnan().all(1).tolist() == [False, True, False, False]
    return rows and not bool(grown[1, 3].isfinite()) and int(grown.isfinite().sum()) == 4 * 40 - 1


def main() -> None:
    torch.manual_seed(0)
    fused_norm._NORM_PARTS, fused_norm._GELU_PARTS = 16, 2  # rows in several turns
    for update, state, rows, size in CASES:
        checks._STATES = rows
        error, where = checks.worst(checks.norm(Request(CPU, (update, state), size)))
        line = {"dtype": str(update)[6:], "rows": rows, "size": size, "error": error,
                "of": where, "same_mask": same_mask(rows, size),
                "repeats": repeats(state, rows, size)}
        print(json.dumps(line), flush=True)
    nothing = torch.zeros(0, 8, requires_grad=True)
    ones = torch.ones(8)
    out = fused_norm.residual_norm(nothing, nothing, ones, ones, 1e-7, KEEP)[0].sum()
    out += fused_norm.biased_gelu(nothing, ones).sum()
    out.backward()
    empty = out.item() == 0 and nothing.grad.shape == (0, 8)
    found = [poisoned(bad) for bad in (torch.nan, torch.inf)]
    print(json.dumps({"poisoned": found, "empty": empty}), flush=True)


if __name__ == "__main__":
    main()
