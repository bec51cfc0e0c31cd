"""Checks of the Triton kernels of the vocabulary loss, LayerNorm and GELU on this GPU.

Small problems through them and through torch's operators in fp32; see `kernel_check` for when this
is asked and where a pass is kept.

Legend: T target rows, V vocabulary; R rows, C columns.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from deberta_ds.model.dropout import DropoutMask
from deberta_ds.model.kernels import kernel_check
from deberta_ds.model.linear_cross_entropy import linear_cross_entropy

_KERNELS = Path(__file__).parent
_MODEL = _KERNELS.parent
_LEAST_SAME_DRAWS = 0.99  # the others lie at an edge between two ids
# Files whose content a passed check depends on.
LOSS_SOURCES = [_KERNELS / "fused_cross_entropy.py", _MODEL / "linear_cross_entropy.py",
                Path(__file__)]
NORM_SOURCES = [_KERNELS / "fused_norm.py", _MODEL / "dropout.py", Path(__file__)]
_ROWS = 1100  # so that programs of the weights' gradients take several turns


def check_loss(device: torch.device, dtype: torch.dtype, size: int) -> kernel_check.Verdict:
    """Return whether the fused vocabulary loss is right for residual states of this size."""
    return kernel_check.check(device, dtype, f"vocabulary loss, width {size}", LOSS_SOURCES,
                              partial(compare_fused_loss, device, dtype, size))


def compare_fused_loss(device: torch.device, dtype: torch.dtype, size: int) -> tuple[float, str]:
    """Return `compare_loss` of the Triton kernels."""
    from deberta_ds.model.kernels.fused_cross_entropy import fused_linear_cross_entropy

    return compare_loss(device, dtype, size, fused_linear_cross_entropy)


def check_norm(device: torch.device, sublayer: torch.dtype, residual: torch.dtype, size: int
               ) -> kernel_check.Verdict:
    """Return whether the fused LayerNorm and GELU are right for residual states of this size."""
    kind = f"LayerNorm and GELU, {str(sublayer)[6:]} into {str(residual)[6:]}, width {size}"
    return kernel_check.check(device, sublayer, kind, NORM_SOURCES,
                              partial(compare_norm, device, sublayer, residual, size))


def compare_loss(device: torch.device, dtype: torch.dtype, size: int, fused: Callable
                 ) -> tuple[float, str]:
    """Return the largest relative error of `fused` against the chunked function in fp32."""
    generator = torch.Generator().manual_seed(size)
    rows, ids = 300, 1000
    results, truth, names = [], [], []
    # Under autocast the bias is in fp32, of which Triton compiles another binary.
    for temperature, valid, of_bias in ((1.0, 990, dtype), (0.7, 992, torch.float32)):
        values = [torch.randn(rows, size, generator=generator),
                  torch.randn(ids, size, generator=generator) * size**-0.5,
                  torch.randn(ids, generator=generator)]
        kinds = (dtype, dtype, of_bias)
        values = [x.to(device, kind) for x, kind in zip(values, kinds, strict=True)]
        labels = torch.randint(0, valid, (rows,), generator=generator).to(device)
        uniforms = torch.rand(rows, generator=generator).to(device)
        found, right = (
            _loss_and_gradients(function, inputs, labels, uniforms, temperature, valid)
            for function, inputs in ((fused, values),
                                     (linear_cross_entropy, [x.float() for x in values])))
        results += found[:-1]
        truth += right[:-1]
        names += [f"{name} at temperature {temperature}" for name in
                  ("loss", "gradient of the states", "of the table", "of the bias")]
        same = (found[-1] == right[-1]).double().mean().item()
        if same < _LEAST_SAME_DRAWS:
            return float("inf"), f"draws ({same:.1%} the same) at temperature {temperature}"
    return kernel_check.largest_error(results, truth, tuple(names))


def _loss_and_gradients(function: Callable, values: list[Tensor], labels_T: Tensor,
                        uniforms_T: Tensor, temperature: float, valid: int) -> list[Tensor]:
    """Return the loss, its gradients, and the ids drawn."""
    leaves = [x.detach().clone().requires_grad_() for x in values]
    loss, _, sampled_T = function(*leaves, labels_T, uniforms_T, temperature=temperature,
                                  valid_vocab=valid)
    return [loss, *torch.autograd.grad(loss, leaves), sampled_T]


def compare_norm(device: torch.device, sublayer: torch.dtype, residual: torch.dtype, size: int
                 ) -> tuple[float, str]:
    """Return the largest relative error against torch's operators in fp32, and of what it is."""
    from deberta_ds.model.kernels import fused_norm

    generator = torch.Generator().manual_seed(size)
    key = torch.tensor([123_456_789, 4_000_000_000], device=device)
    mask = DropoutMask(key, round(0.1 * 2**32))

    def sample(dtype, *shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    values = [sample(sublayer, _ROWS, size), sample(residual, _ROWS, size), sample(residual, size),
              sample(residual, size)]
    kept = mask.mask(torch.ones(_ROWS, size, device=device)) * mask.scale

    def plain(x_RC, y_RC, weight_C, bias_C):
        return F.layer_norm(x_RC * kept + y_RC, (size,), weight_C, bias_C, 1e-7).mul(1.5)

    def fused(x_RC, y_RC, weight_C, bias_C):
        once, again = fused_norm.residual_norm(x_RC, y_RC, weight_C, bias_C, 1e-7, mask)
        return once * 0.5 + again  # both uses

    def fused_in_evaluation(x_RC, y_RC, weight_C, bias_C):
        return fused_norm.residual_norm(x_RC, y_RC, weight_C, bias_C, 1e-7)[0]

    def plain_in_evaluation(x_RC, y_RC, weight_C, bias_C):
        return F.layer_norm(x_RC + y_RC, (size,), weight_C, bias_C, 1e-7)

    grad = sample(residual, _ROWS, size)
    found, right, names = [], [], []
    for one, other, where in ((fused, plain, "LayerNorm"), (
            fused_in_evaluation, plain_in_evaluation, "LayerNorm without dropout")):
        found += _with_gradients(one, values, grad)
        right += _with_gradients(other, [x.float() for x in values], grad)
        names += [f"{what} of {where}" for what in ("result", "gradient of the sublayer",
                                                    "of the state", "of the weight", "of the bias")]
    found += _with_gradients(lambda x_RC: fused_norm.dropout(x_RC, mask), values[:1], grad)
    right += _with_gradients(lambda x_RC: x_RC * kept, [values[0].float()], grad)
    names += ["dropout", "its gradient"]
    inner = 4 * size  # of a feed-forward part
    values = [sample(sublayer, _ROWS, inner), sample(residual, inner)]
    grad = sample(sublayer, _ROWS, inner)
    found += _with_gradients(fused_norm.biased_gelu, values, grad)
    right += _with_gradients(lambda x, bias: F.gelu(x + bias), [x.float() for x in values], grad)
    names += ["GELU", "its gradient", "its bias's gradient"]
    return kernel_check.largest_error(found, right, tuple(names))


def _with_gradients(function, values: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Return a function's result and all gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in values]
    out = function(*leaves)
    return [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))]
