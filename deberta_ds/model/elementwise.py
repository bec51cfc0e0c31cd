"""Who computes what lies between a layer's products on a GPU: Triton kernels, or torch's operators.

The kernels (`fused_norm`) are taken in every precision, once they agree with torch's operators on
the card.

Legend: R rows, C columns.
"""

import logging
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from deberta_ds.model import kernel_check
from deberta_ds.model.keep import Keep

_LOG = logging.getLogger("deberta_ds")
_MOST_COLUMNS = 8192  # a program of the LayerNorm holds a row
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_ROWS = 1100  # so that programs of the weights' gradients take several turns


def kernels(update: torch.dtype, hidden: Tensor) -> ModuleType | None:
    """Return the module of the kernels for updates of a dtype, or None for torch's operators.

    The result has the dtype of `hidden`: where torch's would be wider, its operators are taken.
    """
    if not (hidden.is_cuda or kernel_check.interpreted()) or torch.jit.is_tracing():
        return None
    device = hidden.device
    if hidden.dtype != torch.float32 and (
            update != hidden.dtype or torch.is_autocast_enabled(device.type)):
        return None
    return _kernels(device, update, hidden.dtype, hidden.shape[-1])


@lru_cache
def _kernels(device: torch.device, update: torch.dtype, hidden: torch.dtype, size: int
             ) -> ModuleType | None:
    """Return the module or None, and say why once in the log."""
    obstacle = _why_not(device, update, hidden, size)
    if not obstacle and device.type == "cuda":
        verdict = _check(device, update, hidden, size)
        obstacle = "" if verdict.passed else f"they fail their check on this card: {verdict.text}"
        if verdict.passed:
            _LOG.info("LayerNorm and GELU: fused on %s, width %d (%s)", device.type, size,
                      verdict.text)
    if obstacle:
        _LOG.info("LayerNorm and GELU: torch's on %s, width %d (no kernels: %s)", device.type,
                  size, obstacle)
        return None
    from deberta_ds.model import fused_norm  # needs Triton

    return fused_norm


def _why_not(device: torch.device, update: torch.dtype, hidden: torch.dtype, size: int) -> str:
    if missing := kernel_check.obstacle(device):
        return missing
    if size > _MOST_COLUMNS:
        return f"rows of more than {_MOST_COLUMNS}"
    unknown = {update, hidden} - set(_FLOATS)
    return f"{unknown.pop()} is not supported" if unknown else ""


def _check(device: torch.device, update: torch.dtype, hidden: torch.dtype, size: int
           ) -> kernel_check.Verdict:
    folder = Path(__file__).parent
    sources = [folder / "fused_norm.py", folder / "keep.py", Path(__file__)]
    kind = f"LayerNorm and GELU, {str(update)[6:]} into {str(hidden)[6:]}, width {size}"
    return kernel_check.check(device, update, kind, sources,
                              lambda: compare(device, update, hidden, size))


def compare(device: torch.device, update: torch.dtype, hidden: torch.dtype, size: int
            ) -> tuple[float, str]:
    """Return the largest relative error beside torch's operators in fp32, and of what it is."""
    from deberta_ds.model import fused_norm

    generator = torch.Generator().manual_seed(size)
    keep = Keep(123_456_789, 4_000_000_000, round(0.1 * 2**32))

    def draw(dtype, *shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    values = [draw(update, _ROWS, size), draw(hidden, _ROWS, size), draw(hidden, size),
              draw(hidden, size)]
    kept = keep.mask(torch.ones(_ROWS, size)).to(device) * keep.scale

    def plain(x_RC, y_RC, weight_C, bias_C):
        return F.layer_norm(x_RC * kept + y_RC, (size,), weight_C, bias_C, 1e-7).mul(1.5)

    def fused(x_RC, y_RC, weight_C, bias_C):
        once, again = fused_norm.residual_norm(x_RC, y_RC, weight_C, bias_C, 1e-7, keep)
        return once * 0.5 + again  # both uses

    def fused_in_evaluation(x_RC, y_RC, weight_C, bias_C):
        return fused_norm.residual_norm(x_RC, y_RC, weight_C, bias_C, 1e-7, Keep(0, 0, 0))[0]

    def plain_in_evaluation(x_RC, y_RC, weight_C, bias_C):
        return F.layer_norm(x_RC + y_RC, (size,), weight_C, bias_C, 1e-7)

    grad = draw(hidden, _ROWS, size)
    found, right, names = [], [], []
    for one, other, where in ((fused, plain, "LayerNorm"), (
            fused_in_evaluation, plain_in_evaluation, "LayerNorm without dropout")):
        found += _run(one, values, grad)
        right += _run(other, [x.float() for x in values], grad)
        names += [f"{what} of {where}" for what in ("result", "gradient of the update",
                                                    "of the state", "of the weight", "of the bias")]
    inner = 4 * size  # of a feed-forward part
    values, grad = [draw(update, _ROWS, inner), draw(hidden, inner)], draw(update, _ROWS, inner)
    found += _run(fused_norm.biased_gelu, values, grad)
    right += _run(lambda x, bias: F.gelu(x + bias), [x.float() for x in values], grad)
    names += ["GELU", "its gradient", "its bias's gradient"]
    return kernel_check.largest_error(found, right, tuple(names))


def _run(function, values: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Return a function's result and all gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in values]
    out = function(*leaves)
    return [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))]
