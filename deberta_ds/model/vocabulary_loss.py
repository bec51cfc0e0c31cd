"""The one entry to the masked LM's loss: picks the chunked function or the Triton kernels.

Legend: T target rows, C hidden size, V vocabulary.
"""

import logging
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from deberta_ds.errors import UserError
from deberta_ds.model import kernel_check
from deberta_ds.model.linear_cross_entropy import linear_cross_entropy

_LOG = logging.getLogger("deberta_ds")
_ELEMENTS = 1 << 31  # the kernels count in 32 bits
_WIDTH_STEP = 16  # of hidden states: rows that begin at whole vectors
_LEAST_SAME_DRAWS = 0.99  # the others lie at an edge between two words


def loss_function(mode: str, hidden_TC: Tensor, weight_VC: Tensor) -> Callable:
    """Return `linear_cross_entropy`, or the same in Triton where it may run and is right.

    mode: "auto", "chunked" or "fused". Raises UserError for "fused" where it cannot run.
    """
    device, dtype = hidden_TC.device, hidden_TC.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    small = max(hidden_TC.numel(), weight_VC.numel()) < _ELEMENTS
    return _choose(mode, device, dtype, hidden_TC.shape[1], small)


@lru_cache
def _choose(mode: str, device: torch.device, dtype: torch.dtype, size: int, small: bool
            ) -> Callable:
    """Return the function, and say its name once in the log."""
    if mode == "chunked":
        return linear_cross_entropy
    obstacle = _why_not_fused(device, dtype, size, small)
    if mode == "fused" and obstacle:
        raise UserError(f"vocabulary_loss = 'fused' cannot run here: {obstacle}; use 'auto' or "
                        "'chunked'")
    fused, reason = mode == "fused", f" (not fused: {obstacle})" if obstacle else ""
    if mode == "auto" and not obstacle and device.type == "cuda":
        verdict = _check(device, dtype, size)
        fused, reason = verdict.passed, f" ({verdict.text})"
        if not fused:
            reason = f" (not fused: it fails its check on this card: {verdict.text})"
    name = "fused" if fused else "chunked"
    _LOG.info("vocabulary loss: %s on %s, asked for: %s%s", name, device.type, mode, reason)
    return _fused() if fused else linear_cross_entropy


def _fused() -> Callable:
    from deberta_ds.model.fused_cross_entropy import fused_linear_cross_entropy  # needs Triton

    return fused_linear_cross_entropy


def _why_not_fused(device: torch.device, dtype: torch.dtype, size: int, small: bool) -> str:
    """Return what keeps the Triton kernels from running, or an empty string."""
    if missing := kernel_check.obstacle(device):
        return missing
    if not small:
        return "2^31 hidden states or weights and more"
    if kernel_check.interpreted():
        return ""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bf16 and fp16, not {str(dtype)[6:]}"
    return f"hidden size {size} is no multiple of {_WIDTH_STEP}" if size % _WIDTH_STEP else ""


def _check(device: torch.device, dtype: torch.dtype, size: int) -> kernel_check.Verdict:
    folder = Path(__file__).parent
    sources = [folder / "fused_cross_entropy.py", folder / "linear_cross_entropy.py",
               Path(__file__)]
    return kernel_check.check(device, dtype, f"vocabulary loss, width {size}", sources,
                              lambda: compare(device, dtype, size, _fused()))


def compare(device: torch.device, dtype: torch.dtype, size: int, fused: Callable
            ) -> tuple[float, str]:
    """Return the largest relative error of `fused` beside the chunked function in fp32."""
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
            _run(function, inputs, labels, uniforms, temperature, valid)
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


def _run(function: Callable, values: list[Tensor], labels_T: Tensor, uniforms_T: Tensor,
         temperature: float, valid: int) -> list[Tensor]:
    """Return the loss, its gradients, and the ids drawn."""
    leaves = [x.detach().clone().requires_grad_() for x in values]
    loss, _, sampled_T = function(*leaves, labels_T, uniforms_T, temperature=temperature,
                                  valid_vocab=valid)
    return [loss, *torch.autograd.grad(loss, leaves), sampled_T]
